"""Names from internal modules of the official SDK that other code imports, implemented with tinkex."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Generic, Protocol, TypeVar, cast, overload, runtime_checkable

from tinkex._retry import Clock, retrying
from tinkex._wire import proto_codec
from tinkex._wire import tinkex_pb2 as pb
from tinkex.config import DEFAULT_BASE_URL, read_env
from tinkex.errors import InvalidInputError
from tinkex.telemetry import exceptions
from tinkex.telemetry.calls import attempt_events
from tinkex.telemetry.reporter import Reporter
from tinkex.types import (
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    SampleResponse,
)

from .budget import Budget, Lease, slots
from .retry import RetryConfig, SampleRetryPolicy
from .samples import UNLIMITED
from .stuck import StuckWatch

__all__ = [
    "PROTO_SUPPORTED_TYPES",
    "BytesSemaphore",
    "RetryHandler",
    "TelemetryProvider",
    "capture_exceptions",
    "deserialize_proto_response",
    "forward_backward_request_to_proto",
    "is_user_error",
    "resolve_base_url",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_READERS: Final[dict[type, Callable[[bytes], Any]]] = {
    SampleResponse: proto_codec.decode_sample_response,
    ForwardBackwardOutput: proto_codec.decode_forward_backward_output,
}
#: Result types that the client requests as protobuf.
PROTO_SUPPORTED_TYPES: Final = set(_READERS)


def resolve_base_url(base_url: object = None) -> str:
    """The base URL without a trailing slash: the argument, else TINKER_BASE_URL, else the hosted service."""
    given = "" if base_url is None else str(base_url)
    return (given or read_env("TINKER_BASE_URL") or DEFAULT_BASE_URL).rstrip("/")


def forward_backward_request_to_proto(
    request: ForwardBackwardRequest | ForwardRequest,
) -> pb.ForwardBackwardRequest:
    encoded = proto_codec.encode_forward_backward_request(request)
    return pb.ForwardBackwardRequest.FromString(encoded)


def deserialize_proto_response(proto_bytes: bytes, model_cls: type) -> Any:
    if model_cls not in _READERS:
        raise InvalidInputError(f"{model_cls!r:.80} has no protobuf form", field="model_cls")
    return _READERS[model_cls](proto_bytes)


class BytesSemaphore:
    """A limit on bytes in flight, which one request may exceed: even a request larger than the limit runs."""

    def __init__(self, max_bytes: int) -> None:
        self._budget = Budget(max_bytes)

    @asynccontextmanager
    async def acquire(self, bytes: int) -> AsyncIterator[None]:
        with Lease() as lease:
            await lease.take(self._budget, bytes)
            yield


class RetryHandler(Generic[T]):
    """Runs coroutine functions with the concurrency limit, retries and stuck detection of a `RetryConfig`."""

    def __init__(
        self,
        config: RetryConfig | None = None,
        name: str = "default",
        telemetry: Reporter | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.config = config or RetryConfig()
        self.name = name
        self._telemetry = telemetry
        self._clock = clock or Clock()
        self._room = slots(self.config.max_connections or UNLIMITED)
        self._watch = StuckWatch(self._clock, self.config)

    async def execute(self, func: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        policy = SampleRetryPolicy(self.config, billing_window=0.0)

        async def once(_: int) -> T:
            return await func(*args, **kwargs)

        with Lease() as lease:
            await lease.take(self._room)
            with self._watch.watching():
                result = await retrying(once, policy, self._clock, events=attempt_events)
        self._watch.progressed()
        return result

    def get_telemetry(self) -> Reporter | None:
        return self._telemetry


@runtime_checkable
class TelemetryProvider(Protocol):
    def get_telemetry(self) -> Reporter | None: ...


def is_user_error(exception: BaseException) -> bool:
    """Whether the caller caused the error."""
    return exceptions.user_error_in(exception) is not None


@overload
def capture_exceptions(func: F, *, fatal: bool = False, severity: str = "ERROR") -> F: ...


@overload
def capture_exceptions(
    func: None = None, *, fatal: bool = False, severity: str = "ERROR"
) -> Callable[[F], F]: ...


def capture_exceptions(
    func: F | None = None, *, fatal: bool = False, severity: str = "ERROR"
) -> Any:
    """Report exceptions that leave a function to the telemetry of `self`: its first argument, or the `self` in its closure."""
    if func is None:
        return functools.partial(capture_exceptions, fatal=fatal, severity=severity)
    function = func

    def capturing(args: tuple[Any, ...]) -> exceptions.capture_exceptions:
        reporter = _reporter_of(function, args)
        return exceptions.capture_exceptions(reporter, fatal=fatal, severity=severity)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def observed(*args: Any, **kwargs: Any) -> Any:
            async with capturing(args):
                return await function(*args, **kwargs)
    else:

        @functools.wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            with capturing(args):
                return function(*args, **kwargs)

    return cast("F", observed)


def _reporter_of(function: Callable[..., Any], args: tuple[Any, ...]) -> Reporter | None:
    provider = args[0] if args else None
    if not isinstance(provider, TelemetryProvider):
        with suppress(TypeError, AttributeError):
            provider = inspect.getclosurevars(function).nonlocals.get("self")
    return provider.get_telemetry() if isinstance(provider, TelemetryProvider) else None
