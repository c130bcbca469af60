"""Split a call that is too large for one request, and combine the results. Pure functions."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import isfinite
from typing import Final

from tinkex.errors import InvalidInputError
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)

from .notices import logger

__all__ = ["combine", "datum_bytes", "input_bytes", "known_tokens", "reduce_metrics", "split"]

MAX_ITEMS: Final = 1024
MAX_BYTES: Final = 5_000_000

_TOKEN_BYTES: Final = 4  # in protobuf a token is an int32
_JSON_TOKEN_BYTES: Final = 10  # in JSON: digits and a comma, estimated


def known_tokens(prompt: ModelInput) -> int:
    """The length of a prompt in tokens, without images of unknown length."""
    total = 0
    for chunk in prompt.chunks:
        with suppress(InvalidInputError):
            total += chunk.length
    return total


def chunk_bytes(chunk: ModelInputChunk, token_bytes: int) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return chunk.length * token_bytes
    if isinstance(chunk, ImageChunk):
        return len(chunk.data)
    if isinstance(chunk, ImageAssetPointerChunk):
        return len(chunk.location.encode())
    return len(chunk.dmel) if isinstance(chunk, DmelChunk) else 0


def input_bytes(model_input: ModelInput) -> int:
    """Approximate size of a prompt as JSON, for the limit on bytes being sent."""
    return sum(chunk_bytes(chunk, _JSON_TOKEN_BYTES) for chunk in model_input.chunks)


def datum_bytes(datum: Datum) -> int:
    """Approximate size of a datum as protobuf."""
    tensors = 0
    for tensor in datum.loss_fn_inputs.values():
        tensors += tensor.values.nbytes
        if tensor.indices is not None:
            tensors += sum(index.nbytes for index in tensor.indices)
    return tensors + sum(chunk_bytes(chunk, _TOKEN_BYTES) for chunk in datum.model_input.chunks)


def split(
    data: Sequence[Datum],
    *,
    max_items: int = MAX_ITEMS,
    max_bytes: int = MAX_BYTES,
    weigh: Callable[[Datum], int] = datum_bytes,
) -> Iterator[list[Datum]]:
    """Split greedily and in order. A datum above `max_bytes` becomes a chunk of its own."""
    chunk: list[Datum] = []
    size = 0
    for datum in data:
        weight = weigh(datum)
        if chunk and (len(chunk) >= max_items or size + weight > max_bytes):
            yield chunk
            chunk, size = [], 0
        chunk.append(datum)
        size += weight
    if chunk:
        yield chunk


def combine(results: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Combine results: outputs in order, each metric reduced by the suffix of its name.

    A single result is reduced too, so that the meaning of a metric does not depend on the batch size.
    """
    kinds = {result.loss_fn_output_type for result in results}
    if len(kinds) > 1:
        logger.warning(
            "Chunks of one call have different output types: %s", ", ".join(sorted(kinds))
        )
    return ForwardBackwardOutput(
        loss_fn_output_type=results[0].loss_fn_output_type if results else "",
        loss_fn_outputs=[output for result in results for output in result.loss_fn_outputs],
        metrics=reduce_metrics(
            [(result.metrics, len(result.loss_fn_outputs)) for result in results]
        ),
    )


def reduce_metrics(parts: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Reduce each metric of the first part; the suffix of its name (`:sum`, `:mean`, …) says how.

    A metric that some parts lack is reduced over the parts that have it. Without a known suffix it is averaged.
    Averages are weighted by the number of datums; if that is zero everywhere, all parts count equally.
    """
    reduced: dict[str, float] = {}
    for name in parts[0][0] if parts else ():
        found = [(metrics[name], weight) for metrics, weight in parts if name in metrics]
        values = [value for value, _ in found]
        weights = [weight for _, weight in found]
        reduction = name.rpartition(":")[2] if ":" in name else ""
        if reduction == "unique":
            reduced |= _keep_all(name, values)
        else:
            reduced[name] = _REDUCTIONS.get(reduction, _mean)(values, weights)
    return reduced


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if total == 0 or len(values) == 1:  # exact: value · weight / weight may round differently
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def _sum_of_hashes(values: Sequence[float], _: Sequence[float]) -> int:
    """Add 64-bit hashes modulo 2⁶⁴."""
    return sum(int(value) for value in values if isfinite(value)) % 2**64


def _hash_unordered(values: Sequence[float], _: Sequence[float]) -> float:
    """Hash that is equal for equal values in any order and in any process."""
    packed = struct.pack(f"<{len(values)}d", *sorted(values))
    return float(int.from_bytes(hashlib.blake2b(packed, digest_size=6).digest(), "big"))


def _slack(values: Sequence[float], weights: Sequence[float]) -> float:
    return max(values) - _mean(values, weights)


_REDUCTIONS: Final[dict[str, Callable[[Sequence[float], Sequence[float]], float]]] = {
    "mean": _mean,
    "sum": lambda values, _: sum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "slack": _slack,
    "hash2": _sum_of_hashes,
    "hash_unordered": _hash_unordered,
}


def _keep_all(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name if index == 0 else f"{name}_{index}": value for index, value in enumerate(values)}
