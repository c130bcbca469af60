"""Futures and the shared runtime loop: from any thread, event loop and process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import tinkex
from tinkex._client.runtime import APIFuture, SampleFuture, TaskGroup, runtime
from tinkex.errors import (
    APITimeoutError,
    BadRequestError,
    ClientClosedError,
    RequestFailedError,
    TinkerError,
    WrongThreadError,
)
from tinkex.types import AdamParams

from ..scripted import Answer, Hang, promise
from .helpers import (
    CANCEL,
    CREATE_SESSION,
    DYNAMIC,
    POLL,
    SAMPLE,
    STEP,
    answer_samples,
    answer_training,
    new_sampler,
    new_trainer,
    run_script,
    sample,
    sampled,
    seq_ids,
    until,
)


def start(
    work: Coroutine[Any, Any, Any],
    kind: Callable[[], APIFuture[Any]] = APIFuture,
    group: TaskGroup | None = None,
) -> APIFuture[Any]:
    return runtime().submit(work, kind(), group or TaskGroup())


class Gated:
    """Work on the runtime's loop that ends when the test releases it, and records how it ended."""

    def __init__(self, kind: Callable[[], APIFuture[Any]] = APIFuture) -> None:
        self.gate: APIFuture[Any] = APIFuture()
        self.begun, self.ended = threading.Event(), threading.Event()
        self.outcome: object = None
        self.future = start(self._work(), kind)
        assert self.begun.wait(10)

    async def _work(self) -> Any:
        self.begun.set()
        try:
            self.outcome = await self.gate
            return self.outcome
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise
        finally:
            self.ended.set()


async def give(value: Any) -> Any:
    return value


async def fail_with(error: BaseException) -> None:
    raise error


# -- waiting -------------------------------------------------------------------------------------


def test_a_result_can_be_blocked_for():
    assert start(give(7)).result(10) == 7


def test_a_result_can_be_awaited_on_any_loop():
    async def wait() -> Any:
        return await start(give(7))

    assert asyncio.run(wait()) == 7


def test_finished_future_returns_result_to_late_waiters():
    future = start(give(7))
    future.result(10)

    async def wait() -> Any:
        return await future, await future.result_async(), await future

    assert asyncio.run(wait()) == (7, 7, 7)


def test_threads_and_event_loops_wait_for_one_future_at_once():
    gated = Gated()

    async def wait() -> Any:
        return await asyncio.gather(*(give_result() for _ in range(3)))

    async def give_result() -> Any:
        return await gated.future

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        blocking = [pool.submit(gated.future.result, 10) for _ in range(4)]
        awaiting = [pool.submit(asyncio.run, wait()) for _ in range(4)]
        gated.gate.set_result(7)
        assert [each.result(10) for each in blocking] == [7] * 4
        assert [each.result(10) for each in awaiting] == [[7] * 3] * 4


def test_a_thousand_futures_are_awaited_together():
    async def wait() -> Any:
        return await asyncio.gather(*(start(give(number)) for number in range(1000)))

    assert asyncio.run(wait()) == list(range(1000))


def test_timed_out_blocking_wait_does_not_affect_future():
    gated = Gated()
    with pytest.raises(TimeoutError):
        gated.future.result(0)
    with pytest.raises(TimeoutError):
        gated.future.exception(0)
    gated.gate.set_result(7)
    assert gated.future.result(10) == 7


def test_timed_out_await_does_not_affect_operation():
    gated = Gated()

    async def wait() -> None:
        with pytest.raises(TimeoutError):
            await gated.future.result_async(0)

    asyncio.run(wait())
    gated.gate.set_result(7)
    assert gated.future.result(10) == 7


def test_result_async_returns_result_within_timeout():
    async def wait() -> Any:
        return await start(give(7)).result_async(10)

    assert asyncio.run(wait()) == 7


def test_await_many_returns_results_and_errors_in_order():
    error = TinkerError("no")
    futures = [start(give(1)), start(fail_with(error)), start(give(3))]
    assert tinkex.await_many(futures, 10) == [1, error, 3]
    assert tinkex.await_many([]) == []


def test_await_many_returns_timeout_error_for_unfinished_future():
    never: APIFuture[int] = APIFuture()
    done, late = tinkex.await_many([start(give(1)), never], 0.01)
    assert done == 1
    assert isinstance(late, APITimeoutError)
    assert "0.01 s" in str(late)
    assert not never.done()


def test_await_many_returns_cancelled_error():
    cancelled: APIFuture[int] = APIFuture()
    cancelled.cancel()
    (outcome,) = tinkex.await_many([cancelled])
    assert isinstance(outcome, concurrent.futures.CancelledError)


