"""`tinkex checkpoint export`, `import` and `push-hf`: checkpoints out of a service and into one."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click

from tinkex.config import is_loopback
from tinkex.errors import APIConnectionError, ConfigError, InvalidInputError, NotFoundError

from .connection import Connection, connected, formatted
from .human import size
from .output import Output, say

__all__ = ["export", "import_adapter", "push_hf", "refuse_existing"]

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
#: The files of a checkpoint that other programs read.
_ADAPTER: Final = (_CONFIG, _WEIGHTS)
#: A path of the tinkex service; not part of the protocol.
_IMPORT: Final = "/local/import"
#: Further files of our own checkpoints: with them, an import restores the optimizer too.
_BESIDES: Final = ("optimizer.safetensors", "tinkex.json")


# -- export -----------------------------------------------------------------------------------------


@click.command("export")
@click.argument("checkpoint_path")
@click.option(
    "--output",
    "-o",
    "directory",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The new directory.",
)
@click.option(
    "--merge/--adapter",
    "merged",
    default=True,
    help="Write the whole model with the adapter merged in, or only the PEFT adapter.  [default: merge]",
)
@click.option(
    "--base-model",
    help="Directory or hub id of the base model.  [default: that of the checkpoint]",
)
@click.option("--force", is_flag=True, help="Replace an existing directory.")
@connected
@formatted
def export(
    checkpoint_path: str,
    directory: Path,
    merged: bool,
    base_model: str | None,
    force: bool,
    connection: Connection,
    output: Output,
) -> None:
    """Export a checkpoint to a directory that other programs can load.

    After a failure nothing is left. Merging works tensor by tensor, so it needs little memory.
    """
    with _new_directory(directory, force=force) as scratch:
        files, weights = _downloaded(connection, checkpoint_path, scratch.parent)
        name = base_model or weights.base_model
        if merged:
            _merge(files, name, scratch)
        else:
            for file in _ADAPTER:
                shutil.copyfile(files / file, scratch / file)
        taken = sum(file.stat().st_size for file in scratch.iterdir())
        written = sorted(file.name for file in scratch.iterdir())
    result = {
        "checkpoint_path": checkpoint_path,
        "destination": str(directory),
        "merged": merged,
        "base_model": weights.base_model,
        "size_bytes": taken,
        "files": written,
    }
    kind = "model" if merged else "adapter"
    output.record(
        {"Exported": checkpoint_path, f"As {kind} to": directory, "Size": size(taken)}, result
    )


def _merge(files: Path, base_model: str, target: Path) -> None:
    from .progress import download_bar

    try:
        from tinkex.engine import base_models, checkpoint  # noqa: F401 - fails here if torch is missing
        from tinkex.server.service import default_cache_dir
    except ImportError as error:
        raise ConfigError(
            f"merging needs {error.name}: pip install 'tinkex[local]'", field="merge"
        ) from error
    from .merging import merge

    spec = base_models.parse_spec(base_model)
    try:
        base = base_models.prepare(spec, default_cache_dir(), progress=say)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}; --base-model names its directory or hub id") from error
    with download_bar(base_model) as progress:
        merge(files, base, target, progress)


def _downloaded(connection: Connection, path: str, scratch: Path) -> tuple[Path, Any]:
    """Download a checkpoint; its directory, and the facts about its weights."""
    from tinkex._client.downloads import download_checkpoint

    from .progress import download_bar

    with connection.rest() as rest:
        weights = rest.get_weights_info_by_tinker_path(path).result()
        if not weights.is_lora:
            raise InvalidInputError("the checkpoint is not a LoRA adapter", field="checkpoint_path")
        with download_bar(path) as progress:
            files = download_checkpoint(rest, path, scratch / "download", progress=progress)
    encrypted = [file.name for file in files.iterdir() if file.name.endswith(".age")]
    if encrypted:
        raise InvalidInputError(
            f"the checkpoint is encrypted ({', '.join(sorted(encrypted))}); decrypt it with age first",
            field="checkpoint_path",
        )
    return files, weights


def refuse_existing(target: Path, *, force: bool) -> None:
    if target.exists() and not force:
        raise InvalidInputError(f"{target} exists; --force replaces it", field="output")


@contextmanager
def _new_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """A directory to fill: it becomes `target` on success and is removed otherwise."""
    refuse_existing(target, force=force)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".tinkex-", dir=target.parent))
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()
        yield fresh
        if target.exists():
            target.replace(scratch / "old")
        fresh.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# -- import -----------------------------------------------------------------------------------------


@click.command("import")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--base-model",
    help="Its base model, by the service's name.  [default: that of adapter_config.json]",
)
@click.option("--name", help="Name of the checkpoint.  [default: the name of the directory]")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["training", "sampler", "both"]),
    default="both",
    show_default=True,
    help="A checkpoint for training, for sampling, or one of each.",
)
@connected
@formatted
def import_adapter(
    directory: Path,
    base_model: str | None,
    name: str | None,
    kind: str,
    connection: Connection,
    output: Output,
) -> None:
    """Import a PEFT adapter directory into a service on this machine, as a checkpoint of a new run.

    Only the tinkex service supports this; the protocol has no such operation.
    """
    files = _adapter_files(directory)
    query = {
        "base_model": base_model or _base_model_of(directory),
        "name": name or re.sub(r"[^A-Za-z0-9_.-]+", "-", directory.resolve().name).strip(".-"),
        "type": kind,
    }
    with connection.rest() as rest:
        answer = _send(rest, directory, files, query)
    facts = {"Run": answer["run_id"], "Base model": answer["base_model"]}
    for checkpoint in answer["checkpoints"]:
        facts[checkpoint["checkpoint_type"].capitalize()] = checkpoint["tinker_path"]
    output.record(facts, answer)


def _adapter_files(directory: Path) -> list[str]:
    missing = [name for name in _ADAPTER if not (directory / name).is_file()]
    if missing:
        advice = ""
        if (directory / "adapter_model.bin").exists():
            advice = "; adapter_model.bin is a pickle, which can run any code: save it as safetensors first"
        raise InvalidInputError(
            f"{directory} lacks {' and '.join(missing)}{advice}", field="directory"
        )
    return [*_ADAPTER, *(name for name in _BESIDES if (directory / name).is_file())]


def _base_model_of(directory: Path) -> str:
    try:
        name = json.loads((directory / _CONFIG).read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise InvalidInputError(f"{_CONFIG} cannot be read: {error}", field="directory") from None
    if not name:
        raise InvalidInputError(
            f"{_CONFIG} names no base model; give --base-model", field="base_model"
        )
    return str(name)


def _send(rest: Any, directory: Path, files: list[str], query: dict[str, str]) -> dict[str, Any]:
    from tinkex._wire.failures import error_from_response
    from tinkex.errors import HTTPRequest

    transport = rest.holder.transport  # for --base-url local this starts the service
    url = transport.url(_IMPORT, query)
    where = urlsplit(url)
    _check_is_local(where.hostname or "")
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name in files:
                tar.add((directory / name).resolve(), name, recursive=False)
        headers = {
            **transport.headers(),
            "content-type": "application/x-tar",
            "content-length": str(archive.tell()),
        }
        archive.seek(0)
        status, answered, body = _post(where, archive, headers)
    if status in {404, 405}:
        raise NotFoundError(
            "This service cannot import adapters; only the tinkex service (`tinkex serve`) can."
        )
    if status >= 300:
        request = HTTPRequest("POST", url)
        raise error_from_response(status, answered, body, request, now=time.time())
    answer: dict[str, Any] = json.loads(body)
    return answer


def _post(where: Any, content: Any, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Send a file and read the answer, without a proxy: the service is on this machine."""
    import http.client

    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    with closing(kind(where.hostname, where.port)) as sending:
        try:
            target = f"{where.path}?{where.query}"
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the service refused early; its answer says why
                sending.request("POST", target, body=content, headers=headers)
            response = sending.getresponse()
            answered = {name.lower(): value for name, value in response.getheaders()}
            return response.status, answered, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise APIConnectionError(message=f"The service did not answer: {error}") from error


