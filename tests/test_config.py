from __future__ import annotations

import copy
import logging
import pickle
from base64 import b64encode
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tinkex import config as module
from tinkex.config import (
    DEFAULT_BASE_URL,
    REDACTED,
    CircuitBreaker,
    Config,
    Proxy,
    defaults,
    mask_key,
    normalize_base_url,
    poll_delay,
    read_env,
    redact_headers,
    reset_defaults,
    set_defaults,
    settings,
    snapshot,
)
from tinkex.errors import ConfigError

KEY = "tml-abcdef123456"
FIELDS = tuple(row.name for row in settings() if row.name)


@pytest.fixture(autouse=True)
def _no_process_defaults() -> Iterator[None]:
    reset_defaults()
    yield
    reset_defaults()


def make(environ: Mapping[str, str] | None = None, **options: Any) -> Config:
    """A config with a key, independent of the real environment."""
    return Config.from_environ({"TINKER_API_KEY": KEY} | dict(environ or {}), **options)


class FakeHTTP:
    """Defined at module level, so that a config with one can be pickled."""

    def post(self) -> None: ...
    def get(self) -> None: ...
    def delete(self) -> None: ...


def one_second_more(iteration: int) -> float:
    return iteration + 1.0


# Defaults


def test_built_in_defaults():
    config = make()
    assert config.base_url == "https://tinker.thinkingmachines.dev/services/tinker-prod"
    assert config.timeout == 60.0
    assert config.connect_timeout == 5.0
    assert config.max_retries == 10
    assert config.feature_gates == ("async_sampling",)
    assert config.tags == ("tinkex-python",)
    assert config.telemetry_enabled is True
    assert config.dump_headers is False
    assert (config.pool_size, config.pool_count) == (50, 20)


def test_everything_else_is_off_by_default():
    config = make()
    for name in (
        *("credential_cmd", "project_id", "proxy", "http_client", "http_pool", "log_level"),
        *("poll_backoff", "circuit_breaker", "user_metadata", "recovery"),
        *("heartbeat_max_failures", "heartbeat_max_silence"),
        *("cf_access_client_id", "cf_access_client_secret"),
    ):
        assert getattr(config, name) is None
    assert config.default_headers == config.default_query == {}
    assert config.proxy_headers == ()
    assert config.otel_propagate is False


def test_named_defaults_are_the_python_profile():
    assert (module.DEFAULT_TIMEOUT, module.DEFAULT_MAX_RETRIES) == (60.0, 10)
    assert (module.PYTHON_TIMEOUT, module.PYTHON_MAX_RETRIES) == (60.0, 10)
    assert (module.BEAM_TIMEOUT, module.BEAM_MAX_RETRIES) == (120.0, 2)


