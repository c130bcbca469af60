"""Commands that show runs, sessions, models and the service."""

from __future__ import annotations

import base64
import csv
import json
import re
import socket
import threading
from datetime import UTC, datetime, timedelta

import pytest

from tinkex._version import __version__
from tinkex.cli import doctor
from tinkex.cli.status import _engines
from tinkex.types import EngineHealth

from ..scripted import Answer
from .commands import payload, process, run
from .conftest import TINY


@pytest.fixture(scope="module")
def training(here):
    training = here.client.create_lora_training_client(
        TINY, rank=4, user_metadata={"of": "looking"}
    )
    training.save_state("last").result()
    return training


# -- runs and sessions -----------------------------------------------------------------------------


def test_runs(here, training):
    printed = here.ask("run list", "--limit", 1)
    assert printed["shown"] == 1
    assert printed["total"] >= 1
    shown = here.type("run", "list", "--limit", 0)
    head, *rows = shown.out.splitlines()
    assert re.split(r"\s{2,}", head) == [
        "Run ID", "Base Model", "Owner", "LoRA", "Status", "Last Update",
    ]  # fmt: skip
    (row,) = [row for row in rows if training.model_id in row]
    assert "Yes (rank 4)" in row
    assert "Active" in row
    some = here.quick("run", "list", "--columns", "lora, run id", "--access-scope", "accessible")
    assert some.out.splitlines()[0].split() == ["LoRA", "Run", "ID"]
    wrong = here.quick("run", "list", "--columns", "colour")
    assert wrong.code == 2
    assert "checkpoint_time" in wrong.err
    official = "id,model,owner,lora,updated,status,checkpoint,checkpoint_time"
    head, *rows = here.quick("run", "list", "-c", official, "--limit", 0).out.splitlines()
    assert re.split(r"\s{2,}", head)[-2:] == ["Last Checkpoint", "Checkpoint Time"]
    (row,) = [row for row in rows if training.model_id in row]
    *_, last, saved = re.split(r"\s{2,}", row)
    assert last == "weights/last"
    assert saved.endswith(("now", "ago"))
    assert here.quick("run", "list", "--access-scope", "stolen").code == 2


def test_a_run(here, training):
    printed = here.ask("run info", training.model_id)
    assert printed["training_run_id"] == training.model_id
    last = printed["last_checkpoint"]["tinker_path"]
    by_path = here.quick("run", "info", last)
    assert f"Last checkpoint:  {last}" in by_path.out
    assert "of=looking" in by_path.out
    unknown = here.type("run", "info", "nobody:train:0")
    assert (unknown.code, unknown.out) == (1, "")
    assert unknown.err == "Error: There is no training run nobody:train:0. (status 404)\n"
    for command in (["checkpoint", "list"], ["checkpoint", "delete", "--yes"]):
        unknown = here.quick(*command, "--run-id", "nobody:train:0")
        assert "There is no training run nobody:train:0." in unknown.err


def test_sessions(here, training, tmp_path):
    session_id = training.model_id.partition(":")[0]
    printed = here.ask("session list", "--limit", 0)
    assert session_id in printed["sessions"]
    assert session_id in here.quick("session", "list", "--limit", 0).out
    info = here.ask("session info", session_id)
    assert training.model_id in info["training_run_ids"]
    assert here.quick("session", "info", "nobody").code == 1
    file = tmp_path / "trace"
    fetched = here.quick("session", "export-trace", session_id, "-o", file, "--json")
    printed = payload("session export-trace", fetched)
    assert printed["destination"] == str(file)
    assert list(tmp_path.iterdir()) == [file]
    url = here.quick("session", "export-trace", session_id, "--url-only").out
    assert url.startswith("http")
    unknown = here.quick("session", "export-trace", "nobody", "-o", tmp_path / "none")
    assert unknown.code == 1
    assert list(tmp_path.iterdir()) == [file]


# -- the service -----------------------------------------------------------------------------------


def test_models(here):
    printed = here.ask("model list")
    (tiny,) = [model for model in printed["models"] if model["model_name"] == TINY]
    assert tiny["max_context_length"] > 0
    head, row = here.quick("model", "list", "TINY").out.splitlines()
    assert head.split() == ["Model", "Context", "Train", "Sample"]
    assert row.split() == [TINY, str(tiny["max_context_length"]), "yes", "yes"]
    assert payload("model list", here.quick("model", "list", "none", "--json")) == {"models": []}


