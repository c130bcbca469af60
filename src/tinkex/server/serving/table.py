"""The table of serving endpoints, one row each. The table of operations has only those of the Tinker protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tinkex._wire.operations import Body, BodyLimits, Operation, Pool

from .anthropic_requests import CountTokensRequest, MessagesRequest
from .errors import Dialect
from .openai_requests import ChatRequest, CompletionRequest

__all__ = ["SERVING", "ServingRow"]

#: Prefixes under which programs look for each API.
_OPENAI: Final = ("/v1", "/oai/api/v1")
_ANTHROPIC: Final = ("/v1", "/anthropic/api/v1")
_LIMITS: Final = BodyLimits(json=16 << 20, items=100_000)


@dataclass(frozen=True)
class ServingRow:
    """One endpoint: its operation, with body and limits as in the operations table, its paths, and the form of its errors."""

    operation: Operation[object]
    dialect: Dialect
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.operation.name


def _row(name: str, summary: str, path: str, request: type | None, dialect: Dialect) -> ServingRow:
    prefixes = _OPENAI if dialect == "openai" else _ANTHROPIC
    paths = tuple(f"{prefix}{path}" for prefix in prefixes)
    operation: Operation[object] = Operation(
        name,
        "GET" if request is None else "POST",
        paths[0],
        request or object,
        object,
        Pool.SAMPLING,
        body=Body.NONE if request is None else Body.JSON,
        summary=summary,
        limits=_LIMITS,
    )
    return ServingRow(operation, dialect, paths)


_ROWS: Final = (
    _row("list_models", "List the models that can be used", "/models", None, "openai"),
    _row("get_model", "Describe a model", "/models/{name:path}", None, "openai"),
    _row("chat_completions", "Answer a conversation", "/chat/completions", ChatRequest, "openai"),
    _row("completions", "Continue a text", "/completions", CompletionRequest, "openai"),
    _row(
        "count_tokens",
        "Count the tokens of a conversation",
        "/messages/count_tokens",
        CountTokensRequest,
        "anthropic",
    ),
    _row("messages", "Answer a conversation", "/messages", MessagesRequest, "anthropic"),
)
SERVING: Final[Mapping[str, ServingRow]] = {row.name: row for row in _ROWS}
