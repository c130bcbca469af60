"""Forward and backward passes over one adapter.

Shapes: B sequences of a micro-batch, T padded positions, N real positions of all its sequences one after
another, D hidden size, V vocabulary, K targets per position.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tinkex._wire.pass_parts import PassPart

from .checks import Loss, check_examples, check_loss
from .devices import choices_for
from .llama import LlamaBody, is_llama
from .llama_train import MicroBatchPass
from .lora import Adapter, LoraLinear, wrap
from .losses import loss_sum
from .native import kernels_for
from .optim import AdamW
from .pending import PendingPass
from .shards import ShardSums, add_in_order, divide
from .shared_weights import Join
from .traced import CUSTOM
from .traced_cost import TracedSum
from .unembedding import target_logprobs, unembedded
from .values import AdamStep, Array, Example, LossLimits, PassJob, PassResult

__all__ = [
    "Gradients",
    "LanguageModel",
    "TrainedModel",
    "add_gradients",
    "begin_pass",
    "finish_pass",
    "run_pass",
    "run_shards",
]

#: One per parameter of an adapter; None if nothing was added.
Gradients = list[Tensor | None]


class LanguageModel:
    """A base model, split into body, unembedding and wrapped linear layers."""

    def __init__(
        self,
        model: Any,
        *,
        context_length: int,
        native: bool | None = None,
        join: Join = torch.cat,
    ) -> None:
        self.model = model
        self.layers: dict[str, LoraLinear] = wrap(model)
        self.body: Any = getattr(model, model.base_model_prefix)
        self.unembed: Any = model.get_output_embeddings()
        self.device = next(model.parameters()).device
        self.dtype: torch.dtype = model.dtype
        self.kernels = kernels_for(self.device, self.dtype, native=native)
        self.llama = LlamaBody(model, self.kernels, join) if is_llama(model.config) else None
        self.config = model.config
        self.context_length = context_length
        self.vocab_size: int = self.unembed.out_features
        self.choices = choices_for(self.device)
        self._softcap = getattr(self.config, "final_logit_softcapping", None)
        self._scale = getattr(self.config, "logit_scale", None)
        self._divisor = getattr(self.config, "logits_scaling", None)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits by the modules of transformers, for families other than Llama."""
        return self.scaled(self.unembed(hidden_ND.to(self.dtype)).float())

    def scaled(self, logits: Tensor) -> Tensor:
        """Apply what some families do to the logits after the unembedding."""
        if self._scale is not None:
            logits = logits.float() * self._scale
        if self._divisor is not None:
            logits = logits.float() / self._divisor
        if self._softcap is not None:
            logits = torch.tanh(logits.float() / self._softcap) * self._softcap
        return logits


@dataclass
class OpenedPass:
    """A backward pass that has begun: gradients of the parts before it, and what this engine has computed of it."""

    part: PassPart | None
    earlier: Gradients | None
    own: ShardSums[Gradients] | None = None


