"""Imported adapters are untrusted: no path in them is opened outside their own files."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tarfile

import httpx
import pytest
import torch

from tinkex.engine.interface import IN_LINE
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.server.auth import Keys
from tinkex.server.imports import unpack
from tinkex.server.quotas import KeyLimits
from tinkex.server.service import Settings
from tinkex.testing import service

from ..tars import tar
from .api import TINY, Api
from .test_storage import housed

QUERY = {"base_model": TINY, "name": "x"}
TAR = {"content-type": "application/x-tar"}


@pytest.fixture(scope="module")
def running():
    with service("fake") as started:
        yield started


@pytest.fixture(scope="module")
def tiny():
    with service("torch") as started:
        yield started


@pytest.fixture(scope="module")
def saved(running):
    """The files of a checkpoint, by name."""
    with Api(running.url) as api:
        api.model().save("saved")
    (directory,) = (running.data_dir / "checkpoints").glob("*/training/saved")
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def post(running, files):
    with httpx.Client(trust_env=False) as http:
        return http.post(
            f"{running.url}/local/import", params=QUERY, headers=TAR, content=tar(*files.items())
        )


def with_manifest(files, **changes):
    manifest = json.loads(files["tinkex.json"]) | changes
    return files | {"tinkex.json": json.dumps(manifest).encode()}


def test_manifest_cannot_name_a_file_outside_its_directory(running, saved, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"of somebody else")
    digest = hashlib.sha256(secret.read_bytes()).hexdigest()
    assert post(running, saved).status_code == 200
    for name in (str(secret), "../files/tinkex.json", ".", "..", "", "a\0b", "/proc/self/pagemap"):
        refused = post(running, with_manifest(saved, sha256={name: digest}))
        assert refused.status_code == 400, name
        assert "tinkex.json names" in refused.json()["detail"]


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"rank": "8"}},
        {"lora": {"rank": 8, "alpha": float("nan")}},
        {"lora": {"rank": 8, "seed": "x"}},
        {"lora": {"rank": 8, "train_mlp": 7}},
        {"lora": {"rank": 8, "other": 1}},
        {"lora": []},
        {"steps": -1},
        {"steps": 1e300},
        {"sha256": 7},
    ],
)
def test_manifest_with_wrong_values_is_refused(running, saved, changes):
    refused = post(running, with_manifest(saved, **changes))
    assert refused.status_code == 400, refused.text
    assert "tinkex.json" in refused.json()["detail"]


@pytest.mark.parametrize(
    "config",
    [
        '{"r": 1e999, "lora_alpha": 32}',
        '{"r": 8, "lora_alpha": 1e999}',
        '{"r": 1' + "0" * 400 + ', "lora_alpha": 32, "use_rslora": true}',
        '{"r": 8, "lora_alpha": 1' + "0" * 400 + "}",
        '{"r": NaN, "lora_alpha": 32}',
    ],
    ids=["infinite rank", "infinite alpha", "huge rank", "huge alpha", "rank that is none"],
)
def test_peft_configuration_with_extreme_numbers_is_refused(tiny, config):
    files = {"adapter_config.json": config.encode(), "adapter_model.safetensors": b"x"}
    refused = post(tiny, files)
    assert refused.status_code == 400, refused.text
    assert "adapter_config.json" in refused.json()["detail"]


def test_adapter_of_a_rank_that_no_model_can_have_is_refused(running, saved):
    refused = post(running, with_manifest(saved, lora={"rank": 1 << 40}))
    assert refused.status_code == 400
    assert "the highest possible is 512" in refused.json()["detail"]


def test_weights_larger_than_any_adapter_of_the_model_are_refused_unread(tiny, tmp_path):
    from safetensors.torch import save_file

    save_file({"x.lora_A.weight": torch.zeros(8, 1 << 18)}, tmp_path / "w")
    files = {
        "adapter_config.json": json.dumps({"r": 1, "lora_alpha": 32}).encode(),
        "adapter_model.safetensors": (tmp_path / "w").read_bytes(),
    }
    refused = post(tiny, files)
    assert refused.status_code == 400
    assert "adapter_model.safetensors is larger than" in refused.json()["detail"]


@pytest.mark.parametrize("number", ["../0", "0/..", "a\0b", "x" * 5000, ""])
def test_loss_id_must_be_a_session_and_a_number(running, number):
    with Api(running.url) as api:
        model = api.model()
        config = {"loss_id": f"{model.session_id}:loss:{number}"}
        failed = api.retrieve(model.forward_backward(loss_fn="custom", loss_fn_config=config))
        assert failed["category"] == "user"
        assert "loss_id" in failed["error"]


def test_service_with_keys_loads_no_base_model_that_a_client_names(tmp_path):
    (tmp_path / "keys").write_text("ann: tml-key-of-ann\n")
    with pytest.raises(ConfigError, match="on_demand"):
        Settings(tmp_path, keys=Keys.from_file(tmp_path / "keys"), on_demand=True)


def test_json_files_of_an_adapter_are_bounded_before_they_are_read(running, saved):
    large = saved | {"tinkex.json": saved["tinkex.json"] + b" " * (5 << 20)}
    refused = post(running, large)
    assert refused.status_code == 400
    assert "tinkex.json is larger than" in refused.json()["detail"]
    deep = saved | {"tinkex.json": b"[" * 200_000}
    assert post(running, deep).status_code == 400


def test_tar_headers_are_bounded_before_they_are_read(tmp_path):
    """`tarfile` reads an extended header into memory at once; one of many megabytes is refused."""
    size = 64 << 20
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, size
    record = f"{size} comment=".encode().ljust(size - 1, b"x") + b"\n"
    files = tar(("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"x"))
    (tmp_path / "archive").write_bytes(header.tobuf(tarfile.USTAR_FORMAT) + record + files)
    with pytest.raises(InvalidInputError, match=r"archive: .*header is larger than"):
        unpack(tmp_path / "archive", tmp_path / "files")


def test_archive_is_charged_to_the_checkpoint_quota_before_it_is_read(saved):
    archive = tar(*saved.items())
    with (
        service("fake", limits=KeyLimits(checkpoint_bytes=len(archive) - 1)) as running,
        httpx.Client(trust_env=False) as http,
    ):
        place = f"{running.url}/local/import"
        refused = http.post(place, params=QUERY, headers=TAR, content=archive)
        assert refused.status_code == 429
        assert "--limit checkpoint_bytes=" in refused.json()["detail"]
        unstated = http.post(place, params=QUERY, headers=TAR, content=iter([archive]))
        assert unstated.status_code == 413
        assert refused.headers["x-should-retry"] == "false"
    with service("fake", limits=KeyLimits(checkpoint_bytes=len(archive))) as running:
        assert post(running, saved).status_code == 200
        assert post(running, saved).status_code == 429


# -- shares of the engine --------------------------------------------------------------------------


def test_import_counts_as_a_request(saved):
    with service("fake", limits=KeyLimits(requests=0)) as running:
        refused = post(running, saved)
    assert refused.status_code == 429
    assert "--limit requests=" in refused.json()["detail"]


def test_adapters_of_one_key_are_imported_one_after_another(saved, tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path) as (made, client):
            trainer, loaded, most = made.engine.trainer, set(), 0
            restore, unload = trainer.restore_model, trainer.unload_model

            async def restore_model(model_id, *args, **options):
                nonlocal most
                loaded.add(model_id)
                most = max(most, len(loaded))
                return await restore(model_id, *args, **options)

            async def unload_model(model_id):
                await unload(model_id)
                loaded.discard(model_id)

            monkeypatch.setattr(trainer, "restore_model", restore_model)
            monkeypatch.setattr(trainer, "unload_model", unload_model)
            place, body = "http://localhost/local/import", tar(*saved.items())
            answers = await asyncio.gather(
                *(client.post(place, params=QUERY, headers=TAR, content=body) for _ in range(5))
            )
            assert [answer.status_code for answer in answers] == [200] * 5
            assert (most, loaded) == (1, set())

    asyncio.run(scenario())


def test_other_work_of_one_key_does_not_delay_another_key(tmp_path):
    async def scenario():
        async with housed(tmp_path) as (made, _):
            order, full, go_on = [], asyncio.Event(), asyncio.Event()

            async def use(owner, name):
                async with made.models.turn(owner, name):
                    order.append(name)
                    if len(order) == IN_LINE:
                        full.set()
                    if owner == "ann":
                        await go_on.wait()

            anns = [asyncio.ensure_future(use("ann", f"a{number}")) for number in range(6)]
            bobs = asyncio.ensure_future(use("bob", "b"))
            await full.wait()
            assert order == ["a0", "a1"]
            cancelled = anns.pop()
            cancelled.cancel()
            go_on.set()
            await asyncio.gather(*anns, bobs)
            assert order == ["a0", "a1", "b", "a2", "a3", "a4"]
            assert cancelled.cancelled()

    asyncio.run(scenario())


# -- local requests only ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", ["x-forwarded-for", "forwarded", "x-real-ip", "x-forwarded-host", "via"]
)
def test_forwarded_request_does_not_count_as_local(running, saved, header):
    with httpx.Client(trust_env=False) as http:
        refused = http.post(
            f"{running.url}/local/import",
            params=QUERY,
            headers=TAR | {header: "127.0.0.1"},
            content=tar(*saved.items()),
        )
    assert refused.status_code == 403
    assert "forwarded" in refused.json()["detail"]


def test_service_behind_a_proxy_refuses_imports(saved):
    with service("fake", behind_proxy=True) as running:
        refused = post(running, saved)
        assert refused.status_code == 403
        assert "--behind-proxy" in refused.json()["detail"]
