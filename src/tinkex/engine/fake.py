"""A fake engine that needs only numpy and starts at once: for testing training code.

Its model is a bigram table: the logits of a token depend only on the token before it. Everything else works as in
`TorchEngine`, with the same values and errors: losses and gradients, Adam, sampling, checkpoints. Training code that
learns here is wired correctly. Results are the same in every run.

Shapes: T positions, K targets per position, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import numpy as np

from tinkex.errors import InvalidInputError, NotFoundError

from . import directories
from .base_models import PreparedModel
from .checks import Loss, check_base, check_examples, check_job, check_loss, check_same_base
from .files import check_regular
from .pending import PendingPass
from .values import (
    AdamStep,
    Array,
    Example,
    LoraSpec,
    PassJob,
    PassResult,
    SampledResult,
    SampleEvent,
    SampleJob,
    TracedGraph,
)

__all__ = ["FakeEngine"]

_SPREAD: Final = 0.5  # standard deviation of the base model's logits
_WORD: Final = 2**64 - 1
_COLDEST: Final = 1e-30  # lowest temperature: only the most likely token has a nonzero probability

Rows = dict[int, Array]  # by previous token: V numbers, float32, never changed in place

# -- the model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """The bigram table. A row that was never trained is absent and costs nothing."""

    base: PreparedModel
    spec: LoraSpec
    rows: Rows

    def logprobs(self, previous: int, temperature: float = 1.0) -> Array:
        """The logprobs of all tokens after `previous`."""
        size = self.base.vocab_size
        start = previous * 7919 % size  # neighbouring tokens get windows that are far apart
        logits_V = _noise(self.base.name, size)[start : start + size].astype(np.float64)
        if previous in self.rows:
            # Scaled by LoRA's alpha, so that learning rates for LoRA have an effect here too.
            logits_V += self.spec.alpha * self.rows[previous]
        logits_V = (logits_V - logits_V.max()) / temperature
        result: Array = logits_V - np.log(np.exp(logits_V).sum())
        return result


@lru_cache(maxsize=16)
def _noise(name: str, vocab_size: int) -> Array:
    """Noise of a base model; its rows are windows of this array. RandomState guarantees a stable stream."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    return (_SPREAD * random.standard_normal(2 * vocab_size)).astype(np.float32)


def _by_token(tokens: Array) -> Iterator[tuple[int, Array]]:
    """Yield each distinct token with its positions."""
    for token in np.unique(tokens).tolist():
        yield token, np.flatnonzero(tokens == token)


@dataclass
class _Model:
    """A table in training, with its optimizer state."""

    table: _Table
    gradients: Rows = field(default_factory=dict)
    moments: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    steps: int = 0
    pending: PendingPass[Rows] = field(default_factory=PendingPass)

    @np.errstate(all="ignore")
    def step(self, options: AdamStep) -> dict[str, float]:
        """AdamW on every row that was ever trained; a missing gradient counts as zero."""
        self.pending.drop()
        rows, gradients, self.gradients = self.table.rows, self.gradients, {}
        norm = math.hypot(*(float(np.linalg.norm(row)) for row in gradients.values()))
        clip = options.grad_clip_norm
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        self.steps += 1
        correction1, correction2 = 1 - options.beta1**self.steps, 1 - options.beta2**self.steps
        zero = np.zeros(self.table.base.vocab_size, np.float32)
        for token in rows | gradients:
            gradient = gradients.get(token, zero) * factor
            first, second = self.moments.get(token, (zero, zero))
            first = first + (gradient - first) * (1 - options.beta1)
            second = second * options.beta2 + gradient * gradient * (1 - options.beta2)
            denominator = np.sqrt(second) / correction2**0.5 + options.eps
            kept = rows.get(token, zero) * (1 - options.learning_rate * options.weight_decay)
            rows[token] = kept - options.learning_rate / correction1 * (first / denominator)
            self.moments[token] = first, second
        return {"grad_norm": norm, "learning_rate": options.learning_rate}


# -- losses -----------------------------------------------------------------------------------------

Inputs = Mapping[str, Array]
Config = Mapping[str, float]
Terms = tuple[Array, Array]  # the loss at each position, and its derivative by the target's logprob


def _cross_entropy(logp: Array, _: Inputs, __: Config) -> Terms:
    return -logp, np.full_like(logp, -1.0)


