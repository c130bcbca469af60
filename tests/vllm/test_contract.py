"""The half of the contract suite that samples, with our client and the newest official one, on the real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkex.testing import service

from ..contract.conftest import RELEASES
from ..contract.test_service_life import (  # noqa: F401 - pytest runs the tests here too
    MODEL,
    Life,
    lived,
    test_a_base_model_samples_untrained,
    test_a_prompt_outside_the_vocabulary_is_refused,
    test_a_sampling_client_works_in_another_process,
    test_many_samples_at_once_all_arrive,
    test_named_sampler_is_a_snapshot,
    test_prompt_logprobs_match_the_trainer,
    test_sample_includes_stop_sequence,
    test_sampled_logprobs_match_the_model,
    test_seed_reproduces_samples_that_otherwise_differ,
    test_temperature_zero_samples_likeliest_tokens,
    test_topk_prompt_tokens_are_sorted,
    test_unnamed_sampler_is_a_snapshot,
)

#: The chapters that sample, and what they need.
CHAPTERS = (
    "training",
    "resuming",
    "samplers",
    "sampling",
    "prompt_logprobs",
    "base_sampler",
    "pickled",
)


@pytest.fixture(scope="module")
def url(python: Path, small: Path) -> Iterator[str]:
    vllm: dict[str, Any] = {"sampler": "vllm", "sampler_python": python, "vllm_eager": True}
    with service("torch", (f"{MODEL}={small}",), dtype="float32", **vllm) as running:
        yield running.url


@pytest.fixture(scope="module", params=["tinkex", RELEASES[-1]])
def life(request: pytest.FixtureRequest, url: str) -> Life:
    return lived(request.param, url, *CHAPTERS)
