"""Builds tar archives for tests."""

from __future__ import annotations

import io
import tarfile

__all__ = ["tar"]


def tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    """An archive with the given files or members."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            archive.addfile(info, io.BytesIO(member[1]))
    return stream.getvalue()
