"""Credentials: keys, commands that print keys, and tokens obtained for keys."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tinkex._client.auth import (
    _from_command,
    claims,
    config_with_login,
    get_tinker_token,
    raise_if_tinker_not_accessible,
    stored_key,
    tinker_has_credentials,
)
from tinkex.config import KEYLESS
from tinkex.errors import (
    APIResponseValidationError,
    AuthenticationError,
    ConfigError,
    DecodeError,
    InternalServerError,
)

from ..scripted import Answer, FakeClock, Raw, Request, ScriptedServer
from .helpers import until

EXCHANGE = "POST /api/v1/auth/token"
CONFIG = "POST /api/v1/client/config"
HEALTH = "GET /api/v1/healthz"
Service = Callable[..., tinkex.ServiceClient]


def part(content: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


def token(**content: Any) -> str:
    return f"{part({'alg': 'none'})}.{part(content)}.signature"


@pytest.fixture
def exchanging(server: ScriptedServer, clock: FakeClock) -> ScriptedServer:
    """A service that requires tokens, each valid for one hour."""
    issued = 0

    def issue(_: Any) -> Answer:
        nonlocal issued
        issued += 1
        jwt = token(exp=clock.now + 3600, number=issued, sub="u-1", org_id="o-1", email="a@b.c")
        return Answer({"jwt": jwt})

    server.on(CONFIG, Answer({"pjwt_auth_enabled": True}))
    server.on(EXCHANGE, issue)
    server.on(HEALTH, Answer({"status": "ok"}))
    return server


def keys(server: ScriptedServer, route: str) -> list[str]:
    return [request.headers["x-api-key"] for request in server.asked(route)]


def numbers(server: ScriptedServer) -> list[int]:
    """The numbers of the issued tokens that the requests carried."""
    return [claims(key)["number"] for key in keys(server, HEALTH)]


# -- keys -----------------------------------------------------------------------------------------


def test_api_key_is_sent_unchanged(server, service):
    server.on(HEALTH, Answer({"status": "ok"}))
    service(api_key="tml-mine").health()
    assert keys(server, HEALTH) == ["tml-mine"]
    assert "authorization" not in server.asked(HEALTH)[0].headers


# -- commands -------------------------------------------------------------------------------------


@pytest.fixture
def of_command(server: ScriptedServer, service: Service, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Creates a client whose key comes from a command."""
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    server.on(HEALTH, Answer({"status": "ok"}))
    return lambda credential_cmd: service(api_key=None, credential_cmd=credential_cmd)


def test_credential_command_runs_once(server, of_command, tmp_path):
    runs = tmp_path / "runs"
    client = of_command(f"echo run >> {shlex.quote(str(runs))}; echo '  tml-printed  '")
    futures = [client.http.get("/api/v1/healthz") for _ in range(5)]
    for future in futures:
        future.result(10)
    assert set(keys(server, HEALTH)) == {"tml-printed"}
    assert runs.read_text() == "run\n"


def test_stream_waits_for_credential_command(server, of_command):
    client = of_command("echo tml-printed")

    async def work() -> None:
        async with client.http.with_streaming_response("GET", "/api/v1/healthz") as response:
            assert response.status == 200

    asyncio.run(work())
    assert keys(server, HEALTH) == ["tml-printed"]


@pytest.mark.parametrize(
    ("credential_cmd", "complaint"),
    [
        ("echo tml-SECRET; echo no luck >&2; exit 3", "status 3 and an error: no luck"),
        ("true SECRET", "status 0 and no key"),
        ("false SECRET", "status 1 and no key"),
        ("echo tml-SECRET more", "more than a key"),
        ("printf 'tml-SECRET\\nmore\\n'", "more than a key"),
    ],
)
def test_error_of_credential_command_does_not_quote_its_output(
    server, of_command, credential_cmd, complaint
):
    client = of_command(credential_cmd)
    with pytest.raises(ConfigError) as raised:
        client.health()
    assert raised.value.field == "credential_cmd"
    assert complaint in str(raised.value)
    assert "SECRET" not in str(raised.value)
    assert server.requests == []


def test_credential_command_has_timeout():
    with pytest.raises(ConfigError, match="did not end within") as raised:
        _from_command("exec sleep 30 # SECRET", timeout=0.01)
    assert "SECRET" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_binary_output_of_credential_command_is_refused(of_command):
    with pytest.raises(ConfigError):
        of_command(r"printf '\377 \377'").health()


def test_failed_credential_command_is_run_again_by_next_call(server, of_command, tmp_path):
    flag = shlex.quote(str(tmp_path / "flag"))
    client = of_command(f"test -e {flag} && echo tml-late || (touch {flag}; exit 1)")
    with pytest.raises(ConfigError):
        client.health()
    client.health()
    assert keys(server, HEALTH) == ["tml-late"]


