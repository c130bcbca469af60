"""Directories that travel with calls as bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tinkex.engine import luggage
from tinkex.engine.calls import CallFrame, RestoreModel
from tinkex.engine.luggage import PackedFrame, Unpacking


def test_directory_without_room_leaves_nothing(tmp_path, monkeypatch):
    def full(files, directory):
        (directory / "first").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(luggage, "write_files", full)
    call = RestoreModel("m", "tinkex/tiny", Path("elsewhere"), optimizer=True)
    packed = PackedFrame(CallFrame(1, call), {"first": np.zeros(8, np.uint8)})
    with pytest.raises(OSError, match="No space left"):
        Unpacking(tmp_path).unpack(packed)
    assert list(tmp_path.iterdir()) == []