def _check_is_local(host: str) -> None:
    if not is_loopback(host):
        raise InvalidInputError(
            f"{host} is another machine; adapters can only be imported into a service on this one "
            "(`tinkex serve`, or --base-url local)",
            field="base_url",
        )


# -- push-hf ----------------------------------------------------------------------------------------


@click.command("push-hf")
@click.argument("checkpoint_path")
@click.option(
    "--repo", "-r", help="The repository, NAME or USER/NAME.  [default: tinker-MODEL-RUN]"
)
@click.option("--public", is_flag=True, help="Make a new repository public.")
@click.option(
    "--revision",
    help="The branch.  [default: main; without --repo, the name of the checkpoint]",
)
@click.option("--commit-message", help="Message of the commit.")
@click.option(
    "--create-pr", is_flag=True, help="Open a pull request instead of committing to main."
)
@click.option(
    "--allow-pattern", multiple=True, help="Upload only files that match; may be repeated."
)
@click.option(
    "--ignore-pattern", multiple=True, help="Do not upload files that match; may be repeated."
)
@click.option("--hf-token", help="Token of the hub. Safer: set HF_TOKEN.")
@click.option("--no-model-card", is_flag=True, help="Do not add a README.md.")
@connected
@formatted
def push_hf(
    checkpoint_path: str,
    repo: str | None,
    public: bool,
    revision: str | None,
    commit_message: str | None,
    create_pr: bool,
    allow_pattern: tuple[str, ...],
    ignore_pattern: tuple[str, ...],
    hf_token: str | None,
    no_model_card: bool,
    connection: Connection,
    output: Output,
) -> None:
    """Upload a checkpoint to the Hugging Face hub as a PEFT adapter with a model card.

    Without --repo the repository is tinker-MODEL-RUN, with one branch per checkpoint.
    """
    from .hub import Hub, check, destination, prepare

    if create_pr and revision not in {None, "main"}:
        raise click.UsageError(f"pull requests go to main only, not to {revision}")
    check(checkpoint_path, repo, allow_pattern, ignore_pattern)
    hub = Hub(hf_token)
    user = hub.user()
    with tempfile.TemporaryDirectory(prefix="tinkex-") as scratch:
        folder, weights = _downloaded(connection, checkpoint_path, Path(scratch))
        revision = "main" if create_pr else revision
        where = destination(checkpoint_path, weights.base_model, user, repo, revision)
        prepare(folder, checkpoint_path, weights.base_model, where, card=not no_model_card)
        hub.make(where, public=public)
        hub.check_is_of(where, checkpoint_path, Path(scratch) / secrets.token_hex(4))
        files, url = hub.upload(
            folder,
            where,
            message=commit_message or f"Upload {checkpoint_path}",
            create_pr=create_pr,
            allow=allow_pattern,
            ignore=ignore_pattern,
        )
    result = {
        "checkpoint_path": checkpoint_path,
        "repo_id": where.repo,
        "revision": where.revision,
        "public": public,
        "url": url,
        "files": files,
    }
    output.record(
        {"Pushed": checkpoint_path, "To": f"{where.repo} at {where.revision}", "See": url}, result
    )
