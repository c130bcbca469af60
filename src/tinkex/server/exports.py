"""Copies of a checkpoint's adapter for other programs, optionally encrypted with age."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyrage  # type: ignore[import-untyped]

from tinkex.engine import directories
from tinkex.engine.files import flush, make_directory
from tinkex.errors import InvalidInputError

from .names import ADAPTER_FILES, scratch_path
from .tars import stat_regular

__all__ = ["export"]

_MAX_RECIPIENTS: Final = 10


def export(source: Path, target: Path, recipients: Sequence[str] = ()) -> int:
    """Copy the adapter of a checkpoint to `target` and return the size of the copy in bytes.

    `recipients` are age public keys: each file is encrypted for all of them and named `<name>.age`. The copy
    appears at `target` complete or not at all. It replaces an older one, so an export that a crash interrupted
    can be run again.
    """
    keys = _parse_recipients(recipients)
    for name in ADAPTER_FILES:
        stat_regular(source, name)
    make_directory(target.parent)
    scratch = scratch_path(target)
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
        size = directories.stored_bytes(scratch)
        directories.put(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return size


def _parse_recipients(recipients: Sequence[str]) -> list[Any]:
    if len(recipients) > _MAX_RECIPIENTS:
        raise InvalidInputError(
            f"{len(recipients)} recipients given, but at most {_MAX_RECIPIENTS} are supported",
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
        # The message omits the value: the likeliest mistake is to pass the secret key.
        raise InvalidInputError(
            f"{which} is not an age X25519 public key ('age1' and 58 more characters)",
            field="age_encryption_recipients",
        ) from None


def _encrypt(source: Path, target: Path, keys: list[Any]) -> None:
    # Not `pyrage.encrypt_file`: it holds the GIL until the whole file is encrypted.
    try:
        with source.open("rb") as reader, target.open("wb") as writer:
            pyrage.encrypt_io(reader, writer, keys)
    except pyrage.EncryptError as error:
        # The keys are already parsed, so the cause is a read or write error.
        raise OSError(f"{source.name} could not be encrypted: {error}") from error
