"""Helpers for the client tests: short names for inputs, routes and answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tinkex
from tinkex import types
from tinkex._client.runtime import SampleFuture, TaskGroup, runtime
from tinkex._wire import proto_codec
from tinkex._wire.compression import decode_body

from ..scripted import Answer, Request, ScriptedServer, promise

ROOT = Path(__file__).parents[2]

CONFIG = "POST /api/v1/client/config"
DYNAMIC = "POST /api/v1/client/dynamic_config"
CREATE_SESSION = "POST /api/v1/create_session"
HEARTBEAT = "POST /api/v1/session_heartbeat"
FINISH = "POST /api/v1/sessions/s-1/finish"
CREATE_MODEL = "POST /api/v1/create_model"
CREATE_SAMPLER = "POST /api/v1/create_sampling_session"
SAMPLE = "POST /api/v1/asample"
STREAM = "POST /api/v1/stream_sample"
POLL = "POST /api/v1/retrieve_future"
POLL_MANY = "POST /api/v1/retrieve_futures"
CANCEL = "POST /api/v1/cancel_future"
JOIN = "POST /api/v1/join_sampling_session"
PASS = "POST /api/v1/forward_backward"
STEP = "POST /api/v1/optim_step"
SAVE = "POST /api/v1/save_weights"
SAVE_SAMPLER = "POST /api/v1/save_weights_for_sampler"
LOAD = "POST /api/v1/load_weights"

TRAINING_OPERATIONS = (STEP, SAVE, SAVE_SAMPLER, LOAD, "POST /api/v1/save_weights_external")
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = types.SamplingParams(max_tokens=1)


def flags(server: ScriptedServer, **values: Any) -> None:
    """Script the service's flags."""
    server.on(CONFIG, Answer(values))


def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds, checked once per turn of the clients' event loop."""

    async def turns() -> None:
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)

    waiting: SampleFuture[None] = SampleFuture()
    try:
        runtime().submit(turns(), waiting, TaskGroup()).result(60)
    finally:
        waiting.cancel()


def datum(*tokens: int) -> types.Datum:
    """A datum whose targets are its own tokens; the scripted service does not compute anything."""
    count = len(tokens)
    return types.Datum(
        types.ModelInput.from_ints(list(tokens)),
        {"target_tokens": list(tokens), "weights": [1.0] * count},
    )


def failed(message: str = "no", category: str = "user") -> Answer:
    return Answer({"error": message, "category": category})


# -- training ------------------------------------------------------------------------------------


def pass_of(request: Request) -> types.ForwardBackwardRequest | types.ForwardRequest:
    """The decoded content of a forward_backward request."""
    encoding = request.headers.get("content-encoding")
    body = decode_body(request.body, encoding) if encoding else request.body
    return proto_codec.decode_forward_backward_request(body)


def input_of(request: Request) -> types.ForwardBackwardInput:
    sent = pass_of(request)
    if isinstance(sent, types.ForwardRequest):
        return sent.forward_input
    return sent.forward_backward_input


def seq_of(request: Request) -> int:
    sent = pass_of(request).seq_id if request.path.endswith("forward_backward") else None
    return int(sent or request.json["seq_id"])


def logprobs_of(count: int, value: float = -1.0) -> dict[str, Any]:
    return {"logprobs": {"data": [value] * count, "dtype": "float32", "shape": [count]}}


def output(
    *outputs: dict[str, Any], kind: str = "cross_entropy", **metrics: float
) -> dict[str, Any]:
    named = {name.replace("__", ":"): value for name, value in metrics.items()}
    return {"loss_fn_output_type": kind, "loss_fn_outputs": list(outputs), "metrics": named}


def answer_pass(request: Request) -> Answer:
    """An immediate result of a pass: one logprob of -1 per target, and `loss:sum` of 1 per datum."""
    data = input_of(request).data
    rows = [logprobs_of(len(each.loss_fn_inputs["target_tokens"])) for each in data]
    return Answer(output(*rows, loss__sum=float(len(data))))


def answer_training(server: ScriptedServer) -> None:
    """Answer every training operation with an immediate result."""
    server.on(PASS, answer_pass)
    server.on(STEP, Answer({"metrics": {}}))
    server.on(SAVE, Answer({"path": "tinker://s-1:train:0/weights/a"}))
    server.on(SAVE_SAMPLER, Answer({"path": "tinker://s-1:train:0/sampler_weights/a"}))
    server.on("POST /api/v1/save_weights_external", Answer({"path": "tinker://r/external/a"}))
    server.on(LOAD, Answer({"path": "tinker://s-1:train:0/weights/a"}))


def new_trainer(client: tinkex.ServiceClient, **options: Any) -> tinkex.TrainingClient:
    return client.create_lora_training_client("some/model", rank=4, **options)


# -- sampling ------------------------------------------------------------------------------------


def sampled(*tokens: int, **more: Any) -> Answer:
    sequence = {"stop_reason": "stop", "tokens": list(tokens), "logprobs": [-0.5] * len(tokens)}
    return Answer({"sequences": [sequence], **more})


def answer_samples(server: ScriptedServer, *tokens: int) -> None:
    """Answer every sample with an immediate result."""
    server.on(SAMPLE, sampled(*(tokens or (7,))))


def promise_by_seq(request: Request) -> Answer:
    return promise(f"r-{request.json['seq_id']}")


def new_sampler(client: tinkex.ServiceClient, **options: Any) -> tinkex.SamplingClient:
    return client.create_sampling_client(base_model="some/model", **options)


def sample(client: tinkex.SamplingClient, **options: Any) -> tinkex.APIFuture[Any]:
    return client.sample(PROMPT, 1, ONE_TOKEN, **options)


def seq_ids(requests: Sequence[Request]) -> list[int]:
    return [request.json["seq_id"] for request in requests]


# -- other processes -----------------------------------------------------------------------------


def run_script(source: str, *, stdin: str = "") -> str:
    """Run Python code in a new process. It must exit with code 0 and write nothing to stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        input=stdin,
        text=True,
        capture_output=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    return done.stdout
