"""A TCP proxy on loopback that resets connections after a given number of bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Self
from urllib.parse import urlsplit

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # linger time 0: the peer gets a reset


class CuttingProxy:
    """A proxy in front of a service; each of `cuts` is a number of bytes after which one connection is reset."""

    def __init__(self, service_url: str, cuts: Iterable[int] = ()) -> None:
        address = urlsplit(service_url)
        self._service = (address.hostname, address.port)
        self._left = list(cuts)
        #: Number of connections reset so far.
        self.cut = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._listening.shutdown(socket.SHUT_RDWR)
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            service = socket.create_connection(self._service)
            with self._lock:
                self._open |= {client, service}
                thread = threading.Thread(target=self._serve, args=(client, service), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket, service: socket.socket) -> None:
        upward = threading.Thread(target=_relay, args=(client, service), daemon=True)
        upward.start()
        brought = 0
        with contextlib.suppress(OSError):
            while data := service.recv(_CHUNK):
                brought += len(data)
                if self._cuts(brought):
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    break
                client.sendall(data)
        for end in (service, client):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        upward.join()
        with self._lock:
            self._open -= {client, service}
        client.close()
        service.close()

    def _cuts(self, brought: int) -> bool:
        with self._lock:
            if not self._left or brought < self._left[0]:
                return False
            self._left.pop(0)
            self.cut += 1
            return True


def _relay(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
