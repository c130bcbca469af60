"""Checks that a sample contains the requested fields, and repairs a missing first logprob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex._lazy import np
from tinkex.errors import APIResponseValidationError
from tinkex.types import EncodedTextChunk, ModelInput, SampleResponse

__all__ = ["check_answered", "lacks_alternatives", "with_first_logprob"]


def check_answered(fields: Mapping[str, Any], result: SampleResponse) -> None:
    """Raise if the answer lacks a requested field: the service does not know that field of the request."""
    ignored = None
    if fields.get("prompt_alt_tokens_k") and result.prompt_alt_tokens is None:
        ignored = "prompt_alt_tokens_k"
    if fields.get("target_prompt_logprobs") is not None and result.target_prompt_logprobs is None:
        ignored = "target_prompt_logprobs"
    last, scored = fields.get("prompt_logprobs_last_n"), result.prompt_logprobs_np
    if last is not None and scored is not None and not np.isnan(scored[:-last]).all():
        ignored = "prompt_logprobs_last_n"
    if ignored is not None:
        raise APIResponseValidationError(
            message=f"The service ignores {ignored}; it may be too old to know it."
        )


def lacks_alternatives(result: SampleResponse) -> bool:
    """Whether no sequence has the requested `topk_sample_logprobs`. The samples are still valid."""
    return all(sequence.topk_logprobs_np is None for sequence in result.sequences)


def with_first_logprob(prompt: ModelInput, result: SampleResponse) -> None:
    """Insert NaN for the first prompt token if the service leaves it out: the first token has no logprob."""
    scored = result.prompt_logprobs_np
    if scored is None or not all(isinstance(chunk, EncodedTextChunk) for chunk in prompt.chunks):
        return
    if len(scored) == prompt.length - 1:
        result.prompt_logprobs_np = np.concatenate([np.array([np.nan], scored.dtype), scored])