def test_construction_reads_the_process_environment(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_PROJECT_ID", "from-the-process")
    config = Config()
    assert (config.api_key, config.project_id) == (KEY, "from-the-process")
    assert Config(project_id="given").project_id == "given"


# Precedence


class Sources(NamedTuple):
    """Three different values for one field; `env_held` is the value read from the text `env`."""

    option: Any
    process: Any
    env: str | None = None
    env_held: Any = None


CLIENT = FakeHTTP()
OTHER_CLIENT = FakeHTTP()

SOURCES: dict[str, Sources] = {
    "base_url": Sources("http://a", "http://b", "http://c", "http://c"),
    "api_key": Sources("tml-a", "tml-b", "tml-c", "tml-c"),
    "credential_cmd": Sources("a", "b", "c", "c"),
    "project_id": Sources("a", "b", "c", "c"),
    "parity_mode": Sources("python", "python", "beam", "beam"),
    "timeout": Sources(1.0, 2.0),
    "connect_timeout": Sources(1.0, 2.0),
    "max_retries": Sources(0, 1),
    "retry_window": Sources(0.0, 1.0),
    "retry_delay_base": Sources(1.0, 2.0),
    "retry_delay_max": Sources(20.0, 30.0),
    "poll_backoff": Sources(
        ("exponential", 1.0, 2.0), one_second_more, "yes", ("exponential", 1.0, 30.0)
    ),
    "circuit_breaker": Sources(
        CircuitBreaker(1), CircuitBreaker(2), "on", CircuitBreaker(5, 30.0, 1)
    ),
    "user_metadata": Sources({"a": 1}, {"b": 2}),
    "tags": Sources(("a",), ("b",), "c", ("c",)),
    "feature_gates": Sources(("a",), ("b",), "c", ("c",)),
    "telemetry_enabled": Sources(True, True, "off", False),
    "log_level": Sources("debug", "info", "error", "error"),
    "dump_headers": Sources(False, False, "on", True),
    "otel_propagate": Sources(False, False, "on", True),
    "cf_access_client_id": Sources("a", "b", "c", "c"),
    "cf_access_client_secret": Sources("a", "b", "c", "c"),
    "default_headers": Sources({"a": "1"}, {"b": "2"}, '{"c": 3}', {"c": "3"}),
    "default_query": Sources({"a": "1"}, {"b": "2"}, '{"c": 3}', {"c": "3"}),
    "proxy": Sources(
        Proxy("http", "a", 1), Proxy("http", "b", 2), "http://c", Proxy("http", "c", 80)
    ),
    "proxy_headers": Sources((("a", "1"),), (("b", "2"),), '[["c", "3"]]', (("c", "3"),)),
    "http_client": Sources(CLIENT, OTHER_CLIENT, "pkg.mod:client", "pkg.mod:client"),
    "http_pool": Sources("a", "b", "c", "c"),
    "pool_size": Sources(1, 2, "3", 3),
    "pool_count": Sources(1, 2, "3", 3),
    "dispatch_concurrency": Sources(1, 2),
    "throttled_dispatch_concurrency": Sources(1, 2),
    "dispatch_byte_budget": Sources(1000, 2000),
    "shared_limits": Sources(True, False),
    "recovery": Sources({"enabled": True}, {"enabled": False}),
    "heartbeat_interval": Sources(5.0, 20.0),
    "heartbeat_warning_after": Sources(60.0, 600.0),
    "heartbeat_max_failures": Sources(0, 5),
    "heartbeat_max_silence": Sources(60.0, 600.0),
    "warn_on_base_url_mismatch": Sources(True, False),
}
ENV_FIRST = {"pool_size", "pool_count"}
VARIABLE = {row.name: row.env for row in settings() if row.name}


def test_precedence_table_covers_every_field_and_variable():
    assert set(SOURCES) == set(FIELDS)
    assert {name for name, sources in SOURCES.items() if sources.env} == {
        name for name, variable in VARIABLE.items() if variable
    }


def environ_of(name: str) -> dict[str, str]:
    variable, text = VARIABLE[name], SOURCES[name].env
    return {variable: text} if variable and text else {}


@pytest.mark.parametrize("name", FIELDS)
def test_option_has_priority_over_every_other_source(name):
    set_defaults(warn_on_base_url_mismatch=False)
    set_defaults(**{name: SOURCES[name].process})
    config = make(environ_of(name), **{name: SOURCES[name].option})
    assert getattr(config, name) == SOURCES[name].option


@pytest.mark.parametrize("name", sorted(set(FIELDS) - ENV_FIRST))
def test_process_default_has_priority_over_the_environment(name):
    set_defaults(**{name: SOURCES[name].process})
    assert getattr(make(environ_of(name)), name) == SOURCES[name].process


@pytest.mark.parametrize("name", sorted(ENV_FIRST))
def test_environment_has_priority_over_process_default_for_pools(name):
    set_defaults(**{name: SOURCES[name].process})
    assert getattr(make(environ_of(name)), name) == SOURCES[name].env_held
    assert getattr(make(), name) == SOURCES[name].process


@pytest.mark.parametrize("name", [name for name, sources in SOURCES.items() if sources.env])
def test_environment_has_priority_over_built_in_default(name):
    assert getattr(make(environ_of(name)), name) == SOURCES[name].env_held
    assert getattr(make(), name) != SOURCES[name].env_held


@pytest.mark.parametrize("name", FIELDS)
def test_none_means_not_given(name):
    assert make(environ_of(name), **{name: None}) == make(environ_of(name))


def test_explicit_false_has_priority_over_a_true_environment():
    environ = {
        "TINKER_TELEMETRY": "1",
        "TINKEX_DUMP_HEADERS": "1",
        "TINKEX_OTEL_PROPAGATE": "1",
        "TINKEX_POLL_BACKOFF": "1",
    }
    config = make(
        environ,
        telemetry_enabled=False,
        dump_headers=False,
        otel_propagate=False,
        poll_backoff=False,
    )
    assert not config.telemetry_enabled
    assert not config.dump_headers
    assert not config.otel_propagate
    assert config.poll_backoff is None


def test_explicit_zero_and_empty_are_choices():
    config = make({"TINKER_TAGS": "a,b"}, max_retries=0, tags=[], feature_gates=())
    assert (config.max_retries, config.tags, config.feature_gates) == (0, (), ())


@pytest.mark.parametrize(
    ("name", "variable", "text"),
    [
        ("proxy", "TINKEX_PROXY", "http://proxy.test"),
        ("cf_access_client_id", "CLOUDFLARE_ACCESS_CLIENT_ID", "id"),
        ("cf_access_client_secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET", "secret"),
        ("credential_cmd", "TINKER_CREDENTIAL_CMD", "pass show tinker"),
    ],
)
def test_empty_string_turns_off_a_setting_of_the_environment(name, variable, text):
    assert getattr(make({variable: text}), name) is not None
    assert getattr(make({variable: text}, **{name: ""}), name) is None


def test_process_default_can_turn_off_a_setting_of_the_environment():
    set_defaults(poll_backoff=False, proxy="")
    config = make({"TINKEX_POLL_BACKOFF": "1", "TINKEX_PROXY": "http://proxy.test"})
    assert config.poll_backoff is None
    assert config.proxy is None


# The environment


def mixed_case(words: list[str]) -> st.SearchStrategy[str]:
    def spelled(word: str) -> st.SearchStrategy[str]:
        letters = st.tuples(*(st.sampled_from([c.lower(), c.upper()]) for c in word))
        return letters.map("".join)

    padding = st.text(" \t\n", max_size=3)
    spelling = st.sampled_from(words).flatmap(spelled)
    return st.tuples(padding, spelling, padding).map("".join)


TRUE, FALSE = ["1", "true", "yes", "on"], ["0", "false", "no", "off"]


@given(mixed_case(TRUE))
def test_environment_booleans_that_are_true(text):
    assert make({"TINKEX_DUMP_HEADERS": text}).dump_headers is True


@given(mixed_case(FALSE))
def test_environment_booleans_that_are_false(text):
    assert make({"TINKER_TELEMETRY": text}).telemetry_enabled is False


@given(st.text().filter(lambda text: text.strip().lower() not in {*TRUE, *FALSE}))
@example("")
@example("maybe")
def test_unknown_environment_boolean_means_default_and_disables_telemetry(text):
    config = make({"TINKEX_OTEL_PROPAGATE": text, "TINKER_TELEMETRY": text})
    assert config.otel_propagate is False
    assert config.telemetry_enabled is False
    assert make().telemetry_enabled is True


def test_shown_base_url_hides_user_and_password():
    config = make(base_url="https://user:secret@example.com/x")
    assert config.shown_base_url == f"https://{REDACTED}@example.com/x"
    assert make(base_url="https://example.com/x").shown_base_url == "https://example.com/x"


def test_environment_lists_drop_blanks():
    config = make({"TINKER_TAGS": " a, ,b,, c ", "TINKER_FEATURE_GATES": " , "})
    assert config.tags == ("a", "b", "c")
    assert config.feature_gates == ("async_sampling",)


@given(st.lists(st.text(st.characters(exclude_characters=","))))
def test_environment_lists_are_split_at_commas(parts):
    wanted = tuple(part.strip() for part in parts if part.strip())
    assert make({"TINKER_TAGS": ",".join(parts)}).tags == (wanted or ("tinkex-python",))


@pytest.mark.parametrize("text", ["{not json", "[]", "3", "null", "[" * 100_000])
def test_bad_json_in_the_environment_is_empty(text):
    environ = {
        "TINKEX_DEFAULT_HEADERS": text,
        "TINKEX_DEFAULT_QUERY": text,
        "TINKEX_PROXY_HEADERS": text,
    }
    config = make(environ)
    assert config.default_headers == config.default_query == {}
    assert config.proxy_headers == ()


def test_bad_proxy_headers_in_the_environment_are_skipped_one_by_one():
    text = '[["a", "1"], ["b"], "c", ["", "2"], ["d", 3], ["e", "4"]]'
    assert make({"TINKEX_PROXY_HEADERS": text}).proxy_headers == (("a", "1"), ("e", "4"))


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("debug", "debug"),
        (" INFO ", "info"),
        ("warn", "warn"),
        ("Warning", "warn"),
        ("error", "error"),
        ("loud", None),
        ("", None),
    ],
)
def test_log_level_in_the_environment(text, level):
    assert make({"TINKER_LOG": text}).log_level == level


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "", "9" * 5000])
def test_invalid_pool_sizes_in_the_environment_are_unset(text):
    config = make({"TINKEX_POOL_SIZE": text, "TINKEX_POOL_COUNT": text})
    assert (config.pool_size, config.pool_count) == (50, 20)


