"""Adapters from elsewhere: a PEFT directory, sent as a tar, becomes a checkpoint of a run of its own.

The protocol has no call for this, so it is a path of our own, open to who works on the same machine. What arrives is
not kept as it came: the engine reads it, which shows whether it fits the base model, and writes it anew.
"""

from __future__ import annotations

import asyncio
import io
import secrets
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request

from tinkex.engine import directories
from tinkex.engine.files import make_directory
from tinkex.errors import (
    InvalidInputError,
    PayloadTooLargeError,
    PermissionDeniedError,
    UnsupportedMediaTypeError,
)
from tinkex.types import (
    CheckpointType,
    ClientSessionFinishSuccess,
    CreateSessionRequest,
    FinishSessionRequest,
)

from .checkpoints import checkpoint_of
from .names import ADAPTER_FILES, validate_name
from .nearness import is_near, was_forwarded
from .service import Service
from .store import RunRow

__all__ = ["LIMIT", "MEDIA_TYPE", "PATH", "receive", "unpack"]

PATH: Final = "/local/import"
MEDIA_TYPE: Final = "application/x-tar"
#: Of an archive, in bytes: room for an adapter of rank 64 on 70 billion weights.
LIMIT: Final = 8 << 30

_MANIFEST: Final = "tinkex.json"
_READ_LIMIT: Final = 1 << 20
#: What an archive may hold: an adapter, and what a checkpoint of ours has besides.
_ALLOWED: Final = frozenset({*ADAPTER_FILES, directories.OPTIMIZER, _MANIFEST})
_KINDS: Final[Mapping[str, tuple[CheckpointType, ...]]] = {
    "training": ("training",),
    "sampler": ("sampler",),
    "both": ("training", "sampler"),
}


@dataclass(frozen=True)
class _Asked:
    """What an adapter shall become."""

    base_model: str
    name: str
    kinds: tuple[CheckpointType, ...]


async def receive(
    service: Service, owner: str, request: Request, *, limit: int = LIMIT
) -> dict[str, Any]:
    """Take an adapter in; the run it became, and the checkpoints of it."""
    _check_is_near(request, behind_proxy=service.settings.behind_proxy)
    asked = _asked(request)
    service.engine.check_model(asked.base_model, "base_model")
    # Where the service clears up after a crash.
    scratch = service.checkpoints.place("imports", "training", f".{secrets.token_hex(8)}")
    try:
        await asyncio.to_thread(scratch.mkdir, parents=True)
        with _reserved(service, owner, request, limit) as size:
            archive, files = scratch / "archive.tar", scratch / "files"
            await _store(request, archive, size)
            await asyncio.to_thread(unpack, archive, files, limit=size)
            await _rewritten(service, asked, files, scratch)
        return await _listed(service, owner, asked, scratch)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


@contextmanager
def _reserved(service: Service, owner: str, request: Request, limit: int) -> Iterator[int]:
    """Count an archive towards the checkpoints of its owner while it is on the disk; how large it may be.

    Where its size is not stated, it may take all that the owner has left.
    """
    stated = request.headers.get("content-length", "")
    quota = service.quotas.checkpoint_bytes
    size = int(stated) if stated.isdigit() else quota.limit - quota.used(owner)
    if stated.isdigit() and size > limit:
        raise _too_large(limit)
    size = max(1, min(size, limit))
    quota.take(owner, size)
    try:
        yield size
    finally:
        quota.release(owner, size)


# -- what is asked ---------------------------------------------------------------------------------


def _check_is_near(request: Request, *, behind_proxy: bool) -> None:
    """Refuse a request that was not made on this machine.

    A proxy on this machine connects from a loopback address too. Most proxies say that they forward a request, and
    then it does not count as near, whatever address they name; for one that is silent there is `behind_proxy`.
    """
    if behind_proxy:
        raise PermissionDeniedError(
            "Adapters are taken from the machine of the service only, and behind a proxy (--behind-proxy) nobody "
            "can tell who is there."
        )
    if was_forwarded(request):
        raise PermissionDeniedError(
            "Adapters are taken from the machine of the service only, and this request was forwarded by a proxy."
        )
    if not is_near(request):
        raise PermissionDeniedError("Adapters are taken from the machine of the service only.")


def _asked(request: Request) -> _Asked:
    # A web page that a browser has open can send forms to this machine, but nothing of this type.
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != MEDIA_TYPE:
        raise UnsupportedMediaTypeError(f"An adapter comes as {MEDIA_TYPE}, not {media!r:.80}.")
    query = request.query_params
    for name in ("base_model", "name"):
        if not query.get(name):
            raise InvalidInputError("is missing", field=name)
    kind = query.get("type", "both")
    if kind not in _KINDS:
        raise InvalidInputError(
            f"must be one of {', '.join(_KINDS)}, not {kind!r:.80}", field="type"
        )
    return _Asked(query["base_model"], validate_name(query["name"]), _KINDS[kind])


