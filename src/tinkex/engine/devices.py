"""Choices that depend on the device a model runs on, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

__all__ = ["DeviceChoices", "choices_for", "device_for", "dtype_for", "has_bfloat16"]

#: Flags of /proc/cpuinfo that mean matrix products in bfloat16 without emulation.
_BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16"})
#: Models with fewer parameters stay float32: their products are too small to be faster in bfloat16.
SMALL_MODEL: Final = 8_000_000


@dataclass(frozen=True)
class DeviceChoices:
    #: Positions per page of the cache of keys and values.
    page_tokens: int
    #: Prompt tokens that one sampling step reads at most, so that running continuations are not delayed.
    prefill_tokens: int
    #: Tokens of a micro-batch in training. On a CPU, products of 512 rows reach 97 % of the rate of 2048 rows.
    micro_batch_tokens: int
    #: Positions whose logits are computed at a time. With a vocabulary of 49k, those of 256 need 50 MB of memory that a
    #: CPU's allocator maps anew each time.
    logit_positions: int
    #: Bytes of activations of a micro-batch; above that, layers run again in the backward pass.
    activation_bytes: int


_CHOICES: Final = {
    "cpu": DeviceChoices(
        page_tokens=32,
        prefill_tokens=512,
        micro_batch_tokens=512,
        logit_positions=128,
        activation_bytes=1_750_000_000,
    ),
    # Not measured: there was no such device to test with.
    "cuda": DeviceChoices(
        page_tokens=32,
        prefill_tokens=8192,
        micro_batch_tokens=8192,
        logit_positions=1024,
        activation_bytes=8_000_000_000,
    ),
}


def choices_for(device: torch.device) -> DeviceChoices:
    return _CHOICES.get(device.type, _CHOICES["cuda"])


def device_for(wanted: str) -> str:
    """The device of `--device`; `auto` takes the fastest there is."""
    if wanted != "auto":
        return wanted
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def dtype_for(wanted: str, device: str, parameters: int) -> torch.dtype:
    """The type of the products with a model's frozen weights, for `--dtype`.

    `auto` takes bfloat16 where the device computes it natively and the model is large enough to gain from it.
    """
    if wanted != "auto":
        chosen: torch.dtype = getattr(torch, wanted)
        return chosen
    native = has_bfloat16(device) and parameters >= SMALL_MODEL
    return torch.bfloat16 if native else torch.float32


def has_bfloat16(device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the device multiplies bfloat16 matrices without emulation."""
    kind = torch.device(device).type
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind != "cpu" or not cpuinfo.is_file():
        return False
    lines = cpuinfo.read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())
