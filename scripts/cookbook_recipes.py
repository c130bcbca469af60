"""Recipes of tinker-cookbook that need neither the hub nor a key, run against a service of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Module and options of each recipe: reinforcement learning, the same in several turns, supervised learning.
RECIPES: Mapping[str, Sequence[str]] = {
    "math_rl": (
        *("tinker_cookbook.recipes.math_rl.train", "env=arithmetic", "lora_rank=8"),
        *("group_size=4", "groups_per_batch=6", "max_tokens=6", "max_steps=4", "save_every=2"),
    ),
    "guess_number": (
        "tinker_cookbook.recipes.multiplayer_rl.guess_number.train",
        *("group_size=2", "batch_size=4", "max_tokens=8", "max_steps=2", "save_every=1"),
    ),
    "chat_sl": (
        *("tinker_cookbook.recipes.chat_sl.train", "dataset={sources}/conversations.jsonl"),
        *("lora_rank=8", "batch_size=32", "max_length=512", "save_every=2"),
    ),
}
RECIPE_TIMEOUT = 1200  # seconds for one recipe


@contextmanager
def serving(home: Path, engines: str) -> Iterator[tuple[str, Path]]:
    """The address of a service with these engines, and its base model: a directory, for its tokenizer."""
    from tinkex.engine.base_models import default_cache_dir, parse_spec, prepare

    model = prepare(parse_spec("tinkex/tiny"), default_cache_dir()).directory
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tinkex", "serve", "--port", "0", "--base-model", str(model)]
    with (
        (home / "service.log").open("w") as log,
        subprocess.Popen(
            [*command, "--engines", engines, "--data-dir", str(home / "data")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        announced = process.stdout.readline().split()
        if not announced:
            sys.exit(f"the service did not start; see {log.name}")
        try:
            yield announced[-1], model
        finally:
            process.terminate()


def run(
    runner: Sequence[str], service: tuple[str, Path], home: Path, sources: Path, env: dict[str, str]
) -> dict[str, Any]:
    """Whether each recipe ran to its end, and the steps that it reports."""
    url, model = service
    found: dict[str, Any] = {}
    for name, (module, *options) in RECIPES.items():
        logs = home / name
        logs.mkdir(parents=True, exist_ok=True)
        command = [
            *(*runner, module, *(option.format(sources=sources) for option in options)),
            *(f"model_name={model}", "renderer_name=role_colon", "eval_every=0"),
            *(f"log_path={logs}", "behavior_if_log_dir_exists=delete"),
        ]
        with (home / f"{name}.log").open("w") as output:
            try:
                code = subprocess.run(
                    command,
                    env=env | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-cookbook"},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=RECIPE_TIMEOUT,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        found[name] = {"passed": code == 0, "steps": _steps(logs / "metrics.jsonl")}
    return found


def _steps(metrics: Path) -> int:
    """Steps that a recipe has logged."""
    if not metrics.exists():
        return 0
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return len({row["step"] for row in rows if "step" in row})
