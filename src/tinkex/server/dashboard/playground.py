"""The playground: a prompt to a base model or a checkpoint, answered token by token as server-sent events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
from pydantic import Field

from tinkex._wire.failures import failure_body
from tinkex.engine.values import SampledResult, StreamedToken
from tinkex.errors import InvalidInputError
from tinkex.types import ModelInput, SampleRequest, SamplingParams
from tinkex.types._base import RequestModel

from ..client_errors import client_error
from ..serving.chat import chat_prompt
from ..serving.models import ServedModel
from ..serving.vocabulary import TextDecoder, Vocabulary

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["Message", "PlaygroundRequest", "play"]

Text = Annotated[str, Field(max_length=1 << 20)]


class Message(RequestModel):
    role: Literal["system", "user", "assistant"]
    content: Text


class PlaygroundRequest(RequestModel):
    """A prompt: a plain text, or the messages of a chat. `model` is a base model, an alias or a path `tinker://…`."""

    model: str
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(max_length=200)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=32_768)] = 256
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    stop: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    alternatives: Annotated[int, Field(ge=0, le=20)] = 5


async def play(
    service: Service, owner: str, asked: PlaygroundRequest
) -> tuple[AsyncIterator[bytes], Callable[[], object]]:
    """The events of one answer, and what ends it early; a bad request is refused before the first."""
    model = await service.served_models.find(owner, asked.model)
    request = _sample_request(asked, model, await _prompt(service, model, asked))
    queue: asyncio.Queue[StreamedToken | None] = asyncio.Queue()
    drawing = await service.samplers.draw(owner, request, queue.put_nowait)
    drawing.add_done_callback(lambda _: queue.put_nowait(None))
    return _events(model.vocabulary, drawing, queue), drawing.cancel


async def _prompt(service: Service, model: ServedModel, asked: PlaygroundRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidInputError("give either prompt or messages", field="prompt")
    if asked.prompt is not None:
        tokens = await model.vocabulary.encode(
            asked.prompt, model.in_turn, special=True, field="prompt"
        )
    else:
        messages = [message.model_dump() for message in asked.messages or ()]
        template = service.served_models.template(model)
        tokens = (await chat_prompt(model, template, messages, None, {})).tokens
    if not tokens:
        raise InvalidInputError("must not be empty", field="prompt")
    return tokens


def _sample_request(
    asked: PlaygroundRequest, model: ServedModel, tokens: list[int]
) -> SampleRequest:
    return SampleRequest(
        prompt=ModelInput.from_ints(tokens),
        sampling_params=SamplingParams(
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            stop=list(asked.stop) or None,
        ),
        model_path=model.model_path,
        base_model=None if model.model_path else model.base_model,
        topk_sample_logprobs=asked.alternatives,
    )


async def _events(
    vocabulary: Vocabulary,
    drawing: asyncio.Task[SampledResult],
    queue: asyncio.Queue[StreamedToken | None],
) -> AsyncIterator[bytes]:
    decoder = TextDecoder(vocabulary)
    try:
        while (token := await queue.get()) is not None:
            text = decoder.add(token.token)
            yield _event("token", {"text": text, "logprob": _finite(token.logprob)})
        result = await drawing
        if rest := decoder.end():
            yield _event("token", {"text": rest, "logprob": None})
        tokens = result.tokens[0].tolist()
        yield _event(
            "done",
            {
                "stop_reason": result.stop_reasons[0],
                "tokens": len(tokens),
                "text": vocabulary.text(tokens),
                "texts": list(map(vocabulary.token_text, tokens)),
                "alternatives": _alternatives(vocabulary, result),
            },
        )
    except Exception as error:  # the status has been sent, so the error is an event of the stream
        yield _event("error", failure_body(client_error(error, "play_prompt")))
    finally:
        drawing.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await drawing


def _alternatives(vocabulary: Vocabulary, result: SampledResult) -> list[list[tuple[str, float]]]:
    """For every sampled token the most likely tokens at its position, with their logprobs."""
    if not result.topk_sampled:
        return []
    tokens, logprobs = result.topk_sampled[0]
    return [
        [
            (vocabulary.token_text(token), _finite(number) or -999.0)
            for token, number in zip(ids, numbers, strict=True)
        ]
        for ids, numbers in zip(tokens.tolist(), logprobs.tolist(), strict=True)
    ]


def _finite(number: float) -> float | None:
    return round(number, 4) if math.isfinite(number) else None


def _event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(content) + b"\n\n"
