"""Ports that are chosen before a service listens on them."""

from __future__ import annotations

import socket


def reserved() -> tuple[socket.socket, int]:
    """A free port on loopback, and the socket that keeps other programs from getting it by chance.

    A service that is told this port may listen on it while the socket is open, also again after a restart.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return kept, kept.getsockname()[1]