def _importance_sampling(logp: Array, inputs: Inputs, _: Config) -> Terms:
    terms = -_ratio(logp, inputs) * inputs["advantages"]
    return terms, terms


def _ppo(logp: Array, inputs: Inputs, config: Config) -> Terms:
    return _clipped(_ratio(logp, inputs), inputs, config)


def _cispo(logp: Array, inputs: Inputs, config: Config) -> Terms:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    slopes = -_ratio(logp, inputs).clip(low, high) * inputs["advantages"]
    return slopes * logp, slopes


def _dro(logp: Array, inputs: Inputs, config: Config) -> Terms:
    distance, advantages, beta = logp - inputs["logprobs"], inputs["advantages"], config["beta"]
    return 0.5 * beta * distance**2 - logp * advantages, beta * distance - advantages


def _gspo(logp: Array, inputs: Inputs, config: Config) -> Terms:
    mask = inputs["sequence_ratio_mask"] != 0
    mean = (logp - inputs["logprobs"])[mask].sum() / max(1, mask.sum())
    return _clipped(np.full_like(logp, np.exp(mean)), inputs, config)


def _ratio(logp: Array, inputs: Inputs) -> Array:
    ratio: Array = np.exp(logp - inputs["logprobs"])
    return ratio


def _clipped(ratio: Array, inputs: Inputs, config: Config) -> Terms:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    free, held = ratio * inputs["advantages"], ratio.clip(low, high) * inputs["advantages"]
    return -np.minimum(free, held), np.where(free <= held, -free, 0.0)


_TERMS: Final[Mapping[str, Callable[[Array, Inputs, Config], Terms]]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def _run_pass(model: _Model, request: PassJob) -> Generator[None, None, PassResult]:
    """Run a pass one example at a time; gradients are accumulated only when the whole pass has succeeded."""
    base = model.table.base
    earlier = model.pending.take(request.part) if request.backward else None
    loss, config = check_loss(request.loss_fn, request.config)
    check_examples(
        request.examples, loss, vocab_size=base.vocab_size, context_length=base.context_length
    )
    gradients: Rows = {}
    logprobs, total = [], 0.0
    for example in request.examples:
        logp = _forward(model.table, example)
        value, slopes = _weighted(loss, logp, example.inputs, config)
        if request.backward:
            _add(gradients, _backward(model.table, example, slopes))
        total += value
        logprobs.append(logp.astype(np.float32))
        yield
    if earlier is not None:
        gradients = _sum(earlier, gradients)
    if request.backward and request.part is not None and not request.part.is_last:
        model.pending.keep(request.part, gradients)
    else:
        _add(model.gradients, gradients)
    tokens = sum(example.length for example in request.examples)
    return PassResult(logprobs, {"loss:sum": total, "tokens:sum": float(tokens)})


def _forward(table: _Table, example: Example) -> Array:
    targets = example.inputs["target_tokens"]
    logp = np.empty(targets.shape)
    for previous, where in _by_token(example.tokens_T):
        logp[where] = table.logprobs(previous)[targets[where]]
    return logp


# A zero weight masks an infinite ratio.
@np.errstate(over="ignore", invalid="ignore")
def _weighted(loss: Loss, logp: Array, inputs: Inputs, config: Config) -> tuple[float, Array]:
    terms, slopes = _TERMS[loss.name](logp, inputs, config)
    if "weights" in inputs:
        weights = inputs["weights"]
        terms, slopes = (np.where(weights != 0, part * weights, 0.0) for part in (terms, slopes))
    return float(terms.sum()), slopes


@np.errstate(over="ignore", invalid="ignore")
def _backward(table: _Table, example: Example, slopes: Array) -> Rows:
    """The derivative of a target's logprob by the logits: one at the target, minus all probabilities."""
    gradients, targets = {}, example.inputs["target_tokens"]
    for previous, where in _by_token(example.tokens_T):
        slope = slopes[where].ravel()
        if slope.any():
            row_V = np.bincount(targets[where].ravel(), slope, table.base.vocab_size)
            row_V -= slope.sum() * np.exp(table.logprobs(previous))
            gradients[previous] = (table.spec.alpha * row_V).astype(np.float32)
    return gradients


def _sum(first: Rows, second: Rows) -> Rows:
    total = dict(first)
    _add(total, second)
    return total


def _add(rows: Rows, more: Rows) -> None:
    for token, row in more.items():
        rows[token] = rows[token] + row if token in rows else row


# -- sampling ---------------------------------------------------------------------------------------


@dataclass
class _Sequence:
    random: np.random.Generator
    previous: int
    stopped: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[Array, Array]] = field(default_factory=list)