@dataclass
class TrainedModel:
    """An adapter in training, with its optimizer."""

    base: LanguageModel
    adapter: Adapter
    optimizer: AdamW = field(init=False)
    pending: PendingPass[Gradients] = field(default_factory=PendingPass)
    opened: OpenedPass | None = None

    def __post_init__(self) -> None:
        self.optimizer = AdamW(self.adapter.parameters())

    @property
    def dtype(self) -> str:
        """The type of the matrix products, as in `--dtype`."""
        return str(self.base.dtype).removeprefix("torch.")

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits with gradients; the adapter is switched on by the caller."""
        base = self.base
        if base.llama is None:
            return base.logits(hidden_ND)
        pair = self.adapter.pairs.get("lm_head")
        scale, products = self.adapter.scale, base.kernels.products
        return base.scaled(
            unembedded(hidden_ND, base.unembed.weight, pair, scale, products, base.dtype)
        )

    def step(self, options: AdamStep) -> dict[str, float]:
        """Take an optimizer step; drops the gradients of an incomplete pass."""
        self.pending.drop()
        self.opened = None
        return self.optimizer.step(options)


def run_pass(
    model: TrainedModel,
    request: PassJob,
    token_budget: int,
    limits: LossLimits = LossLimits(),  # noqa: B008 - frozen
) -> Generator[None, None, PassResult]:
    """Run a pass; yield after each micro-batch, so that other requests can run.

    The gradients are accumulated only when the whole pass, with all its parts, has succeeded.
    """
    begin_pass(model, request)
    try:
        sums = yield from run_shards(model, request, None, token_budget, limits)
    except BaseException:
        model.opened = None
        raise
    return finish_pass(model, request, [sums])


def begin_pass(model: TrainedModel, request: PassJob) -> None:
    """Take the gradients of the parts before this one; raises if an earlier part is missing.

    A part that is begun again, because another engine died while it helped, has taken them before.
    """
    if not request.backward:
        return
    before, model.opened = model.opened, None
    if before is not None and request.part is not None and before.part == request.part:
        earlier = before.earlier
    else:
        earlier = model.pending.take(request.part)
    model.opened = OpenedPass(request.part, earlier)


def run_shards(
    model: TrainedModel,
    request: PassJob,
    numbers: Sequence[int] | None,
    token_budget: int,
    limits: LossLimits = LossLimits(),  # noqa: B008 - frozen
) -> Generator[None, None, ShardSums[Gradients]]:
    """Compute some shards of a pass, or all; the accumulated gradients of the model stay as they are."""
    traced = None if request.traced is None else TracedSum(request.traced, limits)
    loss, settings = (CUSTOM, {}) if traced else check_loss(request.loss_fn, request.config)
    check_examples(
        request.examples,
        loss,
        vocab_size=model.base.vocab_size,
        context_length=model.base.context_length,
    )
    if traced is not None:
        traced.check(request.examples, backward=request.backward)
    parameters = model.optimizer.parameters
    sums = ShardSums[Gradients]()
    shards = divide(request.examples, token_budget)
    for number in range(len(shards)) if numbers is None else numbers:
        sums.losses[number] = 0.0
        gradients: Gradients = [None] * len(parameters)
        for group in shards[number].batches:
            examples = [request.examples[index] for index in group]
            with _collecting(parameters, gradients):
                batch_loss, batch_logprobs = _run_batch(
                    model, examples, loss, settings, request.backward, traced
                )
            sums.losses[number] += batch_loss
            sums.logprobs.update(zip(group, batch_logprobs, strict=True))
            yield
        if request.backward:
            sums.add(number, gradients, add_gradients)
    sums.metrics = traced.metrics if traced else {}
    return sums


def finish_pass(
    model: TrainedModel, request: PassJob, parts: Sequence[ShardSums[Gradients]]
) -> PassResult:
    """Add the sums of all shards to the model's gradients, unless parts of the pass are still to come."""
    if request.backward:
        assert model.opened is not None
        earlier, model.opened = model.opened.earlier, None
        total = add_in_order((block for sums in parts for block in sums.blocks), add_gradients)
        if earlier is not None:
            total = add_gradients(earlier, total)
        if request.part is not None and not request.part.is_last:
            model.pending.keep(request.part, total)
        else:
            accumulated = [parameter.grad for parameter in model.optimizer.parameters]
            _put(model.optimizer.parameters, add_gradients(accumulated, total))
    logprobs = {index: values for sums in parts for index, values in sums.logprobs.items()}
    losses = {number: value for sums in parts for number, value in sums.losses.items()}
    tokens = sum(example.length for example in request.examples)
    metrics = {
        "loss:sum": sum(losses[number] for number in sorted(losses)),
        "tokens:sum": float(tokens),
    }
    for sums in parts:
        metrics |= sums.metrics
    return PassResult([logprobs[index] for index in range(len(request.examples))], metrics)


def add_gradients(first: Gradients, second: Gradients) -> Gradients:
    return [
        right if left is None else left if right is None else left + right
        for left, right in zip(first, second, strict=True)
    ]


@contextmanager
def _collecting(parameters: Sequence[Tensor], gradients: Gradients) -> Iterator[None]:
    """Let autograd add to `gradients` inside the block, and give the parameters their own back after it."""
    accumulated = [parameter.grad for parameter in parameters]
    _put(parameters, gradients)
    try:
        yield
        gradients[:] = [parameter.grad for parameter in parameters]
    finally:
        _put(parameters, accumulated)


