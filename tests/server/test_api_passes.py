"""A pass in several requests counts completely or not at all, whatever happens in between."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from tinkex.errors import RequestFailedError
from tinkex.testing import service
from tinkex.types import AdamParams

from ..processes import children, command
from .api import Api, Model, datum, proto_datum

GOOD = [[datum((20, 21, 9), (21, 9, 3))], [datum((30, 31, 9), (31, 9, 3))], [datum()]]
BAD = [datum((5, 6, 7), (6, 7, 10**6))]


@pytest.fixture
def api(tinkex_fake):
    with Api(tinkex_fake.url) as api:
        yield api


def part(model: Model, data, index: int, count: int = 3, pass_id: str = "p"):
    """The response to one request of a pass."""
    body = {
        "model_id": model.model_id,
        "seq_id": model.seq(),
        "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"},
    }
    headers = {"x-tinkex-pass": f"{pass_id} {index + 1}/{count}"}
    return model.api.post("forward_backward", body, headers=headers)


def run(model: Model, *requests, pass_id: str = "p"):
    """Send the requests of one pass and return their results."""
    answers = [
        part(model, data, index, len(requests), pass_id) for index, data in enumerate(requests)
    ]
    return [model.api.retrieve(answer.json()) for answer in answers]


def grad_norm(model: Model) -> float:
    norm: float = model.api.retrieve(model.optim_step())["metrics"]["grad_norm"]
    return norm


def test_the_service_announces_support_for_pass_tags(api):
    model = api.model()
    assert part(model, GOOD[0], 0, 2).headers["x-tinkex-pass"] == "all-or-nothing"
    assert (
        "x-tinkex-pass"
        not in model.ask(
            "forward_backward",
            forward_backward_input={"data": GOOD[0], "loss_fn": "cross_entropy"},
        ).headers
    )


def test_a_complete_pass_gives_the_same_result_as_untagged_requests(api):
    whole, apart = api.model(), api.model(number=1, session_id=api.session())
    results = run(whole, *GOOD)
    losses = [api.retrieve(apart.forward_backward(data))["metrics"]["loss:sum"] for data in GOOD]
    assert [result["metrics"]["loss:sum"] for result in results] == losses
    assert grad_norm(whole) == pytest.approx(grad_norm(apart), rel=1e-6)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_request_discards_the_whole_pass(api, failing):
    model = api.model()
    requests = [BAD if index == failing else data for index, data in enumerate(GOOD)]
    results = run(model, *requests)
    assert ["error" in result for result in results] == [index >= failing for index in range(3)]
    assert "vocabulary" in results[failing]["error"]
    for result in results[failing + 1 :]:
        assert "no gradient of the pass is kept" in result["error"]
        assert result["category"] == "user"
    assert grad_norm(model) == 0.0


def test_a_pass_that_is_retried_after_a_failure_counts_once(api):
    model, other = api.model(), api.model(number=1, session_id=api.session())
    run(model, GOOD[0], BAD)
    run(model, *GOOD, pass_id="again")
    run(other, *GOOD)
    assert (grad_norm(model), model.logprobs()) == (grad_norm(other), other.logprobs())


def test_a_refused_request_discards_the_whole_pass(api):
    model = api.model()
    first = part(model, GOOD[0], 0)
    refused = part(model, "nonsense", 1)
    assert refused.status_code in {400, 422}
    last = part(model, GOOD[2], 2)
    assert "metrics" in api.retrieve(first.json())
    assert "no gradient of the pass is kept" in api.retrieve(last.json())["error"]
    assert grad_norm(model) == 0.0


def test_a_cancelled_request_discards_the_whole_pass(api):
    model = api.model()
    later = [part(model, data, index) for index, data in enumerate(GOOD)]
    # It may have run already; then it cannot be cancelled.
    api.post("cancel_future", {"request_id": later[1].json()["request_id"]})
    results = [api.retrieve(answer.json()) for answer in later]
    norm = grad_norm(model)
    assert (norm > 0) == all("metrics" in result for result in results)


def test_an_unreadable_tag_is_refused(api):
    model = api.model()
    body = {
        "model_id": model.model_id,
        "seq_id": model.seq(),
        "forward_backward_input": {"data": GOOD[0], "loss_fn": "cross_entropy"},
    }
    answer = api.post("forward_backward", body, headers={"x-tinkex-pass": "p 3/2"})
    assert answer.status_code == 400 or answer.status_code == 422
    assert "x-tinkex-pass" in answer.text
    assert api.retrieve(model.forward_backward())["metrics"]


def undisturbed(running) -> object:
    """The losses of a run without any fault between requests."""
    with Api(running.url) as api:
        return _life(api.model(), lambda model: model)


def _life(model: Model, disturb):
    run(model, GOOD[0])
    first = part(model, GOOD[0], 0)
    model.api.retrieve(first.json())
    model = disturb(model)
    second = part(model, GOOD[1], 1)
    model.api.retrieve(second.json())
    model = disturb(model)
    third = part(model, GOOD[2], 2)
    model.api.retrieve(third.json())
    norms = [grad_norm(model)]
    assert norms[0] > 0
    model.api.retrieve(part(model, GOOD[0], 0, 2, "q").json())
    model = disturb(model)
    assert "error" in model.api.retrieve(part(model, BAD, 1, 2, "q").json())
    model = disturb(model)
    norms.append(grad_norm(model))
    assert norms[1] == 0.0
    return norms, model.logprobs(GOOD[0])


def test_a_pass_survives_a_restart_between_its_requests(tinkex_fake, tmp_path):
    running = service(data_dir=tmp_path)
    api = Api(running.__enter__().url)

    def restart(model: Model) -> Model:
        nonlocal running, api
        api.http.close()
        running.__exit__(None, None, None)
        running = service(data_dir=tmp_path)
        api = Api(running.__enter__().url)
        return Model(api, model.model_id, model.next_seq)

    try:
        assert _life(api.model(), restart) == undisturbed(tinkex_fake)
    finally:
        api.http.close()
        running.__exit__(None, None, None)


def engines() -> set[int]:
    """The engine processes that this process has started."""
    return {pid for pid in children() if b"tinkex.engine" in command(pid)}


def test_a_pass_survives_the_death_of_the_engine_between_its_requests(tinkex_tiny, tmp_path):
    others = engines()
    moments = itertools.count()

    def kill(model: Model) -> Model:
        if next(moments) == 1:  # two of three requests have run
            (engine,) = engines() - others
            os.kill(engine, signal.SIGKILL)
        return model

    with service("torch", data_dir=tmp_path) as running, Api(running.url) as api:
        assert _life(api.model(), kill) == undisturbed(tinkex_tiny)


def test_a_chunked_client_call_counts_completely_or_not_at_all(tinkex_fake):
    trainer = tinkex_fake.client().create_lora_training_client(tinkex_fake.base_model, rank=8)
    good = proto_datum()
    bad = proto_datum(targets=(6, 7, 10**6))
    with pytest.raises(RequestFailedError) as caught:
        trainer.forward_backward([good] * 1025 + [bad], "cross_entropy").result(60)
    assert str(caught.value).startswith("data.1025.target_tokens")
    assert "none was accumulated" in str(caught.value)
    step = trainer.optim_step(AdamParams(learning_rate=0.1)).result(60)
    assert step.metrics is not None
    assert step.metrics["grad_norm"] == 0.0
    result = trainer.forward_backward([good] * 1025, "cross_entropy").result(60)
    assert len(result.loss_fn_outputs) == 1025
    once = trainer.optim_step(AdamParams(learning_rate=0.1)).result(60)
    assert once.metrics is not None
    assert once.metrics["grad_norm"] > 0
