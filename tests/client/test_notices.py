"""Log messages about slow calls, slow work and retries."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tinkex import types
from tinkex._client.notices import Notices
from tinkex._retry import Clock
from tinkex.errors import APIConnectionError, BillingError, InternalServerError, TinkerError

from ..scripted import Answer, FakeClock, Hang, Raw, Reply, promise

WHERE = "http://service"
X = "/api/v1/x"


class Told(logging.Handler):
    """Collects log messages and their times."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.times: list[float] = []
        self._clock, self._said = clock, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        assert (record.name, record.levelname) == ("tinkex", "WARNING")
        self.lines.append(record.getMessage())
        self.times.append(self._clock.now - 1000.0)
        self._said.set()

    def wait(self) -> str:
        assert self._said.wait(60), "nothing was said"
        return self.lines[0]


@pytest.fixture
def told(clock: FakeClock) -> Iterator[Told]:
    handler, logger = Told(clock), logging.getLogger("tinkex")
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def nowhere() -> Iterator[str]:
    """The address of a service that is not running."""
    with socket.socket() as taken:  # bound but not listening
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


# -- a service that cannot be reached -------------------------------------------------------------


def test_unreachable_service_is_reported_within_three_seconds(told, service, nowhere):
    with pytest.raises(APIConnectionError):
        service(base_url=nowhere, max_retries=4).http.get(X).result(10)
    assert told.times[0] <= 3
    what = told.lines[0]
    assert what.startswith(f"GET {X}: Connection failed")
    assert nowhere in what
    assert "Tried 3 times in 2 s, next try in 2.0 s, giving up after try 5." in what


def test_same_failure_is_reported_at_most_every_thirty_seconds(told, service, nowhere):
    clock = FakeClock(long=1e9)
    told._clock = clock
    with pytest.raises(APIConnectionError):
        service(base_url=nowhere, clock=clock).http.get(X, max_retries=20).result(10)
    assert len(told.times) > 3
    assert all(
        after - before >= 30 for before, after in zip(told.times, told.times[1:], strict=False)
    )


def test_report_names_end_of_retry_window(told, server, service, clock):
    server.on("GET /api/v1/healthz", *[Raw(b"")] * 4, Answer({"status": "ok"}))
    service().health()
    (line,) = told.lines
    assert line.startswith("healthz: Connection failed: the connection was closed")
    assert line.endswith("giving up 300 s after the first.")


def test_report_names_remaining_timeout(told, server, service):
    server.on(f"GET {X}", Answer({"detail": "busy"}, 503))
    with pytest.raises(InternalServerError):
        service().http.get(X, timeout=9.5).result(10)
    assert "busy (status 503)" in told.lines[0]
    assert told.lines[0].endswith("giving up when the call's own timeout ends in 8 s.")


def test_unpaid_bill_is_reported_at_once(told, server, service):
    server.on(f"GET {X}", Answer({"detail": "please pay"}, 402), Answer({}))
    service().http.get(X).result(10)
    assert told.times == [0.0]
    assert "please pay" in told.lines[0]
    assert told.lines[0].endswith("giving up 3600 s after the first.")


def test_unreachable_service_is_reported_while_opening_session(told, service, nowhere):
    client = service(base_url=nowhere, max_retries=3)
    with pytest.raises(APIConnectionError):
        client.create_lora_training_client("some/model")
    assert told.times[0] <= 3
    assert told.lines[0].startswith("client_config: Connection failed")


def test_call_that_succeeds_within_two_attempts_is_not_reported(told, server, service):
    server.on(f"GET {X}", Answer({}, 503), Answer({}))
    client = service()
    for _ in range(5):
        client.http.get(X).result(10)
    assert told.lines == []


def test_password_in_url_is_not_logged(told, service, nowhere):
    client = service(base_url=nowhere.replace("http://", "http://me:secret@"), max_retries=3)
    with pytest.raises(APIConnectionError):
        client.http.get(X).result(10)
    assert told.lines
    assert "secret" not in "".join(told.lines)


# -- a service that does not answer ---------------------------------------------------------------


def test_call_without_answer_is_reported(told, server, service, clock):
    server.on(f"GET {X}", Hang())
    future = service(timeout=60).http.get(X)
    server.wait_for(f"GET {X}")
    clock.advance(2.5)
    assert told.wait() == (
        f"No answer yet from {server.url} to GET {X}, sent 2 s ago; giving up after 60 s."
    )
    assert not future.done()


def test_stream_that_does_not_start_is_reported(told, server, service, clock):
    server.on("POST /api/v1/stream_sample", Hang())
    sampler = service().create_sampling_client(base_model="some/model")

    async def work() -> None:
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
        stream = sampler.sample_stream(prompt, params)
        reading = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.to_thread(server.wait_for, "POST /api/v1/stream_sample")
        clock.advance(2.5)
        line = await asyncio.to_thread(told.wait)
        assert line.startswith(f"No answer yet from {server.url} to stream_sample")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()

    asyncio.run(work())


