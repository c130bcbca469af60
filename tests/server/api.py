"""A small client of the HTTP API, with plain HTTP and JSON, so that tests see the wire format."""

from __future__ import annotations

from typing import Any, Self

import httpx

from tinkex.types import Datum, ForwardBackwardInput, ForwardBackwardRequest, ForwardRequest

__all__ = ["Api", "Model", "Sampler", "datum", "proto_datum", "training_request"]

TINY = "tinkex/tiny"
JSON = "application/json"
PROTO = "application/x-protobuf"


def datum(tokens=(5, 6, 7), targets=(6, 7, 8), *, bare=False, **inputs) -> dict[str, Any]:
    """An example as 0.36 writes it, or, if `bare`, as 0.7.0 does: without any `type`."""
    chunk: dict[str, Any] = {"tokens": list(tokens)}
    if not bare:
        chunk["type"] = "encoded_text"
    tensors = {"target_tokens": _tensor(targets, "int64")}
    tensors |= {name: _tensor(values, "float32") for name, values in inputs.items()}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": tensors}


def _tensor(values, dtype) -> dict[str, Any]:
    return {"data": list(values), "dtype": dtype, "shape": [len(values)]}


def proto_datum(tokens=(5, 6, 7), targets=(6, 7, 8)) -> Datum:
    import numpy as np

    from tinkex.types import ModelInput

    return Datum(ModelInput.from_ints(list(tokens)), {"target_tokens": np.array(targets, np.int64)})


def training_request(
    model_id, seq_id, data=None, *, loss_fn="cross_entropy", config=None, forward_only=False
) -> bytes:
    """The protobuf body of a pass."""
    from tinkex._wire.proto_codec import encode_forward_backward_request

    inputs = ForwardBackwardInput([proto_datum()] if data is None else data, loss_fn, config)
    kind = ForwardRequest if forward_only else ForwardBackwardRequest
    return encode_forward_backward_request(kind(inputs, model_id, seq_id))


