"""Serving: chat completions beside native sampling, and JSON schemas beside free answers.

    python benchmarks/serving.py [--model NAME] [--rounds N] [--first]

All variants run in turns on one service, so that the machine's other work hits them alike. Figures are tokens per
second of 32 concurrent requests, and the time to the first token of a request that is alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

import httpx

import tinkex
from tinkex.testing import service
from tinkex.types import ModelInput, SamplingParams

CONCURRENT, TOKENS = 32, 48
#: No answer ends before `TOKENS`: otherwise the batch would shrink, and its rate with it.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 24, "maxLength": 60},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 40,
            "maxItems": 50,
        },
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me a story about the number {number} and a cat."}]


class Bench:
    def __init__(self, url: str, model: str) -> None:
        self.model = model
        self.http = httpx.AsyncClient(
            base_url=url, timeout=300, trust_env=False, limits=httpx.Limits(max_connections=100)
        )
        self.sampler = tinkex.ServiceClient(
            base_url=url, api_key="tml-local"
        ).create_sampling_client(base_model=model)
        tokenizer = self.sampler.get_tokenizer()
        self.prompts = [
            tokenizer.apply_chat_template(
                messages(number), add_generation_prompt=True, return_dict=False
            )
            for number in range(CONCURRENT)
        ]
        vocabulary = len(tokenizer)
        self.ends = {str(token): -100 for token in {tokenizer.eos_token_id, vocabulary - 1}}

    # Every variant draws exactly TOKENS tokens per request: the end tokens are banned by the same bias.

    async def native(self, number: int) -> int:
        bias = {int(token): value for token, value in self.ends.items()}
        params = SamplingParams(max_tokens=TOKENS, seed=number, logit_bias=bias)
        drawn = await self.sampler.sample(ModelInput.from_ints(self.prompts[number]), 1, params)
        return len(drawn.sequences[0].tokens)

    async def chat(self, number: int, **more: object) -> int:
        body = {
            "model": self.model,
            "messages": messages(number),
            "max_tokens": TOKENS,
            "seed": number,
            **more,
        }
        answer = (await self.http.post("/v1/chat/completions", json=body)).raise_for_status().json()
        return int(answer["usage"]["completion_tokens"])

    async def free(self, number: int) -> int:
        return await self.chat(number, logit_bias=self.ends)

    async def schema(self, number: int) -> int:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        return await self.chat(number, response_format=form)

    async def rate(self, ask: Callable[[int], Awaitable[int]]) -> float:
        started = time.perf_counter()
        drawn = await asyncio.gather(*(ask(number) for number in range(CONCURRENT)))
        return sum(drawn) / (time.perf_counter() - started)

    # -- time to first token ------------------------------------------------------------------

    async def first_native(self, number: int) -> float:
        started = time.perf_counter()
        params = SamplingParams(max_tokens=2, seed=number)
        spent = 0.0
        prompt = ModelInput.from_ints(self.prompts[number])
        async for _ in self.sampler.sample_stream(prompt, params):
            spent = spent or time.perf_counter() - started
        return spent  # after the last token: the engine is idle when the next request comes

    async def first_chat(self, number: int) -> float:
        """Over a plain connection: an HTTP client written in Python takes a millisecond or two of its own."""
        body = {
            "model": self.model,
            "messages": messages(number),
            "max_tokens": 2,
            "seed": number,
            "stream": True,
        }
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(
            self.http.base_url.host, self.http.base_url.port
        )
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        started = time.perf_counter()
        writer.write(head.encode() + content)
        while not (line := await reader.readline()).startswith(b"data: "):
            assert line, "the service closed the connection"
        spent = time.perf_counter() - started
        await reader.read()
        writer.close()
        return spent


async def measure(url: str, model: str, rounds: int, *, rated: bool) -> dict[str, object]:
    bench = Bench(url, model)
    variants = {"native": bench.native, "chat": bench.free, "schema": bench.schema}
    for ask in variants.values():
        await asyncio.gather(*(ask(number) for number in range(8)))  # warm up
    rates: dict[str, list[float]] = {name: [] for name in variants}
    firsts: dict[str, list[float]] = {"native": [], "chat": []}
    for turn in range(rounds):
        for name, ask in variants.items() if rated else ():
            rates[name].append(await bench.rate(ask))
        for number in range(CONCURRENT // 2):
            firsts["native"].append(await bench.first_native(number))
            firsts["chat"].append(await bench.first_chat(CONCURRENT - 1 - number))
        print(
            turn, {name: round(values[-1]) for name, values in rates.items() if values}, flush=True
        )
    await bench.http.aclose()
    medians = {name: statistics.median(values) * 1000 for name, values in firsts.items()}
    first_token = {name: round(value, 2) for name, value in medians.items()}
    if not rated:
        return {"model": model, "first_token_ms": first_token}
    ratio = statistics.median(c / n for c, n in zip(rates["chat"], rates["native"], strict=True))
    schema = statistics.median(s / c for s, c in zip(rates["schema"], rates["chat"], strict=True))
    return {
        "model": model,
        "tokens_per_second": {
            name: round(statistics.median(values), 1) for name, values in rates.items()
        },
        "chat_over_native": round(ratio, 3),
        "schema_over_chat": round(schema, 3),
        "first_token_ms": first_token,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", action="store_true", help="only the time to the first token")
    options = parser.parse_args()
    with service("torch", (options.model,)) as running:
        found = asyncio.run(
            measure(running.url, options.model, options.rounds, rated=not options.first)
        )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
