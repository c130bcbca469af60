"""Settings: one immutable `Config`, and the only reader of the process environment.

    >>> config = Config(api_key="tml-...", timeout=30)
    >>> patient = config.replace(timeout=300)

Each field of `Config` is one row of a table. The row says where the value comes from, which values are
valid and how much of it may be shown. A value is looked up in this order; the first one found is used:

    argument  >  process default (`set_defaults`)  >  environment  >  built-in default

Pool sizes are the exception: the environment goes before the process defaults, so that the user of a
program can size its pools. `None` means "not given"; any other value is a choice, also `False`, `0` and `""`.
Times are in seconds.
"""

# ruff: noqa: RUF009 - `setting()` is `dataclasses.field()` with our metadata

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from tinkex.errors import ConfigError

__all__ = [
    "BEAM_MAX_RETRIES",
    "BEAM_TIMEOUT",
    "DEFAULT_BASE_URL",
    "DEFAULT_CONNECT_TIMEOUT",
    "DEFAULT_MAX_RETRIES",
    "DEFAULT_POOL_COUNT",
    "DEFAULT_POOL_SIZE",
    "DEFAULT_RETRY_WINDOW",
    "DEFAULT_TIMEOUT",
    "KEYLESS",
    "LOCAL",
    "PYTHON_MAX_RETRIES",
    "PYTHON_TIMEOUT",
    "REDACTED",
    "CircuitBreaker",
    "Config",
    "PollBackoff",
    "Proxy",
    "SettingInfo",
    "configured_base_url",
    "defaults",
    "is_loopback",
    "mask_key",
    "normalize_base_url",
    "poll_delay",
    "read_env",
    "redact_headers",
    "reset_defaults",
    "set_defaults",
    "settings",
    "snapshot",
]

DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"  # base_url of a private service, which the client starts in a separate process
KEYLESS = "tml-local"  # sent to services that need no key, because every request carries one
REDACTED = "[REDACTED]"

# The two profiles of `parity_mode`: timeout and retries of the official Python SDK, or those of tinkex on
# the BEAM, which were the default there before its version 0.1.20.
PYTHON_TIMEOUT, PYTHON_MAX_RETRIES = 60.0, 10
BEAM_TIMEOUT, BEAM_MAX_RETRIES = 120.0, 2
DEFAULT_TIMEOUT, DEFAULT_MAX_RETRIES = PYTHON_TIMEOUT, PYTHON_MAX_RETRIES
DEFAULT_CONNECT_TIMEOUT = 5.0
DEFAULT_POOL_SIZE, DEFAULT_POOL_COUNT = 50, 20
DEFAULT_RETRY_WINDOW = 300.0

_PROFILES: Mapping[str, Mapping[str, Any]] = {
    "python": {"timeout": PYTHON_TIMEOUT, "max_retries": PYTHON_MAX_RETRIES},
    "beam": {"timeout": BEAM_TIMEOUT, "max_retries": BEAM_MAX_RETRIES},
}
_PORTS = {"http": 80, "https": 443}
_EMPTY: Mapping[str, Any] = MappingProxyType({})

HeaderPairs: TypeAlias = tuple[tuple[str, str], ...]
LogLevel: TypeAlias = Literal["debug", "info", "warn", "error"]
PollBackoff: TypeAlias = tuple[Literal["exponential"], float, float] | Callable[[int], float] | None
PollBackoffOption: TypeAlias = bool | str | tuple[str, float, float] | Callable[[int], float]
ProxyOption: TypeAlias = "Proxy | str | tuple[str, str, int, Mapping[str, Any] | None]"


# Redaction

_SECRET_HEADERS = {
    "x-api-key",
    "cf-access-client-secret",
    "authorization",
    "proxy-authorization",
    "x-tinker-weights-access-token",
}


def mask_key(key: str) -> str:
    """A key shortened so that it can be recognised but not used: `tml-abcdef123456` becomes `tml-ab...3456`."""
    if len(key) <= 4:
        return "*" * len(key)
    return f"{key[: min(6, len(key) - 2)]}...{key[-4:]}"


def redact_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    """The same headers with credentials replaced by `[REDACTED]`, for logs."""
    return {
        name: REDACTED if name.strip().lower() in _SECRET_HEADERS else str(value)
        for name, value in headers.items()
    }