@dataclass
class _Request:
    job_id: str
    job: SampleJob
    table: _Table
    limit: int
    stops: Sequence[int]
    sequences: list[_Sequence]
    result: SampledResult

    def under_way(self) -> list[tuple[int, _Sequence]]:
        return [
            (index, sequence)
            for index, sequence in enumerate(self.sequences)
            if not sequence.stopped and len(sequence.tokens) < self.limit
        ]


def _random(job: SampleJob, index: int, number: int) -> np.random.Generator:
    """Random generator of one sequence; without a seed, the number of the job serves as one."""
    key = (number, _WORD - index) if job.seed is None else (job.seed & _WORD, index)
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))


def _draw(logp_V: Array, job: SampleJob, random: np.random.Generator) -> int:
    if job.temperature <= 0:
        return int(logp_V.argmax())
    order: Array = np.arange(len(logp_V))
    chances = np.exp(logp_V)
    if 0 < job.top_k < len(logp_V) or job.top_p < 1:
        order = np.argsort(-logp_V, kind="stable")[: job.top_k if job.top_k > 0 else None]
        chances = chances[order]
        before = chances.cumsum() - chances
        kept = max(1, int((before < job.top_p * chances.sum()).sum())) if job.top_p < 1 else None
        chances = chances[:kept]
    cumulative = chances.cumsum()
    drawn = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
    return int(order[min(int(drawn), len(chances) - 1)])


def _topk(logp_V: Array, k: int) -> tuple[Array, Array]:
    best = np.argpartition(-logp_V, k - 1)[:k]
    best = best[np.argsort(-logp_V[best], kind="stable")]
    return best.astype(np.int32), logp_V[best].astype(np.float32)


def _scored_prompt(job: SampleJob, table: _Table) -> SampledResult:
    """The scores of a job's prompt, as a result without sequences."""
    prompt, k, targets = job.prompt_T, job.topk_prompt_logprobs, job.target_prompt_tokens
    length, result = len(prompt), SampledResult([], [], [])
    scores = np.full(length, np.nan, np.float32)
    ids, values = np.zeros((length, k), np.int32), np.full((length, k), -99999.0, np.float32)
    target_scores = None if targets is None else np.zeros(targets.shape, np.float32)
    if job.prompt_logprobs or k or targets is not None:
        first = job.first_scored - 1 if targets is None else 0
        for previous, found in _by_token(prompt[first:-1]):
            before, logp_V = found + first, table.logprobs(previous)
            scores[before + 1] = logp_V[prompt[before + 1]]
            if k:
                ids[before + 1], values[before + 1] = _topk(logp_V, k)
            if targets is not None and target_scores is not None:
                here = targets[before]
                target_scores[before] = np.where(here < 0, 0.0, logp_V[np.maximum(here, 0)])
        unasked = slice(job.first_scored)  # computed only for the targets
        scores[unasked], ids[unasked], values[unasked] = np.nan, 0, -99999.0
    result.prompt_logprobs_T = scores if job.prompt_logprobs else None
    result.topk_prompt = (ids, values) if k else None
    result.target_prompt_logprobs = target_scores
    return result


def _finished(request: _Request) -> SampledResult:
    result, k = request.result, request.job.topk_sample_logprobs
    for sequence in request.sequences:
        result.tokens.append(np.array(sequence.tokens, np.int32))
        result.logprobs.append(np.array(sequence.logprobs, np.float32))
        result.stop_reasons.append("stop" if sequence.stopped else "length")
    if k:
        result.topk_sampled = [
            (
                np.array([ids for ids, _ in sequence.topk], np.int32).reshape(-1, k),
                np.array([values for _, values in sequence.topk], np.float32).reshape(-1, k),
            )
            for sequence in request.sequences
        ]
    return result


# -- checkpoints ------------------------------------------------------------------------------------


