"""All errors that tinkex raises.

    TinkerError
    ├── APIError                          a call to the service failed
    │   ├── APIConnectionError            no usable answer: refused, reset, name not found
    │   │   ├── APITimeoutError           no answer in time
    │   │   └── CircuitOpenError          not sent: the circuit breaker is open
    │   ├── APIResponseValidationError (ValueError)  an answer that does not follow the protocol
    │   └── APIStatusError                an answer with an error status
    │       ├── BadRequestError (ValueError)  400
    │       ├── AuthenticationError (ValueError)  401
    │       ├── BillingError              402
    │       ├── PermissionDeniedError (ValueError)  403
    │       ├── NotFoundError (ValueError)  404
    │       ├── ConflictError (ValueError)  409
    │       ├── GoneError                 410   finished session or expired result
    │       ├── PayloadTooLargeError (ValueError)  413
    │       ├── UnsupportedMediaTypeError (ValueError)  415
    │       ├── UnprocessableEntityError (ValueError)  422
    │       ├── RateLimitError            429
    │       └── InternalServerError       5xx
    ├── RequestFailedError                accepted by the service, then failed there
    ├── InvalidInputError (ValueError)    refused locally, before anything was sent
    │   ├── ConfigError                   a setting is missing or malformed
    │   └── InvalidPathError              not a tinker:// path
    ├── DecodeError (ValueError)          bytes that are not a message of this protocol
    ├── ClientClosedError (RuntimeError)  the client was closed
    └── WrongThreadError (RuntimeError)   blocking call on the runtime's own thread

    ExperimentalWarning (FutureWarning)   an interface that may still change

4xx errors that a retry cannot fix are also ValueErrors, and so are answers that cannot be decoded: the official
SDK raises a plain ValueError when the service refuses a result, and scripts catch that.

Every error carries its facts as attributes (`type`, `status_code`, `request_id`, `category`, `body`,
`retry_after`), has `user_error` and `retryable`, and can be pickled. This module depends on no HTTP
library: where the official SDK passes an `httpx` object, any object with the same attributes is accepted.
Errors that tinkex raises itself carry the small `HTTPRequest` and `HTTPResponse` below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeAlias

from tinkex._statuses import facts_of

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "CircuitOpenError",
    "ClientClosedError",
    "ConfigError",
    "ConflictError",
    "DecodeError",
    "ErrorType",
    "ExperimentalWarning",
    "GoneError",
    "HTTPRequest",
    "HTTPResponse",
    "InternalServerError",
    "InvalidInputError",
    "InvalidPathError",
    "NotFoundError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestErrorCategory",
    "RequestFailedError",
    "TinkerError",
    "UnprocessableEntityError",
    "UnsupportedMediaTypeError",
    "WrongThreadError",
    "status_error_class",
]


#: The kind of a failure, for code that handles errors by kind instead of by class.
ErrorType: TypeAlias = Literal[
    "api_connection", "api_timeout", "api_status", "request_failed", "validation"
]


class RequestErrorCategory(StrEnum):
    """Whose fault a failure is; only the user's own is pointless to retry."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def parse(cls, value: object) -> RequestErrorCategory:
        """Read a category in any case; unknown values become `Unknown`."""
        try:
            return cls(str(value).strip().lower())
        except ValueError:
            return cls.Unknown

    @classmethod
    def of_status(cls, status: int | None) -> RequestErrorCategory:
        """The category a status implies when the body names none."""
        if status is None:
            return cls.Unknown
        return cls.User if is_user_status(status) else cls.Server


def is_user_status(status: int) -> bool:
    return facts_of(status).user_fault


