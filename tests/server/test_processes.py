"""What is seen of a process from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinkex.engine.resident import resident_bytes
from tinkex.server.processes import activity, how_it_ended, resident_with_children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (None, "has died"),
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by signal 9 (out of memory?)"),
        (-11, "was killed by signal 11"),
    ],
)
def test_the_end_of_a_process_is_told(code, told):
    assert how_it_ended(code) == told


def test_activity_grows_with_work_and_is_not_known_of_others():
    before = activity(os.getpid())
    with Path(os.devnull).open("wb", buffering=0) as nowhere:
        nowhere.write(bytes(1000))
    after = activity(os.getpid())
    assert before is not None
    assert after is not None
    assert after >= before + 1000
    assert activity(1 << 22) is None


def test_a_process_that_waits_shows_no_activity_but_its_child_does():
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "print(flush=True); input(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdout.readline()  # the child waits now, and so does its parent
        seen = {activity(parent.pid) for _ in range(20)}
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        parent.stdout.readline()
        later = activity(parent.pid)
        assert later is not None
        assert all(each is not None and each < later for each in seen)
        assert resident_with_children(parent.pid) > 1.5 * resident_bytes(str(parent.pid))
        parent.stdin.write(b"\n")