def test_blank_text_is_unset():
    environ = {"TINKER_API_KEY": " \t", "TINKER_BASE_URL": "  ", "TINKER_PROJECT_ID": ""}
    with pytest.raises(ConfigError, match="missing"):
        Config.from_environ(environ)
    config = Config.from_environ(environ, api_key=KEY)
    assert (config.base_url, config.project_id) == (DEFAULT_BASE_URL, None)


def test_an_error_names_the_variable_a_value_came_from():
    with pytest.raises(ConfigError, match=r"^base_url: .*\(from TINKER_BASE_URL\)$"):
        make({"TINKER_BASE_URL": "nowhere"})


def test_read_env_trims_and_treats_blank_as_unset():
    assert read_env("HF_TOKEN", {"HF_TOKEN": " hf_x\n"}) == "hf_x"
    assert read_env("HF_TOKEN", {"HF_TOKEN": "  "}) is None
    assert read_env("HF_HOME", {}) is None


def test_read_env_reads_the_process_environment(monkeypatch):
    monkeypatch.setenv("TINKEX_DATA_DIR", "/somewhere")
    assert read_env("TINKEX_DATA_DIR") == "/somewhere"


def test_read_env_refuses_unknown_variables():
    with pytest.raises(ConfigError, match="NOT_OURS"):
        read_env("NOT_OURS", {"NOT_OURS": "1"})


# Parity


@pytest.mark.parametrize(
    ("mode", "held", "timeout", "max_retries"),
    [
        (None, "python", 60.0, 10),
        ("python", "python", 60.0, 10),
        ("beam", "beam", 120.0, 2),
        ("elixir", "beam", 120.0, 2),
        ("BEAM", "beam", 120.0, 2),
        ("ruby", "python", 60.0, 10),
        (7, "python", 60.0, 10),
    ],
)
def test_parity_mode_chooses_the_profile(mode, held, timeout, max_retries):
    config = make(parity_mode=mode)
    assert (config.parity_mode, config.timeout, config.max_retries) == (held, timeout, max_retries)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("python", "python"),
        ("Python", "python"),
        ("PYTHON", "python"),
        ("beam", "beam"),
        ("BEAM", "beam"),
        ("elixir", "beam"),
        ("ELIXIR", "beam"),
        ("ruby", "python"),
    ],
)
def test_parity_mode_in_the_environment(text, held):
    assert make({"TINKEX_PARITY": text}).parity_mode == held


def test_unknown_parity_in_the_environment_counts_as_unset():
    assert snapshot({"TINKEX_PARITY": "ruby"})["parity_mode"] is None


def test_unknown_parity_option_overrides_the_environment():
    assert make({"TINKEX_PARITY": "beam"}, parity_mode="ruby").timeout == 60.0


def test_explicit_timeout_or_retries_override_the_profile():
    config = make(parity_mode="beam", timeout=7)
    assert (config.timeout, config.max_retries) == (7.0, 2)
    assert make(parity_mode="beam", max_retries=0).max_retries == 0


