"""The table of operations and the service say the same."""

from __future__ import annotations

import httpx
import pytest

from tinkex._wire.operations import OPERATIONS
from tinkex.server.routes import HANDLERS
from tinkex.testing import service


@pytest.fixture(scope="module")
def http():
    with service("fake") as running, httpx.Client(base_url=running.url, trust_env=False) as client:
        yield client


def test_every_operation_has_a_handler_and_every_handler_an_operation():
    assert HANDLERS.keys() == OPERATIONS.keys()


@pytest.mark.parametrize("row", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_every_operation_is_routed_to_its_handler(http, row):
    ids = dict.fromkeys(row.placeholders, "some:train:0") | {"checkpoint_id": "weights/a"}
    path = row.url_path({name: ids[name] for name in row.placeholders})
    answer = http.request(row.method, path, content=b"" if row.method == "GET" else b"{}")
    assert answer.status_code != 405
    assert answer.status_code < 500
    if answer.status_code == 404:  # the thing is not there, the route is
        assert "There is no" in answer.json()["detail"]
    elif answer.status_code >= 400:
        assert answer.json()["detail"]


def test_other_methods_and_paths_are_no_operations(http):
    assert http.get("/api/v1/optim_step").status_code == 405
    assert http.post("/api/v1/healthz").status_code == 405
    assert http.post("/api/v1/nonsense").status_code == 404
    assert http.get("/healthz").status_code == 404


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_for_people(http, path):
    page = http.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")


def test_the_document_is_served(http):
    assert http.get("/openapi.json").json()["openapi"].startswith("3.")