# -- tokens ---------------------------------------------------------------------------------------


def test_key_is_exchanged_for_token_if_flag_is_set(exchanging, service):
    service().health()
    assert keys(exchanging, CONFIG) == ["tml-test"]
    assert keys(exchanging, EXCHANGE) == ["tml-test"]
    assert exchanging.asked(EXCHANGE)[0].json == {}
    assert numbers(exchanging) == [1]


def test_key_is_not_exchanged_without_flag(server, service):
    server.on(HEALTH, Answer({"status": "ok"}))
    service().health()
    assert server.asked(EXCHANGE) == []


def test_concurrent_calls_share_one_exchange(exchanging, service):
    client = service()
    futures = [client.create_rest_client().whoami() for _ in range(10)]
    for future in futures:
        future.result(10)
    assert len(exchanging.asked(EXCHANGE)) == 1


def test_a_token_is_renewed_in_its_last_minute(exchanging, service, clock):
    client = service()
    client.health()
    clock.now += 3600 - 61
    client.health()
    assert numbers(exchanging) == [1, 1]
    clock.now += 2
    client.health()
    assert numbers(exchanging) == [1, 1, 2]
    assert keys(exchanging, EXCHANGE) == ["tml-test", "tml-test"]


def test_failed_exchange_fails_call_and_is_repeated_by_next(exchanging, service, clock):
    good = token(exp=clock.now + 3600, number=7)
    exchanging.on(EXCHANGE, Answer({"detail": "unknown key"}, 401), Answer({"jwt": good}))
    client = service()
    with pytest.raises(AuthenticationError, match="unknown key"):
        client.health()
    assert exchanging.asked(HEALTH) == []
    client.health()
    assert numbers(exchanging) == [7]


def test_an_exchange_is_retried_like_any_call(exchanging, service, clock):
    good = token(exp=clock.now + 3600, number=7)
    exchanging.on(EXCHANGE, Answer({}, 503), Raw(b""), Answer({"jwt": good}))
    service().health()
    assert numbers(exchanging) == [7]
    assert keys(exchanging, EXCHANGE) == ["tml-test"] * 3


@pytest.mark.parametrize("bad", ["no token", "eyJ.eyJ", token(sub="x"), token(exp="soon")])
def test_malformed_token_is_never_sent(exchanging, service, bad):
    exchanging.on(EXCHANGE, Answer({"jwt": bad}))
    with pytest.raises(DecodeError, match="jwt"):
        service().health()
    assert exchanging.asked(HEALTH) == []


def test_an_expired_token_is_not_kept_when_its_renewal_fails(exchanging, service, clock):
    client = service(max_retries=0)
    client.health()
    clock.now += 4000
    exchanging.on(EXCHANGE, Answer({"detail": "down"}, 500, {"x-should-retry": "false"}))
    with pytest.raises(InternalServerError, match="down"):
        client.health()
    assert len(exchanging.asked(HEALTH)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eyJ",
        "a.b.c",
        f"x.{part([1])}.x",
        f"x.{part('exp')}.x",
        f"x.{part({})}.x",
        f"x.{part({'exp': None})}.x",
        f"x.{part({'exp': 'never'})}.x",
        f"x.{base64.urlsafe_b64encode(b'{').decode()}.x",
        "x.\xff.x",
    ],
)
def test_claims_of_malformed_token_are_refused(text):
    with pytest.raises(DecodeError, match="not a JWT"):
        claims(text)


def test_claims_are_read_without_padding_and_with_numeric_expiry():
    assert claims(token(exp=5, sub="é" * 3)) == {"exp": 5.0, "sub": "ééé"}


# -- whoami ---------------------------------------------------------------------------------------


def test_whoami_reads_the_token(exchanging, service):
    me = service().create_rest_client().whoami().result(10)
    assert (me.user_urn, me.org_urn, me.email) == ("u-1", "tml:organization:o-1", "a@b.c")


def test_whoami_needs_service_that_issues_tokens(server, service):
    with pytest.raises(AuthenticationError, match="who you are"):
        service().create_rest_client().whoami().result(10)


@pytest.mark.parametrize("issuer", ["passport-prod", "elsewhere", None])
def test_whoami_reads_token_given_as_key_if_identity_service_issued_it(
    server, service, clock, issuer
):
    own = token(exp=clock.now + 3600, sub="u-2", org_id="o-2", iss=issuer)
    asked = service(api_key=own).create_rest_client().whoami()
    if issuer == "passport-prod":
        assert asked.result(10).user_urn == "u-2"
        assert asked.result(10).email is None
    else:
        with pytest.raises(AuthenticationError):
            asked.result(10)