def test_process_default_timeout_overrides_the_profile():
    set_defaults(timeout=9, parity_mode="beam")
    config = make()
    assert (config.timeout, config.max_retries) == (9.0, 2)


# Keys


def test_missing_key_error_names_every_way_to_set_it():
    with pytest.raises(ConfigError) as caught:
        Config.from_environ({})
    assert caught.value.field == "api_key"
    for hint in ("TINKER_API_KEY", "api_key=", 'base_url="local"'):
        assert hint in str(caught.value)


@pytest.mark.parametrize("key", ["sk-verysecret", "verysecret", "TML-verysecret", "", "   ", 5])
def test_invalid_key_is_refused_without_showing_it(key):
    with pytest.raises(ConfigError) as caught:
        Config.from_environ({}, api_key=key)
    assert caught.value.field == "api_key"
    assert "verysecret" not in str(caught.value)
    assert "TINKER_API_KEY" in str(caught.value)


def test_keys_and_tokens_are_accepted_and_trimmed():
    assert Config.from_environ({}, api_key=" tml-x\n").api_key == "tml-x"
    assert Config.from_environ({}, api_key="eyJhbGciOi").api_key == "eyJhbGciOi"


def test_credential_command_replaces_a_key():
    config = Config.from_environ({"TINKER_CREDENTIAL_CMD": "pass show tinker"})
    assert config.api_key is None
    assert config.credential_cmd == "pass show tinker"


def test_a_local_service_needs_no_key():
    config = Config.from_environ({}, base_url="local")
    assert (config.base_url, config.api_key) == ("local", "tml-local")
    assert make(base_url="local").api_key == KEY


def test_missing_key_is_reported_after_other_errors():
    with pytest.raises(ConfigError) as caught:
        Config.from_environ({}, timeout=-1)
    assert caught.value.field == "timeout"


# Valid values


REFUSED: dict[str, list[Any]] = {
    "timeout": [0, -1, 0.0, True, "60", float("nan"), float("inf"), 10**400],
    "connect_timeout": [0, -0.5, False],
    "max_retries": [-1, 1.5, True, "3"],
    "retry_window": [-1, True, False, "3", float("nan"), float("inf")],
    "heartbeat_max_failures": [-1, 1.5, True, "3"],
    "heartbeat_max_silence": [0, -1.0, True, "3"],
    "pool_size": [0, -1, True, "50"],
    "pool_count": [0, 2.0],
    "retry_delay_base": [0, -1, "1"],
    "retry_delay_max": [0, 0.1, True],
    "dispatch_concurrency": [0, True, "3"],
    "throttled_dispatch_concurrency": [0, 1.5],
    "dispatch_byte_budget": [0, -1, True],
    "shared_limits": [1, "yes"],
    "heartbeat_interval": [0, -1.0, "3"],
    "heartbeat_warning_after": [0, True],
    "base_url": [
        *("", "example.com", "ftp://host", "https://", "http:///path", "https://host:port", 5),
        *("https://h:99999", "https://a b", "https://h/?q=1", "https://h/#top", "http://[::1"),
    ],
    "tags": ["a,b", {"a"}, [1], [" "]],
    "feature_gates": ["async", [None]],
    "telemetry_enabled": [1, "yes"],
    "dump_headers": [0, "no"],
    "otel_propagate": ["on"],
    "warn_on_base_url_mismatch": [1],
    "log_level": ["loud", "", 10],
    "project_id": ["", "  ", 5],
    "http_pool": ["", 5],
    "http_client": [
        *("no_colon", ":attr", "mod:", object()),
        SimpleNamespace(post=print, get=print),
        SimpleNamespace(post=print, get=print, delete=1),
    ],
    "user_metadata": [[("a", 1)], {1: "a"}],
    "default_headers": [{"": "a"}, {" ": "a"}, {"a": []}, {"a": b"x"}, "a: b"],
    "default_query": [{"": 1}, {"a": {}}, {1: "a"}, []],
    "proxy_headers": ["a: b", [("a",)], [("a", 1)], [("", "b")], [1], {"a": 1}],
    "cf_access_client_id": [" ", 5],
    "cf_access_client_secret": [" ", 5],
    "credential_cmd": [" ", ["a"]],
    "poll_backoff": [
        *("linear", 5, ("exponential", 2), ("linear", 1, 2), ("exponential", 2, 1)),
        *(("exponential", 0, 1), ("exponential", -1, 1), ("exponential", 1, "2")),
    ],
    "circuit_breaker": ["on", 5],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_invalid_value_is_refused_with_its_field_name(name, value):
    with pytest.raises(ConfigError) as caught:
        make(**{name: value})
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    "given",
    [
        *({"failure_threshold": 0}, {"failure_threshold": True}, {"half_open_max_calls": 0}),
        *({"reset_timeout": 0}, {"is_failure": 500}),
    ],
)
def test_circuit_breaker_refuses_invalid_values(given):
    with pytest.raises(ConfigError) as caught:
        CircuitBreaker(**given)
    assert [caught.value.field] == list(given)


def test_error_messages_show_the_problem_and_the_value():
    with pytest.raises(ConfigError, match="positive number of seconds, not 0"):
        make(timeout=0)
    with pytest.raises(ConfigError, match="at least 0, not -1"):
        make(max_retries=-1)
    with pytest.raises(ConfigError, match=r"such as https://.*, not 'example.com'"):
        make(base_url="example.com")


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="time_out"):
        Config(time_out=3)  # type: ignore[call-arg]
    for call in (make, set_defaults, make().replace):
        with pytest.raises(ConfigError, match="time_out"):
            call(time_out=3)