@pytest.mark.parametrize(
    ("up", "trouble", "state"),
    [(True, None, "up"), (True, "no progress", "stuck"), (False, "killed", "starting")],
)
def test_status_says_what_an_engine_does(up, trouble, state):
    lines = _engines([EngineHealth(name="engine-1", up=up, trouble=trouble)])["Engines"]
    assert re.split(" {2,}", lines)[2] == state


def test_status_shows_the_service_and_starts_none(here, training, tmp_path):
    printed = here.ask("status", TINKEX_DATA_DIR=str(here.data_dir))
    assert printed["base_url"] == printed["local_url"] == here.url
    assert printed["running"] is True
    assert TINY in printed["models"]
    assert printed["runs"] >= 1
    assert training.model_id in [one["training_run_id"] for one in printed["last_runs"]]
    told = here.quick("status").out
    assert re.search(rf"^Service: +{here.url} \(answers\)$", told, re.MULTILINE)
    assert "not running" not in told
    nowhere = tmp_path / "nowhere"
    local = process("status", "--base-url", "local", "--json", TINKEX_DATA_DIR=str(nowhere))
    printed = payload("status", local)
    assert (printed["running"], printed["local_url"]) == (False, None)
    local = process("status", "--base-url", "local", TINKEX_DATA_DIR=str(nowhere))
    assert "local (not running" in local.out
    assert not nowhere.exists()


def test_doctor_passes_on_a_healthy_setup(here):
    findings = here.ask("doctor")["findings"]
    assert {one["name"] for one in findings} == {
        "settings", "packages", "engine", "models", "disk", "port", "service", "key", "base models",
    }  # fmt: skip
    assert all(one["ok"] for one in findings)


@pytest.mark.heavy  # the commands look at torch
def test_doctor_says_what_to_do(tmp_path):
    gone = process("doctor", "--base-url", "http://127.0.0.1:1", "--json")
    findings = payload("doctor", gone, 1)["findings"]
    (service,) = [one for one in findings if not one["ok"]]
    assert service["name"] == "service"
    assert "tinkex serve" in service["advice"]
    keyless = process("doctor", TINKER_API_KEY="", HOME=str(tmp_path))
    assert keyless.code == 1
    for way in ("TINKER_API_KEY", "tinkex auth login", "--base-url local", "tinkex serve"):
        assert way in keyless.out
    wrong = process("doctor", "--base-url", "ftp://x")
    assert wrong.code == 1
    assert "--base-url" in wrong.out
    # Checks that do not depend on the settings still run.
    looked_at = {line.split()[1] for line in wrong.out.splitlines()[1:]}
    assert {"packages", "engine", "models", "disk", "port"} <= looked_at


