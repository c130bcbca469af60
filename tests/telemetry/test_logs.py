"""Events as log lines, and TINKER_LOG."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tinkex import telemetry
from tinkex.telemetry import bus, logs
from tinkex.telemetry.events import (
    HttpRequestException,
    HttpRequestStop,
    QueueStateChange,
    RegularizerEvent,
    RegularizerException,
    RegularizerStop,
)

from ..client.helpers import run_script

HTTP = ("GET", "/api/v1/x", "session", "http://x")
STOP = HttpRequestStop(1, *HTTP, 0.0123, 200, "ok", 0)
AGAIN = HttpRequestStop(2, *HTTP, 1.5, 500, "error", 2)
FAILED = HttpRequestException(3, *HTTP, 0.5, "APITimeoutError", "No answer within 5 s", "…")
PAUSED = QueueStateChange("r-1", "paused_capacity", "busy")
ACTIVE = QueueStateChange("r-1", "active", None)


@pytest.mark.usefixtures("paused_loop")
def test_requests_and_queues_are_logged(caplog):
    caplog.set_level(logging.DEBUG, "tinkex")
    number = telemetry.attach_logger()
    for event in (STOP, AGAIN, FAILED, PAUSED, ACTIVE):
        bus.emit(event)
    assert telemetry.detach(number)
    bus.emit(STOP)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "GET /api/v1/x: 200 after 12 ms"),
        ("INFO", "GET /api/v1/x: 500 after 1500 ms, retry 2"),
        ("ERROR", "GET /api/v1/x: APITimeoutError after 500 ms: No answer within 5 s"),
        ("INFO", "queue is paused_capacity: busy (request r-1)"),
        ("INFO", "queue is active (request r-1)"),
    ]


@pytest.mark.usefixtures("paused_loop")
def test_the_level_can_be_chosen(caplog):
    caplog.set_level(logging.INFO, "tinkex")
    number = telemetry.attach_logger(logging.DEBUG)
    bus.emit(STOP)
    bus.emit(FAILED)
    telemetry.detach(number)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.usefixtures("paused_loop")
def test_other_events_can_be_logged(caplog):
    caplog.set_level(logging.INFO, "tinkex")
    number = telemetry.attach_logger(logging.INFO, RegularizerEvent)
    bus.emit(RegularizerStop("kl", 0.5, 0.25, 2.0, 1.0, None, is_async=False))
    bus.emit(RegularizerException("kl", 0.5, 0.25, "no"))
    bus.emit(STOP)
    telemetry.detach(number)
    value, failure = caplog.records
    assert (value.levelname, failure.levelname) == ("INFO", "ERROR")
    assert value.message == (
        "regularizer.compute.stop: duration=250 ms, value=2.0000, contribution=1.0000, "
        "regularizer_name=kl, weight=0.5000, is_async=False"
    )
    assert failure.message.endswith("regularizer_name=kl, weight=0.5000, reason=no")


@pytest.fixture
def loggers() -> Iterator[logging.Logger]:
    """The tinkex logger; it and the noisy loggers are restored afterwards."""
    ours = logging.getLogger("tinkex")
    touched = [ours, *map(logging.getLogger, logs._NOISY)]
    levels, handlers = [each.level for each in touched], list(ours.handlers)
    for each in touched:
        each.setLevel(logging.NOTSET)
    yield ours
    for each, level in zip(touched, levels, strict=True):
        each.setLevel(level)
    ours.handlers[:] = handlers
    if logs._attached is not None:
        bus.detach(logs._attached)
        logs._attached = None


@pytest.mark.parametrize(
    ("level", "expected"),
    [("debug", 10), ("info", 20), ("warn", 30), ("error", 40), (None, logging.NOTSET)],
)
def test_log_level_setting_is_applied_to_the_logger(loggers, level, expected):
    logs.apply_log_level(level)
    assert loggers.level == expected
    assert bus.wants(HttpRequestStop) == (level in {"debug", "info"})
    noisy = logging.getLogger("httpx").level
    assert noisy == (logging.NOTSET if level in {"debug", "info"} else logging.WARNING)


def test_log_level_is_applied_once_and_keeps_levels_set_by_the_program(loggers):
    logging.getLogger("httpx").setLevel(logging.DEBUG)
    logs.apply_log_level(None)
    assert logging.getLogger("httpx").level == logging.DEBUG
    logs.apply_log_level("info")
    first = logs._attached
    logs.apply_log_level("debug")
    assert logs._attached == first


@pytest.mark.parametrize(
    ("chosen", "level", "expected"),
    [
        (logging.NOTSET, None, logging.INFO),
        (logging.ERROR, None, logging.ERROR),
        (logging.NOTSET, "warn", logging.WARNING),
    ],
)
def test_dumping_headers_enables_info_unless_a_level_is_chosen(loggers, chosen, level, expected):
    loggers.setLevel(chosen)
    logs.apply_log_level(level, dump_headers=True)
    assert loggers.level == expected


SCRIPT = """
import os, sys
os.environ["TINKER_LOG"] = {level!r}
os.environ["TINKEX_DUMP_HEADERS"] = {dump!r}
sys.stderr = sys.stdout
import tinkex
client = tinkex.ServiceClient(base_url={url!r}, api_key="tml-test", telemetry_enabled=False)
client.create_sampling_client(base_model="some/model")
client.close().result()
"""


def test_client_logs_its_requests_at_info(server):
    shown = run_script(SCRIPT.format(level="info", dump="", url=server.url)).splitlines()
    assert any(line.startswith("POST /api/v1/create_session: 200 after ") for line in shown)


def test_client_logs_no_requests_by_default(server):
    assert run_script(SCRIPT.format(level="", dump="", url=server.url)) == ""


def test_dump_headers_alone_prints_requests_without_the_key(server):
    shown = run_script(SCRIPT.format(level="", dump="1", url=server.url))
    assert f"POST {server.url}/api/v1/create_session (attempt 0)" in shown
    assert "x-api-key: [REDACTED]" in shown
    assert "200 after" not in shown  # only log_level="info" adds this
