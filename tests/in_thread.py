"""Base class of the test servers: on loopback, on their own event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

__all__ = ["ServerInThread"]


class ServerInThread:
    """Runs from `__enter__` to `stop`; subclasses define `_listen` and `_stop`, which run on its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self.port = 0

    async def _listen(self) -> None:
        """Open a port and store its number in `port`."""
        raise NotImplementedError

    async def _stop(self) -> None:
        """Close the port and every connection."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()
