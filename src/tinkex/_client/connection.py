"""Locates the service of a session and creates the transport to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tinkex._retry import Clock
from tinkex.config import LOCAL, Config
from tinkex.errors import TinkerError

from .runtime import begin_anew_in_forks, leave_behind
from .transport import Transport

__all__ = ["LazyTransport"]


class LazyTransport:
    """Creates the transport on first use. With `base_url="local"` it first starts a service on this machine."""

    _pyqwest_lost = False

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self.made: Transport | None = None
        self.local: Any = None
        self._lock = threading.Lock()
        begin_anew_in_forks(self)

    def _begin_anew(self) -> None:
        """In a forked child: drop the connections, which belong to the parent."""
        leave_behind(self.made)
        if self.made is not None and self._uses_pyqwest:
            LazyTransport._pyqwest_lost = True
        self.made = self.local = None
        self._lock = threading.Lock()

    def transport(self, metadata: Mapping[str, Any]) -> Transport:
        """The transport, created on first use; `metadata` is then attached to its events."""
        if self.made is None:
            if self._pyqwest_lost and self._uses_pyqwest:
                raise TinkerError(
                    "TLS connections do not survive a fork: their library uses its own threads. "
                    "Start worker processes with the spawn method, or fork before the first call."
                )
            self.made = Transport(self._located(), clock=self._clock)
            self.made.metadata = metadata
        return self.made

    async def locate(self) -> None:
        """Start the local service if `base_url` is "local". It takes seconds, so it does not block the loop."""
        if self._config.base_url == LOCAL:
            await asyncio.to_thread(self._located)

    def _located(self) -> Config:
        """The settings with the address of the service."""
        if self._config.base_url != LOCAL:
            return self._config
        with self._lock:
            if self.local is None:
                # Imported by name: the service needs optional packages, so the client has no static import of it.
                self.local = import_module("tinkex._local").hold()
        # The user asked for "local", so a warning about a non-default address would be noise.
        return self._config.replace(base_url=self.local.url, warn_on_base_url_mismatch=False)

    @property
    def _uses_pyqwest(self) -> bool:
        config = self._config
        secure = config.base_url.startswith("https:") or config.proxy is not None
        return secure and config.http_client is None

    async def close(self) -> None:
        if self.made is not None:
            await self.made.close()
        if self.local is not None:
            self.local.close()
