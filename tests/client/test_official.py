"""Names from internal modules of the official SDK that other code imports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tinkex import types
from tinkex._client.official import (
    PROTO_SUPPORTED_TYPES,
    BytesSemaphore,
    RetryHandler,
    TelemetryProvider,
    capture_exceptions,
    deserialize_proto_response,
    forward_backward_request_to_proto,
    is_user_error,
    resolve_base_url,
)
from tinkex._client.retry import RetryConfig
from tinkex._wire import proto_codec
from tinkex.config import DEFAULT_BASE_URL
from tinkex.errors import (
    APIConnectionError,
    BadRequestError,
    BillingError,
    InternalServerError,
    InvalidInputError,
)

from ..scripted import FakeClock
from .helpers import datum


def test_base_url_is_the_argument_else_the_environment_else_the_default(monkeypatch):
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    assert resolve_base_url() == resolve_base_url("") == DEFAULT_BASE_URL.rstrip("/")
    monkeypatch.setenv("TINKER_BASE_URL", "http://there/")
    assert resolve_base_url() == "http://there"
    assert resolve_base_url("http://here//") == "http://here"


def test_requests_are_encoded_and_results_decoded_as_protobuf():
    inputs = types.ForwardBackwardInput([datum(1, 2)], "ppo", {"clip": 0.5})
    message = forward_backward_request_to_proto(types.ForwardBackwardRequest(inputs, "m", 3))
    assert (message.model_id, message.seq_id, message.loss_fn) == ("m", 3, "ppo")
    assert len(message.data) == 1

    drawn = types.SampleResponse([types.SampledSequence("stop", tokens=[5], logprobs=[-1.0])])
    encoded = proto_codec.encode_sample_response(drawn)
    assert deserialize_proto_response(encoded, types.SampleResponse).sequences[0].tokens == [5]
    assert {types.SampleResponse, types.ForwardBackwardOutput} == PROTO_SUPPORTED_TYPES
    with pytest.raises(InvalidInputError, match="model_cls"):
        deserialize_proto_response(b"", dict)


def test_bytes_semaphore_may_be_exceeded_by_one_request():
    async def tried() -> list[str]:
        limit, seen = BytesSemaphore(10), []

        async def take(size: int) -> None:
            async with limit.acquire(size):
                seen.append(f"in {size}")
                await asyncio.sleep(0)
            seen.append(f"out {size}")

        await asyncio.gather(take(8), take(7), take(1))
        return seen

    seen = asyncio.run(tried())
    assert seen[:3] == ["in 8", "in 7", "out 8"]
    assert seen.index("in 1") > seen.index("out 8")


# -- retries -------------------------------------------------------------------------------------


def handled(*outcomes: Any, **settings: Any) -> Any:
    left = list(outcomes)

    async def once(*args: Any, **kwargs: Any) -> Any:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, args, kwargs

    handler: RetryHandler[Any] = RetryHandler(RetryConfig(**settings), clock=FakeClock())
    return asyncio.run(handler.execute(once, 1, key=2))


def test_transient_errors_are_retried():
    errors = APIConnectionError(), InternalServerError("no"), TimeoutError()
    assert handled(*errors, "done") == ("done", (1,), {"key": 2})


@pytest.mark.parametrize("error", [BadRequestError("no"), BillingError("no"), KeyError("no")])
def test_permanent_errors_are_not_retried(error):
    with pytest.raises(type(error)):
        handled(error, "done")


def test_max_connections_limits_concurrency():
    async def most() -> int:
        handler: RetryHandler[None] = RetryHandler(RetryConfig(max_connections=3), "few")
        running, seen = [0], [0]

        async def once() -> None:
            running[0] += 1
            seen.append(running[0])
            await asyncio.sleep(0)
            running[0] -= 1

        await asyncio.gather(*(handler.execute(once) for _ in range(10)))
        return max(seen)

    assert asyncio.run(most()) == 3


def test_call_without_progress_fails_after_progress_timeout():
    async def stuck() -> None:
        clock = FakeClock()
        handler: RetryHandler[None] = RetryHandler(RetryConfig(progress_timeout=1e-3), clock=clock)

        async def once() -> None:
            clock.advance(2e-3)
            await asyncio.Event().wait()

        await handler.execute(once)

    with pytest.raises(APIConnectionError, match="progress"):
        asyncio.run(stuck())


# -- telemetry -----------------------------------------------------------------------------------


class Reports(list[Any]):
    def log_exception(self, error: Exception, severity: str) -> None:
        self.append((severity, error))


class Provider:
    def __init__(self) -> None:
        self.reports: Any = Reports()

    def get_telemetry(self) -> Any:
        return self.reports

    @capture_exceptions
    def fails(self) -> None:
        raise KeyError("a")

    @capture_exceptions(severity="CRITICAL")
    async def fails_later(self) -> None:
        raise KeyError("b")

    def inner(self) -> None:
        @capture_exceptions
        def function() -> Any:
            return self.reports[0][1].args, 1 / 0

        function()


def test_exceptions_are_reported_to_the_telemetry_of_self():
    provider = Provider()
    assert isinstance(provider, TelemetryProvider)
    with pytest.raises(KeyError):
        provider.fails()
    with pytest.raises(KeyError):
        asyncio.run(provider.fails_later())
    with pytest.raises(ZeroDivisionError):
        provider.inner()
    assert [(severity, type(error)) for severity, error in provider.reports] == [
        ("ERROR", KeyError),
        ("CRITICAL", KeyError),
        ("ERROR", ZeroDivisionError),
    ]


def test_function_without_a_reporter_is_unchanged():
    @capture_exceptions
    def plain(number: int) -> int:
        return number + 1

    assert plain(1) == 2


def test_is_user_error_separates_client_from_server_errors():
    assert is_user_error(BadRequestError("no"))
    assert not is_user_error(InternalServerError("no"))
