"""A service without keys accepts programs on this machine and refuses web pages."""

from __future__ import annotations

import json

import pytest

from tinkex.server.auth import Keys
from tinkex.server.guard import host_name, refusal
from tinkex.testing import service

from .api import Api

SESSION = {"tags": [], "sdk_version": "1"}
ROUTES = [
    ("POST", "/api/v1/create_session"),
    ("GET", "/api/v1/healthz"),
    ("GET", "/api/v1/sessions"),
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
    ("GET", "/lease"),
    ("GET", "/local/telemetry"),
    ("POST", "/local/import"),
    ("GET", "/nowhere"),
]
FOREIGN = [
    {"host": "evil.example"},
    {"host": "evil.example:8787"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "localhost.evil.example"},
    {"host": "10.0.0.1"},
    {"host": "0.0.0.0"},
    {"host": "[::2]:8787"},
    {"host": ""},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
]


@pytest.fixture(scope="module")
def running():
    with service("fake", allowed_hosts=("box.example",)) as started:
        yield started


@pytest.fixture(scope="module")
def api(running):
    with Api(running.url) as user:
        yield user


@pytest.mark.parametrize("headers", FOREIGN, ids=json.dumps)
@pytest.mark.parametrize(("method", "path"), ROUTES, ids=lambda value: value)
def test_requests_of_a_web_page_are_refused_on_every_route(api, method, path, headers):
    answer = api.http.request(method, path, headers=headers, json=SESSION)
    assert answer.status_code == 403
    assert "has no keys" in answer.json()["detail"]
    assert "access-control-allow-origin" not in answer.headers


def test_a_preflight_of_a_web_page_is_refused(api):
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = api.http.options("/api/v1/create_session", headers=headers)
    assert answer.status_code == 403
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.8.8.8:99", "[::1]:5"]
)
def test_loopback_hosts_are_served(api, host):
    assert api.http.get("/api/v1/healthz", headers={"host": host}).status_code == 200
    same = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert api.http.post("/api/v1/create_session", headers=same, json=SESSION).status_code == 200


def test_an_allowed_host_is_served(api):
    assert api.http.get("/api/v1/healthz", headers={"host": "Box.example:80"}).status_code == 200


def test_a_link_on_another_page_can_be_followed(api):
    link = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert api.http.get("/docs", headers=link).status_code == 200
    assert api.http.post("/api/v1/create_session", headers=link, json=SESSION).status_code == 403


def test_a_request_has_exactly_one_host():
    for hosts in ([], ["localhost", "evil.example"]):
        error = refusal("GET", hosts, {}, ())
        assert error is not None
        assert "one Host header" in str(error)
    assert refusal("GET", ["localhost"], {}, ()) is None


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost.:80", "localhost"),
        ("[::1]:80", "::1"),
        ("[::1", "::1"),
        ("127.0.0.1:x", "127.0.0.1"),
        ("", ""),
    ],
)
def test_host_name_is_parsed_without_port_and_brackets(header, name):
    assert host_name(header) == name


def test_with_keys_every_host_is_served_and_a_lease_needs_a_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-key-of-ann\n")
    with service("fake", keys=Keys.from_file(file)) as started, Api(started.url) as nobody:
        for headers in FOREIGN[:3]:
            with Api(started.url, "tml-key-of-ann", **headers) as ann:
                assert ann.get("healthz").status_code == 200
        assert nobody.http.get("/lease").status_code == 401


def test_health_check_needs_no_key_and_shows_no_facts(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-key-of-ann\n")
    with service("fake", keys=Keys.from_file(file)) as started, Api(started.url) as nobody:
        answer = nobody.http.get("/health")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert nobody.get("healthz").status_code == 401