# -- a paused queue -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 408])
def test_paused_queue_is_reported(told, server, service, status):
    paused = {"type": "try_again", "queue_state": "paused_rate_limit"}
    server.on("POST /api/v1/optim_step", promise("step"))
    server.on_future(
        "step",
        Answer({**paused, "queue_state_reason": "too many runs"}, status),
        Answer({"metrics": {}}),
    )
    training = service().create_lora_training_client("some/model")
    training.optim_step(types.AdamParams()).result(10)
    assert told.lines == ["Training is paused for s-1:train:0. Reason: too many runs"]


def test_slow_work_is_reported(told, server, service, clock):
    """The service answers every poll, but a healthy service may still never finish the work."""
    server.on("POST /api/v1/optim_step", promise("step"))
    polled = threading.Event()

    def not_yet(_: Any) -> Reply:
        if clock.now >= 1011:
            polled.set()
            return Hang()
        clock.advance(1)
        return Answer({"type": "try_again", "queue_state": "active"}, 408)

    server.on_future("step", not_yet)
    training = service().create_lora_training_client("some/model")
    future = training.optim_step(types.AdamParams())
    assert polled.wait(60)
    assert told.wait() == (
        f"Waiting for optim_step (step) for 11 s: {server.url} has accepted it and has not finished it."
    )
    future.cancel()


def test_throttled_samples_are_reported(told, server, service):
    server.on("POST /api/v1/asample", Answer({"detail": "slowly"}, 429), promise("sample"))
    server.on_future("sample", Answer({"sequences": []}))
    sampler = service().create_sampling_client(base_model="some/model")
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    sampler.sample(prompt, 1, params).result(10)
    (line,) = told.lines
    assert line.startswith(
        "sample: the service asks for fewer concurrent samples; waiting 1 s: slowly"
    )
    assert server.url in line


def test_failing_polls_of_one_kind_are_one_line(told, server, service):
    def forward(request: Any) -> Answer:
        return promise(f"step-{request.json['seq_id']}")

    for number in range(1, 4):
        silent = [Raw(b"HTTP/1.1 200")] * 2
        server.on_future(f"step-{number}", *silent, Answer({"metrics": {}}))
    server.on("POST /api/v1/optim_step", forward)
    training = service().create_lora_training_client("some/model")
    futures = [training.optim_step(types.AdamParams()) for _ in range(3)]
    for future in futures:
        future.result(10)
    assert len(told.lines) == 1
    assert told.lines[0].startswith("optim_step (step-")


# -- Notices alone, on a simulated clock ----------------------------------------------------------


class Ahead(asyncio.SelectorEventLoop):
    """An event loop with simulated time, which jumps to the next timer when no callback is ready."""

    _jumped = 0.0

    def time(self) -> float:
        return self._jumped

    def _run_once(self) -> None:
        waiting: Any = self
        timers = [timer.when() for timer in waiting._scheduled if not timer.cancelled()]
        if not waiting._ready and timers:
            self._jumped += max(0.0, min(timers) - self.time())
        super()._run_once()  # type: ignore[misc]


