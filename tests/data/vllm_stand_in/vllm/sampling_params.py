from dataclasses import dataclass
from enum import Enum
from typing import Any


class RequestOutputKind(Enum):
    DELTA = 1


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: Any
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int | None
    detokenize: bool
    skip_special_tokens: bool
    output_kind: RequestOutputKind
