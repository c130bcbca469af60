"""Requests that a cluster cannot fulfil are refused at once, with a clear reason."""

from __future__ import annotations

import shutil
from typing import Any

import httpx
import pytest

from tests.ray.inside.clusters import Machines, eventually
from tinkex.errors import ConfigError
from tinkex.testing import service


def refusal(**settings) -> str:
    with pytest.raises(ConfigError) as caught, service("fake", engine_in_process=False, **settings):
        pass
    return str(caught.value)


def test_unknown_addresses():
    assert "nothing answers at 127.0.0.1:1" in refusal(ray="127.0.0.1:1")
    assert "is not HOST:PORT, auto or local" in refusal(ray="nonsense")
    assert "address of the Ray client" in refusal(ray="ray://127.0.0.1:10001")
    assert "no Ray cluster was found" in refusal(ray="auto")


def test_resources_that_no_node_has_are_named_in_the_refusal():
    with Machines.running(1, num_gpus=1) as machines:
        said = refusal(ray=machines.address, engine_gpus=4)
        assert "no node has 4 GPU; the most is 1" in said
        assert "no node has 9 CPU; the most is 1" in refusal(ray=machines.address, engine_cpus=9)
        # It serves with fewer engines than asked for, and starts more when there is room.
        options: dict[str, Any] = {
            "ray": machines.address,
            "engine_gpus": 0,
            "engine_in_process": False,
        }
        with service("fake", engines=2, **options) as running:
            assert httpx.get(f"{running.url}/api/v1/healthz").status_code == 200
            machines.join()
            eventually(lambda: httpx.get(f"{running.url}/api/v1/healthz").json().get("engines"))


def test_a_base_model_that_only_some_nodes_have(tmp_path):
    """The front has it; nodes are on this machine too, so the directory is moved away once the front has read it."""
    with service("fake") as running:  # makes the model in the cache
        health = running.client().get_server_capabilities()
        assert health.model_names() == ["tinkex/tiny"]
    from tinkex.engine.base_models import TINY, ModelSpec, default_cache_dir, prepare

    there = tmp_path / "model"
    shutil.copytree(prepare(ModelSpec(TINY, TINY), default_cache_dir()).directory, there)
    (there / "model.safetensors").unlink()
    with Machines.running(1) as machines:
        said = refusal(ray=machines.address, base_models=(f"mine={there}",))
        assert "on node" in said
        assert "lacks model.safetensors" in said
