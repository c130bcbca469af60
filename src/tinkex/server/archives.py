"""Checkpoints as files that leave the service: signed links, tar streams, exports.

Knows files and signatures; routes know the HTTP around them and the store knows which checkpoint lies where.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyrage  # type: ignore[import-untyped]

from tinkex.engine import directories
from tinkex.engine.files import flush, make_directory
from tinkex.errors import (
    AuthenticationError,
    ConfigError,
    InternalServerError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
)

__all__ = ["ADAPTER_FILES", "Signer", "Tar", "export", "validate_name"]

#: What of a checkpoint others can use; optimizer state and manifest mean something only here.
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")

_SECRET_BYTES: Final = 32
_CHUNK: Final = 1 << 20
_RECIPIENTS: Final = 10
#: What a token is good for.
_SCOPE: Final = "weights:read"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")


def validate_name(name: str) -> str:
    """The name of a checkpoint, which is also that of its directory, if it is fit for both."""
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name!r:.200} is not a name for a checkpoint: 1 to 255 of the characters A-Z, a-z, 0-9, "
            "'.', '_' and '-', not starting with '.'",
            field="path",
        )
    return name


class Signer:
    """Makes links that work without a key until they expire, and tells whether it made a link."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def from_file(cls, path: Path) -> Signer:
        """A signer with the secret in a file, which is made if there is none: links outlive a restart."""
        try:
            secret = path.read_bytes()
        except FileNotFoundError:
            secret = _create_secret(path)
        if len(secret) < _SECRET_BYTES:
            raise ConfigError(
                f"{path} holds {len(secret)} bytes, and a secret has at least {_SECRET_BYTES}; "
                "remove the file to have a new one made"
            )
        return cls(secret)

    def sign(self, path: str, expires_at: datetime) -> str:
        """The query string that opens `path`, as it is routed, until a moment (down to its second)."""
        expires = str(_seconds(expires_at))
        return f"expires={expires}&signature={self._signature(path, expires)}"

    def check(self, path: str, expires: str, signature: str, now: datetime) -> None:
        """Refuse a link that was not signed here for this path, or whose time is over.

        Both values are taken as they stand in the query; empty strings will do for missing ones.
        """
        # Digits only, so that no part of a path can pass for a part of an expiry.
        genuine = expires.isascii() and expires.isdigit()
        expected = self._signature(path, expires) if genuine else ""
        given = signature.encode("utf-8", "backslashreplace")
        if not hmac.compare_digest(expected.encode(), given) or not genuine:
            raise PermissionDeniedError("The link's signature is wrong; ask for a new link.")
        if _seconds(now) >= int(expires):
            raise PermissionDeniedError("The link has expired; ask for a new one.")

    def token(self, owner: str, key_digest: bytes, expires_at: datetime) -> str:
        """A JSON web token that lets its holder read an owner's weights until a moment, while the key lives.

        The claims can be read by whoever holds the token, so they name the key by a keyed hash: a plain one would let
        the holder try keys offline.
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
        """Whose weights a token reads; `digest_of` gives the digest of an owner's key as it is now."""
        unsigned, _, signature = token.rpartition(".")
        expected = self._token_signature(unsigned).encode()
        if not hmac.compare_digest(expected, signature.encode("utf-8", "backslashreplace")):
            raise AuthenticationError("the token was not made by this service")
        payload = unsigned.partition(".")[2]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        if claims.get("scope") != _SCOPE:
            raise AuthenticationError("the token is not for reading weights")
        if _seconds(now) >= claims["exp"]:
            raise AuthenticationError("the token has expired; ask for a new one")
        owner = str(claims["owner"])
        digest = digest_of(owner)
        if digest is None or not hmac.compare_digest(self._mark(digest), str(claims["key"])):
            raise AuthenticationError("the key of the token is no longer known here")
        return owner

    def _mark(self, key_digest: bytes) -> str:
        """What tells the key of an owner from the one that comes after it, and says nothing else about it."""
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
    # A difference rather than `timestamp()`: a moment without a zone fails here instead of being
    # taken for local time.
    return (moment - _EPOCH) // timedelta(seconds=1)


def _create_secret(path: Path) -> bytes:
    make_directory(path.parent)
    scratch = _scratch(path)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        flush(scratch)
        # A link, unlike a rename, never replaces: of two processes one wins, and both read its secret.
        with suppress(FileExistsError):
            path.hardlink_to(scratch)
    finally:
        scratch.unlink()
    flush(path.parent)
    return path.read_bytes()


def _scratch(path: Path) -> Path:
    # Without the name of `path`, which may be as long as names get.
    return path.with_name(f".{secrets.token_hex(8)}.tmp")


