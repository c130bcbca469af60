"""The client against the recorded routes and answers of TuFT 0.2.2."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tinkex
from tinkex import types
from tinkex._client.downloads import download_checkpoint
from tinkex.errors import APIResponseValidationError, UnprocessableEntityError

from ..client.helpers import PROMPT, datum
from .tuft import TuFT

ONE = types.SamplingParams(max_tokens=1)


@pytest.fixture
def client(tuft: TuFT, client_of: Callable[..., tinkex.ServiceClient]) -> tinkex.ServiceClient:
    return client_of(tuft)


def test_model_is_created_and_trained(trainer):
    result = trainer.forward_backward([datum(1, 2)], "cross_entropy").result(10)
    assert result.loss == result.metrics["loss:sum"] == 1.0
    assert trainer.optim_step(types.AdamParams()).result(10).metrics is None
    assert trainer.get_info().model_data.tokenizer_id == "some/model"


def test_weights_are_saved_loaded_and_sampled(client, trainer):
    state = trainer.save_state("half").result(10).path
    trainer.load_state(state).result(10)
    assert client.create_training_client_from_state_with_optimizer(state).model_id == "a-run"
    path = trainer.save_weights_for_sampler("final").result(10).path
    for sampler in (
        client.create_sampling_client(model_path=path),
        trainer.save_weights_and_get_sampling_client(),
        trainer.save_weights_and_get_sampling_client(name="eval"),
        trainer.save_weights_and_get_sampling_client(name="eval"),
    ):
        assert sampler.sample(PROMPT, 2, ONE).result(10).sequences[1].tokens == [5]


def test_user_metadata_of_save_is_dropped_if_server_refuses_it(tuft, trainer, caplog):
    with caplog.at_level("WARNING", "tinkex"):
        saved = [
            trainer.save_state(name, user_metadata={"step": "1"}).result(10) for name in ("a", "b")
        ]
    assert [each.path for each in saved] == ["tinker://a-run/weights/a", "tinker://a-run/weights/b"]
    assert len([each for each in caplog.messages if "user_metadata" in each]) == 1
    sent = tuft.asked("POST /api/v1/save_weights")
    assert ["user_metadata" in each.json for each in sent] == [True, False, False]
    assert [each.json["seq_id"] for each in sent] == [1, 1, 2]


def test_session_name_is_dropped_if_server_refuses_it(tuft, client_of):
    client = client_of(tuft, display_name="mine")
    assert client.create_lora_training_client("some/model", rank=4).model_id == "a-run"


def test_a_failed_training_request_is_a_value_error(tuft, trainer):
    tuft.failing = "out of memory"
    with pytest.raises(UnprocessableEntityError, match="out of memory") as refused:
        trainer.forward_backward([datum(1, 2)], "cross_entropy").result(10)
    assert isinstance(refused.value, ValueError)


def test_telemetry_is_accepted(tuft, client_of):
    client = client_of(tuft, telemetry_enabled=True)
    client.create_lora_training_client("some/model", rank=4)
    client.close().result(10)
    assert tuft.asked("POST /api/v1/telemetry")


def test_requests_have_only_fields_known_to_server(tuft, trainer):
    """The dialect answers 422 to an unknown field; none of these calls is refused."""
    trainer.unload_model().result(10)
    assert tuft.asked("POST /api/v1/unload_model")


def test_archive_on_disk_of_server_is_reported(client, tmp_path):
    rest = client.create_rest_client()
    with pytest.raises(APIResponseValidationError, match="a file on its own disk, file:///check"):
        download_checkpoint(rest, "tinker://a-run/sampler_weights/final", tmp_path)
    assert list(tmp_path.iterdir()) == []
