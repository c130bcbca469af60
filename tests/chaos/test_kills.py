"""Kill the service and its engine during training: the run continues with bit-identical results."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import environment

from .served import Served

LIFE = Path(__file__).with_name("training_life.py")


def finish(life: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = life.communicate()
    assert life.returncode == 0, err[-3000:]
    outcome: dict[str, Any] = json.loads(out.splitlines()[-1])
    return outcome


def begin(python: str, module: str, served: Served, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, str(LIFE), module, served.url, str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def clients(long: bool) -> list[tuple[str, str]]:
    mine = [(sys.executable, "tinkex")]
    return [*mine, (str(environment("0.36.0")), "tinker")] if long else mine


def test_killing_service_and_engine_does_not_change_the_run(tmp_path: Path, long: bool) -> None:
    steps, kills = (40, 50) if long else (12, 4)
    served = Served(tmp_path, "--snapshot-every=0.2")
    served.start()
    try:
        undisturbed = finish(begin(sys.executable, "tinkex", served, steps))
        lives = [begin(python, module, served, steps) for python, module in clients(long)]
        # One thread per client, so that every output pipe is read.
        outcomes: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda life=life: outcomes.append(finish(life)))
            for life in lives
        ]
        for thread in threads:
            thread.start()
        chance = random.Random(4)
        killed = 0
        while killed < kills and any(thread.is_alive() for thread in threads):
            threads[0].join(timeout=chance.uniform(0.05, 1.0))
            (served.kill_service if killed % 2 else served.kill_engine)()
            killed += 1
        for thread in threads:
            thread.join()
    finally:
        served.stop()
    assert killed >= 2
    assert len(outcomes) == len(lives)
    for outcome in outcomes:
        assert outcome == undisturbed
    print(f"{killed} kills, {len(lives)} clients, {steps} steps: bit-identical")


@pytest.mark.parametrize("damage", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_damaged_snapshot_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    import tinkex

    served = Served(tmp_path, "--snapshot-every=0")
    served.start()
    try:
        service = tinkex.ServiceClient(base_url=served.url, api_key="tml-local")
        training = service.create_lora_training_client("tinkex/tiny", rank=4)
        snapshots = tmp_path / "snapshots"
        for _ in range(1000):  # snapshots are written in the background: work until there is one
            training.optim_step(tinkex.AdamParams()).result()
            if list(snapshots.glob("*/current.json")):
                break
        served.process.kill()
        served._wait()
        current = next(snapshots.glob("*/current.json"))
        changes = json.loads(current.read_text())["changes"]
        file = current.parent / str(changes) / damage
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        served.start()
        with pytest.raises(tinkex.RequestFailedError, match=damage):
            training.optim_step(tinkex.AdamParams()).result(timeout=60)
        # Other models still work.
        other = service.create_lora_training_client("tinkex/tiny", rank=4)
        assert other.optim_step(tinkex.AdamParams()).result().metrics
        service.close("success").result()
    finally:
        served.stop()