@dataclass(frozen=True, slots=True)
class HTTPRequest:
    """The request of a failed call; without headers, because they may contain a key."""

    method: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class HTTPResponse:
    """The parts of an answer that an error report needs."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    request: HTTPRequest = HTTPRequest()

    @property
    def url(self) -> str:
        return self.request.url


class TinkerError(Exception):
    """Base class: `except TinkerError` catches every error that the SDK raises on purpose."""

    type: ClassVar[ErrorType] = "request_failed"
    status_code: int | None = None
    request_id: str | None = None
    body: object | None = None
    retry_after: float | None = None
    category: RequestErrorCategory = RequestErrorCategory.Unknown

    def __init__(self, message: str = "") -> None:
        self.message = message
        super().__init__(message)

    @property
    def status(self) -> int | None:
        return self.status_code

    @property
    def data(self) -> object | None:
        """The same as `body`."""
        return self.body

    @property
    def retry_after_ms(self) -> int | None:
        return None if self.retry_after is None else round(self.retry_after * 1000)

    @property
    def user_error(self) -> bool:
        """True if the same request will fail again."""
        if self.category is RequestErrorCategory.User:
            return True
        return self.status_code is not None and is_user_status(self.status_code)

    @property
    def retryable(self) -> bool:
        return not self.user_error

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt from attributes, not from constructor arguments: subclasses can then have any
        # constructor and still be pickled.
        state = {name: _portable(value) for name, value in self.__dict__.items()}
        return _rebuild, (type(self), self.args, state)


def _rebuild(cls: type[TinkerError], args: tuple[Any, ...], state: dict[str, Any]) -> TinkerError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


def _portable(value: Any) -> Any:
    """Replace an HTTP object of another library by its facts, which can always be pickled."""
    if isinstance(value, HTTPRequest | HTTPResponse):
        return value
    if hasattr(value, "status_code") and hasattr(value, "headers"):
        request = _portable(getattr(value, "_request", None)) or HTTPRequest()
        return HTTPResponse(int(value.status_code), dict(value.headers), request)
    if hasattr(value, "method") and hasattr(value, "url"):
        return HTTPRequest(str(value.method), str(value.url))
    return value


class APIError(TinkerError):
    """A call to the service returned no result."""

    def __init__(self, message: str, request: Any = None, *, body: object | None = None) -> None:
        super().__init__(message)
        self.request = request
        self.body = body


class APIConnectionError(APIError):
    """No usable answer came back: connection refused, reset, or the name does not resolve."""

    type: ClassVar[ErrorType] = "api_connection"

    def __init__(self, request: Any = None, message: str = "Connection error.") -> None:
        super().__init__(message, request)


class APITimeoutError(APIConnectionError):
    """No answer came in time; the request may or may not have reached the service."""

    type: ClassVar[ErrorType] = "api_timeout"

    def __init__(self, request: Any = None, message: str = "Request timed out.") -> None:
        super().__init__(request, message)


class CircuitOpenError(APIConnectionError):
    """The circuit breaker refused the call because too many before it failed."""

    def __init__(
        self,
        request: Any = None,
        message: str = "The circuit breaker is open; the call was not sent.",
        *,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(request, message)
        self.retry_after = retry_after


class APIResponseValidationError(APIError, ValueError):
    """The service answered with something that is not part of the protocol."""

    type: ClassVar[ErrorType] = "validation"

    def __init__(
        self,
        response: Any = None,
        body: object | None = None,
        message: str | None = None,
        *,
        request_id: str | None = None,
    ) -> None:
        super().__init__(
            message or "The service answered with data this client does not understand.",
            getattr(response, "request", None) if isinstance(response, HTTPResponse) else None,
            body=body,
        )
        self.response = response
        self.status_code = getattr(response, "status_code", None)
        self.request_id = request_id
        self.category = RequestErrorCategory.Server

    @property
    def user_error(self) -> bool:
        return False

    @property
    def retryable(self) -> bool:
        """A retry would bring the same answer."""
        return False


class APIStatusError(APIError):
    """The service answered with an error status.

    `response` may be any object with `status_code` and `headers`. The category comes from the body
    if it names one, else from the status.
    """

    type: ClassVar[ErrorType] = "api_status"

    _status: int | None = None  # used if there is no response

    def __init__(
        self,
        message: str,
        response: Any = None,
        body: object | None = None,
        *,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, getattr(response, "_request", None), body=body)
        if isinstance(response, HTTPResponse):
            self.request = response.request
        elif response is None:
            response = HTTPResponse(self._status or 0)
        self.response = response
        self.status_code = int(response.status_code) or None
        self.request_id = response.headers.get("x-request-id")
        self.retry_after = retry_after
        named = body.get("category") if isinstance(body, Mapping) else None
        self.category = (
            RequestErrorCategory.parse(named)
            if named is not None
            else RequestErrorCategory.of_status(self.status_code)
        )

    def __str__(self) -> str:
        return f"{self.message} (status {self.status_code})" if self.status_code else self.message


class BadRequestError(APIStatusError, ValueError):
    _status = 400


class AuthenticationError(APIStatusError, ValueError):
    _status = 401


class BillingError(APIStatusError):
    """The account cannot pay for the call; the client pauses and retries for up to an hour."""

    _status = 402


class PermissionDeniedError(APIStatusError, ValueError):
    _status = 403


class NotFoundError(APIStatusError, ValueError):
    _status = 404


class ConflictError(APIStatusError, ValueError):
    _status = 409


class GoneError(APIStatusError):
    """The session is finished or the result expired; submit a new request."""

    _status = 410


class PayloadTooLargeError(APIStatusError, ValueError):
    _status = 413


class UnsupportedMediaTypeError(APIStatusError, ValueError):
    _status = 415


class UnprocessableEntityError(APIStatusError, ValueError):
    _status = 422


class RateLimitError(APIStatusError):
    _status = 429


class InternalServerError(APIStatusError):
    _status = 500


_BY_STATUS: dict[int, type[APIStatusError]] = {
    cls._status: cls for cls in APIStatusError.__subclasses__() if cls._status is not None
}


def status_error_class(status: int) -> type[APIStatusError]:
    """The exception class for an error status."""
    if status >= 500:
        return InternalServerError
    return _BY_STATUS.get(status, APIStatusError)


class RequestFailedError(TinkerError):
    """The service accepted the request, and then its execution failed."""

    def __init__(
        self,
        message: str,
        request_id: str | None = None,
        category: RequestErrorCategory | str = RequestErrorCategory.Unknown,
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.category = RequestErrorCategory.parse(category)


class InvalidInputError(TinkerError, ValueError):
    """A value was refused before anything was sent; `field` names it.

    `problem` says what is wrong with it. `advice` says how to fix it in Python; the command line gives its own.
    """

    type: ClassVar[ErrorType] = "validation"

    category = RequestErrorCategory.User

    def __init__(
        self, message: str, *, field: str | None = None, advice: str | None = None
    ) -> None:
        whole = f"{message}; {advice}" if advice else message
        super().__init__(f"{field}: {whole}" if field else whole)
        self.field = field
        self.problem = message
        self.advice = advice


class ConfigError(InvalidInputError):
    """A setting is missing or malformed; `field` names it."""


class InvalidPathError(InvalidInputError):
    """Not a `tinker://<run>/<weights|sampler_weights|external_weights>/<name>` path."""


class DecodeError(TinkerError, ValueError):
    """Bytes that are not a message of this protocol; `field` says where decoding stopped."""

    type: ClassVar[ErrorType] = "validation"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field

    @property
    def retryable(self) -> bool:
        return False


class ClientClosedError(TinkerError, RuntimeError):
    """The client was closed; make a new one."""

    type: ClassVar[ErrorType] = "validation"

    @property
    def retryable(self) -> bool:
        return False


class WrongThreadError(TinkerError, RuntimeError):
    """A blocking call on the runtime's own thread, where it would wait for itself."""

    type: ClassVar[ErrorType] = "validation"

    @property
    def retryable(self) -> bool:
        return False


class ExperimentalWarning(FutureWarning):
    """An interface that may change without notice was used."""
