"""Failures on the wire: exception ↔ status and body, and a failed operation ↔ its result body."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    ClientClosedError,
    ConflictError,
    DecodeError,
    HTTPRequest,
    HTTPResponse,
    InvalidInputError,
    RateLimitError,
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
    status_error_class,
)

__all__ = [
    "error_from_response",
    "failure_body",
    "failure_from_body",
    "lacks_route",
    "response_from_error",
    "retry_after",
]

# The status with which a service answers an error that is not a status error. Subclasses come
# before their parents.
_STATUS_OF: Final[tuple[tuple[type[TinkerError], int], ...]] = (
    (DecodeError, 422),
    (InvalidInputError, 400),
    (APITimeoutError, 504),
    (APIConnectionError, 503),
    (APIResponseValidationError, 502),
    (ClientClosedError, 503),
)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that the service asks to wait: `retry-after-ms`, else `retry-after` in seconds or as a date."""
    if (milliseconds := _float(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    if text is None or (seconds := _float(text)) is not None:
        return seconds if text is not None else None
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    # The oldest of HTTP's three date formats has no time zone; all three mean UTC.
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now


def _float(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if isfinite(number) else None


def error_from_response(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    request: HTTPRequest,
    *,
    now: float,
) -> APIStatusError:
    """The exception for an error answer; `headers` have lower-case names."""
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        content = body.decode("utf-8", "replace") or None
    message = _message(content)
    if _is_missing_route(status, message):
        message = _no_such_route(request)
    return status_error_class(status)(
        message or _UNEXPLAINED.get(status, f"The service answered {status} without a reason."),
        HTTPResponse(status, dict(headers), request),
        content,
        retry_after=retry_after(headers, now),
    )


_UNEXPLAINED: Final = {
    410: "The result or session has expired at the service; submit the request again.",
}


#: Messages of web frameworks for an unknown address. A service names the thing it has not found.
_GENERIC: Final = frozenset(
    {"", "not found", "method not allowed", "404 not found", "404 page not found"}
)


def _is_missing_route(status: int, message: str) -> bool:
    return status in {404, 405} and message.strip().rstrip(".").lower() in _GENERIC


def _no_such_route(request: HTTPRequest) -> str:
    parts = urlsplit(request.url)
    where = f"The service at {parts.scheme}://{parts.netloc}" if parts.netloc else "The service"
    return f"{where} has no {request.method} {parts.path}."


def lacks_route(error: TinkerError) -> bool:
    """Whether the service does not have this call at all, as opposed to not having the requested object."""
    return _is_missing_route(error.status_code or 0, _message(error.body))


def _message(content: Any) -> str:
    if isinstance(content, str):
        return content[:2000]
    if not isinstance(content, dict):
        return ""
    for key in ("detail", "message", "error"):
        value = content.get(key)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, list):  # a validation report, one entry a field
            value = "; ".join(map(_complaint, value))
        if isinstance(value, str) and value:
            return value[:2000]
    return ""


def _complaint(entry: Any) -> str:
    if isinstance(entry, dict) and "msg" in entry:
        loc = entry.get("loc")
        where = ".".join(map(str, loc)) if isinstance(loc, list) else ""
        return f"{where}: {entry['msg']}" if where else str(entry["msg"])
    return str(entry)


def response_from_error(error: TinkerError) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body that report `error` to a client."""
    if isinstance(error, APIStatusError) and error.status_code:
        status = error.status_code
    else:
        status = next((code for cls, code in _STATUS_OF if isinstance(error, cls)), 500)
    body: dict[str, Any] = {"detail": error.message, "category": _category(error, status)}
    if field := getattr(error, "field", None):
        body["field"] = field
    headers = {}
    if error.retry_after is not None:
        headers["retry-after-ms"] = str(round(error.retry_after * 1000))
    elif isinstance(error, RateLimitError | ConflictError):
        # It does not pass by itself. Without the header, clients would retry for minutes.
        headers["x-should-retry"] = "false"
    if error.request_id:
        headers["x-request-id"] = error.request_id
    return status, headers, body


def _category(error: TinkerError, status: int) -> str:
    if error.category is RequestErrorCategory.Unknown and not isinstance(error, APIStatusError):
        return RequestErrorCategory.of_status(status).value
    return error.category.value


def failure_body(error: TinkerError) -> dict[str, str]:
    """The result body of a failed operation. The request was accepted, so the answer is a 200 with this body."""
    category = RequestErrorCategory.User if error.user_error else error.category
    return {"error": error.message, "category": category.value}


def failure_from_body(body: Mapping[str, Any], request_id: str | None) -> RequestFailedError:
    error = body.get("error")
    if isinstance(error, dict):  # older services nest the error one level deeper
        body, error = error, error.get("error") or error.get("message")
    return RequestFailedError(
        str(error or "The service gave no reason."),
        request_id,
        RequestErrorCategory.parse(body.get("category")),
    )
