"""SkyRL's server with its JAX backend, as a client sees it: routes, answers and refusals."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from tinkex import types

from ..client.helpers import input_of, pass_of
from ..scripted import Answer, Reply, Request
from .dialect import Dialect, invalid, pass_answer, sampled_answer

_ID = re.compile(r"[a-zA-Z0-9_-]{1,255}")
_RUN = "/api/v1/training_runs/{run}"
#: The tokens of every sample. Token 2 ends a sequence if the request lists it as a stop token.
DRAWN = [5, 6, 2, 8, 9, 10, 11, 12]


class SkyRL(Dialect):
    """One base model. A checkpoint is a pair of name and kind; saving under an existing name is refused."""

    routes: ClassVar = {
        "POST /api/v1/client/config": "client_config",
        "GET /api/v1/healthz": "healthz",
        "GET /api/v1/get_server_capabilities": "capabilities",
        "POST /api/v1/create_session": "create_session",
        "POST /api/v1/session_heartbeat": "heartbeat",
        "POST /api/v1/create_sampling_session": "create_sampling_session",
        "GET /api/v1/samplers/{sampler}": "sampler",
        "POST /api/v1/create_model": "create_model",
        "POST /api/v1/unload_model": "unload_model",
        "POST /api/v1/get_info": "get_info",
        "POST /api/v1/forward_backward": "forward_backward",
        "POST /api/v1/forward": "forward_backward",
        "POST /api/v1/optim_step": "optim_step",
        "POST /api/v1/save_weights": "save_weights",
        "POST /api/v1/save_weights_for_sampler": "save_weights_for_sampler",
        "POST /api/v1/load_weights": "load_weights",
        "POST /api/v1/weights_info": "weights_info",
        "POST /api/v1/asample": "asample",
        "POST /api/v1/retrieve_future": "retrieve_future",
        "POST /api/v1/telemetry": "telemetry",
        "GET /api/v1/training_runs": "training_runs",
        f"GET {_RUN}": "training_run",
        f"GET {_RUN}/checkpoints": "checkpoints",
        f"GET {_RUN}/checkpoints/{{name}}/archive": "archive",
        f"GET {_RUN}/checkpoints/{{name}}/download": "download",
        f"DELETE {_RUN}/checkpoints/{{checkpoint:path}}": "delete_checkpoint",
    }

    def __init__(self) -> None:
        super().__init__()
        self.saved: set[tuple[str, str]] = set()
        self.samplers: dict[str, str | None] = {}

    # -- sessions ------------------------------------------------------------------------------

    def client_config(self, _: Request) -> Answer:
        return Answer(
            {"pjwt_auth_enabled": False, "proto_write_fwdbwd": True, "proto_compress_fwdbwd": True}
        )

    def healthz(self, _: Request) -> Answer:
        return Answer({"status": "ok"})

    def capabilities(self, _: Request) -> Answer:
        losses = ["cispo", "cross_entropy", "dppo", "importance_sampling", "ppo", "ppo_critic"]
        return Answer(
            {"supported_models": [{"model_name": "some/model"}], "supported_loss_fns": losses}
        )

    def create_session(self, _: Request) -> Answer:
        nothing = dict.fromkeys(["info_message", "warning_message", "error_message"])
        return Answer({"type": "create_session", **nothing, "session_id": "session_1a2b3c4d"})

    def heartbeat(self, _: Request) -> Answer:
        return Answer({"type": "session_heartbeat"})

    def telemetry(self, _: Request) -> Answer:
        return Answer({"status": "accepted"})

    # -- training ------------------------------------------------------------------------------

    def create_model(self, request: Request) -> Answer:
        asked = {"rank": request.json["lora_config"]["rank"], "seed": None}
        made = {"model_id": "model_1", "base_model": "some/model"}
        number = self.later(Answer({**made, "lora_config": {**asked, "alpha": 32.0, "seed": 7}}))
        return Answer({**made, "lora_config": asked, "status": "created", "request_id": number})

    def unload_model(self, _: Request) -> Answer:
        done = {"model_id": "model_1", "status": "unloaded", "type": "unload_model"}
        return Answer({"request_id": self.later(Answer(done)), "model_id": "model_1"})

    def get_info(self, _: Request) -> Answer:
        lora = {"rank": 4, "seed": None}
        data = {"base_model": "some/model", "lora_config": lora, "model_name": "some/model"}
        return Answer({"model_id": "model_1", "status": "created", "model_data": data})

    def forward_backward(self, request: Request) -> Answer:
        """Returns no metrics; per token the logprob, and the loss before division by the sum of the weights."""
        assert pass_of(request).model_id == "model_1"
        outputs = []
        for datum in input_of(request).data:
            weights = datum.loss_fn_inputs["weights"].to_numpy()
            logprobs = types.TensorData([-0.5] * len(weights), "float32", [len(weights)])
            losses = types.TensorData((0.5 * weights).tolist(), "float32", [len(weights)])
            outputs.append({"elementwise_loss": losses, "logprobs": logprobs})
        return self._promised(pass_answer(types.ForwardBackwardOutput("scalar", outputs)))

    def optim_step(self, _: Request) -> Answer:
        metrics = {"skyrl.ai/grad_norm": 0.25, "skyrl.ai/learning_rate": 1e-4}
        return self._promised(Answer({"metrics": metrics}))

    # -- weights -------------------------------------------------------------------------------

    def save_weights(self, request: Request) -> Answer:
        name = request.json["path"]
        taken = self._take("training", name)
        path = f"tinker://model_1/weights/{name}"
        return taken or self._promised(Answer({"path": path, "type": "save_weights"}))

    def save_weights_for_sampler(self, request: Request) -> Answer:
        asked = request.json
        number = asked.get("sampling_session_seq_id")
        name = asked.get("path") or f"ss{number}_seq{asked['seq_id']}"
        taken = self._take("sampler", name)
        if taken is not None:
            return taken
        sampler = None if number is None else f"sampling_{number:08x}"
        if sampler is not None:
            self.samplers[sampler] = f"tinker://model_1/sampler_weights/{name}"
        saved = {
            "path": None if sampler else f"tinker://model_1/{name}",
            "type": "save_weights_for_sampler",
            "sampling_session_id": sampler,
        }
        return self._promised(Answer(saved))

    def _take(self, kind: str, name: str) -> Answer | None:
        if not _ID.fullmatch(name):
            return invalid(("string_pattern_mismatch", "path", "String should match pattern"))
        if (kind, name) in self.saved:
            told = f"Checkpoint '{name}' already exists for model 'model_1'"
            return Answer({"detail": told}, 409)
        self.saved.add((kind, name))
        return None

    def load_weights(self, request: Request) -> Answer:
        found = self._found(request.json["path"], "weights", "training")
        return found or self._promised(Answer({"type": "load_weights"}))

    def weights_info(self, request: Request) -> Answer:
        found = self._found(request.json["tinker_path"], "weights", "training")
        return found or Answer({"base_model": "some/model", "is_lora": True, "lora_rank": 4})

    def _found(self, path: str, kind: str, stored: str) -> Answer | None:
        match = re.fullmatch(rf"tinker://model_1/{kind}/({_ID.pattern})", path)
        if match is None:
            told = f"Invalid tinker path format. Expected: tinker://model_id/{kind}/checkpoint_id"
            return Answer({"detail": told}, 400)
        return self._missing(stored, match[1])

    def _missing(self, kind: str, name: str) -> Answer | None:
        if (kind, name) in self.saved:
            return None
        return Answer({"detail": f"Checkpoint not found: model_1/{name}"}, 404)

    # -- sampling ------------------------------------------------------------------------------

    def create_sampling_session(self, request: Request) -> Answer:
        asked = request.json
        if (asked.get("base_model") is None) == (asked.get("model_path") is None):
            told = "Exactly one of base_model or model_path must be provided"
            return Answer({"detail": told}, 400)
        sampler = f"sampling_{asked['sampling_session_seq_id']:08x}"
        self.samplers[sampler] = asked.get("model_path")
        return Answer({"type": "create_sampling_session", "sampling_session_id": sampler})

    def sampler(self, _: Request, sampler: str) -> Answer:
        if sampler not in self.samplers:
            return Answer({"detail": "Sampler not found"}, 404)
        path = self.samplers[sampler]
        return Answer({"sampler_id": sampler, "base_model": "some/model", "model_path": path})

    def asample(self, request: Request) -> Answer:
        """Only listed stop tokens end a sequence. Prompt logprobs lack the first token. Top-k is not supported."""
        asked = request.json
        path = self.samplers[asked["sampling_session_id"]]
        if path is not None:
            match = re.fullmatch(r"tinker://model_1/(?:sampler_weights/)?([^/]+)", path)
            missing = self._missing("sampler", match[1] if match else path)
            if missing is not None:
                return missing
        params = asked["sampling_params"]
        if params.get("max_tokens") is None:
            return Answer({"detail": "max_tokens is currently required"}, 400)
        tokens = DRAWN[: params["max_tokens"]]
        ends = [place for place, token in enumerate(tokens) if token in (params.get("stop") or ())]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        sequence = types.SampledSequence(
            "stop" if ends else "length", tokens=tokens, logprobs=[-0.5] * len(tokens)
        )
        length = sum(len(chunk["tokens"]) for chunk in asked["prompt"]["chunks"])
        scored = [-1.0] * (length - 1) if asked.get("prompt_logprobs") else None
        drawn = types.SampleResponse([sequence] * asked["num_samples"], prompt_logprobs=scored)
        return self._promised(sampled_answer(drawn))

    # -- runs ----------------------------------------------------------------------------------

    def training_runs(self, _: Request) -> Answer:
        cursor = {"offset": 0, "limit": 20, "total_count": 1}
        return Answer({"training_runs": [_RUN_FACTS], "cursor": cursor})

    def training_run(self, _: Request, run: str) -> Answer:
        found = Answer(_RUN_FACTS) if run == "model_1" else None
        return found or Answer({"detail": "Model not found"}, 404)

    def checkpoints(self, _: Request, run: str) -> Answer:
        kinds = {"training": "weights", "sampler": "sampler_weights"}
        listed = [
            {
                "checkpoint_id": name,
                "checkpoint_type": kind,
                "time": "2026-11-01T00:00:00Z",
                "tinker_path": f"tinker://{run}/{kinds[kind]}/{name}",
            }
            for kind, name in sorted(self.saved)
        ]
        return Answer({"checkpoints": listed})

    def archive(self, _: Request, run: str, name: str) -> Answer:
        missing = self._missing("sampler", name)
        url = f"{self.url}/api/v1/training_runs/{run}/checkpoints/{name}/download"
        expires = "Sun, 01 Nov 2026 02:00:00 GMT"
        return missing or Answer(b"", 302, {"location": url, "expires": expires})

    def download(self, _: Request, run: str, name: str) -> Reply:
        return Answer(b"archive", content_type="application/octet-stream")

    def delete_checkpoint(self, _: Request, run: str, checkpoint: str) -> Answer:
        kind, _slash, name = checkpoint.partition("/")
        missing = self._missing({"weights": "training"}.get(kind, "sampler"), name)
        return missing or Answer(b"", 204)

    def _promised(self, answer: Any) -> Answer:
        number = self.later(answer)
        return Answer({"future_id": number, "status": "pending", "request_id": number})


_RUN_FACTS = {
    "training_run_id": "model_1",
    "base_model": "some/model",
    "model_owner": "default",
    "is_lora": True,
    "corrupted": False,
    "lora_rank": 4,
    "last_request_time": "2026-11-01T00:00:00Z",
    "last_checkpoint": None,
    "last_sampler_checkpoint": None,
    "user_metadata": None,
}
