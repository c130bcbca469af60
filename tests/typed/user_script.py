"""A user's script under `mypy --strict`, with and without pydantic's plugin; `make check` runs both, nothing executes it."""

from __future__ import annotations

from typing import assert_type

import tinkex
from tinkex import types


def train(service: tinkex.ServiceClient) -> str:
    training = service.create_lora_training_client("tinkex/tiny", rank=8)
    assert_type(training, tinkex.TrainingClient)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    passed = training.forward_backward([datum], "cross_entropy")
    assert_type(passed, tinkex.APIFuture[types.ForwardBackwardOutput])
    assert_type(passed.result().metrics, dict[str, float])
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-4)).result(timeout=10)
    assert_type(stepped, types.OptimStepResponse)
    return training.save_state("last").result().path


async def sample(service: tinkex.ServiceClient, path: str) -> list[int]:
    sampler = await service.create_sampling_client_async(model_path=path)
    assert_type(sampler, tinkex.SamplingClient)
    params = types.SamplingParams(max_tokens=8, temperature=0.7, seed=1)
    answer = await sampler.sample_async(types.ModelInput.from_ints([1]), 1, params)
    assert_type(answer, types.SampleResponse)
    logprobs = await sampler.compute_logprobs_async(types.ModelInput.from_ints([1, 2]))
    assert_type(logprobs, list[float | None])
    return list(answer.sequences[0].tokens)


def look(service: tinkex.ServiceClient) -> None:
    rest = service.create_rest_client()
    for run in rest.list_training_runs(limit=5).result().training_runs:
        assert_type(run.training_run_id, str)
        assert_type(run.is_lora, bool)


def fail(service: tinkex.ServiceClient) -> int | None:
    try:
        train(service)
    except tinkex.APIStatusError as error:
        return error.status_code
    return None