def test_log_level_options_are_normalised():
    assert make(log_level="warning").log_level == "warn"
    assert make(log_level="DEBUG").log_level == "debug"


def test_mappings_become_strings_without_none():
    config = make(default_headers={" X-N ": 1, "x-f": True, "gone": None}, default_query={"a": 1.5})
    assert config.default_headers == {"X-N": "1", "x-f": "true"}
    assert config.default_query == {"a": "1.5"}


def test_http_client_is_kept_as_object_or_as_name():
    assert make(http_client=CLIENT).http_client is CLIENT
    assert make(http_client="pkg.mod:client").http_client == "pkg.mod:client"


def test_recovery_is_kept_unchanged():
    policy = object()
    assert make(recovery=policy).recovery is policy


# Base URL


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        (DEFAULT_BASE_URL, "https://tinker.thinkingmachines.dev"),
        ("HTTPS://Example.COM:443/a/b", "https://example.com"),
        ("http://example.com:80", "http://example.com"),
        ("http://example.com:443", "http://example.com:443"),
        ("https://example.com:8443/x", "https://example.com:8443"),
        ("http://user:pw@example.com/x", "http://example.com"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("local", "local"),
    ],
)
def test_normalized_base_url(url, origin):
    assert make(base_url=url).normalized_base_url == normalize_base_url(url) == origin


def test_trailing_slashes_are_dropped():
    assert make(base_url="http://host/api//").base_url == "http://host/api"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tinkex"]


def test_base_url_other_than_the_process_default_logs_a_warning(caplog):
    set_defaults(base_url="https://one.test")
    with caplog.at_level(logging.WARNING, logger="tinkex"):
        make(base_url="https://user:hush@two.test/path")
    (message,) = warnings_of(caplog)
    assert "https://one.test" in message
    assert "https://two.test" in message
    assert "hush" not in message


def test_no_warning_without_a_mismatch(caplog):
    with caplog.at_level(logging.WARNING, logger="tinkex"):
        make(base_url="https://two.test")
        set_defaults(base_url="https://one.test/a")
        make()
        make(base_url="https://ONE.test:443/b")
        make(base_url="https://two.test", warn_on_base_url_mismatch=False)
        set_defaults(warn_on_base_url_mismatch=False)
        make(base_url="https://two.test")
    assert warnings_of(caplog) == []


def test_replace_warns_only_about_a_new_base_url(caplog):
    config = make()
    set_defaults(base_url="https://one.test")
    with caplog.at_level(logging.WARNING, logger="tinkex"):
        config.replace(timeout=1)
        pickle.loads(pickle.dumps(config))
        assert warnings_of(caplog) == []
        config.replace(base_url="https://two.test")
    assert len(warnings_of(caplog)) == 1


# Proxy


def basic(userinfo: str) -> tuple[str, str]:
    return ("proxy-authorization", "Basic " + b64encode(userinfo.encode()).decode())


@pytest.mark.parametrize(
    ("given_proxy", "held"),
    [
        ("http://proxy.test", Proxy("http", "proxy.test", 80)),
        ("https://proxy.test/", Proxy("https", "proxy.test", 443)),
        ("HTTP://Proxy.Test:3128", Proxy("http", "proxy.test", 3128)),
        ("http://[::1]:3128", Proxy("http", "::1", 3128)),
        ("http://user:pw@proxy.test:1", Proxy("http", "proxy.test", 1, (basic("user:pw"),))),
        ("http://user@proxy.test:1", Proxy("http", "proxy.test", 1, (basic("user:"),))),
        ("http://u%40x:p%3Aw@p.test:1", Proxy("http", "p.test", 1, (basic("u@x:p:w"),))),
        (("https", "p.test", 8443, None), Proxy("https", "p.test", 8443)),
        (["http", "p.test", 1, {}], Proxy("http", "p.test", 1)),
        (
            ("http", "p.test", 65535, {"headers": {"a": "b"}}),
            Proxy("http", "p.test", 65535, (("a", "b"),)),
        ),
    ],
)
def test_proxy_forms(given_proxy, held):
    assert make(proxy=given_proxy).proxy == held


@pytest.mark.parametrize(
    "bad",
    [
        "ftp://hush:hush@proxy.test",
        "socks5://proxy.test:1080",
        "proxy.test:3128",
        "hush:hush@proxy.test",
        "http://",
        "http://hush:hush@proxy.test:0",
        "http://hush:hush@proxy.test:65536",
        "http://proxy.test:hush",
        "http://proxy.test/path",
        "http://proxy.test?x=1",
        "http://[hush",
        " ",
        5,
        ("http", "proxy.test", 80),
        ("ftp", "proxy.test", 80, {}),
        (None, "proxy.test", 80, {}),
        ("http", "", 80, {}),
        ("http", "a b", 80, {}),
        ("http", "hush@proxy.test", 80, {}),
        ("http", "proxy.test", 0, {}),
        ("http", "proxy.test", 65536, {}),
        ("http", "proxy.test", "80", {}),
        ("http", "proxy.test", True, {}),
        ("http", "proxy.test", 80, {"headers": [("hush",)]}),
        ("http", "proxy.test", 80, {"headers": "hush"}),
        ("http", "proxy.test", 80, {"hush": 1}),
        ("http", "proxy.test", 80, "hush"),
        Proxy("ftp", "proxy.test", 80),
        Proxy("http", "proxy.test", 0),
    ],
)
def test_invalid_proxy_is_refused_without_showing_it(bad):
    with pytest.raises(ConfigError) as caught:
        make(proxy=bad)
    assert caught.value.field == "proxy"
    assert "hush" not in str(caught.value)


