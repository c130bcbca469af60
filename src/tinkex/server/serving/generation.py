"""Runs a request for both APIs: prompts as tokens in, answers as parts and tokens out.

The same code splits the tokens of streamed and of whole answers, so both have the same text.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from tinkex.engine.interface import OnToken
from tinkex.engine.values import Array, SampledResult, StreamedToken
from tinkex.errors import InvalidInputError, RequestErrorCategory, RequestFailedError
from tinkex.server.samplers import Samplers
from tinkex.types import ModelInput, SampleRequest, SamplingParams

from .answers import AnswerParser, Piece, Thinking
from .models import ServedModel
from .stops import StopFilter
from .tools import ToolUse
from .vocabulary import TextDecoder

__all__ = ["Answer", "Generation", "TokenCounts", "Update"]

FinishReason = Literal["stop", "length", "tool_calls"]

#: Estimated bytes of a token, with its text and its logprob, and of an alternative in an answer's JSON.
_TOKEN_BYTES: Final = 128
_ALTERNATIVE_BYTES: Final = 32


@dataclass(frozen=True)
class Generation:
    """A request, independent of the API in which it was asked."""

    model: ServedModel
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    count: int = 1
    stops: tuple[str, ...] = ()
    #: Alternatives per sampled token; None if no logprobs are wanted.
    topk: int | None = None
    #: Whether prompts are scored too.
    echo: bool = False
    tools: ToolUse | None = None
    thinking: Thinking = "none"
    #: Fields of the request by the fields of `SamplingParams`, for errors.
    fields: Mapping[str, str] = field(default_factory=dict)

    def request(self, prompt: Sequence[int]) -> SampleRequest:
        # Not through the constructor: these values are checked, and every request passes here.
        params = self.params.model_copy(update={"stop": list(self.stops) or None})
        return SampleRequest(
            prompt=ModelInput.from_ints(list(prompt)),
            sampling_params=params,
            num_samples=self.count,
            base_model=None if self.model.model_path else self.model.base_model,
            model_path=self.model.model_path,
            prompt_logprobs=True if self.echo else None,
            topk_prompt_logprobs=(self.topk or 0) if self.echo else 0,
            topk_sample_logprobs=self.topk or 0,
        )

    def prompts_alone(self) -> Generation:
        """The same prompts, to be scored without an answer."""
        params = self.params.model_copy(update={"max_tokens": 0})
        return replace(self, params=params, count=1)

    def answers_alone(self) -> Generation:
        """The same request without the scores of its prompts."""
        return replace(self, echo=False)

    def check_room(self) -> None:
        """Refuse a prompt that leaves no room for an answer."""
        context = self.model.vocabulary.context_length
        for prompt in self.prompts:
            if not prompt:
                raise InvalidInputError("is empty", field=self.fields.get("prompt", "prompt"))
            if len(prompt) >= context:
                raise InvalidInputError(
                    f"has {len(prompt)} tokens; the model's context of {context} tokens leaves no room for an "
                    f"answer. Shorten it by at least {len(prompt) - context + 1} tokens",
                    field=self.fields.get("prompt", "prompt"),
                )


@dataclass
class TokenCounts:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    #: False if the prompts were scored before: the cache then holds what that pass has read.
    counts_cache: bool = True

    def add(self, prompt: Sequence[int], result: SampledResult) -> None:
        self.prompt_tokens += len(prompt)
        if self.counts_cache:
            self.cached_tokens += result.cached_tokens
        self.completion_tokens += sum(map(len, result.tokens))


@dataclass
class Answer:
    """One sequence: its tokens, and its text split into parts."""

    index: int
    generation: Generation
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[Array, Array]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    reason: FinishReason | None = None

    def __post_init__(self) -> None:
        vocabulary, tools = self.generation.model.vocabulary, self.generation.tools
        marks = [] if tools is None else [tools.format.before.strip(), tools.format.after.strip()]
        shown = [vocabulary.token_id(mark) for mark in marks if mark]
        self._decoder = TextDecoder(
            vocabulary, frozenset(each for each in shown if each is not None)
        )
        self._filter = StopFilter(self.generation.stops)
        self._parser = AnswerParser(self.generation.thinking, tools)
        #: The whole text, before it is split into parts.
        self.text = ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        return self._filter.found

    def add(
        self, token: int, logprob: float, topk: tuple[Array, Array] | None = None
    ) -> list[Piece]:
        """The parts that are complete with this token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if topk is not None:
            self.topk.append(topk)
        return self._passed(self._filter.add(self._decoder.add(token)))

    def end(self, reason: Literal["stop", "length"]) -> list[Piece]:
        """The remaining parts."""
        rest = self._filter.add(self._decoder.end()) + self._filter.end()
        pieces = self._passed(rest)
        last = self._parser.end()
        self.pieces += last
        called = any(piece.kind == "call" for piece in self.pieces)
        self.reason = "tool_calls" if called else "stop" if self.stopped_by else reason
        return [*pieces, *last]

    def _passed(self, text: str) -> list[Piece]:
        self.text += text
        pieces = self._parser.add(text) if text else []
        self.pieces += pieces
        return pieces