def _save(directory: Path, model: _Model, *, optimizer: bool, gradients: Rows | None = None) -> int:
    return directories.write(
        directory,
        lambda target: _write(target, model, gradients or {}, optimizer=optimizer),
        base_model=model.table.base.name,
        spec=model.table.spec,
        target_modules=(),
        steps=model.steps if optimizer else 0,
        dtype="float32",
        kernels="fake",
    )


def _write(target: Path, model: _Model, gradients: Rows, *, optimizer: bool) -> None:
    from safetensors.numpy import save_file

    def stacked(rows: Sequence[Array]) -> Array:
        return np.array(rows, np.float32).reshape(-1, model.table.base.vocab_size)

    rows, moments = model.table.rows, model.moments
    save_file(
        {"ids": np.array(list(rows), np.int64), "values": stacked(list(rows.values()))},
        target / directories.WEIGHTS,
    )
    if optimizer:
        save_file(
            {
                "ids": np.array(list(moments), np.int64),
                "first": stacked([first for first, _ in moments.values()]),
                "second": stacked([second for _, second in moments.values()]),
            },
            target / directories.OPTIMIZER,
        )
    if gradients:
        save_file(
            {
                "ids": np.array(list(gradients), np.int64),
                "values": stacked(list(gradients.values())),
            },
            target / directories.GRADIENTS,
        )


def _read(
    directory: Path, base: PreparedModel, *, optimizer: bool = False, gradients: bool = False
) -> _Model:
    from safetensors.numpy import load_file

    manifest = directories.checked_manifest(directory)
    with directories.reading(directories.WEIGHTS):
        check_regular(directory / directories.WEIGHTS)
        saved = load_file(directory / directories.WEIGHTS)
        rows = dict(zip(saved["ids"].tolist(), saved["values"], strict=True))
    if manifest.spec is None:
        raise InvalidInputError("is a checkpoint without tinkex.json", field="path")
    if saved["values"].shape[1:] != (base.vocab_size,):
        raise InvalidInputError(
            "does not fit this base model: its vocabulary has another size", field="path"
        )
    model = _Model(_Table(base, manifest.spec, rows))
    if optimizer:
        if not (directory / directories.OPTIMIZER).exists():
            raise InvalidInputError("the checkpoint holds no optimizer state", field="optimizer")
        with directories.reading(directories.OPTIMIZER):
            check_regular(directory / directories.OPTIMIZER)
            saved = load_file(directory / directories.OPTIMIZER)
            moments = zip(saved["first"], saved["second"], strict=True)
            model.moments = dict(zip(saved["ids"].tolist(), moments, strict=True))
        model.steps = manifest.steps
    if gradients and (directory / directories.GRADIENTS).exists():
        with directories.reading(directories.GRADIENTS):
            check_regular(directory / directories.GRADIENTS)
            saved = load_file(directory / directories.GRADIENTS)
            model.gradients = dict(zip(saved["ids"].tolist(), saved["values"], strict=True))
    return model


# -- the engine -------------------------------------------------------------------------------------