def _hide(value: object) -> str | None:
    return REDACTED if value else None


def _without_userinfo(url: object) -> str:
    # Cut at the last "@" of the whole text, not of the authority: a password may contain a "/".
    before, at, address = str(url).rpartition("@")
    if not at:
        return address
    scheme = before.partition("://")[0] + "://" if "://" in before else ""
    return f"{scheme}{REDACTED}@{address}"


# Reading the environment: text that is not valid for a setting is read as None and counts as unset.

_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True)
_BOOLEANS |= dict.fromkeys(("0", "false", "no", "off"), False)
_LOG_LEVELS = {"warning": "warn"} | {level: level for level in ("debug", "info", "warn", "error")}
_PARITY_MODES = {"python": "python", "beam": "beam", "elixir": "beam"}


def _is_on(text: str) -> bool:
    return _BOOLEANS.get(text.lower(), False)


def _one_of(words: Mapping[str, Any]) -> Callable[[str], Any]:
    return lambda text: words.get(text.lower())


def _read_list(text: str) -> tuple[str, ...] | None:
    return tuple(part for part in map(str.strip, text.split(",")) if part) or None


def _read_count(text: str) -> int | None:
    try:
        count = int(text)
    except ValueError:
        return None
    return count if count > 0 else None


def _read_backoff(text: str) -> str | None:
    on = text.lower() == "exponential" or _BOOLEANS.get(text.lower())
    return "exponential" if on else None


def _json(shape: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        import json

        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, shape) else None

    return read


def _read_pairs(text: str) -> list[Any]:
    return [entry for entry in _json(list)(text) or () if _is_pair(entry)]


# Checking and normalising: each function takes a value a user may pass and returns the value `Config` holds.
# It is idempotent: given its own result, it returns it unchanged.


class _SettingError(ValueError):
    """A value that is not valid for a setting; `_checked` adds the name and makes it a `ConfigError`."""

    def __init__(self, problem: str, advice: str | None = None) -> None:
        super().__init__(problem)
        self.advice = advice


def _require(condition: bool, problem: str, advice: str | None = None) -> None:
    if not condition:
        raise _SettingError(problem, advice)


def _text(value: Any) -> str:
    _require(isinstance(value, str) and value.strip() != "", "must be a non-blank string")
    return str(value).strip()


def _text_or_off(value: Any) -> str | None:
    """An empty string turns the setting off, even if the environment or a process default sets it."""
    return None if value == "" else _text(value)


