"""Answers of OpenAI's API: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson

from tinkex.engine.values import Array, SampledResult

from .answers import Piece, ToolCall
from .generation import Answer, Finished, Generation, TokenCounts, Update
from .vocabulary import Vocabulary

__all__ = ["OpenAIAnswer"]

#: The logprob that the engine writes where a prompt position has fewer alternatives.
_EMPTY: Final = -99999.0


@dataclass
class _Sent:
    """What a stream has sent of one answer: the characters of its tokens, and its calls."""

    characters: int = 0
    calls: int = 0

    def placed(self, logprobs: dict[str, Any]) -> dict[str, Any]:
        """Logprobs of the next tokens, with the offset of each token in the text."""
        offsets = []
        for text in logprobs["tokens"]:
            offsets.append(self.characters)
            self.characters += len(text)
        return {**logprobs, "text_offset": offsets}


@dataclass(frozen=True)
class OpenAIAnswer:
    """Writes the answer to one request."""

    generation: Generation
    chat: bool
    created: int
    include_usage: bool = False
    return_token_ids: bool = False
    number: str = field(default_factory=lambda: secrets.token_hex(12))

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}",
            "object": f"{kind}.chunk" if self.chat and streamed else kind,
            "created": self.created,
            "model": self.generation.model.name,
        }

    # -- whole -------------------------------------------------------------------------------

    def whole(self, finished: Iterable[Finished]) -> bytes:
        usage = TokenCounts()
        choices = []  # written one by one: as objects they take ten times the memory
        for part in finished:
            usage.add(part.prompt, part.result)
            choices += [
                orjson.Fragment(orjson.dumps(self._choice(answer, part))) for answer in part.answers
            ]
        head = self._head(streamed=False)
        return orjson.dumps({**head, "choices": choices, "usage": _usage(usage)})

    def _choice(self, answer: Answer, part: Finished) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": answer.index, "finish_reason": answer.reason}
        if self.chat:
            choice["message"] = _message(answer)
            choice["logprobs"] = self._chat_logprobs(answer, 0)
        else:
            choice["text"] = self._echoed(part) + answer.text
            choice["logprobs"] = self._completion_logprobs(answer, part)
        if self.return_token_ids:
            choice["token_ids"] = answer.tokens
            choice["prompt_token_ids"] = list(part.prompt)
        return choice

    def _echoed(self, part: Finished) -> str:
        if not self.generation.echo:
            return ""
        return b"".join(map(self._vocabulary.token_bytes, part.prompt)).decode("utf-8", "replace")

    def _echoed_length(self, answer: Answer) -> int:
        """Characters of the tokens before an answer."""
        if not self.generation.echo:
            return 0
        prompt = self.generation.prompts[answer.index // self.generation.count]
        return sum(len(self._vocabulary.token_text(token)) for token in prompt)

    @property
    def _vocabulary(self) -> Vocabulary:
        return self.generation.model.vocabulary

    # -- streamed ----------------------------------------------------------------------------

    def echoes(self, scored: Iterable[Finished]) -> Iterator[bytes]:
        """The prompts, as the first event of each answer."""
        for place, part in enumerate(scored):
            (unanswered,) = part.answers
            choice: dict[str, Any] = {"text": self._echoed(part)}
            choice["logprobs"] = self._completion_logprobs(unanswered, part)
            for offset in range(self.generation.count):
                yield self._chunk(place * self.generation.count + offset, choice)

    async def chunks(
        self, updates: AsyncIterator[Update], usage: TokenCounts
    ) -> AsyncIterator[bytes]:
        """The events of a stream, without the last one."""
        sent: dict[int, _Sent] = {}
        async for update in updates:
            answer = update.answer
            if answer.index not in sent:
                sent[answer.index] = _Sent(self._echoed_length(answer))
                if self.chat:
                    yield self._chunk(answer.index, {"delta": {"role": "assistant", "content": ""}})
            for delta in self._deltas(update, sent[answer.index]):
                yield self._chunk(answer.index, delta)
            if update.ended:
                last: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
                yield self._chunk(answer.index, {**last, "finish_reason": answer.reason})
        if self.include_usage:
            yield _event({**self._head(streamed=True), "choices": [], "usage": _usage(usage)})

    def _deltas(self, update: Update, sent: _Sent) -> list[dict[str, Any]]:
        """The deltas of an update; logprobs and token ids go with the first."""
        answer = update.answer
        deltas = [self._delta(piece, sent) for piece in update.pieces]
        extra: dict[str, Any] = {}
        if update.tokens:
            if self.generation.topk is not None:
                extra["logprobs"] = (
                    self._chat_logprobs(answer, -update.tokens)
                    if self.chat
                    else sent.placed(self._sampled_logprobs(answer, -update.tokens))
                )
            if self.return_token_ids:
                extra["token_ids"] = answer.tokens[-update.tokens :]
        if extra:
            empty: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            first = deltas[0] if deltas else empty
            deltas[:1] = [{**first, **extra}]
        return deltas

    def _delta(self, piece: Piece, sent: _Sent) -> dict[str, Any]:
        if not self.chat:
            return {"text": piece.text}
        if piece.call is not None:
            sent.calls += 1
            return {"delta": {"tool_calls": [{"index": sent.calls - 1, **_call(piece.call)}]}}
        name = "reasoning_content" if piece.kind == "reasoning" else "content"
        return {"delta": {name: piece.text}}

    def _chunk(self, index: int, choice: dict[str, Any]) -> bytes:
        head = self._head(streamed=True)
        filled = {"index": index, "finish_reason": None, "logprobs": None, **choice}
        return _event(
            {**head, "choices": [filled], **({"usage": None} if self.include_usage else {})}
        )

    # -- logprobs ----------------------------------------------------------------------------

    def _chat_logprobs(self, answer: Answer, first: int) -> dict[str, Any] | None:
        if self.generation.topk is None:
            return None
        rows: list[tuple[Array, Array] | None] = [*answer.topk] or [None] * len(answer.tokens)
        entries = [
            {**self._entry(token, logprob), "top_logprobs": [] if row is None else self._top(row)}
            for token, logprob, row in list(zip(answer.tokens, answer.logprobs, rows, strict=True))[
                first:
            ]
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._vocabulary.token_bytes(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    def _top(self, row: tuple[Array, Array]) -> list[dict[str, Any]]:
        ids, logprobs = row
        pairs = zip(np.atleast_1d(ids).tolist(), np.atleast_1d(logprobs).tolist(), strict=True)
        return [self._entry(token, logprob) for token, logprob in pairs]

    def _sampled_logprobs(self, answer: Answer, first: int) -> dict[str, Any]:
        rows: list[tuple[Array, Array] | None] = [*answer.topk] or [None] * len(answer.tokens)
        tokens = answer.tokens[first:]
        return {
            "tokens": [self._vocabulary.token_text(token) for token in tokens],
            "token_logprobs": answer.logprobs[first:],
            "top_logprobs": [None if row is None else self._top_map(row) for row in rows[first:]],
        }

    def _completion_logprobs(self, answer: Answer, part: Finished) -> dict[str, Any] | None:
        if self.generation.topk is None:
            return None
        logprobs = self._sampled_logprobs(answer, 0)
        if self.generation.echo:
            prompt = self._prompt_logprobs(part.prompt, part.result)
            logprobs = {name: [*prompt.get(name, ()), *values] for name, values in logprobs.items()}
        return _Sent().placed(logprobs)

    def _prompt_logprobs(
        self, prompt: Sequence[int], result: SampledResult
    ) -> dict[str, list[Any]]:
        scores = result.prompt_logprobs_T
        assert scores is not None
        found = [None if np.isnan(score) else float(score) for score in scores.tolist()]
        top: list[Any] = [None] * len(prompt)
        if result.topk_prompt is not None:
            ids, values = result.topk_prompt
            top = [
                None if place == 0 else self._top_map((ids[place], values[place]))
                for place in range(len(prompt))
            ]
        tokens = [self._vocabulary.token_text(token) for token in prompt]
        return {"tokens": tokens, "token_logprobs": found, "top_logprobs": top}

    def _top_map(self, row: tuple[Array, Array]) -> dict[str, float]:
        """Alternatives by their text; of several tokens with the same text, the most likely."""
        ids, logprobs = row
        found: dict[str, float] = {}
        for token, logprob in zip(
            np.atleast_1d(ids).tolist(), np.atleast_1d(logprobs).tolist(), strict=True
        ):
            if logprob > _EMPTY:
                found.setdefault(self._vocabulary.token_text(token), logprob)
        return found


def _message(answer: Answer) -> dict[str, Any]:
    content = "".join(piece.text for piece in answer.pieces if piece.kind == "content")
    reasoning = "".join(piece.text for piece in answer.pieces if piece.kind == "reasoning")
    calls = [piece.call for piece in answer.pieces if piece.call is not None]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _usage(usage: TokenCounts) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
