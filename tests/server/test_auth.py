"""API keys in files and headers, and services without keys."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import AuthenticationError, ConfigError, InvalidInputError
from tinkex.server.auth import Keys, hash_key, require_keys

ALICE = "tml-alice-0001"
BOB = "tml-bob-000002"
CAROL = "tml:carol:3333"


@pytest.fixture
def load(tmp_path):
    def load(text):
        file = tmp_path / "keys.txt"
        file.write_text(text, encoding="utf-8")
        return Keys.from_file(file)

    return load


@pytest.fixture
def keys(load):
    return load(
        f"# who may call\n\nalice: {hash_key(ALICE)}\n  {BOB}  \r\ncarol@example.org:  {CAROL}\n"
        f"   # {ALICE}\n{hash_key('tml-dave-4444')}"
    )


# --- the owner of a request


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (ALICE, "alice"),
        (BOB, "key-1"),
        (CAROL, "carol@example.org"),
        ("tml-dave-4444", "key-2"),
    ],
)
def test_a_key_identifies_its_owner(keys, key, name):
    assert keys.owner({"x-api-key": key}) == name
    assert keys.owner({"authorization": f"Bearer {key}"}) == name
    assert keys.owner({"authorization": f"bearer   {key} "}) == name


def test_the_api_key_header_takes_precedence_over_a_bearer_token(keys):
    assert keys.owner({"x-api-key": ALICE, "authorization": f"Bearer {BOB}"}) == "alice"
    assert keys.owner({"x-api-key": "", "authorization": f"Bearer {BOB}"}) == "key-1"
    with pytest.raises(AuthenticationError):
        keys.owner({"x-api-key": "tml-unknown", "authorization": f"Bearer {BOB}"})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"x-api-key": ALICE + "x"},
        {"x-api-key": ALICE[:-1]},
        {"x-api-key": ALICE.upper()},
        {"x-api-key": hash_key(ALICE)},  # the hash from the key file is no key
        {"x-api-key": hash_key(ALICE).removeprefix("sha256:")},
        {"x-api-key": "alice"},
        {"x-api-key": f"alice: {ALICE}"},
        {"x-api-key": "\udcff\u2603"},
        {"authorization": ALICE},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": "Bearer"},
    ],
)
def test_an_unknown_key_is_refused_and_not_shown(keys, headers):
    with pytest.raises(AuthenticationError) as caught:
        keys.owner(headers)
    assert caught.value.status_code == 401
    message = str(caught.value)
    assert "x-api-key" in message
    assert "authorization: Bearer" in message
    for part in ("alice", "tml-", "sha256", hash_key(ALICE)[7:], "☃"):
        assert part not in message.lower()


@given(st.text())
def test_any_header_text_is_handled(key):
    keys = Keys({"alice": hashlib.sha256(ALICE.encode()).digest()})
    with pytest.raises(AuthenticationError):
        keys.owner({"x-api-key": key})


def test_without_keys_every_request_has_the_local_owner():
    keys = Keys.open()
    assert not keys.needed
    for headers in ({}, {"x-api-key": ALICE}, {"authorization": "nonsense"}):
        assert keys.owner(headers) == "local"


def test_keys_are_not_shown_in_repr(keys):
    assert keys.needed
    shown = repr(keys) + str(keys)
    for key in (ALICE, BOB, CAROL):
        digest = hashlib.sha256(key.encode())
        for secret in (key, digest.hexdigest(), repr(digest.digest())):
            assert secret not in shown


# --- key files


def test_a_hashed_key_has_the_documented_form():
    assert hash_key("tml-12345") == "sha256:" + hashlib.sha256(b"tml-12345").hexdigest()


@pytest.mark.parametrize("key", ["", "short12", "with a space", "schlüssel1"])
def test_an_invalid_key_is_not_hashed(key):
    with pytest.raises(InvalidInputError, match="at least 8") as caught:
        hash_key(key)
    assert not key or key not in str(caught.value)


def test_a_hash_may_be_upper_case(load):
    digits = hash_key(ALICE).removeprefix("sha256:").upper()
    assert load(f"sha256:{digits}").owner({"x-api-key": ALICE}) == "key-1"


def test_a_byte_order_mark_is_ignored(load):
    assert load(f"\ufeff{ALICE}\n").owner({"x-api-key": ALICE}) == "key-1"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (f"alice: {ALICE}\nalice: {BOB}", 2, "line 1 already uses this name"),
        (f"{ALICE}\nkey-1: {BOB}", 2, "line 1 already uses this name"),
        (f"alice: {ALICE}\n# bob\nbob: {ALICE}", 3, "line 1 already has the same key"),
        (f"alice: {ALICE}\n\n{hash_key(ALICE)}", 3, "line 1 already has the same key"),
        (f"{ALICE}\nsecret7", 2, "at least 8"),
        ("bob: secret7", 1, "at least 8"),
        ("bob: ", 1, "space after the colon"),
        ("bob: secret secret", 1, "without spaces"),
        ("secret secret", 1, "without spaces"),
        ("bob: schlüssel-secret", 1, "ASCII"),
        ("bob:secretsecret", 1, "space after the colon"),
        (": secretsecret", 1, "a name is"),
        ("bob the builder: secretsecret", 1, "a name is"),
        ("bob: sha256:secret", 1, "64 hexadecimal"),
        (f"sha256: {'0' * 64}", 1, "64 hexadecimal"),
        (f"sha256:{'0' * 63}", 1, "64 hexadecimal"),
    ],
)
def test_an_invalid_line_is_reported_by_number_and_not_shown(load, text, line, why):
    with pytest.raises(ConfigError, match=why) as caught:
        load(text)
    assert caught.value.field == "api_key_file"
    message = str(caught.value)
    assert f"keys.txt, line {line}:" in message
    for secret in ("secret", ALICE, BOB, "0" * 63):
        assert secret not in message
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("text", ["", "\n \n", "# nobody yet\n"])
def test_a_key_file_without_keys_is_refused(load, text):
    with pytest.raises(ConfigError, match="holds no keys"):
        load(text)


def test_an_unreadable_key_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.txt cannot be read"):
        Keys.from_file(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"secret-\xff\xfe")
    with pytest.raises(ConfigError, match="not a UTF-8 text file") as caught:
        Keys.from_file(tmp_path / "binary")
    assert caught.value.__suppress_context__


def test_keys_are_read_again_and_a_wrong_file_changes_nothing(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text(f"alice: {ALICE}\nbob: {BOB}\n")
    keys = Keys.from_file(file)
    file.write_text(f"alice: {CAROL}\n")
    assert keys.reload() == ["alice"]
    assert keys.owner({"x-api-key": CAROL}) == "alice"
    for gone in (ALICE, BOB):
        with pytest.raises(AuthenticationError):
            keys.owner({"x-api-key": gone})
    file.write_text("")
    with pytest.raises(ConfigError, match="holds no keys"):
        keys.reload()
    assert keys.owner({"x-api-key": CAROL}) == "alice"
    assert Keys.open().reload() == []


# --- where to listen


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "LocalHost"]
)
def test_loopback_needs_no_keys(host, keys):
    require_keys(host, Keys.open())
    require_keys(host, keys)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "", "192.168.1.4", "128.0.0.1", "example.org", "localhost.example.org"],
)
def test_other_addresses_need_keys(host, keys):
    with pytest.raises(ConfigError, match="--api-key-file"):
        require_keys(host, Keys.open())
    require_keys(host, keys)