# -- the archive -----------------------------------------------------------------------------------


async def _store(request: Request, file: Path, limit: int) -> None:
    """Put the body into a file; anything over the limit is refused."""
    size = 0
    with await asyncio.to_thread(file.open, "wb") as target:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            await asyncio.to_thread(target.write, part)


def unpack(archive: Path, target: Path, *, limit: int = LIMIT) -> None:
    """Unpack an archive that holds the files of an adapter, each once, and nothing else."""
    target.mkdir()
    left = limit
    try:
        # Uncompressed: the archive is as large as it looks.
        with _ShortReads(archive) as content, tarfile.open(fileobj=content, mode="r:") as tar:
            for member in tar:
                plain = member.isreg() and member.sparse is None
                if member.name not in _ALLOWED or not plain:
                    raise InvalidInputError(
                        f"the archive holds {member.name!r:.200}, which is no file of an adapter",
                        field="archive",
                    )
                left -= member.size
                if left < 0:
                    raise _too_large(limit)
                source = tar.extractfile(member)
                assert source is not None
                with source, (target / member.name).open("xb") as file:
                    shutil.copyfileobj(source, file, _READ_LIMIT // 2)
    except FileExistsError:
        raise InvalidInputError("the archive holds a file twice", field="archive") from None
    except (tarfile.TarError, EOFError) as error:
        raise InvalidInputError(f"is no tar that can be read: {error}", field="archive") from error
    missing = [name for name in ADAPTER_FILES if not (target / name).is_file()]
    if missing:
        raise InvalidInputError(f"the archive lacks {' and '.join(missing)}", field="archive")


class _ShortReads(io.FileIO):
    """An archive of which tarfile reads little at a time.

    Content is read in pieces. Extended headers are read whole, however large they say they are: those are refused.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _READ_LIMIT:
            raise InvalidInputError(f"a header is larger than {_READ_LIMIT} bytes", field="archive")
        return super().read(size)


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The adapter takes more than {limit} bytes.")


# -- the checkpoint --------------------------------------------------------------------------------


async def _rewritten(service: Service, asked: _Asked, files: Path, scratch: Path) -> None:
    """Let the engine read the files and write a checkpoint of each kind into `scratch`."""
    engine, model_id = service.engine, scratch.name
    optimizer = (files / directories.OPTIMIZER).exists()

    async def work() -> None:
        await engine.model(asked.base_model, "base_model")
        await engine.worker.call(
            "restore_model", model_id, asked.base_model, files, optimizer=optimizer
        )
        try:
            for kind in asked.kinds:
                training = kind == "training"
                await engine.worker.call("save_state", model_id, scratch / kind, optimizer=training)
        finally:
            await engine.call_now("unload_model", model_id)

    await engine.persist(work)


async def _listed(service: Service, owner: str, asked: _Asked, scratch: Path) -> dict[str, Any]:
    """Put the checkpoints into place, as those of a run whose session is over."""
    manifest = await asyncio.to_thread(directories.checked_manifest, scratch / asked.kinds[0])
    assert manifest.spec is not None
    sizes = {kind: await asyncio.to_thread(_size, scratch / kind) for kind in asked.kinds}
    service.checkpoints.check_room(owner, sum(sizes.values()))
    session_id = await service.sessions.create(
        owner, CreateSessionRequest(tags=["import"], sdk_version=""), None
    )
    now, run_id = service.settings.now(), f"{session_id}:train:0"
    lora = asdict(manifest.spec)
    run = RunRow(run_id, session_id, owner, asked.base_model, lora, None, now, now)
    await service.database(service.database.store.add_run, run)
    rows = []
    for kind in asked.kinds:
        place = await service.checkpoints.check_free(owner, run_id, kind, asked.name)
        await asyncio.to_thread(_move, scratch / kind, place)
        rows.append(
            await service.checkpoints.add(
                run_id, kind, asked.name, owner, sizes[kind], ttl_seconds=None
            )
        )
        service.usage.add(owner, session_id, asked.base_model, "checkpoint", 1)
    over = FinishSessionRequest(reason=ClientSessionFinishSuccess(), detail="imported")
    await service.finish_session(session_id, owner, over)
    return {
        "run_id": run_id,
        "base_model": asked.base_model,
        "lora_rank": manifest.spec.rank,
        "checkpoints": [checkpoint_of(row).model_dump(mode="json") for row in rows],
    }


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def _move(source: Path, target: Path) -> None:
    make_directory(target.parent)
    directories.put(source, target)