def test_future_is_its_own_concurrent_future():
    future = start(give(7))
    assert isinstance(future, concurrent.futures.Future)
    assert future.future() is future
    assert future._future is future


def test_an_event_loop_that_waited_is_not_kept_alive():
    async def wait() -> weakref.ref[asyncio.AbstractEventLoop]:
        gated = Gated()
        with pytest.raises(TimeoutError):
            await gated.future.result_async(0)
        gated.gate.set_result(7)
        assert await gated.future == 7
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(wait())
    gc.collect()
    assert loop() is None


def test_result_is_kept_if_loop_of_waiter_is_closed():
    gated = Gated()

    async def give_up() -> None:
        waiting = asyncio.ensure_future(gated.future.result_async())
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(give_up())
    gated.gate.set_result(7)
    assert gated.future.result(10) == 7


# -- the standard library's tools ----------------------------------------------------------------


def test_a_done_callback_is_called_once_and_can_read_the_result():
    gated = Gated()
    called: list[Any] = []
    ready = threading.Event()

    def note(future: Any) -> None:
        called.append(future.result())
        ready.set()

    gated.future.add_done_callback(note)
    gated.gate.set_result(7)
    assert ready.wait(10)
    assert called == [7]


def test_failing_done_callback_does_not_affect_result(caplog):
    first, second = Gated(), Gated()
    first.future.add_done_callback(lambda _: 1 / 0)
    first.gate.set_result(1)
    second.gate.set_result(2)
    assert (first.future.result(10), second.future.result(10)) == (1, 2)
    assert "ZeroDivisionError" in caplog.text


def test_as_completed_yields_futures_in_the_order_they_end():
    gated = [Gated() for _ in range(3)]
    order = []
    completed = concurrent.futures.as_completed([each.future for each in gated], timeout=10)
    for index in (2, 0, 1):
        gated[index].gate.set_result(index)
        order.append(next(completed).result())
    assert order == [2, 0, 1]


def test_as_completed_and_wait_see_a_cancelled_future():
    cancelled, waiting = Gated(), Gated()
    seen = concurrent.futures.as_completed([cancelled.future, waiting.future], timeout=10)
    cancelled.future.cancel()
    assert next(seen) is cancelled.future
    done, rest = concurrent.futures.wait(
        [cancelled.future, waiting.future], 10, concurrent.futures.FIRST_COMPLETED
    )
    assert (done, rest) == ({cancelled.future}, {waiting.future})
    waiting.gate.set_result(None)


def test_cancelling_from_many_threads_at_once_cancels_once():
    gated = Gated()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: gated.future.cancel(), range(50)))
    assert gated.future.cancelled()
    gated.gate.set_result(None)


def test_wrap_future_works():
    async def wait() -> Any:
        return await asyncio.wrap_future(start(give(7)))

    assert asyncio.run(wait()) == 7


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RequestFailedError("no", "r-1"), KeyError("x"), OSError(5, "io")]
)
def test_exceptions_are_delivered_unchanged(error: Exception) -> None:
    future = start(fail_with(error))
    with pytest.raises(type(error)) as blocked:
        future.result(10)
    assert blocked.value is error
    assert future.exception(10) == error

    async def wait() -> None:
        await future

    with pytest.raises(type(error)) as awaited:
        asyncio.run(wait())
    assert awaited.value is error


def test_error_answer_is_raised_as_typed_error(server, service):
    server.on(STEP, Answer({"detail": "learning rate?"}, 400))
    with pytest.raises(BadRequestError, match="learning rate"):
        new_trainer(service()).optim_step(AdamParams()).result(10)


@pytest.mark.parametrize("wait", [APIFuture.result, APIFuture.exception])
def test_blocking_on_the_runtimes_own_thread_is_refused_at_once(wait):
    gated = Gated()

    async def on_the_runtimes_thread() -> Any:
        return wait(gated.future)

    with pytest.raises(WrongThreadError, match="own thread"):
        start(on_the_runtimes_thread()).result(10)
    gated.gate.set_result(7)
    assert gated.future.result(10) == 7


def test_a_blocking_method_in_a_callback_is_refused_at_once(server, service):
    answer_training(server)
    trainer = new_trainer(service())
    raised: list[BaseException] = []
    done = threading.Event()

    def ask(_: object) -> None:
        try:
            trainer.get_info()
        except WrongThreadError as error:
            raised.append(error)
        done.set()

    gated = Gated()
    gated.future.add_done_callback(ask)
    gated.gate.set_result(None)
    assert done.wait(10)
    assert len(raised) == 1


