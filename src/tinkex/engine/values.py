"""Values that service and engine exchange: plain data without torch.

Shapes: T positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy.typing as npt

from tinkex._wire.pass_parts import PassPart

__all__ = [
    "MAX_RANK",
    "AdamStep",
    "Array",
    "Constraint",
    "Example",
    "LoraSpec",
    "LossLimits",
    "PassJob",
    "PassResult",
    "SampleEvent",
    "SampleJob",
    "SampledResult",
    "StreamedToken",
    "TracedGraph",
    "VllmOptions",
]

Array = npt.NDArray[Any]

#: Highest rank of an adapter.
MAX_RANK: Final = 512


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Configuration of an adapter. `alpha` is not part of the protocol; other services use 32 as well."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence to train on: position t of `tokens_T` predicts `inputs["target_tokens"][t]`."""

    tokens_T: Array
    inputs: Mapping[str, Array]

    @property
    def length(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A loss traced by a client: its inputs (logprobs first) with their ranks, and its nodes as decoded JSON."""

    name: str
    inputs: Sequence[tuple[str, int]]
    nodes: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class LossLimits:
    """Limits of a traced loss; the fields are settings of the service."""

    #: Peak memory of one example, forward and backward, in bytes.
    max_loss_bytes: int = 1 << 30
    #: Elements that all examples of a pass may compute, forward and backward. The default is about five seconds
    #: of one core, during which no other request is served.
    max_loss_work: int = 4 * 10**9


@dataclass(frozen=True)
class VllmOptions:
    """Settings of vLLM as a sampler; the service has them under names that begin with `vllm_`."""

    #: Most different adapters in one batch, most that it keeps in memory, and their highest rank.
    max_loras: int = 8
    kept_loras: int = 64
    max_rank: int = 64
    max_logprobs: int = 20
    #: Part of a GPU's memory that vLLM takes, and gigabytes of keys and values on a CPU.
    memory_share: float = 0.5
    cpu_cache_gb: int = 2
    #: Whether vLLM skips compiling: it starts faster and samples slower.
    eager: bool = False


@dataclass(frozen=True, slots=True)
class PassJob:
    """A forward pass over examples, with or without gradients; `traced` is set for the loss `custom`."""

    examples: Sequence[Example]
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True
    traced: TracedGraph | None = None
    part: PassPart | None = None  # set if a client splits one pass into several requests


@dataclass(frozen=True, slots=True)
class PassResult:
    """Logprobs of the targets (one array per example, in request order) and metrics named `name:reduction`."""

    logprobs: list[Array]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class AdamStep:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of every sample must match; `text` is a JSON schema, a regular expression or a Lark grammar."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str


@dataclass(frozen=True, slots=True)
class SampleJob:
    """One sampling request: `num_samples` continuations of one prompt.

    With `stop_tokens=None` a sample stops at the model's end tokens; with an empty tuple no token stops it.
    `stop_texts` are the stop strings; the engine searches for them in the decoded text of the sampled tokens.
    The sampler serves the owners in turn.
    """

    sampler_id: str
    prompt_T: Array
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] | None = None
    stop_texts: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_tokens: Array | None = None
    stream: bool = False
    owner: str = ""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None
    kept_mass: bool = False

    @property
    def shaped(self) -> bool:
        """Whether anything beyond temperature, top-k, top-p and min-p changes the distribution."""
        return bool(
            self.constraint is not None
            or self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
        )

    @property
    def first_scored(self) -> int:
        """First prompt position that gets a logprob; `target_prompt_tokens` get theirs at all positions."""
        last_n = self.prompt_logprobs_last_n
        return 1 if last_n is None else max(1, len(self.prompt_T) - last_n)


@dataclass(slots=True)
class SampledResult:
    """The sequences of one job; prompt logprobs are NaN at positions that were not requested."""

    tokens: list[Array]
    logprobs: list[Array]
    stop_reasons: list[Literal["stop", "length"]]
    prompt_logprobs_T: Array | None = None
    topk_prompt: tuple[Array, Array] | None = None
    topk_sampled: list[tuple[Array, Array]] | None = None
    kept_mass: list[Array] | None = None
    target_prompt_logprobs: Array | None = None
    cached_tokens: int = 0  # prompt tokens that were not read again, because the cache held them


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One token of a streamed sample: its sequence, its id, its logprob, and ids and logprobs of the likeliest."""

    index: int
    token: int
    logprob: float
    topk: tuple[Array, Array] | None = None


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """Output of a sampling step: a token of a streamed job, or the result or error of a finished job."""

    job_id: str
    result: SampledResult | None = None
    error: Exception | None = None
    index: int = 0
    token: int | None = None
    logprob: float | None = None
    topk: tuple[Array, Array] | None = None