def test_proxy_headers_replace_those_from_the_url():
    config = make(proxy="http://user:pw@proxy.test", proxy_headers={"x-proxy": "1"})
    assert config.proxy == Proxy("http", "proxy.test", 80, (("x-proxy", "1"),))


def test_proxy_headers_may_come_from_another_source():
    environ = {"TINKEX_PROXY": "http://user:pw@env.test", "TINKEX_PROXY_HEADERS": '[["a", "b"]]'}
    from_environ = make(environ)
    assert from_environ.proxy == Proxy("http", "env.test", 80, (("a", "b"),))
    option = make(environ, proxy="http://user:pw@option.test", proxy_headers=[["c", "d"]])
    assert option.proxy == Proxy("http", "option.test", 80, (("c", "d"),))


def test_a_bad_proxy_in_the_environment_is_an_error_too():
    with pytest.raises(ConfigError, match=r"\(from TINKEX_PROXY\)"):
        make({"TINKEX_PROXY": "ftp://proxy.test"})


def test_proxy_url_has_no_credentials():
    proxy = make(proxy="https://user:hush@[::1]").proxy
    assert proxy is not None
    assert proxy.url == str(proxy) == "https://[::1]:443"
    assert "hush" not in repr(proxy)
    assert basic("user:hush")[1] not in repr(proxy)


# Poll backoff


@pytest.mark.parametrize("off", [None, False, "none"])
def test_no_backoff(off):
    assert [poll_delay(off, iteration) for iteration in range(3)] == [0.0, 0.0, 0.0]
    assert make(poll_backoff=off).poll_backoff is None


@pytest.mark.parametrize("on", [True, "exponential"])
def test_exponential_backoff_goes_from_one_second_to_thirty(on):
    backoff = make(poll_backoff=on).poll_backoff
    assert [poll_delay(backoff, iteration) for iteration in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_exponential_backoff_with_its_own_bounds():
    backoff = make(poll_backoff=("exponential", 0.5, 3)).poll_backoff
    assert backoff == ("exponential", 0.5, 3.0)
    assert [poll_delay(backoff, iteration) for iteration in range(4)] == [0.5, 1.0, 2.0, 3.0]


@given(st.floats(0.001, 1e6), st.floats(1, 1e3), st.integers(0, 10**9), st.integers(0, 10**9))
def test_exponential_backoff_stays_within_its_bounds_and_never_shrinks(initial, factor, one, two):
    backoff = ("exponential", initial, initial * factor)
    earlier, later = (poll_delay(backoff, iteration) for iteration in sorted((one, two)))
    assert initial <= earlier <= later <= initial * factor


def test_backoff_by_function():
    backoff = make(poll_backoff=one_second_more).poll_backoff
    assert backoff is one_second_more
    assert [poll_delay(backoff, iteration) for iteration in range(3)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("answer", [-1, None, "5", True, float("nan"), float("inf"), 0])
def test_invalid_result_of_the_backoff_function_means_no_wait(answer):
    assert poll_delay(lambda _: answer, 0) == 0.0


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("YES", True), ("Exponential", True), ("0", False), ("x", False)]
)
def test_backoff_in_the_environment(text, on):
    backoff = make({"TINKEX_POLL_BACKOFF": text}).poll_backoff
    assert backoff == (("exponential", 1.0, 30.0) if on else None)


def test_poll_delay_refuses_invalid_backoffs():
    with pytest.raises(ConfigError, match=r"^poll_backoff: "):
        poll_delay("linear", 0)


# Redaction


@pytest.mark.parametrize(
    ("key", "masked"),
    [
        ("", ""),
        ("abc", "***"),
        ("abcd", "****"),
        ("abcde", "abc...bcde"),
        ("abcdefgh", "abcdef...efgh"),
        (KEY, "tml-ab...3456"),
    ],
)
def test_mask_key(key, masked):
    assert mask_key(key) == masked


@given(st.text(min_size=6, max_size=6), st.text(), st.text(), st.text(min_size=4, max_size=4))
def test_masked_key_does_not_depend_on_its_middle(start, middle, other, end):
    assert mask_key(start + middle + end) == mask_key(start + other + end) == f"{start}...{end}"


@given(st.text(max_size=4))
def test_a_short_key_is_all_stars(key):
    assert mask_key(key) == "*" * len(key)


def test_redact_headers_blanks_credentials_in_any_case():
    headers = {
        "X-API-Key": "a",
        "cf-access-client-secret": "b",
        "Authorization": "c",
        " PROXY-authorization ": "d",
        "CF-Access-Client-Id": "e",
        "accept": "f",
    }
    redacted = redact_headers(headers)
    assert list(redacted) == list(headers)
    assert list(redacted.values()) == [REDACTED] * 4 + ["e", "f"]
    assert headers["X-API-Key"] == "a"


SECRETIVE: dict[str, Any] = {
    "base_url": "https://user:hush@host.test/api",
    "api_key": "tml-prefix-hush-suffix",
    "credential_cmd": "echo hush",
    "cf_access_client_id": "visible-id",
    "cf_access_client_secret": "hush",
    "default_headers": {"Authorization": "Bearer hush", "x-visible": "yes"},
    "proxy": "http://user:hush@proxy.test:3128",
    "proxy_headers": {"x-anything": "hush"},
}


