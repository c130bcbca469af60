"""Files of a service are private to their owner, also if an older release created them otherwise."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys

import pytest

from tests.chaos.served import Served
from tinkex.server.private import close_to_others
from tinkex.testing import service

from .api import Api


def open_to_others(directory):
    """All files in a directory that group or others can access."""
    found = [directory, *directory.rglob("*")]
    return [path for path in found if stat.S_IMODE(path.lstat().st_mode) & 0o077]


@pytest.mark.heavy
def test_all_files_of_a_service_process_are_private(tmp_path):
    previous = os.umask(0o022)  # the umask of most shells
    try:
        running = Served(tmp_path / "data", "--engine=fake")
        running.start()
    finally:
        os.umask(previous)
    try:
        with Api(running.url) as api:
            model = api.model()
            model.step()
            model.save("kept")
            api.sampler(model_path=model.save("kept", "save_weights_for_sampler")).tokens()
        assert (tmp_path / "data" / "tinkex.db-wal").exists()
        assert open_to_others(tmp_path / "data") == []
    finally:
        running.stop()


def test_directory_of_an_older_release_is_made_private_with_a_warning(tmp_path, caplog):
    data = tmp_path / "data"
    with service("fake", data_dir=data):
        pass
    for path in (data, *data.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with caplog.at_level(logging.WARNING, "tinkex.server"), service("fake", data_dir=data):
        assert open_to_others(data) == []
    assert f"Other users of this machine could read {data};" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tinkex.server"), service("fake", data_dir=data):
        pass
    assert "other users" not in caplog.text.lower()


def test_directory_with_other_files_keeps_its_mode(tmp_path, caplog):
    """In a home directory or one for temporary files, only the service's own files become private."""
    data = tmp_path / "shared"
    (data / "checkpoints").mkdir(parents=True)
    (data / "checkpoints").chmod(0o755)
    (data / "of-somebody-else").write_text("x")
    (data / "of-somebody-else").chmod(0o644)
    data.chmod(0o755)
    close_to_others(data)
    assert stat.S_IMODE(data.stat().st_mode) == 0o755
    assert stat.S_IMODE((data / "of-somebody-else").stat().st_mode) == 0o644
    assert stat.S_IMODE((data / "checkpoints").stat().st_mode) == 0o700
    assert "contains other files" in caplog.text
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    close_to_others(sticky)
    assert stat.S_IMODE(sticky.stat().st_mode) == 0o1777


def test_links_are_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere").chmod(0o755)
    data = tmp_path / "data"
    data.mkdir()
    (data / "checkpoints").symlink_to(tmp_path / "elsewhere")
    close_to_others(data)
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_files_of_another_user_are_not_changed(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 12345, 12345)
    data.chmod(0o755)
    close_to_others(data)
    assert stat.S_IMODE(data.stat().st_mode) == 0o755


def test_database_file_is_private_from_its_creation(tmp_path):
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tinkex.server.store import Store\n"
        "os.umask(0)\n"
        "path = Path(sys.argv[1])\n"
        "store = Store(f'sqlite:///{path}')\n"
        "store.open()\n"
        "print(*(oct(file.stat().st_mode & 0o777) for file in path.parent.glob('x.db*')))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.db")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(run.stdout.split()) == {"0o600"}