@pytest.mark.heavy
def test_doctor_says_that_a_compiler_makes_the_engine_faster(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    without = doctor._engine()
    assert without.ok
    assert "C compiler" in without.advice


def test_doctor_tells_a_service_from_another_program_on_its_port(monkeypatch, here):
    host, _, port = here.url.rpartition("//")[2].rpartition(":")
    monkeypatch.setattr(doctor, "_SERVE", (host, int(port)))
    assert doctor._port().found == f"a service shows its page at http://{host}:{port}/"
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up_twice() -> None:
            for _ in range(2):
                other.accept()[0].close()

        threading.Thread(target=hang_up_twice, daemon=True).start()
        monkeypatch.setattr(doctor, "_SERVE", other.getsockname())
        finding = doctor._port()
    assert finding.found.startswith("another program uses")
    assert "--port" in finding.advice


def test_version():
    printed = payload("version", process("version", "--json"))
    assert printed["version"] == __version__
    told = process("--version")
    assert told.out == process("version").out
    assert told.out.startswith(f"tinkex {__version__} (")


# -- usage in full ---------------------------------------------------------------------------------


def test_billing(here, training, tmp_path):
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    between = [(now + timedelta(hours=hours)).isoformat() for hours in (-1, 1)]
    events, sessions = tmp_path / "events.csv", tmp_path / "sessions.csv"
    printed = here.ask("billing usage", *between, "--csv", events, "--sessions-csv", sessions)
    kinds = {event["event_info"]["type"] for event in printed["data"]}
    with events.open(newline="") as file:
        assert {row["type"] for row in csv.DictReader(file)} == kinds
    assert kinds
    assert "How much" in here.quick("billing", "usage", *between).out
    assert here.quick("billing", "usage", "then", "now").code == 1
    stored = here.ask("billing checkpoint-storage", "--csv", tmp_path / "storage.csv")
    assert stored["data"][0]["checkpoint_count"] >= 1
    assert "checkpoint_count" in (tmp_path / "storage.csv").read_text()


KEY_INFO = {
    "key_id": 7,
    "name": "laptop",
    "note": "",
    "details": {
        "org_details": {"name": "an organization"},
        "user_details": {"email": "a@b.c"},
    },
}


# -- the key ---------------------------------------------------------------------------------------


def test_login_is_stored_and_used_until_logout(here, tmp_path):
    home = {"HOME": str(tmp_path), "TINKER_API_KEY": ""}
    before = here.ask("auth status", **home)
    assert (before["source"], before["accepted"]) == (
        "none",
        True,
    )  # on this machine none is needed
    here.ask("auth login", input="tml-abcdefgh\n", **home)
    file = tmp_path / ".tinker" / "credentials.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    stored = json.loads(file.read_text())
    assert stored["keys"][stored["default"]]["key"] == "tml-abcdefgh"
    assert here.ask("auth status", **home)["source"] == "stored"
    assert here.ask("auth logout", **home) == {"forgotten": True, "revoked": False}
    assert "tml-abcdefgh" not in file.read_text()
    assert here.ask("auth status", **home)["source"] == "none"
    assert list(file.parent.iterdir()) == [file]


def test_login_without_a_key_or_with_a_bad_key_fails(here, tmp_path):
    home = {"HOME": str(tmp_path), "TINKER_API_KEY": ""}
    for key in ("\n", "", "no key\n"):
        outcome = here.type("auth", "login", input=key, **home)
        assert outcome.code == 1
        assert "Traceback" not in outcome.err
    assert not (tmp_path / ".tinker").exists()


def test_login_sends_the_key_itself_even_if_the_service_has_tokens(server, tmp_path):
    server.on("POST /api/v1/client/config", Answer({"pjwt_auth_enabled": True}))
    server.on("GET /api/v1/auth/apikey/me", Answer(KEY_INFO))
    home = {"HOME": str(tmp_path), "TINKER_API_KEY": ""}
    done = process("auth", "login", "--base-url", server.url, input="tml-abcdefgh\n", **home)
    assert done.code == 0, done.err
    (asked,) = server.requests
    assert asked.headers["x-api-key"] == "tml-abcdefgh"


def test_login_reports_an_answer_that_describes_no_key(server, tmp_path):
    server.on("GET /api/v1/auth/apikey/me", Answer({"key_id": "first"}))
    home = {"HOME": str(tmp_path), "TINKER_API_KEY": ""}
    done = process("auth", "login", "--base-url", server.url, input="tml-abcdefgh\n", **home)
    assert done.code == 1
    assert "key_id" in done.err
    assert "Traceback" not in done.err


def test_logout_revokes_a_key_that_a_login_generated(server, tmp_path):
    file = tmp_path / ".tinker" / "credentials.json"
    file.parent.mkdir()
    key = {"type": "generated", "key": "tml-abcdefgh"}
    file.write_text(json.dumps({"version": 1, "default": "7", "keys": {"7": key}}))
    server.on("DELETE /api/v1/auth/apikey/me", Answer({}))
    home = {"HOME": str(tmp_path), "TINKER_API_KEY": ""}
    done = process("auth", "logout", "--base-url", server.url, "--json", **home)
    assert payload("auth logout", done) == {"forgotten": True, "revoked": True}
    (asked,) = server.asked("DELETE /api/v1/auth/apikey/me")
    assert asked.headers["x-api-key"] == "tml-abcdefgh"


def test_whoami_shows_user_and_organization(here, server):
    unknown = here.quick("auth", "whoami")  # this service issues no tokens, which name the user
    assert unknown.code == 1
    assert "cannot say who you are" in unknown.err
    content = {"exp": 4e9, "sub": "user-1", "org_id": "org-1", "email": "a@b.c"}
    token = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    server.on("POST /api/v1/client/config", Answer({"pjwt_auth_enabled": True}))
    server.on("POST /api/v1/auth/token", Answer({"jwt": f"eyJ.{token}.x"}))
    known = run("auth", "whoami", "--base-url", server.url, "--json")
    assert payload("auth whoami", known)["org_urn"].endswith("org-1")
