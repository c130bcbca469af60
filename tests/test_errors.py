import copy
import inspect
import pickle
import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from threading import Lock
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import json_values
from tinkex import errors
from tinkex._wire.failures import (
    error_from_response,
    failure_body,
    failure_from_body,
    response_from_error,
    retry_after,
)
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    BadRequestError,
    CircuitOpenError,
    ClientClosedError,
    ConfigError,
    DecodeError,
    GoneError,
    HTTPRequest,
    HTTPResponse,
    InternalServerError,
    InvalidInputError,
    InvalidPathError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
    UnprocessableEntityError,
    status_error_class,
)

Unknown, Server, User = RequestErrorCategory


@dataclass
class ForeignRequest:
    """Like a request of another HTTP library; cannot be pickled."""

    method: str = "POST"
    url: str = "http://service/api/v1/asample"
    lock: Any = field(default_factory=Lock)


@dataclass
class ForeignResponse:
    status_code: int
    headers: dict[str, str] = field(default_factory=dict)
    _request: Any = field(default_factory=ForeignRequest)


def tree(cls: Any) -> dict[type[TinkerError], type[TinkerError]]:
    """Every class below `cls` in this module, with its parent."""
    found: dict[type[TinkerError], type[TinkerError]] = {}
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            found |= {child: cls} | tree(child)
    return found


CLASSES: list[type[TinkerError]] = [TinkerError, *tree(TinkerError)]
STATUS_CLASSES = [cls for cls in CLASSES if issubclass(cls, APIStatusError) and cls._status]


def made(cls: type[TinkerError]) -> TinkerError:
    """An instance with every argument of its constructor given."""
    if issubclass(cls, APIStatusError):
        return cls(
            "no",
            response=ForeignResponse(cls._status or 418, {"x-request-id": "r-1"}),
            body={"detail": "no", "category": "user"},
            retry_after=1.5,
        )
    if issubclass(cls, CircuitOpenError):
        return cls(ForeignRequest(), "open", retry_after=2.0)
    if issubclass(cls, APIConnectionError):
        return cls(ForeignRequest(), "gone")
    if issubclass(cls, APIResponseValidationError):
        return cls(ForeignResponse(200), b"<html>", "not JSON", request_id="r-2")
    if issubclass(cls, APIError):
        return cls("no", ForeignRequest(), body=[1])
    if issubclass(cls, RequestFailedError):
        return cls("no", "r-3", User)
    if issubclass(cls, InvalidInputError | DecodeError):
        return cls("must be 1", field="count")
    return cls("no")


def facts(error: TinkerError) -> dict[str, Any]:
    shown = ("status_code", "request_id", "body", "retry_after", "category", "message", "field")
    return {name: getattr(error, name, None) for name in shown} | {"text": str(error)}


# -- the tree ------------------------------------------------------------------------------------


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """The tree in the docstring: each name with its parent and the other base class in parentheses."""
    drawn: dict[str, tuple[str | None, str | None]] = {}
    above: dict[int, str] = {}
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        if match := re.match(r"^ {4}([│├└─ ]*)([A-Z]\w+)(?: \((\w+)\))?", line):
            depth = len(match[1]) // 4
            above[depth] = match[2]
            drawn[match[2]] = (above.get(depth - 1), match[3])
    return drawn


def test_docstring_shows_the_actual_tree():
    real: dict[str, tuple[str | None, str | None]] = {
        "TinkerError": (None, None),
        "ExperimentalWarning": (None, "FutureWarning"),
    }
    for cls, parent in tree(TinkerError).items():
        others = [base.__name__ for base in cls.__bases__ if base is not parent]
        real[cls.__name__] = (parent.__name__, others[0] if others else None)
    assert drawn_tree() == real


def test_every_class_of_the_tree_is_exported():
    assert {cls.__name__ for cls in CLASSES} <= set(errors.__all__)


