"""Generated methods: `*_async` coroutines and blocking methods, with the parameters of their definition."""

from __future__ import annotations

import ast
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


def test_generated_file_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_async.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("owner", "name"), TWINS)
def test_async_method_has_the_parameters_of_its_plain_method(owner, name):
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


def client_classes() -> list[ast.ClassDef]:
    sources = sorted((ROOT / "src" / "tinkex" / "_client").glob("*.py"))
    trees = [ast.parse(source.read_text()) for source in sources]
    return [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]


def test_no_blocking_method_repeats_the_signature_of_its_private_method():
    repeated = []
    for cls in client_classes():
        arguments = {
            node.name: ast.unparse(node.args)
            for node in cls.body
            if isinstance(node, ast.FunctionDef) and len(node.args.args + node.args.kwonlyargs) > 1
        }
        repeated += [
            f"{cls.name}.{name}"
            for name in arguments
            if arguments[name] == arguments.get(f"_{name}")
        ]
    assert repeated == []


def test_generated_methods_know_the_type_of_self():
    generated = (ROOT / "src" / "tinkex" / "_client" / "_generated.py").read_text()
    assert "self: Any" not in generated


BLOCKING = [
    (tinkex.ServiceClient, "create_lora_training_client", "TrainingClient"),
    (tinkex.ServiceClient, "create_sampling_client", "SamplingClient"),
    (tinkex.ServiceClient, "create_training_client_from_state", "TrainingClient"),
    (tinkex.ServiceClient, "create_training_client_from_state_with_optimizer", "TrainingClient"),
    (tinkex.ServiceClient, "get_server_capabilities", "GetServerCapabilitiesResponse"),
    (tinkex.TrainingClient, "create_sampling_client", "SamplingClient"),
    (tinkex.TrainingClient, "get_info", "GetInfoResponse"),
    (tinkex.TrainingClient, "save_weights_and_get_sampling_client", "SamplingClient"),
    (tinkex.TrainingClient, "save_weights_and_get_sampling_client_sync", "SamplingClient"),
    (tinkex.SamplingClient, "get_base_model", "str"),
]


@pytest.mark.parametrize(("owner", "name", "result"), BLOCKING)
def test_blocking_method_returns_the_result_and_has_a_docstring(owner, name, result):
    method = getattr(owner, name)
    assert inspect.signature(method).return_annotation == result
    assert inspect.getdoc(method)


@pytest.mark.parametrize("owner", ["TrainingClient", "SamplingClient"])
def test_client_has_exactly_the_official_coroutines(owner):
    assert coroutines(CLIENTS[owner]) == official_twins(owner)


@pytest.mark.parametrize("owner", ["ServiceClient", "RestClient", "AdminClient"])
def test_client_has_every_official_coroutine(owner):
    assert official_twins(owner) <= coroutines(CLIENTS[owner])


def test_async_method_calls_a_replaced_plain_method(server, service, monkeypatch):
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


def test_async_method_can_be_replaced_on_the_class(server, service, monkeypatch):
    answer_training(server)

    async def optim_step_async(self: Any, *_: Any) -> str:
        return f"replaced for {self.model_id}"

    monkeypatch.setattr(tinkex.TrainingClient, "optim_step_async", optim_step_async)
    trainer: Any = new_trainer(service())
    assert asyncio.run(trainer.optim_step_async()) == "replaced for s-1:train:0"


def test_training_coroutine_gives_a_future_and_sampling_coroutine_the_result(server, service):
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


def test_async_factories_run_concurrently(server, service):
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


def test_mock_with_the_spec_of_a_client_has_its_async_methods():
    mock = MagicMock(spec=tinkex.SamplingClient)
    mock.sample_async.return_value = "drawn"
    mock.sample.return_value = "future"
    assert asyncio.run(mock.sample_async(PROMPT, 1, ONE_TOKEN)) == "drawn"
    assert mock.sample(PROMPT, 1, ONE_TOKEN) == "future"
    assert isinstance(mock, tinkex.SamplingClient)
    with pytest.raises(AttributeError):
        mock.sampel_async()