@pytest.mark.parametrize("missing", ["sub", "org_id"])
def test_whoami_raises_if_token_lacks_a_claim(exchanging, service, clock, missing):
    content = {"exp": clock.now + 3600, "sub": "u", "org_id": "o"}
    del content[missing]
    exchanging.on(EXCHANGE, Answer({"jwt": token(**content)}))
    with pytest.raises(APIResponseValidationError, match=missing):
        service().create_rest_client().whoami().result(10)


# -- stored logins --------------------------------------------------------------------------------

LOGIN = {"default": 2, "keys": {"1": {"key": "tml-one"}, "2": {"key": "tml-two"}}}


def test_the_default_key_of_a_stored_login_is_found(tmp_path):
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(LOGIN))
    assert stored_key(file) == "tml-two"


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"default": 1}',
        '{"default": 1, "keys": {}}',
        '{"default": 1, "keys": {"1": {}}}',
        '{"default": 1, "keys": {"1": {"key": 5}}}',
        '{"default": 1, "keys": {"1": {"key": ""}}}',
        b"\xff\xfe",
    ],
)
def test_unreadable_stored_login_is_ignored(tmp_path, content):
    file = tmp_path / "credentials.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert stored_key(file) is None


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without a login, and an environment without keys."""
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    return tmp_path


def test_error_without_credential_says_what_to_set(home):
    assert get_tinker_token() is None
    assert not tinker_has_credentials()
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        raise_if_tinker_not_accessible()


def test_credential_comes_from_environment_command_or_login(home, monkeypatch):
    (home / ".tinker").mkdir()
    (home / ".tinker" / "credentials.json").write_text(json.dumps(LOGIN))
    assert get_tinker_token() == "tml-two"
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo tml-printed")
    assert get_tinker_token() == "tml-printed"
    monkeypatch.setenv("TINKER_API_KEY", "tml-given")
    assert get_tinker_token() == "tml-given"
    assert tinker_has_credentials()
    raise_if_tinker_not_accessible()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.3.2.1"])
def test_loopback_service_is_called_without_key(home, host):
    assert config_with_login(base_url=f"http://{host}:8787").api_key == KEYLESS


@pytest.mark.parametrize("host", ["10.0.0.1", "localhost.example.com", "127.0.0.1.example.com"])
def test_remote_service_is_not_called_without_key(home, host):
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        config_with_login(base_url=f"http://{host}:8787")


def test_stored_login_is_used_before_keyless_call(home):
    (home / ".tinker").mkdir()
    (home / ".tinker" / "credentials.json").write_text(json.dumps(LOGIN))
    assert config_with_login(base_url="http://127.0.0.1:1").api_key == "tml-two"


def test_a_stored_login_is_the_last_resort_for_a_key(tmp_path, server):
    script = (
        "import tinkex\n"
        "print(tinkex.ServiceClient().config.api_key)\n"
        "print(tinkex.RestClient().holder.config.api_key)\n"
    )
    login = {
        "version": 1,
        "default": 7,
        "keys": {"7": {"type": "manual", "key": "tml-stored", "name": "me"}},
    }
    home = tmp_path / ".tinker"
    home.mkdir()
    (home / "credentials.json").write_text(json.dumps(login))

    def keys(**environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script],
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert keys().stdout.split() == ["tml-stored", "tml-stored"]
    assert keys(TINKER_API_KEY="tml-given").stdout.split() == ["tml-given", "tml-given"]
    malformed = keys(TINKER_API_KEY="nonsense")
    assert malformed.returncode == 1
    assert "ConfigError" in malformed.stderr
    assert "nonsense" not in malformed.stderr


def test_token_is_renewed_in_background_before_expiry(server, service, clock):
    server.on("POST /api/v1/client/config", Answer({"pjwt_auth_enabled": True}))
    issued = itertools.count()

    def issue(_: Request) -> Answer:
        return Answer({"jwt": token(exp=clock.now + 3600, number=next(issued))})

    server.on("POST /api/v1/auth/token", issue)
    client = service()
    client.create_sampling_client(base_model="m")
    server.wait_for("POST /api/v1/auth/token", 1)
    until(lambda: clock.sleeping >= 3)  # heartbeat, flags, token
    clock.advance(3301)
    server.wait_for("POST /api/v1/auth/token", 2)


def test_queue_pause_of_new_model_is_logged(server, service, caplog):
    paused = {
        "type": "try_again",
        "request_id": "model",
        "queue_state": "paused_capacity",
        "queue_state_reason": "full house",
    }
    server.on_future("model", Answer(paused, 408), Answer({"model_id": "s-1:train:0"}))
    service().create_lora_training_client("some/model")
    assert "Training is paused for some/model. Reason: full house" in caplog.text