@pytest.mark.parametrize("cls", STATUS_CLASSES)
def test_docstring_names_the_status_of(cls):
    drawn = re.search(rf"{cls.__name__}(?: \(ValueError\))? +(\d\S\S)", errors.__doc__ or "")
    assert drawn is not None
    assert drawn[1] == ("5xx" if cls is InternalServerError else str(cls._status))


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        *[(cls._status, cls) for cls in STATUS_CLASSES],
        (502, InternalServerError),
        (599, InternalServerError),
        (408, APIStatusError),
        (418, APIStatusError),
    ],
)
def test_status_selects_the_error_class(status, cls):
    assert status_error_class(status) is cls


# -- construction --------------------------------------------------------------------------------


def test_status_error_has_the_official_constructor():
    error = BadRequestError(
        "bad", response=ForeignResponse(400, {"x-request-id": "r"}), body={"detail": "bad"}
    )
    assert (error.message, error.status_code, error.request_id) == ("bad", 400, "r")
    assert error.body == {"detail": "bad"}
    assert error.response.status_code == 400
    assert error.request.url == "http://service/api/v1/asample"
    assert str(error) == "bad (status 400)"


def test_status_error_without_response_uses_the_status_of_its_class():
    assert NotFoundError("gone").status_code == 404
    assert APIStatusError("odd").status_code is None
    assert str(APIStatusError("odd")) == "odd"


def test_error_takes_the_request_from_its_response():
    request = HTTPRequest("GET", "http://service/x")
    error = NotFoundError("no", HTTPResponse(404, {}, request))
    assert error.request is request
    assert error.response.url == "http://service/x"


def test_timeout_is_a_connection_error_made_from_its_request_alone():
    error = APITimeoutError(ForeignRequest())
    assert isinstance(error, APIConnectionError)
    assert error.message == "Request timed out."


def test_request_failed_takes_its_arguments_by_position():
    error = RequestFailedError("no", "r", "USER")
    assert (error.message, error.request_id, error.category) == ("no", "r", User)


def test_input_errors_are_value_errors_and_name_their_field():
    for error in (InvalidInputError("is odd", field="count"), DecodeError("is odd", field="count")):
        assert isinstance(error, ValueError)
        assert error.field == "count"
        assert str(error) == "count: is odd"


