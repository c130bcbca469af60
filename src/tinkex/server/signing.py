"""Signed links and tokens: they open a checkpoint without an API key, until they expire."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from tinkex.engine.files import flush, make_directory
from tinkex.errors import AuthenticationError, ConfigError, PermissionDeniedError

from .names import scratch_path

__all__ = ["Signer"]

_SECRET_BYTES: Final = 32
#: The only permission that a token gives.
_SCOPE: Final = "weights:read"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Signer:
    """Signs links and tokens with a secret, and verifies them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def from_file(cls, path: Path) -> Signer:
        """A signer with the secret of a file, so that links survive a restart. Creates a missing file."""
        try:
            secret = path.read_bytes()
        except FileNotFoundError:
            secret = _create_secret(path)
        if len(secret) < _SECRET_BYTES:
            raise ConfigError(
                f"{path} holds {len(secret)} bytes, but a secret has at least {_SECRET_BYTES}; "
                "remove the file and the service creates a new one"
            )
        return cls(secret)

    def sign(self, path: str, expires_at: datetime) -> str:
        """The query string that opens the URL path `path` until `expires_at`, in whole seconds."""
        expires = str(_seconds(expires_at))
        return f"expires={expires}&signature={self._signature(path, expires)}"

    def check(self, path: str, expires: str, signature: str, now: datetime) -> None:
        """Refuse a link that has expired or that this signer did not sign for this path.

        `expires` and `signature` are the raw query values; pass an empty string for a missing one.
        """
        # Digits only: otherwise an expiry could contain a newline and part of the path.
        genuine = expires.isascii() and expires.isdigit()
        expected = self._signature(path, expires) if genuine else ""
        given = signature.encode("utf-8", "backslashreplace")
        if not hmac.compare_digest(expected.encode(), given) or not genuine:
            raise PermissionDeniedError("The link's signature is wrong; ask for a new link.")
        if _seconds(now) >= int(expires):
            raise PermissionDeniedError("The link has expired; ask for a new one.")

    def token(self, owner: str, key_digest: bytes, expires_at: datetime) -> str:
        """A JSON web token that reads an owner's weights until it expires or the owner's key changes.

        Anyone who holds the token can read its claims. They identify the key by a keyed hash, because a plain
        hash would let the holder guess keys offline.
        """
        header = {"alg": "HS256", "typ": "JWT"}
        claims = {
            "iss": "tinkex",
            "sub": f"tml:user:{owner}",
            "org_id": "local",
            "scope": _SCOPE,
            "owner": owner,
            "key": self._mark(key_digest),
            "exp": _seconds(expires_at),
        }
        unsigned = f"{_base64(json.dumps(header).encode())}.{_base64(json.dumps(claims).encode())}"
        return f"{unsigned}.{self._token_signature(unsigned)}"

    def token_owner(
        self, token: str, digest_of: Callable[[str], bytes | None], now: datetime
    ) -> str:
        """The owner whose weights a token reads; `digest_of` returns the digest of an owner's current key."""
        unsigned, _, signature = token.rpartition(".")
        expected = self._token_signature(unsigned).encode()
        if not hmac.compare_digest(expected, signature.encode("utf-8", "backslashreplace")):
            raise AuthenticationError("the token was not signed by this service")
        payload = unsigned.partition(".")[2]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        if claims.get("scope") != _SCOPE:
            raise AuthenticationError("the token does not permit reading weights")
        if _seconds(now) >= claims["exp"]:
            raise AuthenticationError("the token has expired; ask for a new one")
        owner = str(claims["owner"])
        digest = digest_of(owner)
        if digest is None or not hmac.compare_digest(self._mark(digest), str(claims["key"])):
            raise AuthenticationError("the API key that requested the token is no longer valid")
        return owner

    def _mark(self, key_digest: bytes) -> str:
        """A keyed hash that identifies a key without disclosing anything else about it."""
        return hmac.new(self._secret, b"key\0" + key_digest, hashlib.sha256).hexdigest()[:32]

    def _token_signature(self, unsigned: str) -> str:
        message = unsigned.encode("utf-8", "surrogatepass")
        return _base64(hmac.new(self._secret, message, hashlib.sha256).digest())

    def _signature(self, path: str, expires: str) -> str:
        message = f"{expires}\n{path}".encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _seconds(moment: datetime) -> int:
    # A subtraction, not `timestamp()`: it raises for a naive datetime, where `timestamp()` would
    # assume local time.
    return (moment - _EPOCH) // timedelta(seconds=1)


def _create_secret(path: Path) -> bytes:
    make_directory(path.parent)
    scratch = scratch_path(path)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        flush(scratch)
        # A hard link, unlike a rename, never replaces a file: if two processes start together, the first
        # one creates the secret and both read it.
        with suppress(FileExistsError):
            path.hardlink_to(scratch)
    finally:
        scratch.unlink()
    flush(path.parent)
    return path.read_bytes()
