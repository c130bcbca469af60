"""The client against the recorded routes and answers of SkyRL's server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

import tinkex
from tinkex import types
from tinkex._client.tokenizers import set_tokenizer_loader
from tinkex.errors import (
    APIResponseValidationError,
    BadRequestError,
    ConflictError,
    NotFoundError,
)

from ..cli.commands import run
from ..client.helpers import PROMPT, datum
from ..scripted import Answer
from .letters import Letters
from .skyrl import DRAWN, SkyRL

TWO = types.SamplingParams(max_tokens=2)


@pytest.fixture
def client(skyrl: SkyRL, client_of: Callable[..., tinkex.ServiceClient]) -> tinkex.ServiceClient:
    return client_of(skyrl)


# -- training ------------------------------------------------------------------------------------


def test_loss_sum_is_computed_if_server_omits_it(trainer):
    half = types.Datum(PROMPT, {"target_tokens": [1, 2, 3], "weights": [0.0, 1.0, 0.5]})
    for result in (
        trainer.forward([half, datum(4, 5)], "cross_entropy").result(10),
        trainer.forward_backward([half, datum(4, 5)], "cross_entropy").result(10),
    ):
        assert result.metrics["loss:sum"] == result.loss == pytest.approx(0.5 * 1.5 + 0.5 * 2)
    stepped = trainer.optim_step(types.AdamParams()).result(10)
    assert stepped.metrics["skyrl.ai/grad_norm"] == 0.25


def test_sum_of_other_losses_is_sum_of_token_losses(trainer):
    scored = {"target_tokens": [1, 2, 3], "advantages": [1.0] * 3, "logprobs": [-1.0] * 3}
    weighted = types.Datum(PROMPT, {**scored, "weights": [1.0, 1.0, 0.0]})
    result = trainer.forward_backward([weighted], "importance_sampling").result(10)
    assert result.loss == pytest.approx(1.0)


@pytest.mark.heavy  # a custom loss needs torch
def test_custom_loss_logs_warning(trainer, caplog):
    """The server divides the loss by the sum of the weights, but a custom loss sends its gradient as weights."""

    def loss(_: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -sum(each.sum() for each in logprobs), {}

    with caplog.at_level("WARNING", "tinkex"):
        for _ in range(2):
            trained = trainer.forward_backward_custom([datum(1, 2)], loss).result(30)
            assert trained.loss == pytest.approx(1.0)
    assert len([each for each in caplog.messages if "divides the loss" in each]) == 1


def test_name_already_in_use_is_refused_without_retry(skyrl, trainer, clock):
    trainer.save_state("best").result(10)
    with pytest.raises(ConflictError, match="'best' already exists"):
        trainer.save_state("best").result(10)
    assert len(skyrl.asked("POST /api/v1/save_weights")) == 2
    assert clock.slept == []


def test_a_failed_training_request_is_a_value_error(skyrl, trainer):
    skyrl.on_future("2", Answer({"detail": "bad shape"}, 400))
    with pytest.raises(BadRequestError, match="bad shape") as refused:
        trainer.optim_step(types.AdamParams()).result(10)
    assert isinstance(refused.value, ValueError)


# -- weights -------------------------------------------------------------------------------------


def test_path_of_saved_sampler_works_in_later_calls(skyrl, client, trainer, tmp_path):
    saved = trainer.save_weights_for_sampler("final").result(10)
    assert saved.path == "tinker://model_1/sampler_weights/final"
    rest = client.create_rest_client()
    assert rest.get_training_run_by_tinker_path(saved.path).result(10).base_model == "some/model"
    sampler = client.create_sampling_client(model_path=saved.path)
    assert sampler.sample(PROMPT, 1, TWO).result(10).sequences[0].tokens == DRAWN[:2]
    assert rest.get_checkpoint_archive_url_from_tinker_path(saved.path).result(10).url == (
        f"{skyrl.url}/api/v1/training_runs/model_1/checkpoints/final/download"
    )
    rest.delete_checkpoint_from_tinker_path(saved.path).result(10)


def test_missing_archive_is_not_found_error(client):
    rest = client.create_rest_client()
    with pytest.raises(NotFoundError, match="Checkpoint not found: model_1/no"):
        rest.get_checkpoint_archive_url("tinker://model_1/sampler_weights/no").result(10)


def test_training_continues_from_saved_state(client, trainer):
    path = trainer.save_state("half").result(10).path
    assert path == "tinker://model_1/weights/half"
    trainer.load_state_with_optimizer(path).result(10)
    assert client.create_training_client_from_state(path).model_id == "model_1"


def test_sampler_of_current_weights_can_be_created_twice_with_same_name(skyrl, trainer):
    first = trainer.save_weights_and_get_sampling_client(name="eval")
    second = trainer.save_weights_and_get_sampling_client(name="eval")
    for sampler in (first, second):
        assert sampler.sample(PROMPT, 1, TWO).result(10).sequences[0].tokens == DRAWN[:2]
    assert ("sampler", "eval") in skyrl.saved


# -- sampling ------------------------------------------------------------------------------------


def test_prompt_logprobs_without_first_token_are_aligned(client):
    sampler = client.create_sampling_client(base_model="some/model")
    assert sampler.compute_logprobs(PROMPT).result(10) == [None, -1.0, -1.0]
    drawn = sampler.sample(PROMPT, 1, TWO, include_prompt_logprobs=True).result(10)
    assert drawn.prompt_logprobs == [None, -1.0, -1.0]


def test_missing_topk_logprobs_log_warning(client, caplog):
    sampler = client.create_sampling_client(base_model="some/model")
    with caplog.at_level("WARNING", "tinkex"):
        for _ in range(2):
            drawn = sampler.sample(PROMPT, 1, TWO, topk_sample_logprobs=3).result(10)
            assert drawn.sequences[0].tokens == DRAWN[:2]
    said = [each for each in caplog.messages if "topk_sample_logprobs" in each]
    assert len(said) == 1  # once per sampler, not per sample


def test_ignored_target_logprobs_are_error(client):
    sampler = client.create_sampling_client(base_model="some/model")
    targets = types.TensorData([1, 2], "int64", [2, 1])
    with pytest.raises(APIResponseValidationError, match="ignores target_prompt_logprobs"):
        sampler.sample(PROMPT, 1, TWO, target_prompt_logprobs=targets).result(10)


def test_a_stream_falls_back_to_a_sample(client):
    sampler = client.create_sampling_client(base_model="some/model")

    async def drawn() -> list[types.SampleStreamChunk]:
        return [chunk async for chunk in sampler.sample_stream(PROMPT, TWO)]

    chunks = asyncio.run(drawn())
    assert [chunk.token_id for chunk in chunks] == [*DRAWN[:2], None]
    assert chunks[-1].finish_reason == "length"


def test_result_the_server_cannot_serialize_fails_after_retries(skyrl, client, clock):
    """A NaN in a result makes the server fail on every poll."""
    sampler = client.create_sampling_client(base_model="some/model")
    for number in "123":
        skyrl.on_future(number, Answer(b"Internal Server Error", 500, content_type="text/plain"))
    with pytest.raises(tinkex.TinkerError, match="Internal Server Error"):
        sampler.sample(PROMPT, 1, TWO, timeout=10).result(30)
    assert len(skyrl.asked("POST /api/v1/retrieve_future")) < 10


# -- the command line ----------------------------------------------------------------------------


def cli(server: SkyRL, *arguments: Any) -> Any:
    return run(*arguments, "--base-url", server.url)


def test_checkpoints_are_listed_run_by_run(skyrl, trainer):
    trainer.save_state("half").result(10)
    trainer.save_weights_for_sampler("final").result(10)
    listed = cli(skyrl, "checkpoint", "list", "--format", "json")
    assert listed.code == 0, listed.err
    paths = {each["tinker_path"] for each in json.loads(listed.out)["checkpoints"]}
    assert paths == {
        "tinker://model_1/weights/half",
        "tinker://model_1/sampler_weights/final",
    }


def test_status_command_shows_server_state(skyrl, trainer):
    trainer.save_state("half").result(10)
    shown = cli(skyrl, "status", "--format", "json")
    assert shown.code == 0, shown.err
    told = json.loads(shown.out)
    assert (told["models"], told["runs"], told["checkpoints"]) == (["some/model"], 1, 1)


@pytest.mark.parametrize(
    ("command", "endpoint"),
    [
        (["session", "list"], "GET /api/v1/sessions"),
        (["usage"], "GET /api/v1/billing/usage/events"),
    ],
)
def test_a_command_names_the_endpoint_that_the_server_lacks(skyrl, command, endpoint):
    refused = cli(skyrl, *command)
    assert refused.code == 1
    assert f"has no {endpoint}" in refused.err
    assert skyrl.url in refused.err


def test_client_sends_end_token_as_stop_if_server_has_no_default(skyrl):
    set_tokenizer_loader(lambda name, revision: Letters())
    try:
        said = run("chat", "some/model", "--json", "--base-url", skyrl.url, input="Hello\n")
    finally:
        set_tokenizer_loader(None)
    assert said.code == 0, said.err
    (answer,) = json.loads(said.out)["answers"]
    assert (answer["text"], answer["tokens"], answer["stop_reason"]) == ("ef", 3, "stop")
    assert skyrl.asked("POST /api/v1/asample")[0].json["sampling_params"]["stop"] == [2, 3]