class Api:
    """One client of a service."""

    def __init__(self, url: str, key: str | None = None, **headers: str) -> None:
        if key is not None:
            headers["X-API-Key"] = key
        # Ignore the machine's proxy settings: this service is on loopback.
        # Without TLS; reading the certificates of the system would take longer than most requests.
        self.http = httpx.Client(
            base_url=url, headers=headers, timeout=60, trust_env=False, verify=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    # -- plain calls -----------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Send any request; `body` is an object to encode as JSON, or raw bytes, by default of JSON."""
        if isinstance(body, bytes):
            options["content"] = body
            options["headers"] = {"content-type": JSON, **options.get("headers", {})}
        elif body is not None:
            options["json"] = body
        return self.http.request(method, f"/api/v1/{path}", **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.ask("POST", path, {} if body is None else body, **options)

    def get(self, path: str, **query: Any) -> httpx.Response:
        return self.ask("GET", path, params=query)

    def told(self, path: str, body: Any = None, **options: Any) -> Any:
        """The content of a POST that must succeed."""
        return _content(self.post(path, body, **options))

    def got(self, path: str, **query: Any) -> Any:
        """The content of a GET that must succeed."""
        return _content(self.get(path, **query))

    # -- futures -------------------------------------------------------------------------------------

    def poll(self, promise: Any, accept: str = "application/json", **more: Any) -> httpx.Response:
        """Poll once for a result."""
        request_id = promise["request_id"] if isinstance(promise, dict) else promise
        return self.post(
            "retrieve_future", {"request_id": request_id, **more}, headers={"accept": accept}
        )

    def retrieve(self, promise: Any, accept: str = "application/json") -> Any:
        """Poll until the result is ready and return it; bytes if it is protobuf."""
        while (answer := self.poll(promise, accept)).status_code == 408:
            assert answer.json()["type"] == "try_again"
        assert answer.status_code == 200, answer.text
        return answer.content if answer.headers["content-type"] == PROTO else answer.json()

    # -- models and samplers -------------------------------------------------------------------------

    def session(self, **fields: Any) -> str:
        body = {"tags": [], "sdk_version": "0.36.0", "type": "create_session", **fields}
        session_id: str = self.told("create_session", body)["session_id"]
        return session_id

    def model(self, session_id: str | None = None, number: int = 0, **fields: Any) -> Model:
        """A new model, ready to train."""
        body = {
            "session_id": session_id or self.session(),
            "model_seq_id": number,
            "base_model": TINY,
            "lora_config": {"rank": 8, "seed": 1},
            **fields,
        }
        made = self.retrieve(self.told("create_model", body))
        return Model(self, made["model_id"])

    def loaded(self, path: str, session_id: str | None = None, number: int = 0, **fields) -> Model:
        """A new model from a checkpoint."""
        body = {"session_id": session_id or self.session(), "model_seq_id": number, "path": path}
        made = self.retrieve(self.told("load_weights", body | fields))
        return Model(self, made["model_id"])

    def sampler(self, session_id: str | None = None, number: int = 0, **fields: Any) -> Sampler:
        body = {
            "session_id": session_id or self.session(),
            "sampling_session_seq_id": number,
            **(fields or {"base_model": TINY}),
        }
        made = self.told("create_sampling_session", body)
        return Sampler(self, made["sampling_session_id"])


class Model:
    """A model; numbers its requests as a client does."""

    def __init__(self, api: Api, model_id: str, next_seq: int = 1) -> None:
        self.api = api
        self.model_id = model_id
        self.next_seq = next_seq

    @property
    def session_id(self) -> str:
        return self.model_id.partition(":")[0]

    def seq(self) -> int:
        self.next_seq += 1
        return self.next_seq - 1

    def ask(self, operation: str, **fields: Any) -> httpx.Response:
        """Send a request with the next number, or with the given one."""
        if "seq_id" not in fields:
            fields["seq_id"] = self.seq()
        return self.api.post(operation, {"model_id": self.model_id, **fields})

    def send(self, operation: str, **fields: Any) -> Any:
        """Send a request and return its promise."""
        return _content(self.ask(operation, **fields))

    def do(self, operation: str, **fields: Any) -> Any:
        """Send a request and return its result."""
        return self.api.retrieve(self.send(operation, **fields))

    def forward_backward(self, data=None, loss_fn="cross_entropy", **more: Any) -> Any:
        """Send a pass and return its promise."""
        inputs = {"data": [datum()] if data is None else data, "loss_fn": loss_fn}
        for name in ("loss_fn_config",):
            if name in more:
                inputs[name] = more.pop(name)
        return self.send("forward_backward", forward_backward_input=inputs, **more)

    def optim_step(self, learning_rate: float = 0.01, **more: Any) -> Any:
        return self.send("optim_step", adam_params={"learning_rate": learning_rate}, **more)

    def step(self, data=None) -> float:
        """Train one step and return the loss before it."""
        passed, stepped = self.forward_backward(data), self.optim_step()
        result = self.api.retrieve(passed)
        assert "metrics" in self.api.retrieve(stepped)
        loss: float = result["metrics"]["loss:sum"]
        return loss

    def logprobs(self, data=None) -> list[list[float]]:
        """The model's current logprobs of examples."""
        inputs = {"data": [datum()] if data is None else data, "loss_fn": "cross_entropy"}
        result = self.do("forward", forward_input=inputs)
        return [output["logprobs"]["data"] for output in result["loss_fn_outputs"]]

    def save(self, name: str, operation: str = "save_weights", **fields: Any) -> str:
        """Save a checkpoint and return its path."""
        path: str = self.do(operation, path=name, **fields)["path"]
        return path


class Sampler:
    """A sampler; numbers its requests as a client does."""

    def __init__(self, api: Api, sampler_id: str) -> None:
        self.api = api
        self.sampler_id = sampler_id
        self.next_seq = 0

    def request(self, prompt=(5, 6, 7), num_samples=1, fields=None, **params: Any) -> Any:
        """The body of a request; `params` are its sampling_params, `fields` are other fields."""
        self.next_seq += 1
        return {
            "prompt": {"chunks": [{"tokens": list(prompt), "type": "encoded_text"}]},
            "num_samples": num_samples,
            "sampling_params": {"max_tokens": 5, "seed": 1, "stop": [], **params},
            "sampling_session_id": self.sampler_id,
            "seq_id": self.next_seq - 1,
            "type": "sample",
            **(fields or {}),
        }

    def send(self, *args: Any, **options: Any) -> Any:
        return self.api.told("asample", self.request(*args, **options))

    def sample(self, *args: Any, **options: Any) -> Any:
        return self.api.retrieve(self.send(*args, **options))

    def tokens(self, *args: Any, **options: Any) -> list[list[int]]:
        result = self.sample(*args, **options)
        return [sequence["tokens"] for sequence in result["sequences"]]


def _content(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
    return answer.json()
