"""Who may call the service, and as whom: keys kept as digests."""

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

#: Who everybody is where no keys are needed.
LOCAL_OWNER: Final = "local"

_HASHED: Final = "sha256:"
_FIELD: Final = "api_key_file"
_OWNER_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")
# What a header carries unharmed. Longer keys are better ones, but that is their owner's business.
_KEY: Final = re.compile(r"[!-~]{8,}")
_KEY_RULE: Final = "a key is at least 8 visible ASCII characters without spaces"
_HOW_TO_SEND: Final = "send one as 'x-api-key: <key>' or 'authorization: Bearer <key>'"


def hash_key(key: str) -> str:
    """The form of a key that can stand in a key file without giving the key away."""
    if not _KEY.fullmatch(key):
        raise InvalidInputError(_KEY_RULE, field="api_key")
    return _HASHED + _digest(key).hex()


def _digest(key: str) -> bytes:
    # Plain SHA-256 is enough for keys that were drawn at random; a slow hash would cost every request.
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a service, by their owners' names; None where no key is needed."""

    _digests: Mapping[str, bytes] | None = field(repr=False)

    @classmethod
    def open(cls) -> Keys:
        """No keys: everybody is the same owner."""
        return cls(None)

    @classmethod
    def from_file(cls, path: Path) -> Keys:
        """Keys from a text file, one a line; blank lines and those that begin with `#` do not count.

        A line is `name: sha256:<hex>` (see `hash_key`), `name: <key>`, or either without a name. Keys
        without one become `key-1`, `key-2` and so on in their order; what a key may see hangs on its name,
        so where keys come and go they should have names of their own.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", field=_FIELD) from error
        except UnicodeDecodeError:  # its own message would show bytes of keys
            raise ConfigError(f"{path} is not a UTF-8 text file", field=_FIELD) from None
        return cls(_parse(path, text))

    @property
    def needed(self) -> bool:
        return self._digests is not None

    def owner(self, headers: Mapping[str, str]) -> str:
        """Whose request this is; header names are lower-case."""
        if self._digests is None:
            return LOCAL_OWNER
        key = _key_of(headers)
        if not key:
            raise AuthenticationError(f"This service needs an API key: {_HOW_TO_SEND}.")
        given = _digest(key)
        # All are compared, whichever fits, so that time tells nothing.
        fits = [
            name for name, digest in self._digests.items() if hmac.compare_digest(digest, given)
        ]
        if not fits:
            raise AuthenticationError(
                "A token of auth/token is good as weights_access_token only; send the key itself as x-api-key."
                if key.startswith("eyJ")
                else f"This service does not know the API key: {_HOW_TO_SEND}."
            )
        return fits[0]

    def digest(self, owner: str) -> bytes | None:
        """The digest of an owner's key; None if the owner has none, or no longer."""
        return (self._digests or {}).get(owner)


def _key_of(headers: Mapping[str, str]) -> str:
    if key := headers.get("x-api-key", "").strip():
        return key
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _parse(path: Path, text: str) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    names: dict[str, int] = {}  # lines on which names and keys were first seen
    keys: dict[bytes, int] = {}
    unnamed = 0
    # Not `splitlines`, which knows more ends of a line than an editor counts.
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
                raise _BadLineError(f"its name is taken by line {names[name]}")
            if digest in keys:
                raise _BadLineError(f"the same key stands on line {keys[digest]}")
        except _BadLineError as error:
            raise ConfigError(f"{path}, line {number}: {error}", field=_FIELD) from None
        names[name] = keys[digest] = number
        digests[name] = digest
    if not digests:
        raise ConfigError(f"{path} holds no keys", field=_FIELD)
    return digests


class _BadLineError(Exception):
    """What is wrong with a line, without what stands on it."""


def _parse_entry(entry: str) -> tuple[str | None, bytes]:
    if entry.startswith(_HASHED):
        return None, _parse_key(entry)
    name, colon, key = entry.partition(":")
    if not colon:
        return None, _parse_key(entry)
    # A colon may also stand inside a key; the space tells, and guessing would lock somebody out.
    if not key[:1].isspace():
        raise _BadLineError("write 'name: key', with a space after the colon")
    if not _OWNER_NAME.fullmatch(name):
        raise _BadLineError("a name is 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_', '@', '-'")
    return name, _parse_key(key.strip())


def _parse_key(key: str) -> bytes:
    if key.startswith(_HASHED):
        digits = key.removeprefix(_HASHED)
        if not re.fullmatch(r"[0-9A-Fa-f]{64}", digits):
            raise _BadLineError("'sha256:' is to be followed by 64 hexadecimal digits")
        return bytes.fromhex(digits)
    if not _KEY.fullmatch(key):
        raise _BadLineError(_KEY_RULE)
    return _digest(key)


def require_keys(host: str, keys: Keys) -> None:
    """Refuse to listen where others can connect while nobody needs a key."""
    if not keys.needed and not is_loopback(host):
        raise ConfigError(
            f"{host!r} can be reached from other machines, and no keys are set; pass "
            "--api-key-file, or listen on 127.0.0.1",
            field="host",
        )