def hear(work: Callable[[Notices], Awaitable[None]]) -> list[tuple[int, str]]:
    """The messages logged while `work` runs, each with its second."""
    said: list[tuple[int, str]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        handler = logging.Handler()
        handler.emit = lambda record: said.append(  # type: ignore[method-assign]
            (int(loop.time() - started), record.getMessage())
        )
        logging.getLogger("tinkex").addHandler(handler)
        notices = Notices(WHERE, Clock(monotonic=loop.time))
        try:
            await work(notices)
        finally:
            notices.close()
            logging.getLogger("tinkex").removeHandler(handler)

    with asyncio.Runner(loop_factory=Ahead) as runner:
        runner.run(main())
    return said


def test_missing_answer_is_reported_after_two_seconds_then_every_thirty():
    async def work(notices: Notices) -> None:
        notices.begin("sample", 60)
        await asyncio.sleep(95)

    said = hear(work)
    assert [second for second, _ in said] == [2, 32, 62, 92]
    assert said[0][1].endswith("to sample, sent 2 s ago; giving up after 60 s.")


def test_quick_calls_are_never_reported():
    async def work(notices: Notices) -> None:
        for _ in range(50):
            flight = notices.begin("sample", 60)
            await asyncio.sleep(1.9)
            notices.end(flight)

    assert hear(work) == []


def test_many_late_calls_are_one_line():
    async def work(notices: Notices) -> None:
        for name in ("save", "load", "load"):
            notices.begin(name, 60)
        await asyncio.sleep(20)

    ((_, line),) = hear(work)
    assert "to save and 2 other calls, sent" in line


def test_continuous_late_calls_are_one_line_per_thirty_seconds():
    async def work(notices: Notices) -> None:
        for _ in range(60):
            notices.begin("sample", 60)
            await asyncio.sleep(1)

    assert [second for second, _ in hear(work)] == [2, 32]


def test_late_call_of_another_kind_is_reported_too():
    async def work(notices: Notices) -> None:
        notices.begin("first", 60)
        await asyncio.sleep(10)
        notices.begin("second", 60)
        await asyncio.sleep(10)

    said = hear(work)
    assert [second for second, _ in said] == [2, 12]
    assert "to second and another call, sent" in said[1][1]


def test_late_call_after_answered_ones_is_reported_again():
    async def work(notices: Notices) -> None:
        first = notices.begin("sample", 60)
        await asyncio.sleep(5)
        notices.end(first)
        await asyncio.sleep(2)
        notices.begin("sample", 60)
        await asyncio.sleep(5)

    assert [second for second, _ in hear(work)] == [2, 9]


def test_work_is_reported_when_slower_than_earlier_work():
    async def work(notices: Notices) -> None:
        for seconds in (12, 30, 40):
            promised = notices.expect("pass", "r-1")
            await asyncio.sleep(seconds)
            notices.end(promised)
        notices.expect("step", "r-2")
        await asyncio.sleep(50)

    said = hear(work)
    # Reported: the first pass at 10 s. The second is normal until 36 s, the third until 90 s. Then the first step.
    assert [second for second, _ in said] == [10, 92, 122]
    assert said[1][1].startswith("Waiting for step (r-2) for 10 s")


def test_calls_and_work_are_reported_separately():
    async def work(notices: Notices) -> None:
        for number in range(3):
            notices.begin("sample", 60)
            notices.expect("sample", f"r-{number}")
        await asyncio.sleep(11)

    calls, promises = hear(work)
    assert calls[1].startswith("No answer yet from http://service to sample and 2 other calls")
    assert promises[1].startswith("Waiting for sample (r-0) and 2 other requests for 10 s")


def test_nothing_is_reported_after_close():
    async def work(notices: Notices) -> None:
        notices.begin("sample", 60)
        notices.close()
        await asyncio.sleep(100)

    assert hear(work) == []


def retry(notices: Notices, what: str, elapsed: float, wait: float, error: TinkerError) -> None:
    notices.retry(what, error, 0, elapsed, wait, "giving up soon")


def test_retries_are_reported_after_two_seconds():
    async def work(notices: Notices) -> None:
        retry(notices, "a", 0.0, 1.9, APIConnectionError(None, "Refused."))
        retry(notices, "b", 1.0, 1.0, APIConnectionError(None, "Refused."))
        retry(notices, "c", 0.0, 30.0, BillingError("pay"))

    assert [line for _, line in hear(work)] == [
        f"b: Refused ({WHERE}). Tried 1 times in 1 s, next try in 1.0 s, giving up soon.",
        f"c: pay (status 402) ({WHERE}). Tried 1 times in 0 s, next try in 30.0 s, giving up soon.",
    ]


def test_each_kind_of_call_is_reported_separately_and_rarely():
    async def work(notices: Notices) -> None:
        for _ in range(61):
            for number, what in enumerate(("save", "load")):
                notices.paused(f"{what} (r-{number})", "no room")
            await asyncio.sleep(1)

    said = [line.partition(" ")[0] for _, line in hear(work)]
    assert said == ["save", "load"] * 3


def test_deprecation_note_is_logged_once_per_text():
    async def work(notices: Notices) -> None:
        for note in ("upgrade", "upgrade", "upgrade now"):
            notices.deprecated(note, None)

    assert [line for _, line in hear(work)] == [
        f"{WHERE} says: upgrade",
        f"{WHERE} says: upgrade now",
    ]


def test_report_of_work_names_error_of_its_polls():
    notices = Notices("http://x", FakeClock())

    async def complaints() -> list[str]:
        number = notices.expect("optim_step", "r-1")
        wait = notices._waits[number]
        lines = [notices._complaint(wait, 0, 11.0)]
        notices.explain(number, "7 polls in a row failed, the last with: no upstream.")
        lines.append(notices._complaint(wait, 0, 12.0))
        notices.explain(number, "")
        lines.append(notices._complaint(wait, 0, 13.0))
        notices.close()
        return lines

    assert [line.partition("has accepted it ")[2] for line in asyncio.run(complaints())] == [
        "and has not finished it.",
        "but 7 polls in a row failed, the last with: no upstream.",
        "and has not finished it.",
    ]
