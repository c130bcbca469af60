"""Compiles the C files of this directory with the machine's C compiler, once, and loads the result.

The library is in a directory of the user's cache that only the user may write to, under a name made of the sources, the
command and the processor. It contains no OpenMP runtime: its symbols are found in the one that torch has loaded, so
that both share one set of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final

from tinkex.config import read_env

__all__ = ["build", "library"]

logger = logging.getLogger("tinkex.engine")

SOURCES: Final = sorted(Path(__file__).parent.glob("*.c"))
HEADERS: Final = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS: Final = (
    *("-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math"),
    "-fno-strict-aliasing",  # rows are read as numbers of 4 bytes and as pairs of 2
    *("-fopenmp", "-fPIC", "-fvisibility=hidden"),
)
_NATIVE: Final = ("-march=native",)
_SECONDS: Final = 120


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None if this machine cannot compile or load them."""
    compiler = shutil.which("cc")
    if compiler is None:
        logger.info("The engine computes with torch alone: there is no C compiler (cc).")
        return None
    try:
        return build(compiler, _directory())
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning(
            "The engine computes with torch alone: its C kernels do not build: %.500s", reason
        )
        return None


def build(compiler: str, directory: Path, flags: Sequence[str] = _NATIVE) -> ctypes.CDLL:
    """Load the library that these flags give from `directory`; compile it first if it is not there."""
    import torch  # noqa: F401 - loads the OpenMP runtime that the library uses

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)
    version = subprocess.run(  # noqa: S603
        [compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS
    ).stdout
    command = [compiler, *_FLAGS, *flags]
    sources = [source.read_bytes() for source in (*SOURCES, *HEADERS)]
    facts = [*sources, " ".join(command).encode(), version, _processor()]
    digest = hashlib.sha256(b"\0".join(facts)).hexdigest()[:32]
    path = directory / f"kernels-{digest}.so"
    if not path.exists():
        _compile(command, path)
    return ctypes.CDLL(str(path))


def _compile(command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        linked = Path(made, "kernels.so")
        objects = [Path(made, source.name).with_suffix(".o") for source in SOURCES]
        with ThreadPoolExecutor() as threads:
            compiled = [
                threads.submit(_run, *command, "-c", str(source), "-o", str(made_of_it))
                for source, made_of_it in zip(SOURCES, objects, strict=True)
            ]
        for each in compiled:
            each.result()
        # Linked without -fopenmp, which would bring a second runtime with threads of its own.
        _run(command[0], "-shared", *map(str, objects), "-lm", "-o", str(linked))
        linked.replace(path)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True, text=True, timeout=_SECONDS)  # noqa: S603


def _directory() -> Path:
    cache_home = read_env("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "tinkex" / "native"


def _check_private(directory: Path) -> None:
    """Refuse a directory in which another user could put code for us to load."""
    facts = directory.stat()
    if hasattr(os, "getuid") and (facts.st_uid != os.getuid() or facts.st_mode & 0o022):
        raise PermissionError(f"others may write to {directory}")


def _processor() -> bytes:
    """What `-march=native` depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}".encode()
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})).encode()
