"""Credentials of a client: a given API key, a key printed by a command, or a token obtained for the key."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tinkex._retry import Clock
from tinkex.config import (
    KEYLESS,
    LOCAL,
    Config,
    configured_base_url,
    defaults,
    normalize_base_url,
    read_env,
)
from tinkex.errors import (
    AuthenticationError,
    ConfigError,
    DecodeError,
    InvalidInputError,
    TinkerError,
)

from .notices import logger

__all__ = ["Auth", "get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]

#: A token that expires within this many seconds is renewed before the next request.
_REFRESH_BEFORE = 60.0
#: The background task renews a token this many seconds before it expires.
_REFRESH_EARLY = 300.0
_COMMAND_TIMEOUT = 60.0


class Auth:
    """Provides the credential for the next request."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._key = config.api_key
        self._token: str | None = None
        self._expires = 0.0
        self._exchange: Callable[[], Awaitable[str]] | None = None
        self._lock = asyncio.Lock()

    @property
    def credential(self) -> str:
        """The credential to send now. `ensure` must have been awaited once."""
        return self._token or self._key or ""

    @property
    def stale(self) -> bool:
        if self._key is None:
            return True
        left = self._expires - self._clock.wall()
        return self._exchange is not None and left < _REFRESH_BEFORE

    def use_tokens(self, exchange: Callable[[], Awaitable[str]]) -> None:
        """Exchange the key for tokens from now on, because the service requires it."""
        self._exchange = exchange

    async def ensure(self) -> None:
        """Make sure the credential is valid for at least one more minute."""
        async with self._lock:
            if self._key is None:
                self._key = await asyncio.to_thread(_from_command, self._config.credential_cmd)
            if self._exchange is not None and self.stale:
                self._token = None  # the exchange request itself sends the key
                token = await self._exchange()
                self._expires = claims(token)["exp"]
                self._token = token

    async def keep_fresh(self) -> None:
        """Renew the token before it expires, while the session lives."""
        await self.ensure()
        while True:
            await self._clock.sleep(self.refresh_in())
            self._expires = 0.0
            try:
                await self.ensure()
            except TinkerError as error:  # the next request tries again and reports the error
                logger.debug("The token could not be renewed: %s", error)

    def refresh_in(self) -> float:
        """Seconds until the token should be renewed in the background."""
        return max(self._expires - self._clock.wall() - _REFRESH_EARLY, _REFRESH_BEFORE)

    async def claims(self) -> dict[str, Any]:
        """The claims in the token about its owner."""
        await self.ensure()
        if self._token is not None:
            return claims(self._token)
        # A token given as the API key identifies its owner only if the identity service issued it.
        if self.credential.startswith("eyJ"):
            content = claims(self.credential)
            if str(content.get("iss", "")).startswith("passport-"):
                return content
        raise AuthenticationError(
            "The service does not ask for keys to be exchanged for tokens, so it cannot say who you are; "
            "`tinkex auth status` says whether it accepts the key."
        )


def claims(token: str) -> dict[str, Any]:
    """The payload of a JWT, not verified: the service verifies it, the client only reads it."""
    try:
        payload = token.split(".")[1]
        padded = payload + "=" * (-len(payload) % 4)
        content: dict[str, Any] = json.loads(base64.urlsafe_b64decode(padded))
        content["exp"] = float(content["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise DecodeError("the token is not a JWT with an expiry date", field="jwt") from error
    return content


def _from_command(command: str | None, timeout: float = _COMMAND_TIMEOUT) -> str:
    if not command:
        raise ConfigError("missing", field="api_key", advice="set TINKER_API_KEY or pass api_key=…")
    # No error quotes the command or its stdout: either may contain the key.
    try:
        done = subprocess.run(  # noqa: S602  # the setting is a shell command of the user
            command,
            shell=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"the command did not end within {timeout:g} s"
        raise ConfigError(message, field="credential_cmd") from None
    key = done.stdout.strip()
    if done.returncode != 0 or not key:
        raise ConfigError(
            f"the command ended with status {done.returncode} and "
            f"{'no key' if not key else 'an error'}: {done.stderr.strip()[:200]}",
            field="credential_cmd",
        )
    if len(key.split()) > 1:
        raise ConfigError("the command printed more than a key", field="credential_cmd")
    return key


def config_with_login(**options: Any) -> Config:
    """A configuration that uses the stored login if no key is given.

    A service on this machine may be called without a key: most need none, and one that needs it answers 401.
    """
    try:
        return Config(**options)
    except ConfigError as error:
        given = options.get("api_key") or defaults().get("api_key") or read_env("TINKER_API_KEY")
        if error.field != "api_key" or given:
            raise  # includes a key that is given but malformed
        stored = stored_key()
        config = Config(**options | {"api_key": stored or KEYLESS})
        if stored is None and not config.is_loopback:
            raise
        return config


def config_for_handle(base_url: str, api_key: str | None) -> Config:
    """A configuration for the address in a sampler handle. The author of the handle chose it, so it is not trusted.

    Credentials of the configured service are sent only to its own host. For another host the caller must pass a key,
    and no other secret of the configuration is sent.
    """
    configured = configured_base_url()
    if base_url == LOCAL or _origin(base_url) == _origin(configured):
        return config_with_login(base_url=base_url, api_key=api_key)
    if api_key is None:
        raise ConfigError(
            f"the handle is for {_origin(base_url)}, not for the configured {_origin(configured)}, so the "
            "configured key is not sent there; if you trust that host, pass its key: "
            "from_sampler_handle(handle, api_key=...), or set TINKER_BASE_URL to it",
            field="api_key",
        )
    return Config(
        base_url=base_url,
        api_key=api_key,
        credential_cmd="",
        cf_access_client_id="",
        cf_access_client_secret="",
        default_headers={},
        default_query={},
    )


def _origin(base_url: str) -> str:
    try:
        return normalize_base_url(base_url)
    except ValueError as error:
        raise InvalidInputError(f"has a bad address: {error}", field="handle") from None


def credentials_file() -> Path:
    return Path.home() / ".tinker" / "credentials.json"


def stored_key(path: Path | None = None) -> str | None:
    """The default key of the stored login, or None."""
    try:
        stored = json.loads((path or credentials_file()).read_text())
        key = stored["keys"][str(stored["default"])]["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) and key else None


def get_tinker_token() -> str | None:
    """The credential that a new client would use, or None."""
    try:
        config = config_with_login()
    except ConfigError:
        return None
    if config.api_key is not None:
        return config.api_key
    return _from_command(config.credential_cmd)


def tinker_has_credentials() -> bool:
    return get_tinker_token() is not None


def raise_if_tinker_not_accessible() -> None:
    """Raise an error that says how to set a credential if none is found."""
    if not tinker_has_credentials():
        Config()
