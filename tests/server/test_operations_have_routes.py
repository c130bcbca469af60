"""The table of operations and the service agree, and the service keeps no facts about operations of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import httpx
import pytest

import tinkex.server
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
    if answer.status_code == 404:  # the object does not exist, but the route does
        assert "There is no" in answer.json()["detail"]
    elif answer.status_code >= 400:
        assert answer.json()["detail"]


def test_other_methods_and_paths_are_refused(http):
    assert http.get("/api/v1/optim_step").status_code == 405
    assert http.post("/api/v1/healthz").status_code == 405
    assert http.post("/api/v1/nonsense").status_code == 404
    assert http.get("/healthz").status_code == 404


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_html_pages_are_served(http, path):
    page = http.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")


def test_the_openapi_document_is_served(http):
    assert http.get("/openapi.json").json()["openapi"].startswith("3.")


# -- facts about operations are in the table -----------------------------------------------------------

SERVER = Path(tinkex.server.__file__).parent
#: Strings that are no names of operations, though they are spelled like some.
OTHER_MEANINGS = {
    ("tables.py", "telemetry"): "a table of the database",
    ("replay.py", "forward"): "a key of the journal",
}


def operation_names_in(source: str) -> list[tuple[int, str]]:
    """Line and text of every string that is the name of an operation."""
    return [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value in OPERATIONS
    ]


def test_the_server_names_no_operation_in_a_string():
    found = {
        f"{file.relative_to(SERVER)}:{line}: {name!r} (ask the row instead)"
        for file in SERVER.rglob("*.py")
        for line, name in operation_names_in(file.read_text())
        if (file.name, name) not in OTHER_MEANINGS
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        'if row.name == "optim_step": pass',
        'CHANGING = {"optim_step"}',
        'HANDLERS["optim_step"] = handler',
        'row = operation("optim_step")',
        'await engine.call("optim_step", model_id)',
        'match name:\n    case "optim_step": pass',
    ],
)
def test_operation_names_are_found_wherever_they_stand(source):
    assert [name for _, name in operation_names_in(source)] == ["optim_step"]
