"""bfloat16 beside float32: held-out loss after the same training, and how closely trainer and sampler agree.

    python benchmarks/precision.py [loss] [agreement] [--kernels torch] [--only demo] [--seed 0]

`loss` trains with the settings of `tinkex demo` and of `tinkex train tolmery` in both types, with the same batches, and
compares the loss of the test split. `agreement` samples 1,024 tokens, without an adapter and with one of rank 32, and scores them with
the trainer. Prints a table. Nothing here is a time, so other work on the machine changes no figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tinkex.cli.demo import _settings as demo_settings
from tinkex.cli.lessons import Lesson, find_data, lessons_of, read_records
from tinkex.cli.run_file import RunSettings
from tinkex.cli.training_plan import batches, learning_rate
from tinkex.engine import base_models
from tinkex.engine.engine import TorchEngine
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob, PassResult, SampleJob
from tinkex.server.service import default_cache_dir

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = (torch.float32, torch.bfloat16)
SETTINGS = {"demo": demo_settings(SMOL, 48), "train tolmery": RunSettings("tolmery", SMOL)}
SAMPLES, PROMPT = 8, 32


def engine_of(dtype: torch.dtype, kernels: str) -> tuple[TorchEngine, base_models.PreparedModel]:
    prepared = base_models.prepare(base_models.parse_spec(SMOL), default_cache_dir())
    return TorchEngine([prepared], dtype=dtype, native=kernels == "native"), prepared


def passed(engine: TorchEngine, job: PassJob) -> PassResult:
    work = engine.run_pass("m", job)
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: PassResult = end.value
            return result


# -- held-out loss -----------------------------------------------------------------------------------


def example(lesson: Lesson, weight: float) -> Example:
    learned = lesson.learned[1:].astype(np.float32) * np.float32(weight)
    targets = lesson.tokens[1:].astype(np.int64)
    return Example(lesson.tokens[:-1], {"target_tokens": targets, "weights": learned})


def loss_of(engine: TorchEngine, lessons: list[Lesson]) -> float:
    job = PassJob([example(each, 1.0) for each in lessons], "cross_entropy", backward=False)
    return passed(engine, job).metrics["loss:sum"] / sum(each.count for each in lessons)


def trained(
    dtype: torch.dtype, settings: RunSettings, kernels: str, seed: int
) -> tuple[float, float]:
    """Held-out loss before and after training."""
    from transformers import AutoTokenizer

    engine, prepared = engine_of(dtype, kernels)
    tokenizer: Any = AutoTokenizer.from_pretrained(prepared.directory)
    records = read_records(find_data(settings.data))
    lessons: dict[str | None, list[Lesson]] = {"train": [], "eval": []}
    for record in records:
        lessons[record.split] += lessons_of(record, tokenizer, settings.system)
    engine.create_model(
        "m", SMOL, LoraSpec(settings.rank, seed=seed, train_unembed=settings.train_unembed)
    )
    plan = batches(
        [lesson.length for lesson in lessons["train"]],
        seed=seed,
        batch_size=settings.batch_size,
        token_budget=None,
        epochs=settings.epochs,
        steps=settings.steps,
    )
    before = loss_of(engine, lessons["eval"])
    for step, batch in enumerate(plan):
        chosen = [lessons["train"][index] for index in batch]
        weight = 1 / sum(lesson.count for lesson in chosen)
        passed(engine, PassJob([example(each, weight) for each in chosen], "cross_entropy"))
        rate = learning_rate(
            step,
            len(plan),
            peak=settings.learning_rate,
            schedule=settings.schedule,
            warmup=settings.warmup,
        )
        engine.optim_step("m", AdamStep(learning_rate=rate))
    return before, loss_of(engine, lessons["eval"])


def measure_loss(options: argparse.Namespace) -> None:
    print("held-out loss                before    float32   bfloat16   difference (asked 2 %)")
    for name in options.only or SETTINGS:
        (before, wide), (_, narrow) = (
            trained(dtype, SETTINGS[name], options.kernels, options.seed) for dtype in DTYPES
        )
        print(f"{name:26} {before:8.4f} {wide:10.4f} {narrow:10.4f} {narrow / wide - 1:12.2%}")


# -- agreement ---------------------------------------------------------------------------------------


def measure_agreement(options: argparse.Namespace) -> None:
    print("logprobs of 1,024 sampled tokens, |sampler - trainer|   mean (1e-3)   worst (1e-2)")
    for dtype in DTYPES:
        for rank in (0, 32):
            mean, worst = differences(dtype, rank, options.kernels)
            name = f"{dtype}, rank {rank}" if rank else f"{dtype}, base"
            print(f"{name:52} {mean:13.1e} {worst:14.1e}", flush=True)


def differences(dtype: torch.dtype, rank: int, kernels: str) -> tuple[float, float]:
    engine, _ = engine_of(dtype, kernels)
    engine.create_model("m", SMOL, LoraSpec(rank or 8, seed=1, train_unembed=False))
    if rank:  # a fresh adapter changes nothing, because its B is zero
        for pair in engine._model("m").adapter.pairs.values():
            torch.nn.init.normal_(pair.b, 0, 0.01)
    engine.open_sampler("s", SMOL, model_id="m" if rank else None)
    prompt = np.random.default_rng(0).integers(10, 49_000, PROMPT).astype(np.int32)
    length = 1024 // SAMPLES
    job = SampleJob("s", prompt, num_samples=SAMPLES, max_tokens=length, seed=1, stop_tokens=())
    engine.add_sample("j", job)
    result = None
    while result is None:
        for event in engine.sample_step():
            result = event.result or result
    texts = [np.concatenate([prompt, tokens]) for tokens in result.tokens]
    data = [Example(text[:-1], {"target_tokens": text[1:].astype(np.int64)}) for text in texts]
    scored = passed(engine, PassJob(data, "cross_entropy", backward=False)).logprobs
    found = np.concatenate(
        [
            np.abs(sampled - again[PROMPT - 1 :])
            for sampled, again in zip(result.logprobs, scored, strict=True)
        ]
    )
    assert len(found) == 1024
    return float(found.mean()), float(found.max())


MEASURES: dict[str, Callable[[argparse.Namespace], None]] = {
    "loss": measure_loss,
    "agreement": measure_agreement,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", choices=[*MEASURES, []])
    parser.add_argument("--kernels", choices=["native", "torch"], default="native")
    parser.add_argument("--only", action="append", choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0, help="of the adapter and of the order")
    options = parser.parse_args()
    torch.set_num_threads(2)
    for name in options.figures or MEASURES:
        MEASURES[name](options)


if __name__ == "__main__":
    main()
