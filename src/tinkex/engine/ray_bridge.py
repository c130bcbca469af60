"""The process of the bridge to a Ray cluster.

    python -m tinkex.engine.ray_bridge CONTROL PARENT

The service starts this command with the descriptor of a socket and its own process id.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from .bridge import Bridge
from .ending import die_with
from .ray_actors import RayActors

__all__ = ["main"]


def main() -> None:
    # The service handles Ctrl-C and then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    control = socket.socket(fileno=descriptor)
    Bridge(control, lambda setup: RayActors(setup.address, setup.namespace)).run()
    os._exit(0)  # threads may still wait for actors


if __name__ == "__main__":
    main()
