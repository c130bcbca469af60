"""Runs, checkpoints, sessions and billing: the request of each call, and its result."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest

import tinkex
from tinkex import types
from tinkex.errors import (
    APIResponseValidationError,
    AuthenticationError,
    ConflictError,
    InternalServerError,
    InvalidInputError,
    InvalidPathError,
    NotFoundError,
    TinkerError,
)

from ..scripted import Answer, FakeClock, Request, ScriptedServer
from .helpers import CONFIG, CREATE_SESSION, flags

RUN, PATH = "s-1:train:0", "tinker://s-1:train:0/weights/0001"
RUN_URL = f"/api/v1/training_runs/{RUN}"
CHECKPOINT = f"{RUN_URL}/checkpoints/weights/0001"
CURSOR = {"offset": 0, "limit": 20, "total_count": 0}
RUN_BODY = {
    "training_run_id": RUN,
    "base_model": "m",
    "model_owner": "me",
    "is_lora": True,
    "last_request_time": "2026-01-02T03:04:05Z",
}
WEIGHTS_INFO = {"base_model": "m", "is_lora": True}
STORAGE: dict[str, Any] = {"data": []}


@pytest.fixture
def rest(service):
    return service().create_rest_client()


class Case:
    """A call and the one request that it must send."""

    def __init__(
        self,
        call: str,
        *arguments: Any,
        sent: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        answer: Any = None,
        **options: Any,
    ) -> None:
        self.call, self.arguments, self.options = call, arguments, options
        self.sent, self.query, self.body = sent, query or {}, body
        self.answer = {} if answer is None else answer

    def __str__(self) -> str:
        return f"{self.call}{self.arguments}{self.options or ''}"


PAGE = {"limit": "20", "offset": "0"}
CASES = [
    Case(
        "get_session",
        "s-9",
        sent="GET /api/v1/sessions/s-9",
        answer={"training_run_ids": [RUN], "sampler_ids": []},
    ),
    Case(
        "get_session",
        "s-9",
        "accessible",
        sent="GET /api/v1/sessions/s-9",
        query={"access_scope": "accessible"},
        answer={"training_run_ids": [], "sampler_ids": []},
    ),
    Case("list_sessions", sent="GET /api/v1/sessions", query=PAGE, answer={"sessions": ["a"]}),
    Case(
        "list_sessions",
        5,
        10,
        access_scope="accessible",
        sent="GET /api/v1/sessions",
        query={"limit": "5", "offset": "10", "access_scope": "accessible"},
        answer={"sessions": []},
    ),
    Case(
        "search_sessions",
        types.SessionSearchRequest(display_name="mine", limit=5),
        sent="POST /api/v1/sessions/search",
        body={"display_name": "mine", "limit": 5, "owner": {"type": "own"}, "user_metadata": {}},
        answer={"sessions": []},
    ),
    Case(
        "assign_session_project",
        "s-9",
        "p-1",
        sent="PUT /api/v1/sessions/s-9/project",
        body={"project_id": "p-1"},
    ),
    Case("get_training_run", RUN, sent=f"GET {RUN_URL}", answer=RUN_BODY),
    Case(
        "get_training_run",
        RUN,
        "accessible",
        sent=f"GET {RUN_URL}",
        query={"access_scope": "accessible"},
        answer=RUN_BODY,
    ),
    Case("get_training_run_by_tinker_path", PATH, sent=f"GET {RUN_URL}", answer=RUN_BODY),
    Case(
        "get_training_run_by_tinker_path",
        PATH,
        access_scope="accessible",
        sent=f"GET {RUN_URL}",
        query={"access_scope": "accessible"},
        answer=RUN_BODY,
    ),
    Case(
        "list_training_runs",
        sent="GET /api/v1/training_runs",
        query=PAGE,
        answer={"training_runs": [RUN_BODY], "cursor": CURSOR},
    ),
    Case(
        "list_training_runs",
        7,
        14,
        "accessible",
        "p-1",
        sent="GET /api/v1/training_runs",
        query={"limit": "7", "offset": "14", "access_scope": "accessible", "project_id": "p-1"},
        answer={"training_runs": [], "cursor": CURSOR},
    ),
    Case("list_checkpoints", RUN, sent=f"GET {RUN_URL}/checkpoints", answer={"checkpoints": []}),
    Case(
        "list_user_checkpoints",
        sent="GET /api/v1/checkpoints",
        query={"limit": "100", "offset": "0"},
        answer={"checkpoints": [], "cursor": CURSOR},
    ),
    Case(
        "list_user_checkpoints",
        1000,
        2000,
        sent="GET /api/v1/checkpoints",
        query={"limit": "1000", "offset": "2000"},
        answer={"checkpoints": []},
    ),
    *(
        Case(name, *arguments, sent=f"DELETE {CHECKPOINT}")
        for name, arguments in (
            ("delete_checkpoint", (RUN, "weights/0001")),
            ("delete_checkpoint", (PATH,)),
            ("delete_checkpoint_from_tinker_path", (PATH,)),
            ("delete_checkpoint_by_tinker_path", (PATH,)),
        )
    ),
    *(
        Case(name, PATH, sent=f"POST {CHECKPOINT}/publish")
        for name in (
            "publish_checkpoint_from_tinker_path",
            "publish_checkpoint_by_tinker_path",
            "publish_checkpoint",
        )
    ),
    *(
        Case(name, PATH, sent=f"DELETE {CHECKPOINT}/publish")
        for name in (
            "unpublish_checkpoint_from_tinker_path",
            "unpublish_checkpoint_by_tinker_path",
            "unpublish_checkpoint",
        )
    ),
    Case(
        "set_checkpoint_ttl_from_tinker_path",
        PATH,
        3600,
        sent=f"PUT {CHECKPOINT}/ttl",
        body={"ttl_seconds": 3600},
    ),
    Case(
        "set_checkpoint_ttl_from_tinker_path",
        PATH,
        None,
        sent=f"PUT {CHECKPOINT}/ttl",
        body={"ttl_seconds": None},
    ),
    *(
        Case(name, *arguments, sent=f"GET {CHECKPOINT}/archive", answer={"url": "http://x/a"})
        for name, arguments in (
            ("get_checkpoint_archive_url", (RUN, "weights/0001")),
            ("get_checkpoint_archive_url", (PATH,)),
            ("get_checkpoint_archive_url_from_tinker_path", (PATH,)),
            ("get_checkpoint_archive_url_by_tinker_path", (PATH,)),
        )
    ),
    Case(
        "get_external_weights_urls",
        "tinker://r/external_weights/a",
        sent="GET /api/v1/training_runs/r/checkpoints/external_weights/a/external_weights_urls",
        answer={"urls": {"a": "http://x/a"}, "expires": "2026-01-02T03:04:05Z"},
    ),
    Case(
        "get_weights_info_by_tinker_path",
        PATH,
        sent="POST /api/v1/weights_info",
        body={"tinker_path": PATH},
        answer=WEIGHTS_INFO,
    ),
    Case(
        "copy_weights",
        PATH,
        "p-1",
        ttl_seconds=3600,
        sent="POST /api/v1/copy_weights",
        body={"source_path": PATH, "destination_project_id": "p-1", "ttl_seconds": 3600},
        answer={"tinker_path": "tinker://r/weights/copy"},
    ),
    Case(
        "get_sampler",
        "s-1:sample:0",
        sent="GET /api/v1/samplers/s-1%3Asample%3A0",
        answer={"sampler_id": "s-1:sample:0", "base_model": "m"},
    ),
    Case(
        "get_audit_log",
        sent="GET /api/v1/audit",
        query={"event_type": "all"},
        answer={"entries": []},
    ),
    Case(
        "get_audit_log",
        "checkpoints",
        date(2026, 1, 2),
        sent="GET /api/v1/audit",
        query={"event_type": "checkpoints", "day": "2026-01-02"},
        answer={"entries": [{"timestamp": "2026-01-02T03:04:05Z", "event": "x"}]},
    ),
    Case(
        "get_billing_usage",
        "2026-01-02T00:00:00+02:00",
        datetime(2026, 1, 3, tzinfo=UTC),
        sent="GET /api/v1/billing/usage/events",
        query={
            "starting_on": "2026-01-02T00:00:00+02:00",
            "ending_before": "2026-01-03T00:00:00Z",
        },
        answer={"data": []},
    ),
    Case(
        "get_current_checkpoint_storage_usage",
        sent="GET /api/v1/billing/usage/checkpoints/current",
        answer=STORAGE,
    ),
    Case(
        "get_current_checkpoint_storage_usage",
        "p-1",
        sent="GET /api/v1/billing/usage/checkpoints/current",
        query={"project_id": "p-1"},
        answer=STORAGE,
    ),
]


def only_request(server: ScriptedServer, case: Case) -> Request:
    config, request = server.requests
    assert config.path == "/api/v1/client/config"
    assert f"{request.method} {request.path}" == case.sent
    return request


@pytest.mark.filterwarnings("ignore::tinkex.ExperimentalWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("twin", [False, True], ids=["plain", "async"])
def test_each_call_sends_one_request(server, rest, case, twin):
    server.on(case.sent, Answer(case.answer))
    if twin:
        call = getattr(rest, f"{case.call}_async")
        result = asyncio.run(call(*case.arguments, **case.options))
    else:
        result = getattr(rest, case.call)(*case.arguments, **case.options).result(10)
    request = only_request(server, case)
    assert request.query == case.query
    assert (json.loads(request.body) if request.body else None) == case.body
    assert request.headers.get("x-api-key") == "tml-test"
    if case.sent.startswith(("PUT", "DELETE")) or "publish" in case.sent:
        assert result is None
    else:
        assert result is not None


def test_every_public_method_has_a_case():
    tried = {case.call for case in CASES} | {"whoami", "export_session_trace"}
    skipped = {"close", "get_telemetry", "holder"}
    public = {name for name in dir(tinkex.RestClient) if not name.startswith("_")}
    assert {name for name in public if not name.endswith("_async")} - skipped == tried


@pytest.mark.filterwarnings("ignore::tinkex.ExperimentalWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_request_headers_name_the_public_method(server, rest, case):
    server.on(case.sent, Answer(case.answer))
    method = getattr(rest, case.call)
    method(*case.arguments, **case.options).result(10)
    headers = only_request(server, case).headers
    assert (headers["x-sdk-method"], headers["x-sdk-version"]) == (method.__name__, "0.36.0")


def test_experimental_method_warns(server, rest):
    server.on("POST /api/v1/sessions/search", Answer({"sessions": []}))
    with pytest.warns(tinkex.ExperimentalWarning, match="search_sessions"):
        rest.search_sessions(types.SessionSearchRequest()).result(10)


# -- argument checks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("get_session", ("s-9", "mine")),
        ("list_sessions", (20, 0, "all")),
        ("get_training_run", (RUN, "")),
        ("get_training_run_by_tinker_path", (PATH, None)),
        ("list_training_runs", (20, 0, "mine")),
        ("list_sessions", (-1,)),
        ("list_sessions", (20, -1)),
        ("list_training_runs", (True,)),
        ("list_user_checkpoints", ("all",)),
        ("set_checkpoint_ttl_from_tinker_path", (PATH, 0)),
        ("set_checkpoint_ttl_from_tinker_path", (PATH, -5)),
        ("set_checkpoint_ttl_from_tinker_path", (PATH, 1.5)),
        ("get_billing_usage", ("yesterday", "2026-01-03")),
        ("get_billing_usage", (date(2026, 1, 2), "2026-01-03")),
        ("get_audit_log", ("everything",)),
        ("copy_weights", ("weights/0001",)),
        ("delete_checkpoint", ("weights/0001",)),
        ("publish_checkpoint", ("tinker://r/0001",)),
        ("get_weights_info_by_tinker_path", ("tinker://r/other/0001",)),
        ("get_external_weights_urls", (PATH,)),
    ],
)
def test_invalid_argument_is_refused_before_sending(server, rest, call, arguments):
    with pytest.raises(InvalidInputError):
        getattr(rest, call)(*arguments)
    assert server.requests == []


@pytest.mark.parametrize("run", ["", "..", "a//b"])
def test_invalid_run_id_is_refused(server, rest, run):
    with pytest.raises(InvalidInputError):
        rest.get_training_run(run).result(10)
    assert [request.path for request in server.requests] == ["/api/v1/client/config"]


def test_invalid_tinker_path_is_refused(rest):
    with pytest.raises(InvalidPathError, match="tinker://"):
        rest.delete_checkpoint_from_tinker_path("weights/0001")


@pytest.mark.parametrize(("status", "error"), [(404, NotFoundError), (409, ConflictError)])
def test_error_class_follows_the_status(server, service, status, error):
    server.on(f"POST {CHECKPOINT}/publish", Answer({"detail": "no"}, status))
    rest = service(max_retries=0, clock=FakeClock(long=math.inf)).create_rest_client()
    with pytest.raises(error, match="no"):
        rest.publish_checkpoint(PATH).result(10)


def test_malformed_answer_is_an_error(server, rest):
    server.on("GET /api/v1/sessions", Answer({"sessions": "none"}))
    with pytest.raises(APIResponseValidationError, match="list_sessions"):
        rest.list_sessions().result(10)


# -- details -------------------------------------------------------------------------------------


def test_rest_client_opens_no_session(server, rest):
    server.on("GET /api/v1/sessions", Answer({"sessions": []}))
    rest.list_sessions().result(10)
    rest.list_sessions().result(10)
    assert server.asked(CREATE_SESSION) == []
    assert len(server.asked(CONFIG)) == 1


def test_rest_client_works_without_a_service_client(server):
    server.on("GET /api/v1/sessions", Answer({"sessions": ["a"]}))
    rest = tinkex.RestClient(base_url=server.url, api_key="tml-own")
    assert rest.list_sessions().result(10).sessions == ["a"]
    assert server.requests[-1].headers["x-api-key"] == "tml-own"
    rest.close().result(10)
    with pytest.raises(tinkex.ClientClosedError):
        rest.list_sessions()


@pytest.mark.parametrize(
    "more", [{"api_key": "tml-other"}, {"base_url": "http://elsewhere"}], ids=str
)
@pytest.mark.parametrize("kind", [tinkex.RestClient, tinkex.AdminClient])
def test_client_with_a_holder_refuses_its_own_key_and_address(service, kind, more):
    with pytest.raises(InvalidInputError, match="_holder"):
        kind(service().holder, **more)


def test_admin_client_has_only_the_reports(server):
    server.on("GET /api/v1/audit", Answer({"entries": []}))
    admin = tinkex.AdminClient(base_url=server.url, api_key="tml-own")
    assert admin.get_audit_log().result(10).entries == []
    assert not hasattr(admin, "list_sessions")
    admin.close().result(10)


def test_training_run_is_read_with_its_checkpoints(server, rest):
    checkpoint = {
        "checkpoint_id": "weights/0001",
        "checkpoint_type": "training",
        "time": "2026-01-02T03:04:05Z",
        "tinker_path": PATH,
        "expires_at": "2026-02-01T00:00:00Z",
    }
    server.on(f"GET {RUN_URL}", Answer({**RUN_BODY, "last_checkpoint": checkpoint}))
    run = rest.get_training_run(RUN).result(10)
    assert run.last_request_time == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert run.last_checkpoint.training_run_id == RUN
    assert run.last_checkpoint.expires_at == datetime(2026, 2, 1, tzinfo=UTC)


def test_a_naive_date_means_utc(server, rest):
    server.on("GET /api/v1/billing/usage/events", Answer({"data": []}))
    elsewhere = datetime(2026, 1, 3, 1, tzinfo=timezone(timedelta(hours=1)))
    rest.get_billing_usage("2026-01-02", elsewhere).result(10)
    assert server.requests[-1].query == {
        "starting_on": "2026-01-02T00:00:00Z",
        "ending_before": "2026-01-03T01:00:00+01:00",
    }


def test_weights_access_token_is_sent_in_a_header(server, service):
    server.on("POST /api/v1/copy_weights", Answer({"tinker_path": "tinker://r/weights/b"}))
    copied = service().copy_weights(PATH, weights_access_token="t").result(10)
    assert copied == "tinker://r/weights/b"
    request = server.requests[-1]
    assert request.headers["x-tinker-weights-access-token"] == "t"
    assert request.json == {"source_path": PATH}


@pytest.mark.parametrize(
    ("own", "configured", "sent"),
    [("p-1", "p-2", "p-1"), (None, "p-2", "p-2"), ("p-1", None, "p-1"), (None, None, None)],
)
def test_copy_uses_the_project_of_the_service_client(server, service, own, configured, sent):
    server.on("POST /api/v1/copy_weights", Answer({"tinker_path": PATH}))
    configured = {} if configured is None else {"project_id": configured}
    config = tinkex.Config(base_url=server.url, api_key="tml-test", **configured)
    client = service(project_id=own, config=config)
    client.copy_weights(PATH).result(10)
    (request,) = server.asked("POST /api/v1/copy_weights")
    assert request.json.get("destination_project_id") == sent


def test_copy_by_a_standalone_rest_client_uses_the_configured_project(server, monkeypatch):
    monkeypatch.setenv("TINKER_PROJECT_ID", "p-3")
    server.on("POST /api/v1/copy_weights", Answer({"tinker_path": PATH}))
    rest = tinkex.RestClient(base_url=server.url, api_key="tml-test")
    rest.copy_weights(PATH).result(10)
    rest.copy_weights(PATH, "p-4").result(10)
    sent = [request.json for request in server.asked("POST /api/v1/copy_weights")]
    assert [each["destination_project_id"] for each in sent] == ["p-3", "p-4"]
    rest.close().result(10)


def test_retried_copy_keeps_its_idempotency_key(server, service):
    server.on("POST /api/v1/copy_weights", Answer({}, 503), Answer({"tinker_path": PATH}))
    service().copy_weights(PATH).result(10)
    first, second = server.asked("POST /api/v1/copy_weights")
    assert first.headers["x-idempotency-key"] == second.headers["x-idempotency-key"]


# -- archives ------------------------------------------------------------------------------------


ARCHIVE = f"GET {CHECKPOINT}/archive"
BUILDING = Answer({"detail": "being built"}, 503)


@pytest.fixture
def patient(service):
    """A client with a fake clock that never waits. It opens no session, so no heartbeat spins on that clock."""
    clock = FakeClock(long=math.inf)
    return service(clock=clock).create_rest_client(), clock


def found(location: str | None, **headers: str) -> Answer:
    return Answer(b"", 302, {**({"location": location} if location else {}), **headers})


def test_archive_url_is_the_location_of_the_redirect(server, rest):
    server.on(ARCHIVE, found("http://x/a.tar", expires="Wed, 27 May 2026 20:00:00 GMT"))
    archive = rest.get_checkpoint_archive_url(PATH).result(10)
    assert archive.url == "http://x/a.tar"
    assert archive.expires == datetime(2026, 5, 27, 20, tzinfo=UTC)
    assert server.asked(ARCHIVE)[0].headers["accept"] == "application/gzip"
    assert len(server.requests) == 2  # the redirect is not followed


@pytest.mark.parametrize(
    ("headers", "expires"),
    [
        ({}, datetime.fromtimestamp(1000, UTC) + timedelta(minutes=15)),
        ({"expires": "soon"}, "soon"),
    ],
)
def test_archive_url_without_expires_header_is_valid_for_15_minutes(
    server, patient, headers, expires
):
    server.on(ARCHIVE, found("http://x/a.tar", **headers))
    assert patient[0].get_checkpoint_archive_url(PATH).result(10).expires == expires


def test_archive_url_may_be_in_the_body(server, rest):
    server.on(ARCHIVE, Answer({"url": "http://x/a.tar", "expires": "2026-05-27T20:00:00Z"}))
    archive = rest.get_checkpoint_archive_url(PATH).result(10)
    assert (archive.url, archive.expires) == (
        "http://x/a.tar",
        datetime(2026, 5, 27, 20, tzinfo=UTC),
    )


def test_archive_being_built_is_requested_every_30_seconds(server, patient, caplog):
    rest, clock = patient
    server.on(ARCHIVE, *[BUILDING] * 5, found("http://x/a.tar"))
    assert rest.get_checkpoint_archive_url(PATH).result(10).url == "http://x/a.tar"
    assert clock.slept == [30.0] * 5
    assert "being built" in caplog.text


def test_archive_that_is_never_ready_fails_after_6_attempts(server, patient):
    rest, clock = patient
    server.on(ARCHIVE, BUILDING)
    with pytest.raises(InternalServerError, match="being built"):
        rest.get_checkpoint_archive_url(PATH).result(10)
    assert len(server.asked(ARCHIVE)) == 6
    assert clock.slept == [30.0] * 5


def test_bad_gateway_is_retried_while_waiting_for_an_archive(server, patient):
    rest, clock = patient
    server.on(ARCHIVE, Answer(b"", 502), found("https://files/archive"))
    assert rest.get_checkpoint_archive_url(PATH).result(10).url == "https://files/archive"
    assert clock.slept == [0.5]


@pytest.mark.parametrize("status", [403, 404])
def test_refused_archive_request_is_not_retried(server, patient, status):
    rest, clock = patient
    server.on(ARCHIVE, Answer({"detail": "no"}, status))
    with pytest.raises(tinkex.APIStatusError):
        rest.get_checkpoint_archive_url(PATH).result(10)
    assert clock.slept == []


def test_archive_redirect_without_location_is_an_error(server, rest):
    server.on(ARCHIVE, found(None))
    with pytest.raises(APIResponseValidationError, match="no URL"):
        rest.get_checkpoint_archive_url(PATH).result(10)


# -- the audit log -------------------------------------------------------------------------------


SECRETS = {
    "cf_access_client_id": "id",
    "cf_access_client_secret": "hidden",
    "default_headers": {"authorization": "Bearer hidden"},
}


@pytest.mark.parametrize("relative", [False, True])
def test_redirected_audit_log_is_fetched_without_secret_headers(server, service, relative):
    rest = service(**SECRETS).create_rest_client()
    where = "/logs/1?signature=x"
    server.on("GET /api/v1/audit", found(where if relative else server.url + where))
    server.on(
        "GET /logs/1", Answer({"entries": [{"timestamp": "2026-01-02T03:04:05Z", "event": "x"}]})
    )
    assert rest.get_audit_log().result(10).entries[0].event == "x"
    asked, fetched = server.requests[-2:]
    assert asked.headers["cf-access-client-secret"] == "hidden"
    assert fetched.query == {"signature": "x"}
    assert not {"x-api-key", "authorization", "cf-access-client-secret"} & set(fetched.headers)


def test_audit_log_that_cannot_be_fetched_is_an_error(server, rest):
    server.on("GET /api/v1/audit", found(f"{server.url}/logs/1"), found(None))
    server.on("GET /logs/1", Answer({"detail": "expired"}, 403))
    with pytest.raises(tinkex.PermissionDeniedError, match="expired"):
        rest.get_audit_log().result(10)
    with pytest.raises(APIResponseValidationError, match="Location"):
        rest.get_audit_log().result(10)


# -- traces and identity -------------------------------------------------------------------------


TRACE = "GET /api/v1/sessions/s-9/trace_export"


def test_trace_export_is_polled_until_ready(server, patient):
    rest, clock = patient
    pending = Answer({"status": "pending"})
    server.on(TRACE, pending, pending, Answer({"status": "ready", "url": "http://x/t"}))
    assert rest.export_session_trace("s-9").result(10) == "http://x/t"
    assert clock.slept == [5.0, 5.0]


@pytest.mark.parametrize(("error", "said"), [("too old", "too old"), (None, "no reason given")])
def test_failed_trace_export_is_an_error(server, rest, error, said):
    server.on(TRACE, Answer({"status": "failed", "error": error}))
    with pytest.raises(TinkerError, match=said):
        rest.export_session_trace("s-9").result(10)


def token(**claims: Any) -> str:
    payload = base64.urlsafe_b64encode(json.dumps({"exp": 9e9, **claims}).encode()).decode()
    return f"eyJ.{payload.rstrip('=')}.signature"


def test_whoami_reads_the_claims_of_the_token(server, rest):
    flags(server, pjwt_auth_enabled=True)
    server.on(
        "POST /api/v1/auth/token", Answer({"jwt": token(sub="u", org_id="o", email="me@x.org")})
    )
    me = rest.whoami().result(10)
    assert (me.user_urn, me.org_urn, me.email) == ("u", "tml:organization:o", "me@x.org")


def test_whoami_fails_if_the_service_does_not_exchange_keys(rest):
    with pytest.raises(AuthenticationError, match="does not ask for keys"):
        rest.whoami().result(10)


def test_whoami_fails_if_the_token_lacks_a_claim(server, rest):
    flags(server, pjwt_auth_enabled=True)
    server.on("POST /api/v1/auth/token", Answer({"jwt": token(sub="u")}))
    with pytest.raises(APIResponseValidationError, match="org_id"):
        rest.whoami().result(10)


# -- service information -------------------------------------------------------------------------


def test_health_and_capabilities_are_read(server, service):
    client = service()
    server.on("GET /api/v1/healthz", Answer({"status": "ok"}))
    server.on(
        "GET /api/v1/get_server_capabilities",
        Answer({"supported_models": ["a", {"model_name": "b"}]}),
    )
    assert client.health().status == "ok"
    assert client.get_server_capabilities().model_names() == ["a", "b"]
    assert asyncio.run(client.get_server_capabilities_async()).model_names() == ["a", "b"]