@dataclass(frozen=True, slots=True)
class _Content:
    """What an archive holds of one file: as many bytes as its header says."""

    file: Path
    facts: os.stat_result

    def __len__(self) -> int:
        return self.facts.st_size

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        with self.file.open("rb") as file:
            # A checkpoint that is saved anew gets new files: two halves make no whole.
            if _identity(os.fstat(file.fileno())) != _identity(self.facts):
                raise self._changed()
            file.seek(start)
            while start < stop and (chunk := file.read(min(stop - start, _CHUNK))):
                start += len(chunk)
                yield chunk
        if start < stop:
            raise self._changed()

    def _changed(self) -> InternalServerError:
        return InternalServerError(f"{self.file.name} changed while it was being sent.")


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    # Numbers of files are given out again when those are deleted.
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


#: Two empty blocks; the padding to a whole record that follows them on tapes is left out.
_END_OF_TAR: Final = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Tar:
    """Files of a directory as a tar that can be sent from anywhere on; the same files give the same bytes."""

    _parts: Sequence[bytes | _Content]
    #: Changes with the bytes.
    tag: str

    @classmethod
    def of(cls, directory: Path, names: Sequence[str]) -> Tar:
        """The tar of some files; what is wrong with them shows here, before a response has begun."""
        parts = [part for name in names for part in _entry(directory, name)]
        digest = hashlib.sha256()
        for part in parts:
            # A header has the time in whole seconds only.
            digest.update(part if isinstance(part, bytes) else b"%d" % part.facts.st_mtime_ns)
        return cls((*parts, _END_OF_TAR), digest.hexdigest()[:32])

    @property
    def size(self) -> int:
        return sum(map(len, self._parts))

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes from `start` to before `stop`, in pieces of at most 1 MiB."""
        stop = self.size if stop is None else stop
        for part in self._parts:
            first, last = max(start, 0), min(stop, len(part))
            start, stop = start - len(part), stop - len(part)
            if first >= last:
                continue
            if isinstance(part, bytes):
                yield part[first:last]
            else:
                yield from part.read(first, last)


def _entry(directory: Path, name: str) -> tuple[bytes, _Content, bytes]:
    """Header, content and padding of a file."""
    if name in {"", ".", ".."} or any(character in name for character in "/\\\0"):
        raise InvalidInputError(
            f"{name!r:.200} is not the name of a file in the checkpoint itself", field="names"
        )
    facts = _stat(directory, name)
    info = tarfile.TarInfo(name)  # a regular file of user and group 0
    info.mode = 0o644
    info.size = facts.st_size
    info.mtime = int(facts.st_mtime)
    # PAX knows long names and more than 8 GiB; the encoding must not depend on the machine's.
    header = info.tobuf(tarfile.PAX_FORMAT, encoding="utf-8")
    padding = bytes(-facts.st_size % tarfile.BLOCKSIZE)
    return header, _Content(directory / name, facts), padding


def _stat(directory: Path, name: str) -> os.stat_result:
    """Facts of a regular file; a link is none, since it may lead out of the directory."""
    try:
        facts = (directory / name).lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"The checkpoint has no file {name!r:.200}.") from None
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidInputError(f"{name!r:.200} is not a regular file", field="names")
    return facts


def export(source: Path, target: Path, recipients: Sequence[str] = ()) -> int:
    """Copy the adapter of a checkpoint; how many bytes the copy takes.

    With `recipients`, age public keys, each file is encrypted for all of them and named `<name>.age`. The
    copy appears at `target` complete or not at all. What was there before is replaced, so that an export
    which a crash cut short can simply be run again.
    """
    keys = _parse_recipients(recipients)
    for name in ADAPTER_FILES:
        _stat(source, name)
    make_directory(target.parent)
    scratch = _scratch(target)
    scratch.mkdir()
    try:
        for name in ADAPTER_FILES:
            if keys:
                copy = scratch / f"{name}.age"
                _encrypt(source / name, copy, keys)
            else:
                copy = scratch / name
                shutil.copyfile(source / name, copy)
            flush(copy)
        flush(scratch)
        size = sum(file.stat().st_size for file in scratch.iterdir())
        directories.put(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return size


def _parse_recipients(recipients: Sequence[str]) -> list[Any]:
    if len(recipients) > _RECIPIENTS:
        raise InvalidInputError(
            f"{len(recipients)} recipients, and at most {_RECIPIENTS} are possible",
            field="age_encryption_recipients",
        )
    return [
        _parse_recipient(text, f"recipient {number} of {len(recipients)}")
        for number, text in enumerate(recipients, 1)
    ]


def _parse_recipient(text: str, which: str) -> Any:
    try:
        return pyrage.x25519.Recipient.from_str(text)
    except pyrage.RecipientError:
        # The value is not shown: the likeliest mistake is the secret half of the pair.
        raise InvalidInputError(
            f"{which} is not an age X25519 public key ('age1' and 58 more characters)",
            field="age_encryption_recipients",
        ) from None


def _encrypt(source: Path, target: Path, keys: list[Any]) -> None:
    # Through Python's files, not `encrypt_file`, which stops all other threads until it is done.
    try:
        with source.open("rb") as reader, target.open("wb") as writer:
            pyrage.encrypt_io(reader, writer, keys)
    except pyrage.EncryptError as error:
        # Keys were parsed before, so this is a disk's failure in other clothes.
        raise OSError(f"{source.name} could not be encrypted: {error}") from error