def test_a_finished_future_can_be_read_on_the_runtimes_thread():
    future = start(give(7))
    future.result(10)

    async def read() -> Any:
        return future.result()

    assert start(read()).result(10) == 7


# -- cancelling ----------------------------------------------------------------------------------


async def awaited_then_cancelled(future: APIFuture[Any]) -> None:
    waiting = asyncio.ensure_future(future.result_async())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_cancelled_await_does_not_cancel_an_operation():
    gated = Gated()
    asyncio.run(awaited_then_cancelled(gated.future))
    gated.gate.set_result(7)
    assert gated.future.result(10) == 7


def test_a_cancelled_await_cancels_a_sample():
    gated = Gated(SampleFuture)
    asyncio.run(awaited_then_cancelled(gated.future))
    assert gated.future.cancelled()
    assert gated.ended.wait(10)
    assert gated.outcome == "cancelled"


def test_cancelled_operation_continues_without_result():
    gated = Gated()
    assert gated.future.cancel()
    gated.gate.set_result(7)
    assert gated.ended.wait(10)
    assert gated.outcome == 7
    with pytest.raises(concurrent.futures.CancelledError):
        gated.future.result(10)


def test_cancelling_sample_cancels_its_work():
    gated = Gated(SampleFuture)
    assert gated.future.cancel()
    assert gated.ended.wait(10)
    assert gated.outcome == "cancelled"


def test_sample_work_is_cancelled_when_its_future_fails():
    gated = Gated(SampleFuture)
    gated.future.set_exception(TimeoutError())
    assert gated.ended.wait(10)
    assert gated.outcome == "cancelled"


def test_awaiting_cancelled_future_raises_cancelled_error():
    gated = Gated()

    async def wait() -> None:
        waiting = asyncio.ensure_future(gated.future.result_async())
        await asyncio.sleep(0)
        gated.future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(wait())
    gated.gate.set_result(None)


def test_a_finished_future_cannot_be_cancelled():
    future = start(give(7))
    future.result(10)
    assert not future.cancel()
    assert future.result(10) == 7


def test_training_step_continues_when_awaiting_task_is_cancelled(server, service):
    held = threading.Event()
    server.on(STEP, promise("step"))
    server.on_future("step", Answer({"metrics": {"x": 1.0}}, wait_for=held))
    step = new_trainer(service()).optim_step(AdamParams())
    server.wait_for(POLL, 2)
    asyncio.run(awaited_then_cancelled(step))
    held.set()
    assert step.result(10).metrics == {"x": 1.0}


def test_sample_is_cancelled_with_awaiting_task(server, service):
    server.on(DYNAMIC, Answer({"sample_cancel_enabled": True}))
    server.on(SAMPLE, promise("sample"))
    server.on_future("sample", Hang())
    server.on(CANCEL, Answer({}))
    client = service()
    drawing = sample(new_sampler(client))
    server.wait_for(POLL)
    until(lambda: client.holder.dynamic.sample_cancel_enabled)
    asyncio.run(awaited_then_cancelled(drawing))
    assert server.wait_for(CANCEL)[0].json == {"request_id": "sample"}


# -- groups --------------------------------------------------------------------------------------


def test_closing_group_fails_running_and_later_work():
    group, gate = TaskGroup(), APIFuture[Any]()

    async def wait() -> Any:
        return await gate

    under_way = [start(wait(), group=group) for _ in range(3)]

    async def close() -> None:
        group.close(ClientClosedError("closed"))

    start(close()).result(10)
    for future in (*under_way, start(give(7), group=group)):
        with pytest.raises(ClientClosedError, match="closed"):
            future.result(10)


# -- other processes -----------------------------------------------------------------------------


SCRIPT = """
import os, sys, warnings, tinkex
from tinkex import types
warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # said of any fork since 3.12
client = tinkex.ServiceClient(base_url={url!r}, api_key="tml-test")
prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
def draw(): return sampler.sample(prompt, 1, params)
"""


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "hanging = [draw() for _ in range(50)]",
        "sys.exit(0)",
        "import asyncio; asyncio.run(sampler.sample_async(prompt, 1, params))",
    ],
)
def test_script_without_close_exits_with_code_0_and_no_output(server, end):
    server.on(SAMPLE, sampled(7), sampled(7), Hang())
    body = "sampler = client.create_sampling_client(base_model='m')\nprint(draw().result().sequences)\n"
    assert "tokens=[7]" in run_script(SCRIPT.format(url=server.url) + body + end)


AT_EXIT = """
import atexit, threading
def look(): print("loops at exit:", [each.name for each in threading.enumerate()].count("tinkex"))
atexit.register(look)  # handlers run last in, first out
"""