def test_repr_hides_secrets():
    text = repr(make(**SECRETIVE))
    assert "hush" not in text
    assert "api_key='tml-pr...ffix'" in text
    assert f"cf_access_client_secret={REDACTED!r}" in text
    assert f"credential_cmd={REDACTED!r}" in text
    assert f"proxy_headers={REDACTED!r}" in text
    assert f"'Authorization': {REDACTED!r}, 'x-visible': 'yes'" in text
    assert "proxy='http://proxy.test:3128'" in text
    assert "host.test/api" in text
    assert "visible-id" in text


def test_repr_hides_the_header_made_from_proxy_credentials():
    text = repr(make(proxy="http://user:hush@proxy.test"))
    assert "hush" not in text
    assert basic("user:hush")[1] not in text


def test_repr_of_a_short_key_and_of_defaults():
    assert "'****'" in repr(make(api_key="tml-"))
    assert repr(make()) == f"Config(base_url={DEFAULT_BASE_URL!r}, api_key='tml-ab...3456')"
    assert "timeout=1.0" in repr(make(timeout=1))


# Snapshot and the tables


def test_snapshot_has_every_variable_and_nothing_set():
    empty = snapshot({})
    assert len(empty) == len([row for row in settings() if row.env])
    assert set(empty.values()) == {None}
    assert {"parity_mode", "pool_size", "pool_count", "api_key", "HF_TOKEN"} <= set(empty)


def test_snapshot_reads_and_redacts():
    taken = snapshot(
        {
            "TINKER_API_KEY": KEY,
            "TINKER_BASE_URL": "https://user:hush@host.test",
            "TINKER_CREDENTIAL_CMD": "echo hush",
            "TINKER_TAGS": "a, b",
            "TINKER_TELEMETRY": "off",
            "TINKEX_PARITY": "ELIXIR",
            "TINKEX_POOL_SIZE": "7",
            "TINKEX_POOL_COUNT": "none",
            "TINKEX_DEFAULT_HEADERS": '{"authorization": "hush", "n": 1}',
            "TINKEX_PROXY": "user:hu/sh@proxy.test",
            "TINKEX_PROXY_HEADERS": '[["a", "hush"]]',
            "CLOUDFLARE_ACCESS_CLIENT_SECRET": "hush",
            "HF_TOKEN": "hush",
            "HF_HOME": "/hf",
        }
    )
    assert "hush" not in repr(taken)
    assert "hu/sh" not in repr(taken)
    assert taken["api_key"] == "tml-ab...3456"
    assert taken["base_url"] == f"https://{REDACTED}@host.test"
    assert taken["proxy"] == f"{REDACTED}@proxy.test"
    assert taken["tags"] == ("a", "b")
    assert taken["telemetry_enabled"] is False
    assert (taken["parity_mode"], taken["pool_size"], taken["pool_count"]) == ("beam", 7, None)
    assert taken["default_headers"] == {"authorization": REDACTED, "n": "1"}
    assert taken["cf_access_client_secret"] == taken["HF_TOKEN"] == REDACTED
    assert taken["HF_HOME"] == "/hf"


def test_snapshot_reads_the_process_environment(monkeypatch):
    monkeypatch.setenv("TINKER_PROJECT_ID", "p")
    assert snapshot()["project_id"] == "p"


def test_settings_list_every_environment_variable_once():
    variables = [row.env for row in settings() if row.env]
    assert len(variables) == len(set(variables))
    assert set(variables) == {
        "CI",
        "CLOUDFLARE_ACCESS_CLIENT_ID",
        "CLOUDFLARE_ACCESS_CLIENT_SECRET",
        "HF_HOME",
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HUGGING_FACE_HUB_TOKEN",
        "NO_COLOR",
        "PYTHONPATH",
        "TINKER_API_KEY",
        "TINKER_BASE_URL",
        "TINKER_CREDENTIAL_CMD",
        "TINKER_FEATURE_GATES",
        "TINKER_LOG",
        "TINKER_PROJECT_ID",
        "TINKER_TAGS",
        "TINKER_TELEMETRY",
        "TINKEX_CIRCUIT_BREAKER",
        "TINKEX_DATA_DIR",
        "TINKEX_KERNELS",
        "TINKEX_DEFAULT_HEADERS",
        "TINKEX_DEFAULT_QUERY",
        "TINKEX_DUMP_HEADERS",
        "TINKEX_HTTP_CLIENT",
        "TINKEX_HTTP_POOL",
        "TINKEX_OTEL_PROPAGATE",
        "TINKEX_PARITY",
        "TINKEX_POLL_BACKOFF",
        "TINKEX_POOL_COUNT",
        "TINKEX_POOL_SIZE",
        "TINKEX_PROXY",
        "TINKEX_PROXY_HEADERS",
        "CUDA_VISIBLE_DEVICES",
        "XDG_CACHE_HOME",
    }


def test_settings_have_docs_and_the_actual_defaults():
    config = make()
    for row in settings():
        assert row.doc.endswith(".")
        if row.name and row.name != "api_key":
            assert getattr(config, row.name) == row.default
    assert {row.env for row in settings() if row.secret} >= {"TINKER_API_KEY", "HF_TOKEN"}


# Process defaults


