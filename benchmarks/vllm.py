"""vLLM behind the service against vLLM's own offline `generate`: samples at once.

    python benchmarks/vllm.py --python PATH [--samples 32] [--tokens 16] [--rounds 2]

PATH is the Python of an environment with vLLM; `make vllm` makes one under .scratch/vllm.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tinkex.engine.base_models import parse_spec, prepare
from tinkex.server.service import default_cache_dir
from tinkex.testing import service
from tinkex.types import ModelInput, SamplingParams

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPT = list(range(5, 37))

#: Reads numbers of samples and tokens, generates as many tokens for each sample, and prints the seconds.
OFFLINE = """
import os, sys, time
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    directory, dtype, with_loras = sys.argv[1:]
    loras = dict(enable_lora=True, max_loras=8, max_cpu_loras=64, max_lora_rank=64) if with_loras == "loras" else {}
    llm = LLM(model=directory, dtype=dtype, enforce_eager=True, logprobs_mode="processed_logprobs", **loras)
    print("ready", flush=True)
    for line in sys.stdin:
        samples, tokens = map(int, line.split())
        params = [
            SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True, logprobs=0, detokenize=False)
            for number in range(samples)
        ]
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": list(range(5, 37))}] * samples, params, use_tqdm=False)
        print("took", time.perf_counter() - began, flush=True)
"""


class Offline:
    """vLLM's own `generate` in a process of its own; `loras` makes it ready for adapters, as behind the service."""

    def __init__(self, python: Path, dtype: str = "float32", *, loras: bool = True) -> None:
        directory = prepare(parse_spec(SMOL), default_cache_dir()).directory
        self._script = Path(default_cache_dir(), "offline_vllm.py")
        self._script.write_text(OFFLINE)  # vLLM starts processes that import the main module
        self.process = subprocess.Popen(
            [python, self._script, directory, dtype, "loras" if loras else "none"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer("ready")

    def _answer(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError("vLLM ended; its error output is above")

    def seconds(self, samples: int, tokens: int) -> float:
        print(samples, tokens, file=self.process.stdin, flush=True)
        return float(self._answer("took"))

    def close(self) -> None:
        self.process.communicate()
        self._script.unlink()


def measured(work: Callable[[int], float], options: argparse.Namespace) -> float:
    """Median seconds, after a short round that warms up."""
    work(2)
    return statistics.median(work(options.tokens) for _ in range(options.rounds))


def main(options: argparse.Namespace) -> None:
    """One after the other: vLLM's processes wait actively for each other, so two would slow each other down."""
    with service(
        "torch",
        (SMOL,),
        sampler="vllm",
        sampler_python=options.python,
        vllm_eager=True,
        dtype="float32",
    ) as running:
        sampler = running.client().create_sampling_client(base_model=SMOL)

        def served(tokens: int) -> float:
            began = time.perf_counter()
            futures = [
                sampler.sample(
                    ModelInput.from_ints(PROMPT),
                    1,
                    SamplingParams(max_tokens=tokens, seed=number, stop=[]),
                )
                for number in range(options.samples)
            ]
            for future in futures:
                future.result()
            return time.perf_counter() - began

        ours = measured(served, options)
    offline = Offline(options.python)
    theirs = measured(partial(offline.seconds, options.samples), options)
    offline.close()
    drawn = options.samples * options.tokens
    print(
        f"{options.samples} at once, {options.tokens} tokens each: service {drawn / ours:.1f} tokens/s, "
        f"generate {drawn / theirs:.1f} tokens/s, {theirs / ours:.2f} x"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    main(parser.parse_args())