def test_loop_does_not_run_while_the_interpreter_ends(server):
    server.on(SAMPLE, sampled(7), Hang())
    body = "sampler = client.create_sampling_client(base_model='m')\ndraw().result()\nhanging = draw()\n"
    told = run_script(AT_EXIT + SCRIPT.format(url=server.url) + body)
    assert "loops at exit: 0" in told


def test_stopped_runtime_continues_with_the_next_work():
    waiting = Gated()
    runtime().stop()
    assert start(give(7)).result(10) == 7
    waiting.gate.set_result(8)
    assert waiting.future.result(10) == 8


FORK = """
sampler = client.create_sampling_client(base_model='m')
trainer = client.create_lora_training_client('m')
print(draw().result(10).sequences[0].tokens, trainer.optim_step().result(10).metrics, flush=True)
child = os.fork()
if child == 0:
    assert draw().result(10).sequences[0].tokens == [7]
    trainer.optim_step().result(10)
    assert client.create_sampling_client(base_model='m')
    client.close().result(10)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(draw().result(10).sequences[0].tokens)
client.close().result(10)
"""


def test_a_client_used_before_a_fork_works_in_the_child_and_in_the_parent(server):
    answer_samples(server, 7)
    answer_training(server)
    out = run_script(SCRIPT.format(url=server.url) + FORK)
    assert out == "[7] {}\n[7]\n"
    first, child, last = seq_ids(server.asked(SAMPLE))
    assert (first, last) == (0, 1)
    assert child >= 1_000_000_000
    assert seq_ids(server.asked(STEP)) == [1, 2]
    # Both processes share one session, and its owner finishes it. Samplers of the child have separate numbers.
    assert len(server.asked(CREATE_SESSION)) == 1
    assert len(server.asked("POST /api/v1/sessions/s-1/finish")) == 1
    own, inherited = (
        request.json["sampling_session_seq_id"]
        for request in server.asked("POST /api/v1/create_sampling_session")
    )
    assert own == 0
    assert inherited > 1_000_000


FORK_BUSY = """
sampler = client.create_sampling_client(base_model='m')
drawing = [draw() for _ in range(20)]
print("ready", flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    try:
        drawing[0].result()
    except tinkex.errors.WrongThreadError as error:
        print(error, flush=True)
    assert draw().result(10).sequences[0].tokens == [8]
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print([each.result(10).sequences[0].tokens[0] for each in drawing])
"""


def test_work_in_flight_stays_with_parent_after_fork(server):
    released = threading.Event()
    server.on(SAMPLE, lambda request: answer(request.json["seq_id"]))
    answers = {f"r-{number}": number for number in range(20)}

    def answer(seq_id: int) -> Answer:
        if seq_id < 1_000_000_000:
            return promise(f"r-{seq_id}")
        released.set()  # the child has finished its own sample
        return sampled(8)

    for request_id, number in answers.items():
        held = Answer(sampled(number).body, wait_for=released)
        server.on_future(request_id, held)
    out = run_script(SCRIPT.format(url=server.url) + FORK_BUSY, stdin="\n").splitlines()
    assert out[0] == "ready"
    assert "repeat the call in this process" in out[1]
    assert out[2] == str(list(range(20)))


@pytest.mark.heavy
def test_a_session_not_opened_before_the_fork_is_opened_by_each_process(server):
    script = """
child = os.fork()
client.holder.get_session_id()
if child == 0:
    client.close().result(10)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
client.close().result(10)
"""
    server.on(CREATE_SESSION, Answer({"session_id": "a"}), Answer({"session_id": "b"}))
    server.on("POST /api/v1/sessions/a/finish", Answer({}))
    server.on("POST /api/v1/sessions/b/finish", Answer({}))
    run_script(SCRIPT.format(url=server.url) + script)
    assert len(server.asked("POST /api/v1/sessions/a/finish")) == 1
    assert len(server.asked("POST /api/v1/sessions/b/finish")) == 1


def test_tls_client_raises_advice_after_fork_instead_of_hanging():
    out = run_script("""
import os, sys, warnings, tinkex
warnings.filterwarnings("ignore", "This process .* is multi-threaded")
client = tinkex.ServiceClient(
    base_url="https://127.0.0.1:9", api_key="tml-test", max_retries=0
)
try:
    client.get_server_capabilities()
except tinkex.APIConnectionError:
    pass
child = os.fork()
if child == 0:
    try:
        client.get_server_capabilities()
    except tinkex.TinkerError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
""")
    assert "spawn" in out