# -- pickling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", CLASSES)
def test_pickling_keeps_class_arguments_and_facts(cls, protocol):
    error = made(cls)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is cls
    assert again.args == error.args
    assert facts(again) == facts(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_copying_keeps_class_and_facts(cls):
    error = made(cls)
    for again in (copy.copy(error), copy.deepcopy(error)):
        assert type(again) is cls
        assert facts(again) == facts(error)


def test_http_objects_of_other_libraries_are_pickled_as_plain_facts():
    error = BadRequestError("bad", response=ForeignResponse(400, {"x-request-id": "r"}))
    again = pickle.loads(pickle.dumps(error))
    request = HTTPRequest("POST", "http://service/api/v1/asample")
    assert again.response == HTTPResponse(400, {"x-request-id": "r"}, request)
    assert again.request == request


def test_a_subclass_with_its_own_arguments_pickles_too():
    again = pickle.loads(pickle.dumps(Picky(3, colour="red")))
    assert (again.size, again.colour, again.message) == (3, "red", "size 3")


class Picky(TinkerError):
    def __init__(self, size: int, *, colour: str) -> None:
        super().__init__(f"size {size}")
        self.size, self.colour = size, colour


# -- user errors and retries -----------------------------------------


@pytest.mark.parametrize(
    ("error", "user_error", "retryable"),
    [
        (BadRequestError("no"), True, False),
        (NotFoundError("no"), True, False),
        (UnprocessableEntityError("no"), True, False),
        (PermissionDeniedError("no"), True, False),
        (APIStatusError("no", HTTPResponse(402)), True, False),
        (APIStatusError("no", HTTPResponse(499)), True, False),
        (APIStatusError("no", HTTPResponse(408)), False, True),
        (GoneError("no"), False, True),
        (RateLimitError("no"), False, True),
        (InternalServerError("no"), False, True),
        (InternalServerError("no", body={"category": "user"}), True, False),
        (RateLimitError("no", body={"category": "User"}), True, False),
        (BadRequestError("no", body={"category": "server"}), True, False),
        (APIConnectionError(), False, True),
        (APITimeoutError(), False, True),
        (CircuitOpenError(), False, True),
        (RequestFailedError("no", "r", User), True, False),
        (RequestFailedError("no", "r", Server), False, True),
        (RequestFailedError("no", "r", Unknown), False, True),
        (InvalidInputError("no"), True, False),
        (ConfigError("no"), True, False),
        (InvalidPathError("no"), True, False),
        (APIResponseValidationError(), False, False),
        (DecodeError("no"), False, False),
        (ClientClosedError("no"), False, False),
        (errors.WrongThreadError("no"), False, False),
    ],
    ids=lambda value: f"{type(value).__name__}" if isinstance(value, TinkerError) else None,
)
def test_user_error_and_retryable(error, user_error, retryable):
    assert (error.user_error, error.retryable) == (user_error, retryable)


@pytest.mark.parametrize("status", [*range(400, 600)])
def test_only_user_errors_are_not_retryable(status):
    error = status_error_class(status)("no", HTTPResponse(status))
    own_fault = status < 500 and status not in {408, 410, 429}
    assert error.user_error is own_fault
    assert error.retryable is not own_fault
    assert error.category is (User if own_fault else Server)


@pytest.mark.parametrize(
    ("text", "category"),
    [("user", User), ("USER", User), (" Server ", Server), ("Unknown", Unknown), (User, User)],
)
def test_category_is_read_in_any_case(text, category):
    assert RequestErrorCategory.parse(text) is category


@given(json_values)
def test_category_of_anything_else_is_unknown(value):
    if str(value).strip().lower() not in {"user", "server"}:
        assert RequestErrorCategory.parse(value) is Unknown


def test_category_without_a_status_is_unknown():
    assert RequestErrorCategory.of_status(None) is Unknown


def test_retry_after_is_also_available_in_milliseconds():
    assert RateLimitError("wait", retry_after=1.25).retry_after_ms == 1250
    assert RateLimitError("wait").retry_after_ms is None


# -- errors on the wire --------------------------------------------------------------------------

NOW = datetime(2026, 5, 27, 20, 0, 0, tzinfo=UTC).timestamp()


def received(status: int, headers: dict[str, str], body: dict[str, Any]) -> APIStatusError:
    return error_from_response(status, headers, orjson.dumps(body), HTTPRequest(), now=NOW)


@pytest.mark.parametrize("category", RequestErrorCategory)
@pytest.mark.parametrize("wait", [None, 0.0, 1.5])
@pytest.mark.parametrize("cls", [*STATUS_CLASSES, APIStatusError])
def test_status_errors_round_trip(cls, wait, category):
    headers = {"x-request-id": "r-9"}
    sent = cls(
        "why not",
        HTTPResponse(cls._status or 418, headers),
        {"category": category.value},
        retry_after=wait,
    )
    got = received(*response_from_error(sent))
    assert type(got) is cls
    for name in ("message", "status_code", "category", "retry_after", "request_id"):
        assert getattr(got, name) == getattr(sent, name), name


@pytest.mark.parametrize(
    ("error", "status", "category"),
    [
        (InvalidInputError("no", field="shape"), 400, User),
        (ConfigError("no"), 400, User),
        (InvalidPathError("no"), 400, User),
        (DecodeError("no", field="body"), 422, User),
        (APITimeoutError(), 504, Server),
        (APIConnectionError(), 503, Server),
        (APIResponseValidationError(), 502, Server),
        (ClientClosedError("no"), 503, Server),
        (TinkerError("no"), 500, Server),
    ],
)
def test_other_errors_have_a_status_by_class(error, status, category):
    code, _, body = response_from_error(error)
    assert (code, body["detail"]) == (status, error.message)
    assert body["category"] == category.value
    assert body.get("field") == getattr(error, "field", None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"detail": "no model"}', "no model"),
        (b'{"message": "no model"}', "no model"),
        (b'{"error": {"message": "no model"}}', "no model"),
        (b'"no model"', "no model"),
        (b"no model", "no model"),
        (b'{"detail": [{"loc": ["body", "x"], "msg": "is odd"}]}', "body.x: is odd"),
        (b'{"detail": [{"loc": null, "msg": "is odd"}, "twice"]}', "is odd; twice"),
        (b"", "The service answered 400 without a reason."),
        (b"{}", "The service answered 400 without a reason."),
        (b"[1]", "The service answered 400 without a reason."),
    ],
)
def test_message_is_found_in_every_known_body_format(body, message):
    assert error_from_response(400, {}, body, HTTPRequest(), now=NOW).message == message


