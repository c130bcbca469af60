"""A stand-in for vLLM: the names that tinkex uses, with tokens that are a function of adapter, prompt and seed."""

from .sampling_params import SamplingParams

__all__ = ["SamplingParams"]