def _flag(value: Any) -> bool:
    _require(isinstance(value, bool), "must be True or False")
    return bool(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(minimum: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        _require(_is_int(value) and value >= minimum, f"must be a whole number, at least {minimum}")
        return int(value)

    return check


def _is_wait(value: Any) -> bool:
    # Python cannot wait longer than TIMEOUT_MAX (some 290 years).
    return (_is_int(value) or isinstance(value, float)) and 0 < value <= threading.TIMEOUT_MAX


def _seconds(value: Any) -> float:
    _require(_is_wait(value), "must be a positive number of seconds")
    return float(value)


def _span(value: Any) -> float:
    _require(value == 0 or _is_wait(value), "must be 0 or a positive number of seconds")
    _require(not isinstance(value, bool), "must be a number of seconds")
    return float(value)


def _names(value: Any) -> tuple[str, ...]:
    _require(isinstance(value, list | tuple), "must be a list of strings")
    return tuple(_text(name) for name in value)


def _mapping(value: Any) -> Mapping[str, Any]:
    _require(isinstance(value, Mapping), "must be a mapping")
    _require(all(isinstance(key, str) for key in value), "must have strings as keys")
    return MappingProxyType(dict(value))


def _string_mapping(value: Any) -> Mapping[str, str]:
    given = {key.strip(): entry for key, entry in _mapping(value).items() if entry is not None}
    _require("" not in given, "has a blank key")
    return MappingProxyType({key: _to_string(entry) for key, entry in given.items()})


def _to_string(value: Any) -> str:
    _require(isinstance(value, str | int | float), "may only contain strings, numbers and booleans")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_pair(entry: Any) -> bool:
    shaped = isinstance(entry, list | tuple) and len(entry) == 2
    return shaped and all(isinstance(part, str) for part in entry) and entry[0].strip() != ""


def _header_pairs(value: Any) -> HeaderPairs:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    shaped = isinstance(pairs, list | tuple) and all(map(_is_pair, pairs))
    _require(shaped, "must be a mapping or a list of (name, value) strings")
    return tuple((name, text) for name, text in pairs)


def _log_level(value: Any) -> str:
    level = _LOG_LEVELS.get(str(value).lower(), "")
    _require(level != "", "must be debug, info, warn or error")
    return level


def _parity_mode(value: Any) -> str:
    return _PARITY_MODES.get(str(value).lower(), "python")


def _http_client(value: Any) -> Any:
    if isinstance(value, str):
        module, _, attribute = value.partition(":")
        _require(module != "" and attribute != "", 'must be written "module:attribute"')
    else:
        verbs = (getattr(value, verb, None) for verb in ("post", "get", "delete"))
        _require(all(map(callable, verbs)), "must have the methods post, get and delete")
    return value


_KEY_ADVICE = f'set TINKER_API_KEY, pass api_key=..., or use base_url="{LOCAL}", which needs no key'


def _api_key(value: Any) -> str:
    key = value.strip() if isinstance(value, str) else ""
    prefixed = key.startswith(("tml-", "eyJ"))
    _require(prefixed, 'must start with "tml-" (a key) or "eyJ" (a token)', _KEY_ADVICE)
    return key


def _base_url(value: Any) -> str:
    url = _text(value).rstrip("/")
    try:
        normalize_base_url(url)
    except ValueError:
        wanted = f'"{LOCAL}" or a URL such as {DEFAULT_BASE_URL}'
        raise _SettingError(f"must be {wanted}, not {_without_userinfo(url)!r}") from None
    return url


def normalize_base_url(url: str) -> str:
    """`scheme://host[:port]`, lower-cased, without a default port. Equal results can share connections."""
    if url == LOCAL:
        return url
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    stray = any(character.isspace() or character in "?#" for character in url)
    if parts.scheme not in _PORTS or not parts.hostname or stray:
        raise ValueError("not a plain http or https URL")
    port = "" if parts.port in {None, _PORTS[parts.scheme]} else f":{parts.port}"
    return f"{parts.scheme}://{_bracketed(parts.hostname)}{port}"


@lru_cache(maxsize=256)  # a service without keys asks it of every request
def is_loopback(host: str) -> bool:
    """Whether a host name or address always means this machine."""
    from ipaddress import ip_address

    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:  # a host name, which may resolve to any address
        return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy. Credentials are in `headers`, which are never shown."""

    scheme: str
    host: str
    port: int
    headers: HeaderPairs = field(default=(), repr=False)

    @property
    def url(self) -> str:
        """Address without credentials; always with a port, because clients disagree about its default."""
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}"

    def __str__(self) -> str:
        return self.url


def _proxy(value: Any) -> Proxy | None:
    """An empty string means a direct connection, even if the environment names a proxy."""
    if value == "":
        return None
    if isinstance(value, str):
        value = _split_proxy_url(value.strip())
    if isinstance(value, Proxy):
        value = (value.scheme, value.host, value.port, {"headers": value.headers})
    shaped = isinstance(value, list | tuple) and len(value) == 4
    _require(shaped, "must be a URL or (scheme, host, port, options)")
    scheme, host, port, options = value
    options = options or {}
    _require(str(scheme).lower() in _PORTS, "must have the scheme http or https")
    named = isinstance(host, str) and host and not any(c.isspace() or c in "/@" for c in host)
    _require(bool(named), "must name a host")
    _require(_is_int(port) and 1 <= port <= 65535, "must have a port from 1 to 65535")
    bare = isinstance(options, Mapping) and not set(options) - {"headers"}
    _require(bare, 'accepts only the option "headers"')
    return Proxy(scheme.lower(), host.lower(), port, _header_pairs(options.get("headers", ())))


def _split_proxy_url(url: str) -> tuple[str, str | None, int | None, dict[str, HeaderPairs]]:
    from base64 import b64encode
    from urllib.parse import unquote, urlsplit

    try:
        parts = urlsplit(url)
        port = _PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError:
        raise _SettingError("must be a URL with a port from 1 to 65535") from None
    bare = parts.path in {"", "/"} and not parts.query and not parts.fragment
    _require(bare, "must have only scheme://[user:password@]host[:port]")
    options: dict[str, HeaderPairs] = {}
    if parts.username or parts.password:
        userinfo = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        basic = f"Basic {b64encode(userinfo.encode()).decode()}"
        options["headers"] = (("proxy-authorization", basic),)
    return parts.scheme, parts.hostname, port, options


def _poll_backoff(value: Any) -> PollBackoff:
    if value is False or value == "none":
        return None
    if value is True or value == "exponential":
        value = ("exponential", 1.0, 30.0)
    if callable(value):
        return value  # type: ignore[no-any-return]
    if isinstance(value, list | tuple) and len(value) == 3 and value[0] == "exponential":
        initial, maximum = _seconds(value[1]), _seconds(value[2])
        if initial <= maximum:
            return ("exponential", initial, maximum)
    raise _SettingError(
        'must be a bool, "none", "exponential", ("exponential", initial, max >= initial) '
        "or a function that returns seconds for an iteration"
    )


def poll_delay(poll_backoff: PollBackoffOption | None, iteration: int) -> float:
    """Seconds to wait after failed poll number `iteration`, which counts from 0."""
    backoff: PollBackoff = _checked("poll_backoff", poll_backoff)
    if backoff is None:
        return 0.0
    if callable(backoff):
        delay = backoff(iteration)
        return float(delay) if _is_wait(delay) else 0.0
    _, initial, maximum = backoff
    # Sixty doublings exceed any useful maximum and do not overflow.
    return min(initial * 2.0 ** min(iteration, 60), maximum)


def is_breakdown(status: int) -> bool:
    """Whether a status means that the service itself is failing."""
    return status >= 500


def _function(value: Any) -> Any:
    _require(callable(value), "must be a function")
    return value


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """When the client stops calling a failing service, and for how long.

    After `failure_threshold` failures in a row, the client refuses new calls of that kind (session, training,
    sampling) for `reset_timeout` seconds. Then it admits `half_open_max_calls` as probes. Calls in flight are not
    affected. A call without an answer counts as a failure; `is_failure` decides by status about the others. In a
    sampling client that is pickled, `is_failure` must be a named function, not a lambda.
    """

    failure_threshold: int = 5
    reset_timeout: float = 30.0
    half_open_max_calls: int = 1
    is_failure: Callable[[int], bool] = is_breakdown

    def __post_init__(self) -> None:
        for name, check in _BREAKER_CHECKS.items():
            try:
                check(getattr(self, name))
            except _SettingError as error:
                raise ConfigError(str(error), field=name) from None


_BREAKER_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "failure_threshold": _whole(1),
    "reset_timeout": _seconds,
    "half_open_max_calls": _whole(1),
    "is_failure": _function,
}


def _circuit_breaker(value: Any) -> CircuitBreaker | None:
    if isinstance(value, bool):
        return CircuitBreaker() if value else None
    _require(isinstance(value, CircuitBreaker), "must be a bool or a CircuitBreaker")
    return value  # type: ignore[no-any-return]


# The table


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: valid values of a setting, where its value comes from and how it is shown."""

    doc: str
    check: Callable[[Any], Any] = _text
    default: Any = None
    env: str | None = None
    read: Callable[[str], Any] = str
    redact: Callable[[Any], object] | None = None
    env_first: bool = False  # the environment goes before the process defaults
    blank: Any = None  # the value if the variable is set to an empty text

    def look_up(self, environ: Mapping[str, str]) -> Any:
        if self.env is None or self.env not in environ:
            return None
        text = environ[self.env].strip()
        return self.read(text) if text else self.blank

    def show(self, value: Any) -> object:
        if value is None or self.redact is None:
            return _unfrozen(value)
        return self.redact(value)


def setting(doc: str, check: Callable[[Any], Any], default: Any = None, **more: Any) -> Any:
    row = Setting(doc, check, default, **more)
    return field(default=None, metadata={"setting": row})


def _unfrozen(value: Any) -> Any:
    return dict(value) if isinstance(value, MappingProxyType) else value


_In_contra = TypeVar("_In_contra", contravariant=True)
_Out_co = TypeVar("_Out_co", covariant=True)


class Option(Protocol[_In_contra, _Out_co]):
    """How type checkers see a field of `Config`: which types can be assigned, and which type is read.

    Only the annotation uses it; the fields are plain attributes.
    """

    def __get__(self, instance: object, owner: object = None, /) -> _Out_co: ...
    def __set__(self, instance: object, value: _In_contra | None, /) -> None: ...


#: For settings of other clients of the protocol: code that sets them runs unchanged.
_NO_EFFECT = "No effect: accepted for code written for other clients."


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """All settings of a client, fixed when it is created.

    The constructor looks up values that are not given; nothing reads the environment afterwards. Equal configs
    have equal hashes, so a config can be a dictionary key. A pickled config contains its key, for worker
    processes. `repr` shows only values that differ from the built-in defaults, and no secrets.
    """

    # fmt: off
    base_url: Option[str, str] = setting(
        f'Root URL of the API, or "{LOCAL}": the client starts a private service in a separate process.',
        _base_url, DEFAULT_BASE_URL, env="TINKER_BASE_URL", redact=_without_userinfo)
    api_key: Option[str, str | None] = setting(
        "Key (tml-...) or token (eyJ...). Required unless credential_cmd is set or base_url needs none.",
        _api_key, env="TINKER_API_KEY", redact=mask_key)
    credential_cmd: Option[str, str | None] = setting(
        "Shell command that prints a credential.",
        _text_or_off, env="TINKER_CREDENTIAL_CMD", redact=_hide)
    project_id: Option[str, str | None] = setting(
        "Project that new sessions belong to.", _text, env="TINKER_PROJECT_ID")
    parity_mode: Option[str, str] = setting(
        "Profile of timeout and max_retries: python, or beam (also elixir).",
        _parity_mode, "python", env="TINKEX_PARITY", read=_one_of(_PARITY_MODES))
    timeout: Option[float, float] = setting(
        "Seconds one HTTP request may take.", _seconds, DEFAULT_TIMEOUT)
    connect_timeout: Option[float, float] = setting(
        "Seconds to open a connection.", _seconds, DEFAULT_CONNECT_TIMEOUT)
    max_retries: Option[int, int] = setting(
        "How often a failed request is retried.", _whole(0), DEFAULT_MAX_RETRIES)
    retry_window: Option[float, float] = setting(
        "A request is retried beyond max_retries until this many seconds after its first attempt, unless it "
        "opens a session, a model or a sampler; 0 turns that off.", _span, DEFAULT_RETRY_WINDOW)
    retry_delay_base: Option[float, float] = setting(
        "Seconds before the first retry of a request; doubles with each retry.", _seconds, 0.5)
    retry_delay_max: Option[float, float] = setting(
        "Longest wait between retries of a request, in seconds.", _seconds, 10.0)
    poll_backoff: Option[PollBackoffOption, PollBackoff] = setting(
        "Wait after a failed poll (408, 5xx), instead of 1 s doubling to 30 s; see poll_delay.",
        _poll_backoff, env="TINKEX_POLL_BACKOFF", read=_read_backoff)
    circuit_breaker: Option[bool | CircuitBreaker, CircuitBreaker | None] = setting(
        "Refuse new calls for 30 s after five failures in a row; True, or a CircuitBreaker.",
        _circuit_breaker, env="TINKEX_CIRCUIT_BREAKER", read=_one_of(_BOOLEANS))
    user_metadata: Option[Mapping[str, Any], Mapping[str, Any] | None] = setting(
        "Sent with each new session, and with models that have no metadata themselves.", _mapping)
    tags: Option[Sequence[str], tuple[str, ...]] = setting(
        "Tags of new sessions.",
        _names, ("tinkex-python",), env="TINKER_TAGS", read=_read_list)
    feature_gates: Option[Sequence[str], tuple[str, ...]] = setting(
        f"Feature gates. {_NO_EFFECT}",
        _names, ("async_sampling",), env="TINKER_FEATURE_GATES", read=_read_list)
    telemetry_enabled: Option[bool, bool] = setting(
        "Report usage events to the service. As an environment variable, only 1, true, yes and on turn it on.",
        _flag, True, env="TINKER_TELEMETRY", read=_is_on, blank=False)
    log_level: Option[str, LogLevel | None] = setting(
        "Level of the tinkex logger: debug, info, warn or error.",
        _log_level, env="TINKER_LOG", read=_one_of(_LOG_LEVELS))
    dump_headers: Option[bool, bool] = setting(
        "Log every request with its headers at level info, without secrets; enables that level unless log_level is set.",
        _flag, False, env="TINKEX_DUMP_HEADERS", read=_one_of(_BOOLEANS))
    otel_propagate: Option[bool, bool] = setting(
        "Send the OpenTelemetry trace context with every request.",
        _flag, False, env="TINKEX_OTEL_PROPAGATE", read=_one_of(_BOOLEANS))
    cf_access_client_id: Option[str, str | None] = setting(
        "Cloudflare Access client id.", _text_or_off, env="CLOUDFLARE_ACCESS_CLIENT_ID")
    cf_access_client_secret: Option[str, str | None] = setting(
        "Cloudflare Access client secret.",
        _text_or_off, env="CLOUDFLARE_ACCESS_CLIENT_SECRET", redact=_hide)
    default_headers: Option[Mapping[str, Any], Mapping[str, str]] = setting(
        "Headers added to every request; a JSON object in the environment.",
        _string_mapping, _EMPTY, env="TINKEX_DEFAULT_HEADERS", read=_json(dict),
        redact=redact_headers)
    default_query: Option[Mapping[str, Any], Mapping[str, str]] = setting(
        "Query parameters added to every request; a JSON object in the environment.",
        _string_mapping, _EMPTY, env="TINKEX_DEFAULT_QUERY", read=_json(dict))
    proxy: Option[ProxyOption, Proxy | None] = setting(
        'HTTP proxy: a URL or (scheme, host, port, options); "" for none.',
        _proxy, env="TINKEX_PROXY", redact=_without_userinfo)
    proxy_headers: Option[Mapping[str, str] | Sequence[Sequence[str]], HeaderPairs] = setting(
        "Headers for the proxy; they replace those from its URL. In the environment, JSON pairs [name, value].",
        _header_pairs, (), env="TINKEX_PROXY_HEADERS", read=_read_pairs, redact=_hide)
    http_client: Option[Any, Any] = setting(
        'Replacement for the HTTP layer: an object with post, get and delete, or its "module:attribute".',
        _http_client, env="TINKEX_HTTP_CLIENT")
    http_pool: Option[str, str | None] = setting(
        f"Name of a connection pool. {_NO_EFFECT}", _text, env="TINKEX_HTTP_POOL")
    pool_size: Option[int, int] = setting(
        "Connections in one group for samples over HTTP/1.1.",
        _whole(1), DEFAULT_POOL_SIZE, env="TINKEX_POOL_SIZE", read=_read_count, env_first=True)
    pool_count: Option[int, int] = setting(
        "Largest number of groups of pool_size connections; another one opens when samples wait for a connection.",
        _whole(1), DEFAULT_POOL_COUNT, env="TINKEX_POOL_COUNT", read=_read_count, env_first=True)
    dispatch_concurrency: Option[int, int] = setting(
        "Largest number of samples in flight that the service has not yet accepted.", _whole(1), 400)
    throttled_dispatch_concurrency: Option[int, int] = setting(
        "The same limit for ten seconds after the service answered 429.", _whole(1), 10)
    dispatch_byte_budget: Option[int, int | None] = setting(
        "Largest size of all samples in flight, in bytes; by default the limit that the service names.", _whole(1))
    shared_limits: Option[bool, bool] = setting(
        "Share these limits, and the pause after a 429, with all clients of the same base_url and key that set this.",
        _flag, False)
    recovery: Option[Any, Any] = setting("Recovery policy, or a mapping of its options.", lambda value: value)
    heartbeat_interval: Option[float, float] = setting(
        "Seconds between heartbeats of a session.", _seconds, 10.0)
    heartbeat_warning_after: Option[float, float] = setting(
        "Seconds without a successful heartbeat after which each failure is logged as a warning.",
        _seconds, 120.0)
    heartbeat_max_failures: Option[int, int | None] = setting(
        "Failed heartbeats in a row that a session survives; one more ends it, and calls fail.", _whole(0))
    heartbeat_max_silence: Option[float, float | None] = setting(
        "Seconds without a successful heartbeat after which the session ends and calls fail.", _seconds)
    warn_on_base_url_mismatch: Option[bool, bool] = setting(
        "Warn if base_url differs from the process default, because its pools are then not used.",
        _flag, True)
    # fmt: on

    def __post_init__(self) -> None:
        self._settle(_resolve(self._values(), os.environ))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], **options: Any) -> Config:
        """Like `Config(**options)`, with `environ` in place of the process environment."""
        _require_known(options)
        return object.__new__(cls)._settle(_resolve(options, environ))

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed; None resets a field to its built-in default.

        The environment and the process defaults are not read again. Other fields keep their values: a new
        `parity_mode` alone does not change the timeout.
        """
        _require_known(changes)
        kept = {name: value for name, value in self._values().items() if name not in changes}
        given = {
            name: _checked(name, value) for name, value in changes.items() if value is not None
        }
        values = _complete(kept | given)
        if "base_url" in changes:
            _warn_on_mismatch(values)
        return object.__new__(type(self))._settle(values)

    @property
    def normalized_base_url(self) -> str:
        return normalize_base_url(self.base_url)

    @property
    def is_loopback(self) -> bool:
        """Whether the service runs on this machine."""
        from urllib.parse import urlsplit

        return self.base_url == LOCAL or is_loopback(urlsplit(self.base_url).hostname or "")

    @property
    def shown_base_url(self) -> str:
        """The address without user name and password, for logs and events."""
        return _without_userinfo(self.base_url)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _settle(self, values: Mapping[str, Any]) -> Config:
        for name, value in values.items():
            object.__setattr__(self, name, value)
        return self

    def __repr__(self) -> str:
        shown = (
            f"{name}={_SETTINGS[name].show(value)!r}"
            for name, value in self._values().items()
            if name == "base_url" or value != _SETTINGS[name].default
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def __hash__(self) -> int:
        # Some fields may hold values that cannot be hashed; these three tell configs apart well enough.
        return hash((self.base_url, self.api_key, self.project_id))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {name: _unfrozen(value) for name, value in self._values().items()}
        return _restore, (type(self), values)


def _restore(cls: type[Config], values: Mapping[str, Any]) -> Config:
    checked = {name: _checked(name, value) for name, value in values.items()}
    return object.__new__(cls)._settle(_complete(checked))


_SETTINGS: Mapping[str, Setting] = {f.name: f.metadata["setting"] for f in fields(Config)}

# Environment variables of other modules, which read them with `read_env`.
_OTHER_VARIABLES = (
    Setting("Token for the Hugging Face Hub.", env="HF_TOKEN", redact=_hide),
    Setting("Older name of HF_TOKEN.", env="HUGGING_FACE_HUB_TOKEN", redact=_hide),
    Setting("File that holds the Hub token.", env="HF_TOKEN_PATH"),
    Setting("Directory of the Hub's cache and token.", env="HF_HOME"),
    Setting("Parent directory of caches.", env="XDG_CACHE_HOME"),
    Setting("GPUs that the local service may use, as in CUDA.", env="CUDA_VISIBLE_DEVICES"),
    Setting("Directory of the local service's data.", env="TINKEX_DATA_DIR"),
    Setting(
        "Set to torch, the local service computes without the kernels in C that it compiles on first use.",
        env="TINKEX_KERNELS",
    ),
    Setting("If set, the command line prints no colours and no bold.", env="NO_COLOR"),
    Setting("If set, `tinkex demo` ends by itself instead of waiting for a key.", env="CI"),
    Setting("Import path of Python, extended for children of tinkex.as_tinker.", env="PYTHONPATH"),
)


# Resolution


def _resolve(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    looked_up = {name: row.look_up(environ) for name, row in _SETTINGS.items()}
    environment = {name: value for name, value in looked_up.items() if value is not None}
    process = defaults()
    found = {}
    for name, row in _SETTINGS.items():
        order = (given, environment, process) if row.env_first else (given, process, environment)
        source = next((source for source in order if name in source), None)
        if source is not None:
            found[name] = _checked(name, source[name], row.env if source is environment else None)
    values = _complete(found)
    _warn_on_mismatch(values)
    return values


def _checked(name: str, value: Any, variable: str | None = None) -> Any:
    row = _SETTINGS[name]
    try:
        return None if value is None else row.check(value)
    except _SettingError as error:
        shown = "" if row.redact else f", not {value!r:.60}"
        origin = f" (from {variable})" if variable else ""
        raise ConfigError(f"{error}{shown}{origin}", field=name, advice=error.advice) from None


def _complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add built-in defaults and resolve values that depend on more than one field."""
    profile = _PROFILES[values.get("parity_mode", "python")]
    complete = {name: profile.get(name, row.default) for name, row in _SETTINGS.items()}
    complete.update(values)
    if complete["proxy"] and complete["proxy_headers"]:
        complete["proxy"] = replace(complete["proxy"], headers=complete["proxy_headers"])
    if complete["retry_delay_max"] < complete["retry_delay_base"]:
        raise ConfigError("must not be smaller than retry_delay_base", field="retry_delay_max")
    if complete["api_key"] is None and complete["base_url"] == LOCAL:
        complete["api_key"] = KEYLESS
    if complete["api_key"] is None and complete["credential_cmd"] is None:
        raise ConfigError("missing", field="api_key", advice=_KEY_ADVICE)
    return complete


