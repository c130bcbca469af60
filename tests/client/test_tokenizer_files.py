"""Tokenizers of remote services: downloaded once, verified, and restricted to tokenizer files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tinkex._client.tokenizer_files import tokenizer_cache
from tinkex._client.tokenizers import set_tokenizer_loader
from tinkex.errors import APIResponseValidationError, InvalidInputError
from tinkex.testing import service as started
from tinkex.types._tokenizer_files import TokenizerFile, tokenizer_digest

from ..scripted import Answer, ScriptedServer
from .helpers import new_sampler, new_trainer

INFO = "POST /api/v1/get_info"
SAMPLER = "GET /api/v1/samplers/s-1%3Asample%3A0"
LIST = "GET /local/tokenizers/org/model"
CONTENT = {"tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b"{}"}


@pytest.fixture(autouse=True)
def loader(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded: list[str] = []

    def load(name: str, _revision: str | None) -> Any:
        loaded.append(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}

    set_tokenizer_loader(load)
    yield loaded
    set_tokenizer_loader(None)


def offer(server: ScriptedServer, content: dict[str, bytes], stated: str | None = None) -> str:
    """Let the service state a path on its machine and offer files; returns their checksum."""
    files = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content.items()
    ]
    digest = stated or tokenizer_digest(TokenizerFile(**file) for file in files)
    facts = {"tokenizer_id": "/on/the/service/model", "tokenizer_sha256": digest}
    info = {"model_id": "m", "model_data": {"model_name": "org/model", **facts}}
    server.on(INFO, Answer(info))
    server.on(SAMPLER, Answer({"sampler_id": "x", "base_model": "org/model", **facts}))
    server.on(LIST, Answer({"base_model": "org/model", "sha256": digest, "files": files}))
    for name, data in content.items():
        server.on(f"{LIST}/files/{name}", Answer(data, content_type="application/octet-stream"))
    return digest


def test_files_are_downloaded_once_and_cached_by_checksum(server, service, loader):
    digest = offer(server, CONTENT)
    trainer = new_trainer(service())
    assert trainer.get_tokenizer() == CONTENT
    assert new_sampler(service()).get_tokenizer() == CONTENT
    assert loader == [str(tokenizer_cache() / digest)]
    assert len(server.asked(LIST)) == len(server.asked(f"{LIST}/files/tokenizer.json")) == 1
    assert [path.name for path in tokenizer_cache().iterdir()] == [digest]


def test_repeated_encode_asks_the_service_once(server, service):
    class Words:
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    set_tokenizer_loader(lambda *_: Words())
    offer(server, CONTENT)
    trainer = new_trainer(service())
    for _ in range(20):
        assert trainer.encode("one three") == [3, 5]
    assert len(server.asked(INFO)) == 1


def test_file_with_a_wrong_checksum_is_refused_and_not_cached(server, service):
    offer(server, CONTENT)
    server.on(f"{LIST}/files/tokenizer.json", Answer(b"other", content_type="text/plain"))
    with pytest.raises(APIResponseValidationError, match=r"checksum of tokenizer\.json is wrong"):
        new_trainer(service()).get_tokenizer()
    assert list(tokenizer_cache().iterdir()) == []


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/evil", "code.py", "model.safetensors"])
def test_files_that_are_not_tokenizer_files_are_refused(server, service, name):
    offer(server, {**CONTENT, name: b"x"})
    with pytest.raises(APIResponseValidationError, match="is not a tokenizer file"):
        new_trainer(service()).get_tokenizer()
    assert not server.asked(f"{LIST}/files/tokenizer.json")


def test_file_list_with_a_different_checksum_is_refused(server, service):
    offer(server, CONTENT, stated="0" * 64)
    with pytest.raises(
        APIResponseValidationError, match="differs from the one that the service states"
    ):
        new_trainer(service()).get_tokenizer()


def test_path_on_the_service_without_a_download_is_an_error(server, service):
    data = {"model_name": "org/model", "tokenizer_id": "/on/the/service/model"}
    server.on(INFO, Answer({"model_id": "m", "model_data": data}))
    with pytest.raises(InvalidInputError, match="a path on its own machine"):
        new_trainer(service()).get_tokenizer()


def test_directory_on_this_machine_is_used_without_a_download(server, service, loader, tmp_path):
    (tmp_path / "here").mkdir()
    data = {"model_name": "org/model", "tokenizer_id": str(tmp_path / "here")}
    data["tokenizer_sha256"] = "0" * 64
    server.on(INFO, Answer({"model_id": "m", "model_data": data}))
    new_trainer(service()).get_tokenizer()
    assert loader == [str(tmp_path / "here")]
    assert server.asked(LIST) == []


def test_tokenizer_is_downloaded_from_a_real_service_at_a_non_loopback_address(loader):
    """0.0.0.0 is this machine too, but the client treats only loopback addresses as local."""
    with started("fake", allowed_hosts=("0.0.0.0",)) as running:
        url = running.url.replace("127.0.0.1", "0.0.0.0")
        with tinkex.ServiceClient(base_url=url, api_key="tml-x", telemetry_enabled=False) as client:
            trainer = client.create_lora_training_client("tinkex/tiny", rank=4)
            files = trainer.get_tokenizer()
    assert loader[0].startswith(str(tokenizer_cache()))
    assert json.loads(files["tokenizer.json"])["model"]["type"] == "BPE"
