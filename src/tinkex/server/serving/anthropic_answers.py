"""Answers of Anthropic's API: whole messages, and the events of a stream."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from .answers import Piece
from .generation import Answer, Finished, Generation, TokenCounts, Update

__all__ = ["AnthropicAnswer", "event"]

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True)
class AnthropicAnswer:
    """Writes the answer to one request."""

    generation: Generation
    return_token_ids: bool = False
    number: str = field(default_factory=lambda: secrets.token_hex(12))

    def _head(self, usage: TokenCounts) -> dict[str, Any]:
        return {
            "id": f"msg_{self.number}",
            "type": "message",
            "role": "assistant",
            "model": self.generation.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def whole(self, finished: Finished) -> bytes:
        usage = TokenCounts()
        usage.add(finished.prompt, finished.result)
        (answer,) = finished.answers
        message = self._head(usage) | {"content": list(_blocks(answer.pieces))} | _end(answer)
        if self.return_token_ids:
            message["token_ids"] = answer.tokens
            message["prompt_token_ids"] = list(finished.prompt)
        return orjson.dumps(message)

    async def events(
        self, updates: AsyncIterator[Update], usage: TokenCounts
    ) -> AsyncIterator[bytes]:
        (prompt,) = self.generation.prompts
        place, kind, started = -1, "", False
        async for update in updates:
            if (
                not started
            ):  # not earlier: a request that the engine refuses gets a status, not a stream
                started = True
                yield event("message_start", message=self._head(TokenCounts(len(prompt))))
            for piece in update.pieces:
                if piece.kind != kind or piece.kind == "call":
                    if kind:
                        yield event("content_block_stop", index=place)
                    place, kind = place + 1, piece.kind
                    yield event("content_block_start", index=place, content_block=_opened(piece))
                yield event("content_block_delta", index=place, delta=_delta(piece))
            if update.ended:
                if kind:
                    yield event("content_block_stop", index=place)
                last = _end(update.answer)
                if self.return_token_ids:
                    last["token_ids"] = update.answer.tokens
                yield event("message_delta", delta=last, usage=_usage(usage))
        yield event("message_stop")


def event(kind: str, **content: Any) -> bytes:
    data = orjson.dumps({"type": kind, **content})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _blocks(pieces: list[Piece]) -> Iterator[dict[str, Any]]:
    """Adjacent pieces of one kind joined into blocks."""
    block: dict[str, Any] | None = None
    for piece in pieces:
        if piece.call is not None:
            if block is not None:
                yield block
            yield {**_opened(piece), "input": piece.call.arguments}
            block = None
            continue
        name = "thinking" if piece.kind == "reasoning" else "text"
        if block is None or block["type"] != name:
            if block is not None:
                yield block
            block = _opened(piece)
        block[name] += piece.text
    if block is not None:
        yield block


def _opened(piece: Piece) -> dict[str, Any]:
    if piece.call is not None:
        return {
            "type": "tool_use",
            "id": f"toolu_{secrets.token_hex(12)}",
            "name": piece.call.name,
            "input": {},
        }
    if piece.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.call is not None:
        arguments = json.dumps(piece.call.arguments, ensure_ascii=False)
        return {"type": "input_json_delta", "partial_json": arguments}
    if piece.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": piece.text}
    return {"type": "text_delta", "text": piece.text}


def _end(answer: Answer) -> dict[str, Any]:
    reason = _REASONS[answer.reason or "stop"]
    if answer.stopped_by is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by}


def _usage(usage: TokenCounts) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