def test_process_defaults_accumulate_and_none_removes_them():
    set_defaults(timeout=5, tags=["a"])
    set_defaults(timeout=None, max_retries=1)
    assert defaults() == {"tags": ("a",), "max_retries": 1}
    assert make().timeout == 60.0
    reset_defaults()
    assert defaults() == {}


def test_process_defaults_are_unchanged_if_one_is_invalid():
    with pytest.raises(ConfigError, match=r"^timeout: "):
        set_defaults(max_retries=1, timeout=0)
    assert defaults() == {}


def test_returned_process_defaults_do_not_change_later():
    set_defaults(timeout=5)
    before = defaults()
    set_defaults(timeout=6)
    assert before == {"timeout": 5.0}
    with pytest.raises(TypeError):
        before["timeout"] = 7  # type: ignore[index]


def test_process_defaults_copy_the_callers_lists():
    tags = ["a"]
    set_defaults(tags=tags)
    tags.append("b")
    assert make().tags == ("a",)


def test_process_defaults_set_by_many_threads_are_all_kept():
    names = [name for name in FIELDS if name != "base_url"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: set_defaults(**{name: SOURCES[name].process}), names))
    assert set(defaults()) == set(names)


def test_an_existing_config_ignores_later_defaults():
    config = make()
    set_defaults(timeout=5)
    assert config.timeout == 60.0


# A config as a value


FULL: dict[str, Any] = {name: sources.option for name, sources in SOURCES.items()}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_cannot_be_changed(name):
    config = make()
    with pytest.raises(FrozenInstanceError):
        setattr(config, name, None)
    with pytest.raises(FrozenInstanceError):
        delattr(config, name)


def test_other_attributes_cannot_be_set():
    # For a frozen dataclass with slots, CPython 3.11 raises TypeError here; later releases raise the others.
    with pytest.raises((AttributeError, TypeError)):
        make().extra = 1  # type: ignore[attr-defined]


def test_collections_are_read_only_copies():
    tags, headers, metadata = ["a"], {"a": "1"}, {"run": 1}
    config = make(tags=tags, default_headers=headers, user_metadata=metadata)
    tags.append("b")
    headers["b"] = "2"
    metadata["b"] = 2
    assert config.tags == ("a",)
    assert config.default_headers == {"a": "1"}
    assert config.user_metadata == {"run": 1}
    for held in (config.default_headers, config.user_metadata, make().default_query):
        with pytest.raises(TypeError):
            held["c"] = "3"  # type: ignore[index]


def test_equal_configs_have_equal_hashes():
    one, two, other = make(**FULL), make(**FULL), make(**FULL | {"timeout": 99})
    assert one == two
    assert hash(one) == hash(two)
    assert one != other
    assert len({one, two, other}) == 2


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_config_can_be_pickled(protocol):
    config = make(**FULL | {"http_client": "pkg.mod:client"})
    restored = pickle.loads(pickle.dumps(config, protocol))
    assert restored == config
    assert restored.api_key == config.api_key
    assert isinstance(restored.default_headers, MappingProxyType)


def test_unpickling_does_not_read_the_environment(monkeypatch):
    data = pickle.dumps(make())
    monkeypatch.setenv("TINKER_PROJECT_ID", "elsewhere")
    set_defaults(timeout=5)
    restored = pickle.loads(data)
    assert (restored.project_id, restored.timeout) == (None, 60.0)


def test_config_with_credential_command_can_be_pickled():
    config = Config.from_environ({}, credential_cmd="pass show tinker")
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_can_be_copied():
    config = make(**FULL)
    assert copy.copy(config) == config
    assert copy.deepcopy(make(user_metadata={"a": [1]})) == make(user_metadata={"a": [1]})


# Replace


def test_replace_changes_only_the_given_fields(monkeypatch):
    config = make(project_id="p", tags=["a"])
    monkeypatch.setenv("TINKEX_PROXY", "http://elsewhere")
    set_defaults(max_retries=3)
    changed = config.replace(timeout=5, tags=["b"])
    assert (changed.timeout, changed.tags) == (5.0, ("b",))
    assert changed.replace(timeout=60, tags=["a"]) == config
    assert config.timeout == 60.0


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_can_be_replaced(name):
    option = SOURCES[name].option
    assert getattr(make().replace(**{name: option}), name) == option


def test_replace_with_nothing_is_an_equal_config():
    assert make(**FULL).replace() == make(**FULL)


def test_replace_with_none_resets_to_the_built_in_default():
    config = make({"TINKEX_PROXY": "http://proxy.test"}, parity_mode="beam", timeout=5)
    assert config.replace(proxy=None).proxy is None
    assert config.replace(timeout=None).timeout == 120.0
    assert config.replace(parity_mode=None, timeout=None).timeout == 60.0
    assert config.replace(parity_mode="python").max_retries == 2


def test_replace_checks_like_construction():
    config = make()
    with pytest.raises(ConfigError, match=r"^timeout: "):
        config.replace(timeout=0)
    with pytest.raises(ConfigError, match=r"^api_key: missing"):
        config.replace(api_key=None)
    assert config.replace(api_key=None, base_url="local").api_key == "tml-local"


def test_replaced_proxy_headers_reach_the_proxy():
    config = make(proxy="http://user:pw@proxy.test").replace(proxy_headers={"a": "b"})
    assert config.proxy == Proxy("http", "proxy.test", 80, (("a", "b"),))


def test_public_names_exist():
    assert all(hasattr(module, name) for name in module.__all__)
