"""Errors in the forms of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final, Literal

from tinkex._wire.failures import response_from_error
from tinkex.errors import (
    DecodeError,
    InvalidInputError,
    NotFoundError,
    TinkerError,
)
from tinkex.server.client_errors import client_error

__all__ = ["Dialect", "failure", "parameter"]

Dialect = Literal["openai", "anthropic"]

_OPENAI: Final[Mapping[int, tuple[str, str | None]]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", "model_not_found"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
_ANTHROPIC: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def failure(error: BaseException, dialect: Dialect) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of an error."""
    request_id = f"req_{secrets.token_hex(12)}"
    error = client_error(error, "the request", request_id)
    status, headers, _ = response_from_error(error)
    if isinstance(error, DecodeError | InvalidInputError):
        status = 400
    message = str(getattr(error, "message", error))
    if dialect == "openai":
        kind, code = _OPENAI.get(status, ("server_error", None))
        body = {"message": message, "type": kind, "param": parameter(error), "code": code}
        return status, headers, {"error": body}
    kind = _ANTHROPIC.get(status, "api_error")
    answer = {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }
    return status, {**headers, "request-id": request_id}, answer


def parameter(error: TinkerError) -> str | None:
    """The parameter of the request that caused the error. For "not found" it is always the model."""
    if isinstance(error, NotFoundError):
        return "model"
    field = getattr(error, "field", None)
    return field if isinstance(field, str) and field != "body" else None
