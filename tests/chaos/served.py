"""A service in its own processes; a test can kill it and restart it on the same port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ..ports import reserved


class Served:
    def __init__(self, data_dir: Path, *arguments: str) -> None:
        self._kept, self.port = reserved()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(sys.executable, "-m", "tinkex", "serve", f"--port={self.port}"),
            *(f"--data-dir={data_dir}", "--base-model=tinkex/tiny", *arguments),
        ]
        self.process: subprocess.Popen[str]

    def run_by(self, wrap: Callable[[list[str]], list[str]]) -> None:
        """Start the service through another command."""
        self._command = wrap(self._command)

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert self.url in line, line

    def kill_service(self) -> None:
        self.process.kill()
        self._wait()
        self.start()

    def kill_engine(self) -> None:
        """Kill the engine; the service restarts it."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)

    def stop(self) -> None:
        self.process.terminate()
        self._wait()
        self._kept.close()

    def _wait(self) -> None:
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