def _require_known(names: Iterable[str]) -> None:
    for name in names:
        if name not in _SETTINGS:
            raise ConfigError("is not a setting", field=name)


def _warn_on_mismatch(values: Mapping[str, Any]) -> None:
    actual = normalize_base_url(values["base_url"])
    expected = normalize_base_url(defaults().get("base_url", values["base_url"]))
    if actual != expected and values["warn_on_base_url_mismatch"]:
        import logging

        logging.getLogger("tinkex").warning(
            "base_url %s differs from the process default %s: pools tuned for the default are not used "
            "(warn_on_base_url_mismatch=False silences this)",
            actual,
            expected,
        )


# Process defaults: one read-only mapping, replaced as a whole, so that readers need no lock.

_process_defaults = _EMPTY
_process_lock = threading.Lock()


def set_defaults(**options: Any) -> None:
    """Set values for every `Config` created from now on; None removes an earlier value."""
    global _process_defaults  # noqa: PLW0603 - the registry is process-wide by definition
    _require_known(options)
    chosen = {name: _checked(name, value) for name, value in options.items() if value is not None}
    with _process_lock:
        kept = {name: value for name, value in _process_defaults.items() if name not in options}
        _process_defaults = MappingProxyType(kept | chosen)


def reset_defaults() -> None:
    """Remove every value set with `set_defaults`."""
    set_defaults(**dict.fromkeys(_SETTINGS))


