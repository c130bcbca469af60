"""The protocol with samples of another engine: `--sampler vllm` with a stand-in for vLLM, which draws from hashes.

So these are the tests of the sampling half that do not look at what a model has learned. tests/vllm runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..server.test_vllm import python as python  # a fixture
from .conftest import RELEASES
from .test_service_life import (  # noqa: F401 - pytest runs the tests here too
    Life,
    lived,
    serving,
    test_a_prompt_outside_the_vocabulary_is_refused,
    test_a_sampling_client_works_in_another_process,
    test_many_samples_at_once_all_arrive,
    test_seed_reproduces_samples_that_otherwise_differ,
)

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def service(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--sampler", "vllm", "--sampler-python", str(python), "--dtype", "float32")
    with serving(tmp_path_factory.mktemp("service"), *options) as url:
        yield url


@pytest.fixture(scope="module", params=["tinkex", RELEASES[-1]])
def life(request: pytest.FixtureRequest, service: str) -> Life:
    return lived(request.param, service, "training", "sampling", "prompt_logprobs", "pickled")