class FakeEngine:
    """All models of one process; the interface of `TorchEngine` with bigram tables as models."""

    def __init__(
        self,
        models: Sequence[PreparedModel],
        *,
        detokenize: Callable[[PreparedModel, Sequence[int]], str] | None = None,
    ) -> None:
        self._known = {model.name: model for model in models}
        self._detokenize = detokenize
        self._models: dict[str, _Model] = {}
        self._samplers: dict[str, _Table] = {}
        self._requests: dict[str, _Request] = {}
        self._jobs = 0

    def load(self, model: PreparedModel) -> None:
        self._known[model.name] = model

    def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> None:
        base = self._base(base_model)
        if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
            raise InvalidInputError("leaves no layer of this model to train", field="lora_config")
        self._models[model_id] = _Model(_Table(base, spec, {}))

    def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> None:
        self._models[model_id] = _read(directory, self._base(base_model), optimizer=optimizer)

    def restore_snapshot(self, model_id: str, base_model: str, directory: Path) -> None:
        base = self._base(base_model)
        self._models[model_id] = _read(directory, base, optimizer=True, gradients=True)

    def unload_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    @property
    def shared_passes(self) -> None:
        """A fake pass is too short to be divided."""

    def run_pass(self, model_id: str, request: PassJob) -> Generator[None, None, PassResult]:
        return _run_pass(self._model(model_id), request)

    def check_traced(self, graph: TracedGraph) -> None:
        raise InvalidInputError("the fake engine does not support traced losses", field="graph")

    def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]:
        return self._model(model_id).step(options)

    def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int:
        return _save(directory, self._model(model_id), optimizer=optimizer)

    def snapshot(self, model_id: str, directory: Path) -> Callable[[], int]:
        model = self._model(model_id)
        table = replace(model.table, rows=dict(model.table.rows))
        frozen = _Model(table, moments=dict(model.moments), steps=model.steps)
        return partial(_save, directory, frozen, optimizer=True, gradients=dict(model.gradients))

    def open_sampler(
        self,
        sampler_id: str,
        base_model: str,
        *,
        model_id: str | None = None,
        directory: Path | None = None,
    ) -> None:
        base = self._base(base_model)
        table = _Table(base, LoraSpec(1), {})
        if model_id is not None:
            now = self._model(model_id).table
            check_same_base(base_model, now.base.name)
            table = replace(now, rows=dict(now.rows))
        elif directory is not None:
            table = _read(directory, base).table
        self._samplers[sampler_id] = table

    def close_sampler(self, sampler_id: str) -> None:
        self._samplers.pop(sampler_id, None)

    def add_sample(self, job_id: str, job: SampleJob) -> None:
        if job.sampler_id not in self._samplers:
            raise NotFoundError(f"There is no sampler {job.sampler_id!r:.200}.")
        table = self._samplers[job.sampler_id]
        base = table.base
        if job.shaped or job.min_p or job.kept_mass:
            raise InvalidInputError(
                "the fake engine does not support the extensions of SamplingParams",
                field="sampling_params",
            )
        check_job(
            job,
            vocab_size=base.vocab_size,
            context_length=base.context_length,
            detokenize=self._detokenize and partial(self._detokenize, base),
        )
        room = base.context_length - len(job.prompt_T)
        limit = room if job.max_tokens is None else min(room, job.max_tokens)
        stops = base.eos_token_ids if job.stop_tokens is None else job.stop_tokens
        sequences = [
            _Sequence(_random(job, index, self._jobs), int(job.prompt_T[-1]))
            for index in range(job.num_samples)
        ]
        request = _Request(job_id, job, table, limit, stops, sequences, _scored_prompt(job, table))
        self._requests[job_id] = request
        self._jobs += 1

    def cancel_sample(self, job_id: str) -> None:
        self._requests.pop(job_id, None)

    @property
    def sampling(self) -> bool:
        return bool(self._requests)

    def sample_step(self) -> list[SampleEvent]:
        events = []
        for request in list(self._requests.values()):
            for index, sequence in request.under_way():
                token, logprob = self._append(request, sequence)
                if request.job.stream:
                    events.append(
                        SampleEvent(request.job_id, index=index, token=token, logprob=logprob)
                    )
            if not request.under_way():
                events.append(SampleEvent(request.job_id, result=_finished(request)))
                del self._requests[request.job_id]
        return events

    def _append(self, request: _Request, sequence: _Sequence) -> tuple[int, float]:
        """Draw a token; its logprob is that of the temperature-scaled distribution."""
        job = request.job
        temperature = max(job.temperature, _COLDEST) if job.temperature > 0 else 1.0
        logp_V = request.table.logprobs(sequence.previous, temperature)
        token = _draw(logp_V, job, sequence.random)
        logprob = float(np.float32(logp_V[token]))
        sequence.previous = token
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if job.topk_sample_logprobs:
            sequence.topk.append(_topk(logp_V, job.topk_sample_logprobs))
        sequence.stopped = token in request.stops or self._stop_text(request, sequence)
        return token, logprob

    def _stop_text(self, request: _Request, sequence: _Sequence) -> bool:
        texts = request.job.stop_texts
        if not texts or self._detokenize is None:
            return False
        # Every token has at least one byte, so a stop string spans at most as many tokens as it has bytes.
        window = max(len(text.encode()) for text in texts) + 4
        tail = self._detokenize(request.table.base, sequence.tokens[-window:])
        return any(text in tail for text in texts)

    def _base(self, name: str) -> PreparedModel:
        check_base(name, self._known)
        return self._known[name]

    def _model(self, model_id: str) -> _Model:
        if model_id not in self._models:
            raise NotFoundError(f"There is no model {model_id!r:.200}.")
        return self._models[model_id]
