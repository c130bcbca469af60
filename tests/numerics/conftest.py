from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinkex.engine import base_models
from tinkex.engine.trainer import LanguageModel


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Small models are faster on one thread, and sums come out the same every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> base_models.BaseModel:
    cache: Path = tmp_path_factory.mktemp("models")
    return base_models.prepare(base_models.parse_spec(base_models.TINY), cache)


def load(tiny: base_models.BaseModel):
    """A fresh copy of the model, as transformers has it."""
    return base_models.load(tiny, device="cpu", dtype=torch.float32)


@pytest.fixture
def language_model(tiny) -> LanguageModel:
    return LanguageModel(load(tiny), context_length=tiny.context_length)
