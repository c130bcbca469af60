"""Import of adapters: a PEFT directory, sent as a tar, becomes a checkpoint of a new run.

The protocol has no operation for this, so it is a path of our own, open only to clients on the same machine. The
uploaded files are not kept: the engine loads them, which checks that they fit the base model, and saves them again.
The adapters of one key are imported one after another, each in a turn of an engine that its key has a share of.
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
from .file_threads import FileThreads
from .names import ADAPTER_FILES, validate_name
from .nearness import is_near, was_forwarded
from .service import Service
from .tables import RunRow

__all__ = ["LIMIT", "MEDIA_TYPE", "PATH", "receive", "unpack"]

PATH: Final = "/local/import"
MEDIA_TYPE: Final = "application/x-tar"
#: Largest archive, in bytes: enough for an adapter of rank 64 on a model with 70 billion weights.
LIMIT: Final = 8 << 30

_MANIFEST: Final = "tinkex.json"
_READ_LIMIT: Final = 1 << 20
#: Files that an archive may contain: an adapter, and the other files of a tinkex checkpoint.
_ALLOWED: Final = frozenset({*ADAPTER_FILES, directories.OPTIMIZER, _MANIFEST})
_KINDS: Final[Mapping[str, tuple[CheckpointType, ...]]] = {
    "training": ("training",),
    "sampler": ("sampler",),
    "both": ("training", "sampler"),
}


@dataclass(frozen=True)
class _Asked:
    """The checkpoints that the client asks for."""

    base_model: str
    name: str
    kinds: tuple[CheckpointType, ...]


async def receive(
    service: Service, owner: str, request: Request, *, limit: int = LIMIT
) -> dict[str, Any]:
    """Import an adapter; return its new run and checkpoints."""
    _check_is_near(request, behind_proxy=service.settings.behind_proxy)
    asked = _asked(request)
    service.engine.catalog.check(asked.base_model, "base_model")
    # In a place that the service cleans up after a crash.
    scratch = service.checkpoints.place("imports", "training", f".{secrets.token_hex(8)}")
    try:
        await service.files(scratch.mkdir, parents=True)
        with _reserved(service, owner, request, limit) as size:
            archive, files = scratch / "archive.tar", scratch / "files"
            await _store(service.files, request, archive, size)
            turn = service.import_turns.setdefault(owner, asyncio.Lock())
            async with turn:
                await service.files(unpack, archive, files, limit=size)
                async with service.models.turn(owner, scratch.name):
                    await _rewritten(service, asked, files, scratch)
        return await _listed(service, owner, asked, scratch)
    finally:
        await service.files.remove(scratch)


@contextmanager
def _reserved(service: Service, owner: str, request: Request, limit: int) -> Iterator[int]:
    """Charge an archive to its owner's checkpoint quota while it is on disk; yields its allowed size in bytes.

    Without a Content-Length the allowed size is all that the owner has left.
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


# -- the request -----------------------------------------------------------------------------------


def _check_is_near(request: Request, *, behind_proxy: bool) -> None:
    """Refuse a request that was not made on this machine.

    A proxy on this machine connects from a loopback address too. Most proxies add a header that says so, and such a
    request is refused whatever address the header names. For a proxy that adds none there is `behind_proxy`.
    """
    if behind_proxy:
        raise PermissionDeniedError(
            "Adapters can be imported only from the service's own machine, and behind a proxy (--behind-proxy) the "
            "service cannot tell where a request comes from."
        )
    if was_forwarded(request):
        raise PermissionDeniedError(
            "Adapters can be imported only from the service's own machine, and a proxy forwarded this request."
        )
    if not is_near(request):
        raise PermissionDeniedError("Adapters can be imported only from the service's own machine.")


def _asked(request: Request) -> _Asked:
    # A web page can make the browser post forms to this machine, but no body of this type.
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != MEDIA_TYPE:
        raise UnsupportedMediaTypeError(
            f"The content type of an adapter must be {MEDIA_TYPE}, not {media!r:.80}."
        )
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


async def _store(files: FileThreads, request: Request, file: Path, limit: int) -> None:
    """Write the body to a file; refuse one over the limit."""
    size = 0
    with await files(file.open, "wb") as target:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            await files(target.write, part)


def unpack(archive: Path, target: Path, *, limit: int = LIMIT) -> None:
    """Unpack an archive; refuse it unless it contains each adapter file once and no other files."""
    target.mkdir()
    left = limit
    try:
        # `r:` refuses compressed archives, which could unpack to far more than their size.
        with _ShortReads(archive) as content, tarfile.open(fileobj=content, mode="r:") as tar:
            for member in tar:
                plain = member.isreg() and member.sparse is None
                if member.name not in _ALLOWED or not plain:
                    raise InvalidInputError(
                        f"the archive contains {member.name!r:.200}, which is not a file of an adapter",
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
        raise InvalidInputError("the archive contains a file twice", field="archive") from None
    except (tarfile.TarError, EOFError) as error:
        raise InvalidInputError(f"is not a readable tar: {error}", field="archive") from error
    missing = [name for name in ADAPTER_FILES if not (target / name).is_file()]
    if missing:
        raise InvalidInputError(f"the archive lacks {' and '.join(missing)}", field="archive")


class _ShortReads(io.FileIO):
    """An archive file that refuses large reads.

    `tarfile` reads content in small pieces, but an extended header at once, whatever size it claims.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _READ_LIMIT:
            raise InvalidInputError(f"a header is larger than {_READ_LIMIT} bytes", field="archive")
        return super().read(size)


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The adapter is larger than {limit} bytes.")


# -- the checkpoint --------------------------------------------------------------------------------


async def _rewritten(service: Service, asked: _Asked, files: Path, scratch: Path) -> None:
    """Have the engine load the files and save a checkpoint of each kind into `scratch`."""
    engine, model_id = service.engine, scratch.name
    optimizer = (files / directories.OPTIMIZER).exists()

    async def work() -> None:
        await engine.catalog.model(asked.base_model, "base_model")
        await engine.trainer.restore_model(model_id, asked.base_model, files, optimizer=optimizer)
        for kind in asked.kinds:
            training = kind == "training"
            await engine.trainer.save_state(model_id, scratch / kind, optimizer=training)

    try:
        await engine.persist(work)
    finally:  # also if nothing was loaded: with the turn, the model has got a place on an engine
        await engine.trainer.unload_model(model_id)


async def _listed(service: Service, owner: str, asked: _Asked, scratch: Path) -> dict[str, Any]:
    """Add the checkpoints to a new run whose session is finished."""
    manifest = await service.files(directories.checked_manifest, scratch / asked.kinds[0])
    assert manifest.spec is not None
    sizes = {
        kind: await service.files(directories.stored_bytes, scratch / kind) for kind in asked.kinds
    }
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
        await service.files(_move, scratch / kind, place)
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


def _move(source: Path, target: Path) -> None:
    make_directory(target.parent)
    directories.put(source, target)