def _put(parameters: Sequence[Tensor], gradients: Gradients) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _run_batch(
    model: TrainedModel,
    examples: Sequence[Example],
    loss: Loss,
    settings: Mapping[str, float],
    backward: bool,
    traced: TracedSum | None,
) -> tuple[float, list[Array]]:
    base = model.base
    inputs = _flat_inputs(examples, loss, base.device)
    body = _body_pass(model, [example.tokens_T for example in examples])
    with torch.set_grad_enabled(backward), model.adapter.switched_on(base.layers):
        hidden_ND = body.forward(backward=backward)
        leaf_ND = hidden_ND.detach().requires_grad_(backward)

        def value(logp: Tensor, here: Mapping[str, Tensor]) -> Tensor:
            if traced is None:
                return loss_sum(loss, logp, here, settings)
            return traced.sum(logp, examples)

        rows = len(leaf_ND) if loss.whole_sequences else base.choices.logit_positions
        total, logp = _unembed(model, leaf_ND, inputs, rows, value, backward)
        if backward and leaf_ND.grad is not None:
            body.backward(leaf_ND.grad)
    pieces = torch.split(logp, [example.length for example in examples])
    return total, [piece.cpu().numpy() for piece in pieces]


class BodyPass(Protocol):
    """Forward and backward pass of one micro-batch through the layers of a model."""

    def forward(self, *, backward: bool) -> Tensor:
        """Compute the hidden states of all real positions, N × D."""

    def backward(self, g_ND: Tensor) -> None:
        """Add the gradients of the adapter, given the gradient of the hidden states."""


def _body_pass(model: TrainedModel, sequences: Sequence[Array]) -> BodyPass:
    base = model.base
    if base.llama is None:
        return _PlainPass(base, sequences)
    tokens_N = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    lengths = [len(sequence) for sequence in sequences]
    return MicroBatchPass(
        base.llama,
        tokens_N.to(base.device),
        lengths,
        model.adapter,
        activation_bytes=base.choices.activation_bytes,
    )


class _PlainPass:
    """Any model, with transformers' forward and autograd; the adapter is switched on by the caller."""

    def __init__(self, base: LanguageModel, sequences: Sequence[Array]) -> None:
        self._base = base
        self._tokens_BT, self._real_BT = _padded(sequences, base.device)
        self._hidden_ND = torch.empty(0)

    def forward(self, *, backward: bool) -> Tensor:
        # Padding on the right has no effect, because attention is causal.
        states = self._base.body(input_ids=self._tokens_BT, use_cache=False).last_hidden_state
        self._hidden_ND = states[self._real_BT]
        return self._hidden_ND

    def backward(self, g_ND: Tensor) -> None:
        if self._hidden_ND.requires_grad:  # false if only the unembedding is trained
            self._hidden_ND.backward(g_ND)  # type: ignore[no-untyped-call]


def _unembed(
    model: TrainedModel,
    hidden_ND: Tensor,
    inputs: dict[str, Tensor],
    rows: int,
    loss: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
    backward: bool,
) -> tuple[float, Tensor]:
    """Compute loss and logprobs, `rows` positions at a time; adds the gradient to `hidden_ND.grad`."""
    total, logprobs = 0.0, []
    for start in range(0, len(hidden_ND), rows):
        part = slice(start, start + rows)
        here = {name: tensor[part] for name, tensor in inputs.items()}
        targets = here["target_tokens"]
        logp = target_logprobs(
            model.logits(hidden_ND[part]),
            targets if targets.dim() == 2 else targets[:, None],
            model.base.kernels,
        )
        logp = logp if targets.dim() == 2 else logp.squeeze(-1)
        value = loss(logp, here)
        if backward:
            value.backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
        logprobs.append(logp.detach())
    return total, torch.cat(logprobs)


def _padded(sequences: Sequence[Array], device: Any) -> tuple[Tensor, Tensor]:
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    real = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.from_numpy(np.asarray(sequence, np.int64))
        real[row, : len(sequence)] = True
    return tokens.to(device), real.to(device)


def _flat_inputs(examples: Sequence[Example], loss: Loss, device: Any) -> dict[str, Tensor]:
    """Concatenate the inputs that the loss reads over all examples; missing weights count as one."""
    targets = [example.inputs["target_tokens"] for example in examples]
    read = {name: [example.inputs[name] for example in examples] for name in loss.required}
    read["weights"] = [
        example.inputs.get("weights", np.ones(own.shape))
        for example, own in zip(examples, targets, strict=True)
    ]
    flat = {name: np.concatenate(parts).astype(np.float32) for name, parts in read.items()}
    flat["target_tokens"] = np.concatenate(targets).astype(np.int64)
    flat["example"] = np.repeat(np.arange(len(examples)), [example.length for example in examples])
    return {name: torch.from_numpy(array).to(device) for name, array in flat.items()}
