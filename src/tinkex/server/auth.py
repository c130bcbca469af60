"""API keys: they identify the owner of a request. Only their digests are kept in memory."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tinkex.config import is_loopback
from tinkex.errors import AuthenticationError, ConfigError, InvalidInputError

__all__ = ["LOCAL_OWNER", "Keys", "hash_key", "require_keys"]

#: The owner of every request to a service without keys.
LOCAL_OWNER: Final = "local"

_HASHED: Final = "sha256:"
_FIELD: Final = "api_key_file"
_OWNER_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")
# Characters that every HTTP header can carry. Longer keys are safer; the operator decides.
_KEY: Final = re.compile(r"[!-~]{8,}")
_KEY_RULE: Final = "a key is at least 8 visible ASCII characters without spaces"
_HOW_TO_SEND: Final = "send one as 'x-api-key: <key>' or 'authorization: Bearer <key>'"


def hash_key(key: str) -> str:
    """The hash of a key, for a key file that must not contain the key itself."""
    if not _KEY.fullmatch(key):
        raise InvalidInputError(_KEY_RULE, field="api_key")
    return _HASHED + _digest(key).hex()


def _digest(key: str) -> bytes:
    # Plain SHA-256 is enough for random keys; a slow hash would slow down every request.
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()


@dataclass(slots=True)
class Keys:
    """The digests of a service's keys, by owner name; None if the service needs no key."""

    _digests: Mapping[str, bytes] | None = field(repr=False)
    _file: Path | None = None

    @classmethod
    def open(cls) -> Keys:
        """No keys: all requests belong to `LOCAL_OWNER`."""
        return cls(None)

    @classmethod
    def from_file(cls, path: Path) -> Keys:
        """Read keys from a text file, one per line; blank lines and lines that start with `#` are ignored.

        A line is `name: sha256:<hex>` (see `hash_key`), `name: <key>`, or either without a name. Unnamed keys
        are called `key-1`, `key-2` and so on, in file order. Data belongs to the name, so give keys names
        if you will add or remove some later.
        """
        return cls(_read(path), path)

    def reload(self) -> list[str]:
        """Read the file again and return the names in it; the next request needs one of these keys.

        A file that is wrong raises `ConfigError`, and the keys stay as they were.
        """
        if self._file is None:
            return []
        self._digests = _read(self._file)
        return list(self._digests)

    @property
    def needed(self) -> bool:
        return self._digests is not None

    def owner(self, headers: Mapping[str, str]) -> str:
        """The owner of a request with these headers; header names are lower-case."""
        if self._digests is None:
            return LOCAL_OWNER
        key = _key_of(headers)
        if not key:
            raise AuthenticationError(f"This service needs an API key: {_HOW_TO_SEND}.")
        given = _digest(key)
        # Compare with every digest, even after a match, so that the response time discloses nothing.
        fits = [
            name for name, digest in self._digests.items() if hmac.compare_digest(digest, given)
        ]
        if not fits:
            raise AuthenticationError(
                "A token from auth/token is valid only as weights_access_token; send the API key itself as x-api-key."
                if key.startswith("eyJ")
                else f"This service does not know the API key: {_HOW_TO_SEND}."
            )
        return fits[0]

    def digest(self, owner: str) -> bytes | None:
        """The digest of an owner's current key; None if the owner has no key."""
        return (self._digests or {}).get(owner)


def _key_of(headers: Mapping[str, str]) -> str:
    if key := headers.get("x-api-key", "").strip():
        return key
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _read(path: Path) -> dict[str, bytes]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field=_FIELD) from error
    except UnicodeDecodeError:  # its own message would show bytes of keys
        raise ConfigError(f"{path} is not a UTF-8 text file", field=_FIELD) from None
    return _parse(path, text)


def _parse(path: Path, text: str) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    names: dict[str, int] = {}  # lines on which names and keys were first seen
    keys: dict[bytes, int] = {}
    unnamed = 0
    # Not `splitlines`: it splits at more characters than editors do, so line numbers would differ.
    for number, line in enumerate(text.split("\n"), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        try:
            name, digest = _parse_entry(entry)
            if name is None:
                unnamed += 1
                name = f"key-{unnamed}"
            if name in names:
                raise _BadLineError(f"line {names[name]} already uses this name")
            if digest in keys:
                raise _BadLineError(f"line {keys[digest]} already has the same key")
        except _BadLineError as error:
            raise ConfigError(f"{path}, line {number}: {error}", field=_FIELD) from None
        names[name] = keys[digest] = number
        digests[name] = digest
    if not digests:
        raise ConfigError(f"{path} holds no keys", field=_FIELD)
    return digests


class _BadLineError(Exception):
    """Says what is wrong with a line without quoting it: the line contains a key."""


def _parse_entry(entry: str) -> tuple[str | None, bytes]:
    if entry.startswith(_HASHED):
        return None, _parse_key(entry)
    name, colon, key = entry.partition(":")
    if not colon:
        return None, _parse_key(entry)
    # A key may contain a colon too. Only a colon with a space separates; a wrong guess would lock a user out.
    if not key[:1].isspace():
        raise _BadLineError("write 'name: key', with a space after the colon")
    if not _OWNER_NAME.fullmatch(name):
        raise _BadLineError("a name is 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_', '@', '-'")
    return name, _parse_key(key.strip())


def _parse_key(key: str) -> bytes:
    if key.startswith(_HASHED):
        digits = key.removeprefix(_HASHED)
        if not re.fullmatch(r"[0-9A-Fa-f]{64}", digits):
            raise _BadLineError("'sha256:' must be followed by 64 hexadecimal digits")
        return bytes.fromhex(digits)
    if not _KEY.fullmatch(key):
        raise _BadLineError(f"{_KEY_RULE}; a line is a key, or 'name: key'")
    return _digest(key)


def require_keys(host: str, keys: Keys) -> None:
    """Refuse to listen on an address that other machines can reach, if no keys are set."""
    if not keys.needed and not is_loopback(host):
        raise ConfigError(
            f"{host!r} can be reached from other machines, but no keys are set; pass "
            "--api-key-file, or listen on 127.0.0.1",
            field="host",
        )
