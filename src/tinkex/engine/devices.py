"""Choices that depend on the device a model runs on, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["DeviceChoices", "choices_for"]


@dataclass(frozen=True)
class DeviceChoices:
    #: Positions per page of the cache of keys and values.
    page_tokens: int
    #: Prompt tokens that one sampling step reads at most, so that running continuations are not held up.
    prefill_tokens: int


_CHOICES: Final = {
    "cpu": DeviceChoices(page_tokens=32, prefill_tokens=512),
    # Not measured: there was no such device to try.
    "cuda": DeviceChoices(page_tokens=32, prefill_tokens=8192),
}


def choices_for(device: torch.device) -> DeviceChoices:
    return _CHOICES.get(device.type, _CHOICES["cuda"])
