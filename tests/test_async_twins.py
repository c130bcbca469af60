"""The `*_async` twins: generated, real coroutines, with the parameters of the methods they follow."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import tinkex
from tinkex import types

from .client.helpers import (
    ONE_TOKEN,
    PROMPT,
    answer_samples,
    answer_training,
    new_sampler,
    new_trainer,
)

ROOT = Path(__file__).parents[1]
OFFICIAL: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "official_api.json").read_text())
CLIENTS = {
    cls.__name__: cls
    for cls in (
        tinkex.ServiceClient,
        tinkex.TrainingClient,
        tinkex.SamplingClient,
        tinkex.RestClient,
        tinkex.AdminClient,
    )
}


def coroutines(cls: type) -> set[str]:
    return {
        name
        for name in dir(cls)
        if not name.startswith("_") and inspect.iscoroutinefunction(getattr(cls, name))
    }


TWINS = sorted((cls.__name__, name) for cls in CLIENTS.values() for name in coroutines(cls))


def official_twins(name: str) -> set[str]:
    return {each for each in OFFICIAL["classes"][name]["methods"] if each.endswith("_async")}


def test_the_generated_file_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_async.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("owner", "name"), TWINS)
def test_a_twin_has_the_parameters_of_its_method(owner, name):
    cls = CLIENTS[owner]
    plain, twin = getattr(cls, name.removesuffix("_async")), getattr(cls, name)
    assert name.endswith("_async")
    assert not inspect.iscoroutinefunction(plain)

    def parameters(method: Any) -> list[tuple[str, Any, Any]]:
        return [
            (each.name, each.kind, each.default)
            for each in inspect.signature(method).parameters.values()
        ]

    assert parameters(twin) == parameters(plain)


@pytest.mark.parametrize("owner", ["TrainingClient", "SamplingClient"])
def test_tools_that_list_coroutines_find_the_official_ones_and_no_more(owner):
    assert coroutines(CLIENTS[owner]) == official_twins(owner)


@pytest.mark.parametrize("owner", ["ServiceClient", "RestClient", "AdminClient"])
def test_every_official_twin_is_there(owner):
    assert official_twins(owner) <= coroutines(CLIENTS[owner])


def test_a_method_replaced_on_the_class_is_seen_by_its_twin(server, service, monkeypatch):
    answer_training(server)
    trainer = new_trainer(service())
    called: list[Any] = []
    original = tinkex.TrainingClient.optim_step

    def optim_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(args)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(tinkex.TrainingClient, "optim_step", optim_step)
    params = types.AdamParams(learning_rate=0.5)

    async def step() -> Any:
        return await (await trainer.optim_step_async(params))

    assert asyncio.run(step()).success
    assert called == [(params,)]


def test_a_twin_can_be_replaced_like_any_method(server, service, monkeypatch):
    answer_training(server)

    async def optim_step_async(self: Any, *_: Any) -> str:
        return f"replaced for {self.model_id}"

    monkeypatch.setattr(tinkex.TrainingClient, "optim_step_async", optim_step_async)
    trainer: Any = new_trainer(service())
    assert asyncio.run(trainer.optim_step_async()) == "replaced for s-1:train:0"


def test_a_training_twin_hands_over_a_future_and_a_sampling_twin_the_result(server, service):
    answer_training(server)
    answer_samples(server, 7)
    client = service()
    trainer, sampler = new_trainer(client), new_sampler(client)

    async def both() -> tuple[Any, Any]:
        future = await trainer.optim_step_async()
        assert isinstance(future, tinkex.APIFuture)
        return await future, await sampler.sample_async(PROMPT, 1, ONE_TOKEN)

    step, drawn = asyncio.run(both())
    assert step.success
    assert drawn.sequences[0].tokens == [7]


def test_the_clients_async_factories_work_side_by_side(server, service):
    client = service()

    async def make() -> list[Any]:
        return list(
            await asyncio.gather(
                client.create_sampling_client_async(base_model="m"),
                client.create_lora_training_client_async("m"),
                client.create_sampling_client_async(base_model="m"),
            )
        )

    made = asyncio.run(make())
    assert [type(each) for each in made] == [
        tinkex.SamplingClient,
        tinkex.TrainingClient,
        tinkex.SamplingClient,
    ]
    assert all(each.holder is client.holder for each in made)


def test_a_mock_with_the_clients_methods_can_be_made():
    mock = MagicMock(spec=tinkex.SamplingClient)
    mock.sample_async.return_value = "drawn"
    mock.sample.return_value = "future"
    assert asyncio.run(mock.sample_async(PROMPT, 1, ONE_TOKEN)) == "drawn"
    assert mock.sample(PROMPT, 1, ONE_TOKEN) == "future"
    assert isinstance(mock, tinkex.SamplingClient)
    with pytest.raises(AttributeError):
        mock.sampel_async()
