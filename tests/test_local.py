"""The local service: shared by all clients of a data directory, stopped after the last one ends or is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading

import pytest

import tinkex
from tinkex import types
from tinkex._local import _is_free
from tinkex.errors import APIConnectionError
from tinkex.testing import service

pytestmark = [
    pytest.mark.skipif(
        not hasattr(os, "pidfd_open"), reason="waiting for a process of others needs Linux"
    ),
    # The service outlives the call that starts it and may outlive the client.
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

MODEL = "tinkex/tiny"
SECONDS = 60  # a generous limit; no time is measured


class Watched:
    """The process of the service on a data directory."""

    def __init__(self, data_dir):
        self.pid = json.loads((data_dir / "service.json").read_text())["pid"]
        self._handle = os.pidfd_open(self.pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._handle)

    @property
    def alive(self):
        return not select.select([self._handle], [], [], 0)[0]

    def ended(self):
        """Wait until the process ends."""
        return bool(select.select([self._handle], [], [], SECONDS)[0])


def local(data_dir, **options):
    return tinkex.local(engine="fake", data_dir=data_dir, **options)


def train(client, name=MODEL):
    """Train one step; return the loss before it."""
    training = client.create_lora_training_client(name, rank=4)
    datum = types.Datum(types.ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7]})
    result = training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams()).result()
    return result.metrics["loss:sum"]


def test_two_clients_of_one_data_directory_share_a_service_until_both_are_closed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path))
    first = local(tmp_path)
    with Watched(tmp_path) as process:
        # The environment names the default data directory, on which a service already runs.
        second = tinkex.ServiceClient(base_url="local")
        assert train(first) > 0
        assert train(second) > 0
        third = tinkex.local()
        assert third.url == first.url
        assert json.loads((tmp_path / "service.json").read_text())["url"] == first.url
        first.close().result(SECONDS)
        third.close().result(SECONDS)
        assert train(second) > 0  # the service is still running
        assert process.alive
        second.close().result(SECONDS)
        assert process.ended()
    assert not (tmp_path / "service.json").exists()


def test_local_base_url_as_process_default_logs_no_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path))
    with local(tmp_path):
        tinkex.set_defaults(base_url="local")
        try:
            with tinkex.ServiceClient() as client:
                client.health()
        finally:
            tinkex.reset_defaults()
    assert "process default" not in caplog.text


def test_next_service_finds_the_data_of_the_previous_one(tmp_path):
    with local(tmp_path) as client:
        training = client.create_lora_training_client(MODEL, rank=4)
        path = training.save_state("kept").result().path
        process = Watched(tmp_path)
    with process:
        assert process.ended()
    with local(tmp_path) as client, Watched(tmp_path) as another:
        assert another.pid != process.pid
        resumed = client.create_training_client_from_state(path)
        assert resumed.get_info().model_data.model_name == MODEL


SCRIPT = """
import sys, tinkex
client = tinkex.local(engine="fake", data_dir=sys.argv[1])
for _ in sys.stdin:  # one step per line of input
    print(client.get_server_capabilities(), flush=True)
"""


class Script:
    """Another program that uses the data directory."""

    def __init__(self, data_dir):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def works(self):
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        return bool(self.process.stdout.readline())

    def end(self, sign):
        self.process.send_signal(sign)
        self.process.wait(SECONDS)


def test_service_runs_until_its_last_script_ends_or_is_killed(tmp_path):
    with Script(tmp_path) as first:
        assert first.works()
        with Watched(tmp_path) as process, Script(tmp_path) as second:
            assert second.works()
            first.end(signal.SIGINT)  # Ctrl-C reaches the script, not the service it started
            assert second.works()
            assert process.alive
            second.end(signal.SIGKILL)
            assert process.ended()


def test_lines_that_something_prints_before_the_address_do_not_matter(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('this site is ready')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with local(tmp_path / "data", timeout=SECONDS) as client:
        assert train(client) > 0


@pytest.mark.heavy
def test_modules_in_the_working_directory_do_not_replace_those_of_python(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('imported')")
    (tmp_path / "secrets.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    with tinkex.local(data_dir=tmp_path / "data", timeout=SECONDS) as client:
        assert train(client) > 0


def test_a_service_that_cannot_start_is_tried_once(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'serve' in sys.argv: print('almost'); raise SystemExit('broken')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(APIConnectionError, match="did not start"):
        local(tmp_path / "data", timeout=SECONDS)
    assert capfd.readouterr().err.count("Fatal Python error") == 1


def test_service_started_by_others_is_shared_and_not_stopped(tmp_path):
    with service("fake", data_dir=tmp_path) as running:
        for _ in range(2):
            with tinkex.local(data_dir=tmp_path) as client:
                assert client.url == running.url
                assert train(client) > 0
        with running.client() as client:  # the service still runs
            assert train(client) > 0


def test_probing_the_lock_does_not_block_a_starting_service(tmp_path):
    """Two scripts that start at the same time test the same lock."""
    looking = threading.Event()
    looking.set()

    def look():
        while looking.is_set():
            _is_free(tmp_path)

    others = threading.Thread(target=look)
    others.start()
    try:
        for _ in range(3):
            with service("fake", data_dir=tmp_path) as running, running.client() as client:
                assert train(client) > 0
    finally:
        looking.clear()
        others.join()


def test_new_service_starts_after_the_old_one_was_killed(tmp_path):
    client = local(tmp_path)
    with Watched(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process.ended()
    client.service.close()
    assert (tmp_path / "service.json").exists()  # the killed service could not remove it
    with local(tmp_path, timeout=60) as client:
        assert train(client) > 0