@dataclass(frozen=True)
class Update:
    """An update of a stream: parts of an answer with the token that completed them, or its end."""

    answer: Answer
    pieces: list[Piece]
    tokens: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Finished:
    """All answers to one prompt."""

    prompt: Sequence[int]
    result: SampledResult
    answers: list[Answer]


async def drawn(samplers: Samplers, owner: str, generation: Generation) -> list[SampledResult]:
    """What is drawn for all prompts, when it is complete."""
    with _errors_of(generation):
        drawing = await _begun(samplers, owner, generation)
        try:
            return await asyncio.gather(*drawing)
        finally:
            for task in drawing:
                task.cancel()


def written_size(generation: Generation, results: Sequence[SampledResult]) -> int:
    """Estimated bytes of answers as JSON."""
    tokens = sum(len(each) for result in results for each in result.tokens)
    if generation.echo:
        tokens += sum(map(len, generation.prompts))
    return tokens * (_TOKEN_BYTES + (generation.topk or 0) * _ALTERNATIVE_BYTES)


def finished(generation: Generation, results: Sequence[SampledResult]) -> Iterator[Finished]:
    """The answers to one prompt after another."""
    for place, (prompt, result) in enumerate(zip(generation.prompts, results, strict=True)):
        yield Finished(prompt, result, _answers(generation, place, result))


def _answers(generation: Generation, place: int, result: SampledResult) -> list[Answer]:
    answers = []
    for index, (tokens, logprobs, reason) in enumerate(
        zip(result.tokens, result.logprobs, result.stop_reasons, strict=True)
    ):
        answer = Answer(place * generation.count + index, generation)
        topk = None if result.topk_sampled is None else result.topk_sampled[index]
        for row, (token, logprob) in enumerate(
            zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            answer.add(token, logprob, None if topk is None else (topk[0][row], topk[1][row]))
        answer.end(reason)
        answers.append(answer)
    return answers


async def streamed(
    samplers: Samplers, owner: str, generation: Generation, usage: TokenCounts
) -> AsyncIterator[Update]:
    """The answers to one prompt as they are sampled. An invalid request is refused before the first update."""
    queues: asyncio.Queue[tuple[int, StreamedToken] | None] = asyncio.Queue()
    answers: dict[int, Answer] = {}

    def hear(place: int) -> Callable[[StreamedToken], None]:
        return lambda token: queues.put_nowait((place, token))

    listeners = [hear(place) for place in range(len(generation.prompts))]
    with _errors_of(generation):
        drawing = await _begun(samplers, owner, generation, listeners)
    for task in drawing:
        task.add_done_callback(lambda _: queues.put_nowait(None))
    return _updates(generation, drawing, queues, answers, usage)


async def _updates(
    generation: Generation,
    drawing: Sequence[asyncio.Future[SampledResult]],
    news: asyncio.Queue[tuple[int, StreamedToken] | None],
    answers: dict[int, Answer],
    usage: TokenCounts,
) -> AsyncIterator[Update]:
    left = len(drawing)
    try:
        while left:
            item = await news.get()
            if item is None:
                left -= 1
                with _errors_of(generation):
                    for task in drawing:
                        if task.done():
                            task.result()  # raises if it failed
                continue
            place, token = item
            index = place * generation.count + token.index
            answer = answers.setdefault(index, Answer(index, generation))
            if answer.stopped_by is None:
                pieces = answer.add(token.token, token.logprob, token.topk)
                yield Update(answer, pieces, 1)
        for place, (prompt, task) in enumerate(zip(generation.prompts, drawing, strict=True)):
            result = task.result()
            usage.add(prompt, result)
            for offset, reason in enumerate(result.stop_reasons):
                index = place * generation.count + offset
                answer = answers.setdefault(index, Answer(index, generation))
                yield Update(answer, answer.end(reason), ended=True)
    finally:
        for task in drawing:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*drawing, return_exceptions=True)


async def _begun(
    samplers: Samplers,
    owner: str,
    generation: Generation,
    listeners: Sequence[OnToken] | None = None,
) -> list[asyncio.Task[SampledResult]]:
    """Start drawing for every prompt."""
    samplers.check_draws(owner, len(generation.prompts))
    generation.check_room()
    requests = [generation.request(prompt) for prompt in generation.prompts]
    stops = generation.model.vocabulary.stop_tokens
    return await samplers.draw_all(owner, requests, listeners, stops)


@contextlib.contextmanager
def _errors_of(generation: Generation) -> Iterator[None]:
    """Errors of what is drawn become errors of the request, with the fields that the user wrote."""
    try:
        yield
    except InvalidInputError as error:
        raise _renamed(error, generation.fields) from error
    except RequestFailedError as error:
        if error.category is RequestErrorCategory.User:
            raise InvalidInputError(str(error)) from error
        raise


def _renamed(error: InvalidInputError, fields: Mapping[str, str]) -> InvalidInputError:
    """The error with the field of the request that the user wrote."""
    field = error.field or ""
    complaint = str(error).removeprefix(f"{field}: ")
    own = field.removeprefix("sampling_params.")
    return InvalidInputError(complaint, field=fields.get(own, own) or None)
