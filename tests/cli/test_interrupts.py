"""Ctrl-C and a full disk during a command: a clear message, the right exit code, and no files left behind."""

from __future__ import annotations

import io
import re
import resource
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager

from ..scripted import Answer, Hang
from .commands import PROGRAM, environment

RUN = "run-1"
PATHS = [f"tinker://{RUN}/weights/step-{number}" for number in range(40)]
ARCHIVE = f"GET /api/v1/training_runs/{RUN}/checkpoints/weights/step-0/archive"


def route(path: str) -> str:
    return "DELETE /api/v1/training_runs/" + path.removeprefix("tinker://").replace(
        "/weights", "/checkpoints/weights"
    )


@contextmanager
def typed(server, *arguments: str, **options) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*PROGRAM, *arguments, "--base-url", server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said_until(process: subprocess.Popen[str], ending: str) -> None:
    assert process.stderr is not None
    said = ""
    while not said.endswith(ending):
        said += process.stderr.read(1)


def interrupted(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C and return the output."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert err.endswith("Interrupted.\n")
    return err


def archive(count: int) -> bytes:
    """A checkpoint of `count` bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        member = tarfile.TarInfo("adapter_model.safetensors")
        member.size = count
        tar.addfile(member, io.BytesIO(bytes(count)))
    return content.getvalue()


def offer(server, reply) -> None:
    """Let the server have an archive of the first checkpoint."""
    server.on(ARCHIVE, Answer({}, 302, {"location": f"{server.url}/archive.tar"}))
    server.on("GET /archive.tar", reply)


def test_a_download(server, tmp_path):
    offer(server, Hang())
    with typed(server, "checkpoint", "download", PATHS[0], "-o", str(tmp_path)) as process:
        server.wait_for("GET /archive.tar")
        interrupted(process)
    assert list(tmp_path.iterdir()) == []


def test_a_question(server):
    with typed(server, "checkpoint", "delete", PATHS[0]) as process:
        said_until(process, "[y/N] ")
        interrupted(process)
    assert server.asked(route(PATHS[0])) == []


def test_ctrl_c_while_deleting_reports_how_many_are_deleted(server):
    for path in PATHS:
        server.on(route(path), Hang())
    with typed(server, "checkpoint", "delete", *PATHS, "--yes") as process:
        for path in PATHS[:32]:
            server.wait_for(route(path))
        said = interrupted(process)
    assert re.search("Deleted 0 of 40; 3[12] more may be deleted too.", said)
    assert all(server.asked(route(path)) == [] for path in PATHS[32:])


def test_a_sample(server, tmp_path):
    prompt = tmp_path / "prompt.json"
    prompt.write_text("[1, 2, 3]")
    server.on("POST /api/v1/asample", Hang())
    file = tmp_path / "out"
    with typed(
        server, "sample", "--base-model", "m", "--prompt-file", str(prompt), "--output", str(file)
    ) as process:
        server.wait_for("POST /api/v1/asample")
        interrupted(process)
    assert not file.exists()
    assert server.asked("POST /api/v1/sessions/s-1/finish")


def test_a_full_disk(server, tmp_path):
    """Limit the size of files to one megabyte, which fails like a full disk."""
    offer(server, Answer(archive(4 << 20), content_type="application/x-tar"))
    with typed(
        server,
        "checkpoint",
        "download",
        PATHS[0],
        "-o",
        str(tmp_path),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    ) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "File too large" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_is_refused(server, tmp_path):
    offer(server, Answer({"detail": "too late"}, 403))
    with typed(server, "checkpoint", "download", PATHS[0], "-o", str(tmp_path)) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "403" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_repeated_ctrl_c_causes_no_traceback(server, tmp_path):
    offer(server, Hang())
    with typed(server, "checkpoint", "download", PATHS[0], "-o", str(tmp_path)) as process:
        server.wait_for("GET /archive.tar")
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
