"""Tokenizer files of base models over HTTP: listed with checksums, cached by checksum, no other files served."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tinkex.server.auth import Keys
from tinkex.server.tokenizers import hub_id, tokenizer_files
from tinkex.testing import service
from tinkex.types._tokenizer_files import TokenizerFile, tokenizer_digest

from .api import TINY, Api

LIST = f"/local/tokenizers/{TINY}"


@pytest.fixture(scope="module")
def running():
    alice = hashlib.sha256(b"tml-alice").digest()
    with service("fake", keys=Keys({"alice": alice})) as started:
        yield started


@pytest.fixture(scope="module")
def api(running):
    with Api(running.url, "tml-alice") as user:
        yield user


def test_files_are_listed_with_their_checksums_and_fetched(api):
    listed = api.http.get(LIST)
    assert listed.status_code == 200
    told = listed.json()
    names = {file["name"] for file in told["files"]}
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names
    assert told["sha256"] == tokenizer_digest(TokenizerFile(**file) for file in told["files"])
    for file in told["files"]:
        content = api.http.get(f"{LIST}/files/{file['name']}").content
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
        assert len(content) == file["size"]


def test_a_cached_file_is_answered_with_304(api):
    for path in (LIST, f"{LIST}/files/tokenizer.json"):
        tag = api.http.get(path).headers["etag"]
        again = api.http.get(path, headers={"if-none-match": f'"other", {tag}'})
        assert (again.status_code, again.content) == (304, b"")
        assert api.http.get(path, headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "..%2fconfig.json",
        "%2e%2e",
        "tokenizer.json%00",
        "tokenizer.json%2f..%2fmodel.safetensors",
        "code.py",
    ],
)
def test_only_tokenizer_files_are_served(api, name):
    assert api.http.get(f"{LIST}/files/{name}").status_code == 404


def test_files_of_unknown_models_are_not_found(api):
    for path in ("/local/tokenizers/no/such", "/local/tokenizers/..%2f..%2fetc"):
        assert api.http.get(path).status_code == 404


def test_tokenizer_files_need_a_key(running):
    with Api(running.url) as nobody:
        assert nobody.http.get(LIST).status_code == 401
        assert nobody.http.get(f"{LIST}/files/tokenizer.json").status_code == 401


def test_a_local_client_gets_the_tokenizer_directory(api):
    info = api.told("get_info", {"model_id": api.model().model_id})["model_data"]
    assert Path(info["tokenizer_id"]).is_dir()
    assert info["tokenizer_sha256"] == api.http.get(LIST).json()["sha256"]


def test_a_remote_client_gets_no_hub_id_that_does_not_exist(api):
    """`tinkex/tiny` exists only locally; a model in the hub's cache would have a hub id."""
    asked = {"model_id": api.model().model_id}
    proxied = api.told("get_info", asked, headers={"x-forwarded-for": "203.0.113.7"})
    assert proxied["model_data"] == api.told("get_info", asked)["model_data"]


def test_checksums_change_with_the_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    (first,) = tokenizer_files(tmp_path)
    assert tokenizer_files(tmp_path) == [first]
    (tmp_path / "tokenizer.json").write_text('{"other": 1}')
    (second,) = tokenizer_files(tmp_path)
    assert first.name == second.name == "tokenizer.json"
    assert first.sha256 != second.sha256


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("/cache/hub/models--org--some-model/snapshots/abc", "org/some-model"),
        ("/cache/hub/models--gpt2/snapshots/abc", "gpt2"),
        ("/cache/tinkex/models/tinkex--tiny-1", None),
        ("/models/mine", None),
    ],
)
def test_a_model_in_the_hub_cache_has_its_hub_id(directory, name):
    assert hub_id(Path(directory)) == name