def defaults() -> Mapping[str, Any]:
    """The values set with `set_defaults`, secrets included."""
    return _process_defaults


# The tables as data


class SettingInfo(NamedTuple):
    """A row for documentation; `name` is None for a variable without a `Config` field."""

    name: str | None
    env: str | None
    default: Any
    doc: str
    secret: bool


def settings() -> tuple[SettingInfo, ...]:
    """Every setting, and every other environment variable that this package reads."""
    rows = [*_SETTINGS.items(), *((None, row) for row in _OTHER_VARIABLES)]
    return tuple(
        SettingInfo(name, row.env, _unfrozen(row.default), row.doc, row.redact is not None)
        for name, row in rows
    )


def configured_base_url() -> str:
    """The address that a `Config` created now without `base_url` would have."""
    row = _SETTINGS["base_url"]
    chosen = defaults().get("base_url") or row.look_up(os.environ) or row.default
    return str(_checked("base_url", chosen, row.env))


def read_env(variable: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The stripped text of a known environment variable; None if it is unset or blank."""
    if not any(variable == info.env for info in settings()):
        raise ConfigError("is not an environment variable of tinkex", field=variable)
    return (os.environ if environ is None else environ).get(variable, "").strip() or None


def snapshot(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The values in the environment, without secrets; None for a variable that is unset or not valid.

    The keys are field names, or variable names where there is no field.
    """
    environ = os.environ if environ is None else environ
    rows = {name: row for name, row in _SETTINGS.items() if row.env}
    rows |= {str(row.env): row for row in _OTHER_VARIABLES}
    return {name: row.show(row.look_up(environ)) for name, row in rows.items()}
