"""The pages are valid HTML, load nothing, show the right values, and escape all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.client.helpers import PASS, STEP, answer_training
from tests.scripted import Answer, ScriptedServer
from tinkex._client.tokenizers import set_tokenizer_loader
from tinkex._wire.operations import OPERATIONS
from tinkex.server.openapi import document
from tinkex.server.pages import docs_page, front_page

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = "<script>alert(1)</script>\"'&"


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """A parsed page: its elements in order, each with all of its text."""

    source: str
    elements: list[Element] = field(default_factory=list)
    _open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.source)
        self.close()
        assert [element.tag for element in self._open] == [], "these were never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        assert len(element.attributes) == len(attrs), f"{tag} has an attribute twice"
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop().tag == tag
        if tag in {"td", "th", "p"}:
            self.handle_data(" ")  # browsers separate block elements

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str, **attributes: str) -> list[Element]:
        return [
            element
            for element in self.elements
            if element.tag == tag and attributes.items() <= element.attributes.items()
        ]

    @property
    def text(self) -> str:
        return self.all("body")[0].text


def front(**facts: Any) -> Page:
    known: dict[str, Any] = {
        "url": "http://127.0.0.1:8787",
        "version": "1.2.3",
        "models": [("some/model", 8192), ("other/model", 2048)],
        "sessions": 3,
        "runs": 12,
        "checkpoints": 1480,
        "uptime_seconds": 9301.5,
    }
    return Page(front_page(**known | facts))


def scripts_of(page: Page) -> list[str]:
    return [element.text for element in page.all("pre")]


DOCUMENT = document("1.2.3")
DOCS = Page(docs_page(DOCUMENT))


# -- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [front(), DOCS], ids=["front", "docs"])
def test_a_page_loads_no_other_files(page):
    assert page.source.startswith("<!doctype html>")
    assert page.all("html", lang="en")
    assert page.all("script") == []
    for element in page.elements:
        assert not element.attributes.keys() & {"src", "style", "srcset"}
        assert not any(name.startswith("on") for name in element.attributes)
        assert re.match(r"[#/]|data:,$", element.attributes.get("href", "#"))
    style = page.all("style")[0].text
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme:dark" in style


@pytest.mark.parametrize("page", [front(), DOCS], ids=["front", "docs"])
def test_ids_are_unique_and_links_within_the_page_have_targets(page):
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    links = {element.attributes["href"] for element in page.all("a")}
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


# -- the front page ------------------------------------------------------------------------------


def test_the_front_page_shows_the_state_of_the_service():
    page = front()
    cells = [element.text for element in page.all("td")]
    assert cells == ["some/model", "8,192 tokens", "other/model", "2,048 tokens"]
    counts = dict(
        zip(
            (element.text for element in page.all("dt")),
            (element.text for element in page.all("dd")),
            strict=True,
        )
    )
    assert counts == {
        "sessions": "3",
        "training runs": "12",
        "checkpoints": "1,480",
        "up for": "2 h 35 min",
    }
    assert "http://127.0.0.1:8787" in page.text
    assert "1.2.3" in page.all("footer")[0].text
    assert {"/docs", "/openapi.json"} <= {link.attributes["href"] for link in page.all("a")}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 s"),
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (86399, "23 h 59 min"),
        (86400 + 59, "1 d"),
        (400 * 86400 + 3600, "400 d 1 h"),
    ],
)
def test_uptime_is_shown_in_its_two_largest_units(seconds, text):
    assert front(uptime_seconds=seconds).all("dd")[-1].text == text


def test_the_front_page_works_without_models():
    page = front(models=[])
    assert page.all("td") == []
    assert "without a model" in page.text
    for script in scripts_of(page)[::2]:
        compile(script, "try.py", "exec")


def test_values_from_outside_are_escaped():
    page = front(models=[(HOSTILE, 1)], url=f"http://h/{HOSTILE}", version=HOSTILE)
    assert page.all("script") == []
    assert "<script" not in page.source
    assert page.all("td")[0].text == HOSTILE
    assert HOSTILE in page.all("footer")[0].text


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.mark.parametrize("model", ["some/model", "quo\"ted\\ mod'el 😀"])
def test_the_script_on_the_page_runs(model, capsys):
    with ScriptedServer() as server:
        answer_training(server)
        info = {"model_data": {"model_name": model, "tokenizer_id": "t"}, "model_id": "s-1:train:0"}
        server.on("POST /api/v1/get_info", Answer(info))
        script = scripts_of(front(url=server.url, models=[(model, 1)]))[0]
        names: dict[str, Any] = {}
        set_tokenizer_loader(lambda name, revision: Letters())
        try:
            exec(compile(script, "try.py", "exec"), names)
        finally:
            set_tokenizer_loader(None)
            names["service"].close().result()
        assert server.asked("POST /api/v1/create_model")[0].json["base_model"] == model
        assert (len(server.asked(PASS)), len(server.asked(STEP))) == (5, 5)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_the_official_sdk_runs_the_script_on_the_page():
    ours, settings, official = scripts_of(front(url="http://h:1/a b"))
    arguments = 'base_url="http://h:1/a b", api_key="tml-local"'
    assert official == ours.replace("tinkex", "tinker").replace(arguments, "")
    assert settings.splitlines() == [
        "export TINKER_BASE_URL='http://h:1/a b'",
        "export TINKER_API_KEY=tml-local",
    ]


# -- the reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("row", OPERATIONS.values(), ids=lambda row: row.name)
def test_every_operation_is_in_the_reference(row):
    path = row.path.replace("{checkpoint_id}", "{checkpoint_kind}/{checkpoint_name}")
    folded = [element for element in DOCS.all("details") if row.name in element.text.split()]
    shown = [element.text.split()[:2] for element in folded]
    assert [row.method, path] in shown
    assert len(DOCS.all("div", id=f"call-{row.name}")) == 1
    assert len(DOCS.all("a", href=f"#call-{row.name}")) >= 1


def test_each_operation_has_a_fold_and_each_tag_a_heading():
    calls = sum(map(len, DOCUMENT["paths"].values()))
    assert len(DOCS.all("details")) == len(DOCS.all("summary")) == calls
    headings = [element.text for element in DOCS.all("h2")]
    assert headings == [*(tag["name"] for tag in DOCUMENT["tags"]), "Schemas"]


def test_every_schema_is_in_the_reference():
    places = [element.attributes["id"] for element in DOCS.all("section", **{"class": "schema"})]
    assert places == [f"schema-{name}" for name in DOCUMENT["components"]["schemas"]]


def inside(name: str) -> str:
    return " ".join(DOCS.all("div", id=f"call-{name}")[0].text.split())


def schema(name: str) -> str:
    return " ".join(DOCS.all("section", id=f"schema-{name}")[0].text.split())


def test_an_operation_shows_its_request_and_its_responses():
    created = inside("create_model")
    assert "base_model required string" in created
    assert "model_seq_id required integer ≥ 0" in created
    assert "retrieve_future returns its result, CreateModelResponse" in created
    assert "UntypedAPIFuture" in created
    assert "application/x-protobuf" in inside("forward_backward")
    assert "Header Location" in inside("get_checkpoint_archive_url")
    listed = inside("list_training_runs")
    assert "limit integer ≥ 0 in the query default 20" in listed
    assert '"owned" | "accessible"' in listed


def test_types_are_described_briefly():
    assert "topk_logprobs list of (list of [integer, number] or null)" in schema("SampledSequence")
    assert "metrics required object of (number or null)" in schema("ForwardBackwardOutput")
    assert "Exactly one of adam_params and optimizer_params" in schema("OptimStepRequest")
    assert "time required string (date-time) or string" in schema("Checkpoint")
    assert "data required string (base64)" in schema("ImageChunk")
    assert "No fields" in schema("EmptyResponse")
    assert '"active"' in schema("QueueState")


def test_values_of_the_document_are_escaped():
    hostile = {
        "info": {"title": HOSTILE, "version": HOSTILE, "description": f"a `{HOSTILE}` b"},
        "tags": [{"name": HOSTILE, "description": HOSTILE}],
        "paths": {
            f"/{HOSTILE}": {
                "get": {
                    "operationId": HOSTILE,
                    "tags": [HOSTILE],
                    "summary": HOSTILE,
                    "parameters": [
                        {
                            "name": HOSTILE,
                            "in": HOSTILE,
                            "schema": {"type": HOSTILE, "format": HOSTILE, "default": HOSTILE},
                        }
                    ],
                    "requestBody": {
                        "content": {HOSTILE: {"schema": {"enum": [HOSTILE, 1]}}},
                    },
                    "responses": {
                        HOSTILE: {
                            "description": HOSTILE,
                            "headers": {HOSTILE: {"description": HOSTILE}},
                        }
                    },
                }
            }
        },
        "components": {
            "schemas": {
                HOSTILE: {
                    "type": "object",
                    "required": [HOSTILE],
                    "properties": {HOSTILE: {"const": HOSTILE, "description": HOSTILE}},
                }
            },
            "securitySchemes": {HOSTILE: {"in": "header", "name": HOSTILE}},
        },
    }
    page = Page(docs_page(hostile))
    assert page.all("script") == []
    assert "<script" not in page.source
    assert page.text.count(HOSTILE) > 15