@given(st.binary(max_size=40) | json_values.map(orjson.dumps), st.integers(400, 599))
def test_any_error_body_gives_an_error(body, status):
    error = error_from_response(status, {}, body, HTTPRequest("GET", "/x"), now=NOW)
    assert error.status_code == status
    assert error.message


@given(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("detail", "message", "error", "category"), json_values)
    )
)
def test_any_error_object_gives_an_error(body):
    assert received(500, {}, body).message


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "0.5"}, 0.0005),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after": "Wed, 27 May 2026 20:00:30 GMT"}, 30.0),
        ({"retry-after": "Wed, 27 May 2026 19:59:00 GMT"}, -60.0),
        ({"retry-after": "Wed May 27 20:00:30 2026"}, 30.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "Wed, 99 May 2026 20:00:30 GMT"}, None),
        ({}, None),
    ],
)
def test_retry_after(headers, seconds):
    assert retry_after(headers, NOW) == seconds


def test_retry_date_without_zone_is_utc_in_every_local_time_zone(monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert retry_after({"retry-after": "Wed May 27 20:00:30 2026"}, NOW) == 30.0
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.text(max_size=30))
def test_invalid_retry_header_does_not_raise(text):
    assert isinstance(retry_after({"retry-after": text}, NOW), float | None)


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)))
def test_http_dates_are_read_to_the_second(when):
    seconds = retry_after({"retry-after": format_datetime(when, usegmt=True)}, 0.0)
    assert seconds == int(when.timestamp())


# -- failed operations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("category", RequestErrorCategory)
def test_failed_operation_round_trips(category):
    failed = RequestFailedError("out of memory", "r", category)
    got = failure_from_body(failure_body(failed), "r")
    assert (got.message, got.request_id, got.category) == ("out of memory", "r", category)


@pytest.mark.parametrize(
    ("error", "message", "category"),
    [
        (InvalidInputError("is odd", field="rank"), "rank: is odd", User),
        (NotFoundError("no such model"), "no such model", User),
        (BadRequestError("bad rank", body={"category": "server"}), "bad rank", User),
        (InternalServerError("oops"), "oops", Server),
    ],
)
def test_any_error_of_a_worker_becomes_a_failed_operation(error, message, category):
    got = failure_from_body(failure_body(error), None)
    assert (got.message, got.category) == (message, category)


@pytest.mark.parametrize(
    ("body", "message", "category"),
    [
        ({"error": "no", "category": "USER"}, "no", User),
        ({"error": "no"}, "no", Unknown),
        ({"error": {"error": "no", "category": "server"}}, "no", Server),
        ({"error": {"message": "no", "category": "user"}}, "no", User),
        ({"error": None}, "The service gave no reason.", Unknown),
    ],
)
def test_failed_operation_is_read_in_every_known_body_format(body, message, category):
    got = failure_from_body(body, None)
    assert (got.message, got.category) == (message, category)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (APIConnectionError(), "api_connection"),
        (errors.CircuitOpenError(), "api_connection"),
        (errors.APITimeoutError(), "api_timeout"),
        (errors.NotFoundError("no"), "api_status"),
        (errors.RequestFailedError("no"), "request_failed"),
        (APIResponseValidationError(), "validation"),
        (errors.ConfigError("no"), "validation"),
        (errors.DecodeError("no"), "validation"),
        (errors.ClientClosedError("no"), "validation"),
    ],
)
def test_every_error_has_a_type(error, kind):
    assert error.type == kind
    assert pickle.loads(pickle.dumps(error)).type == kind


def test_data_is_the_body_of_the_answer():
    error = errors.BadRequestError("no", body={"field": "x"})
    assert error.data == {"field": "x"} == error.body
