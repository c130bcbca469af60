"""Nodes that join and leave a running cluster, the loss of its head, and a cluster that the service starts itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.ray.inside.clusters import Machines, eventually
from tinkex.testing import service
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

DATA = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": np.array([2, 3, 4])})]


def engines(url: str) -> list[dict[str, Any]]:
    """The engines that are up."""
    answer = httpx.get(f"{url}/api/v1/healthz")
    return [each for each in answer.json().get("engines") or [] if each["up"]]


def step(training) -> None:
    training.forward_backward(DATA, "cross_entropy").result()
    training.optim_step(AdamParams(learning_rate=1e-3)).result()


def test_a_node_that_joins_is_used_and_one_that_leaves_is_not_missed():
    options: dict[str, Any] = {"engine_in_process": False, "engines": "auto"}
    with (
        Machines.running(2) as machines,
        service("fake", ray=machines.address, **options) as running,
    ):
        client = running.client()
        trained = [client.create_lora_training_client("tinkex/tiny", seed=n) for n in range(2)]
        assert len(engines(running.url)) == 2
        machines.join()
        listed = eventually(lambda: len(found := engines(running.url)) == 3 and found)
        assert len({each["node"] for each in listed}) == 3
        assert all(each["memory_bytes"] > 0 for each in listed)
        trained.append(client.create_lora_training_client("tinkex/tiny", seed=3))
        step(trained[2])
        assert max(each["models"] for each in engines(running.url)) == 1
        machines.kill_node(0)
        for training in trained:
            step(training)
        eventually(lambda: len(engines(running.url)) == 2)
        text = httpx.get(f"{running.url}/metrics").text
        assert f'node="{engines(running.url)[0]["node"]}"' in text
        assert "tinkex_engine_memory_bytes" in text
        eventually(lambda: len(httpx.get(f"{running.url}/api/v1/healthz").json()["engines"]) == 2)


def test_a_lost_head_is_reported_and_no_call_hangs(monkeypatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    options: dict[str, Any] = {"engine_in_process": False, "engines": 2}
    with (
        Machines.running(2) as machines,
        service("fake", ray=machines.address, **options) as running,
    ):
        assert httpx.get(f"{running.url}/api/v1/healthz").status_code == 200
        machines.kill_head()
        said = eventually(
            lambda: (
                (answer := httpx.get(f"{running.url}/api/v1/healthz")).status_code == 503
                and "nothing answers at" in answer.text
                and answer.text
            )
        )
        assert machines.address in said


def test_a_killed_bridge_is_started_again():
    options: dict[str, Any] = {"engine_in_process": False, "engines": 2}
    with (
        Machines.running(2) as machines,
        service("fake", ray=machines.address, **options) as running,
    ):
        training = running.client().create_lora_training_client("tinkex/tiny", seed=1)
        step(training)
        os.kill(_process("tinkex.engine.ray_bridge"), signal.SIGKILL)
        step(training)
        assert sum(each["restarts"] for each in engines(running.url)) >= 1


def test_a_local_cluster_that_loses_its_head_is_replaced(monkeypatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    with service("fake", ray="local", engines=2, engine_in_process=False) as running:
        training = running.client().create_lora_training_client("tinkex/tiny", seed=1)
        step(training)
        os.kill(_process("gcs/gcs_server "), signal.SIGKILL)
        eventually(
            lambda: sum(each["restarts"] for each in engines(running.url)) >= 2, seconds=240.0
        )
        step(training)


def _process(name: str, count: int = 1) -> int:
    """The process of this name in this network namespace, or the first of several."""
    here = Path("/proc/self/ns/net").readlink()
    found = [
        int(pid)
        for pid in subprocess.run(
            ["pgrep", "-f", name], capture_output=True, text=True, check=True
        ).stdout.split()
        if Path(f"/proc/{pid}/ns/net").readlink() == here
    ]
    assert len(found) == count
    return found[0]


def test_a_local_cluster_listens_on_loopback_alone_and_asks_for_a_token(monkeypatch):
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    # A second address, which Ray would take.
    subprocess.run(["ip", "address", "add", "10.9.9.9/32", "dev", "lo"], check=True)
    subprocess.run(["ip", "route", "add", "default", "dev", "lo", "src", "10.9.9.9"], check=True)
    with service("fake", ray="local", engines=2, engine_in_process=False) as running:
        client = running.client()
        training = client.create_lora_training_client("tinkex/tiny", seed=1)
        step(training)
        # Engines have the priority that they have without Ray.
        assert os.getpriority(os.PRIO_PROCESS, _process("ray::EngineActor", 2)) == os.nice(0)
        sampler = training.save_weights_and_get_sampling_client()
        drawn = sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=4)).result()
        assert len(drawn.sequences[0].tokens) == 4
        listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True)
        places = {line.split()[3]: line for line in listening.stdout.splitlines() if "ray" in line}
        assert places
        assert all(
            place.startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:", "[::1]:")) for place in places
        )
        (head,) = [
            place.rpartition(":")[2]
            for place, line in _listening(listening.stdout)
            if "gcs_server" in line
        ]
        refused = subprocess.run(
            [sys.executable, "-c", _UNINVITED, f"127.0.0.1:{head}"],
            env={
                **os.environ,
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": "guessed" * 8,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode != 0
        assert "uthenticat" in refused.stderr


_UNINVITED = "import ray, sys; ray.init(address=sys.argv[1])"


def _listening(text: str) -> list[tuple[str, str]]:
    return [(line.split()[3], line) for line in text.splitlines()]
