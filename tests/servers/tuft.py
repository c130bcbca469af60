"""TuFT 0.2.2 as a client sees it. It reads requests with the types of the official SDK 0.25.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tinkex import types

from ..client.helpers import input_of
from ..scripted import Answer, Request
from .dialect import Dialect, pass_answer, refused_fields, sampled_answer

#: Required and optional fields of the request types of 0.25.0. All other fields are refused.
_MODEL_OP = ("model_id",)
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "client/config": (("sdk_version",), ()),
    "create_session": (("tags", "user_metadata", "sdk_version"), ("project_id",)),
    "session_heartbeat": (("session_id",), ()),
    "create_sampling_session": (
        ("session_id", "sampling_session_seq_id"),
        ("base_model", "model_path"),
    ),
    "create_model": (
        ("session_id", "model_seq_id", "base_model"),
        ("user_metadata", "lora_config"),
    ),
    "get_info": (_MODEL_OP, ()),
    "unload_model": (_MODEL_OP, ()),
    "optim_step": (("adam_params", "model_id"), ("seq_id",)),
    "save_weights": (_MODEL_OP, ("path", "seq_id", "ttl_seconds", "overwrite")),
    "save_weights_for_sampler": (
        _MODEL_OP,
        ("path", "sampling_session_seq_id", "seq_id", "ttl_seconds"),
    ),
    "load_weights": (
        ("path", "optimizer"),
        (
            *_MODEL_OP,
            "seq_id",
            "session_id",
            "model_seq_id",
            "base_model",
            "user_metadata",
            "weights_access_token",
        ),
    ),
    "asample": (
        ("prompt", "sampling_params"),
        (
            "num_samples",
            "base_model",
            "model_path",
            "sampling_session_id",
            "seq_id",
            "prompt_logprobs",
            "topk_prompt_logprobs",
        ),
    ),
    "retrieve_future": (("request_id",), ("allow_metadata_only",)),
    "telemetry": (("events", "platform", "sdk_version", "session_id", "process_uuid"), ()),
    "weights_info": (("tinker_path",), ()),
}
_RUN = "/api/v1/training_runs/{run}"


class TuFT(Dialect):
    """One base model. Saving under an existing name replaces the checkpoint."""

    routes: ClassVar = {
        **{f"POST /api/v1/{name}": "checked" for name in _FIELDS},
        "POST /api/v1/forward_backward": "forward_backward",
        "GET /api/v1/healthz": "healthz",
        "GET /api/v1/get_server_capabilities": "capabilities",
        "GET /api/v1/training_runs": "training_runs",
        f"GET {_RUN}/checkpoints": "checkpoints",
        "GET /api/v1/checkpoints": "checkpoints",
        "GET /api/v1/sessions": "sessions",
        f"GET {_RUN}/checkpoints/{{checkpoint:path}}/archive": "archive",
    }

    def __init__(self) -> None:
        super().__init__()
        self.failing: str | None = None  # if set, training fails with this message

    def checked(self, request: Request) -> Answer:
        """The answer to a request; refuses fields that 0.25.0 does not know."""
        name = request.path.removeprefix("/api/v1/")
        required, optional = _FIELDS[name]
        if not request.headers.get("x-api-key"):
            return Answer({"detail": "Missing API key"}, 401)
        refused = refused_fields(request.json, required, (*required, *optional, "type"))
        handler: Callable[[Request], Answer] = getattr(self, name.replace("/", "_"))
        return refused or handler(request)

    # -- sessions ------------------------------------------------------------------------------

    def client_config(self, _: Request) -> Answer:
        return Answer(
            {
                "pjwt_auth_enabled": False,
                "credential_default_source": "api_key",
                "sample_dispatch_bytes_semaphore_size": 10 * 1024 * 1024,
                "inflight_response_bytes_semaphore_size": 50 * 1024 * 1024,
                "parallel_fwdbwd_chunks": False,
            }
        )

    def healthz(self, _: Request) -> Answer:
        return Answer({"status": "ok"})

    def capabilities(self, _: Request) -> Answer:
        return Answer({"supported_models": [{"model_name": "some/model"}]})

    def create_session(self, _: Request) -> Answer:
        return Answer({"type": "create_session", "session_id": "a-session"}, 201)

    def session_heartbeat(self, _: Request) -> Answer:
        return Answer({"type": "session_heartbeat"})

    def telemetry(self, _: Request) -> Answer:
        return Answer({"status": "accepted"})

    def sessions(self, _: Request) -> Answer:
        return Answer({"sessions": ["a-session"]})

    # -- training ------------------------------------------------------------------------------

    def create_model(self, _: Request) -> Answer:
        return self._promised(Answer({"model_id": "a-run", "type": "create_model"}))

    def unload_model(self, _: Request) -> Answer:
        return self._promised(Answer({"model_id": "a-run", "type": "unload_model"}))

    def get_info(self, _: Request) -> Answer:
        data = {"arch": None, "model_name": "some/model", "tokenizer_id": "some/model"}
        known = {"is_lora": True, "lora_rank": 4, "model_name": "some/model"}
        return Answer({"type": "get_info", "model_data": data, "model_id": "a-run", **known})

    def forward_backward(self, request: Request) -> Answer:
        if request.headers["content-type"] != "application/x-protobuf":
            return Answer({"detail": "Unsupported Content-Type"}, 415)
        outputs, loss = [], 0.0
        for datum in input_of(request).data:
            weights = datum.loss_fn_inputs["weights"].to_numpy()
            shape = [len(weights)]
            outputs.append({"logprobs": types.TensorData([-0.5] * len(weights), "float32", shape)})
            loss += float((0.5 * weights).sum())
        if self.failing is not None:
            told = f"Future failed: Server error: {self.failing}"
            return self._promised(Answer({"detail": told}, 422))
        output = types.ForwardBackwardOutput("TorchLossReturn", outputs, {"loss:sum": loss})
        return self._promised(pass_answer(output))

    def optim_step(self, _: Request) -> Answer:
        return self._promised(Answer({"metrics": None}))

    # -- weights -------------------------------------------------------------------------------

    def save_weights(self, request: Request) -> Answer:
        path = f"tinker://a-run/weights/{request.json['path']}"
        return self._promised(Answer({"path": path, "type": "save_weights"}))

    def save_weights_for_sampler(self, request: Request) -> Answer:
        asked = request.json
        named = f"tinker://a-run/sampler_weights/{asked.get('path')}"
        unnamed = asked.get("sampling_session_seq_id") is not None
        saved = {
            "path": None if unnamed else named,
            "sampling_session_id": "a-sampler" if unnamed else None,
            "type": "save_weights_for_sampler",
        }
        return self._promised(Answer(saved))

    def load_weights(self, request: Request) -> Answer:
        return self._promised(Answer({"path": request.json["path"], "type": "load_weights"}))

    def weights_info(self, _: Request) -> Answer:
        return Answer({"base_model": "some/model", "is_lora": True, "lora_rank": 4})

    # -- sampling ------------------------------------------------------------------------------

    def create_sampling_session(self, _: Request) -> Answer:
        created = {"type": "create_sampling_session", "sampling_session_id": "a-sampler"}
        return Answer(created, 201)

    def asample(self, request: Request) -> Answer:
        asked = request.json
        tokens = [5, 6, 7][: asked["sampling_params"].get("max_tokens")]
        sequence = types.SampledSequence("length", tokens=tokens, logprobs=[-0.5] * len(tokens))
        drawn = types.SampleResponse([sequence] * asked.get("num_samples", 1))
        return self._promised(sampled_answer(drawn))

    # -- runs ----------------------------------------------------------------------------------

    def training_runs(self, _: Request) -> Answer:
        cursor = {"offset": 0, "limit": 20, "total_count": 0}
        return Answer({"training_runs": [], "cursor": cursor})

    def checkpoints(self, _: Request, run: str = "") -> Answer:
        cursor = {"offset": 0, "limit": 100, "total_count": 0}
        return Answer({"checkpoints": [], "cursor": cursor})

    def archive(self, _: Request, run: str, checkpoint: str) -> Answer:
        location = f"file:///checkpoints/{run}/{checkpoint}"
        return Answer(b"", 302, {"location": location})

    def _promised(self, answer: Any) -> Answer:
        number = self.later(answer)
        return Answer({"request_id": number, "model_id": "a-run"}, 202)
