"""Sampling clients in other processes: same session, separate numbers, no visible keys."""

from __future__ import annotations

import base64
import copy
import json
import multiprocessing
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest

import tinkex
from tinkex._client.retry import RetryConfig
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.recovery import RecoveryPolicy

from ..scripted import Answer
from .helpers import (
    CREATE_SAMPLER,
    CREATE_SESSION,
    FINISH,
    JOIN,
    SAMPLE,
    answer_samples,
    flags,
    new_sampler,
    sample,
    seq_ids,
)

STRIDE = 1_000_000_000


@pytest.fixture
def copies() -> Iterator[Any]:
    """Makes copies with pickle and closes them at the end of the test."""
    made: list[tinkex.SamplingClient] = []

    def make(client: tinkex.SamplingClient) -> tinkex.SamplingClient:
        made.append(pickle.loads(pickle.dumps(client)))
        return made[-1]

    yield make
    for client in made:
        client.holder.close().result(10)


def test_a_copy_samples_in_the_same_sampling_session(server, service, copies):
    answer_samples(server, 7)
    original = new_sampler(service())
    assert sample(copies(original)).result(10).sequences[0].tokens == [7]
    assert server.asked(SAMPLE)[0].json["sampling_session_id"] == "s-1:sample:0"
    assert len(server.asked(CREATE_SESSION)) == len(server.asked(CREATE_SAMPLER)) == 1


def test_a_copy_keeps_its_settings(server, service, copies):
    config = RetryConfig(max_retries=3)
    original = new_sampler(service(), retry_config=config, record_stability_info=True)
    copied = copies(original)
    answer_samples(server)
    sample(copied).result(10)
    assert server.asked(SAMPLE)[0].json["record_stability_info"] is True
    assert copied._retry_config == config
    assert copied.holder.config == original.holder.config


def test_recovery_callbacks_are_not_pickled(server, service, copies):
    policy = RecoveryPolicy(enabled=True, on_recovery=lambda *_: None)
    copied = copies(new_sampler(service(recovery=policy)))
    assert copied.holder.config.recovery is None
    answer_samples(server, 7)
    assert sample(copied).result(10).sequences[0].tokens == [7]


def test_copies_get_clone_number_from_service_if_supported(server, service, copies):
    flags(server, sample_join_sampling_session=True)
    server.on(JOIN, Answer({"client_counter": 3}), Answer({"client_counter": 4}))
    answer_samples(server)
    original = new_sampler(service())
    for client in (original, copies(original), copies(original), original):
        for each in [sample(client) for _ in range(3)]:
            each.result(10)
    expected = [first + number for first in (0, 3 * STRIDE, 4 * STRIDE, 3) for number in range(3)]
    assert sorted(seq_ids(server.asked(SAMPLE))) == sorted(expected)
    assert [request.json["sampling_session_id"] for request in server.asked(JOIN)] == [
        "s-1:sample:0"
    ] * 2


def test_copy_that_cannot_join_raises_and_retries_on_next_call(server, service, copies):
    flags(server, sample_join_sampling_session=True)
    server.on(JOIN, Answer({"detail": "no"}, 403), Answer({"client_counter": 1}))
    answer_samples(server)
    copied = copies(new_sampler(service()))
    with pytest.raises(tinkex.PermissionDeniedError):
        sample(copied).result(10)
    sample(copied).result(10)
    assert seq_ids(server.asked(SAMPLE)) == [STRIDE]


def test_copies_otherwise_get_random_numbers_that_never_collide(server, service, copies):
    answer_samples(server)
    original = new_sampler(service())
    for client in (original, *(copies(original) for _ in range(8))):
        random.seed(0)  # workers often set the same seed
        sample(client).result(10)
        sample(client).result(10)
    numbers = seq_ids(server.asked(SAMPLE))
    assert len(set(numbers)) == 18
    assert numbers[:2] == [0, 1]
    assert all(STRIDE <= number < 10**18 for number in numbers[2:])


def test_copy_of_copy_has_its_own_numbers(server, service, copies):
    answer_samples(server)
    first = copies(new_sampler(service()))
    second = copies(first)
    sample(first).result(10)
    sample(second).result(10)
    one, two = seq_ids(server.asked(SAMPLE))
    assert one // STRIDE != two // STRIDE


def test_copy_in_same_process_behaves_like_in_another(server, service):
    answer_samples(server)
    original = new_sampler(service())
    copied = copy.copy(original)
    sample(copied).result(10)
    assert seq_ids(server.asked(SAMPLE))[0] >= STRIDE
    copied.holder.close().result(10)


def test_closing_a_copy_leaves_the_session_to_its_owner(server, service, copies):
    answer_samples(server)
    client = service()
    copied = copies(new_sampler(client))
    sample(copied).result(10)
    copied.holder.close().result(10)
    assert server.asked(FINISH) == []
    client.close().result(10)
    assert len(server.asked(FINISH)) == 1


def draw(client: tinkex.SamplingClient) -> list[int]:
    tokens: list[int] = sample(client).result(10).sequences[0].tokens
    return tokens


@pytest.mark.heavy
def test_a_client_works_in_spawned_processes(server, service):
    answer_samples(server, 7)
    client = new_sampler(service())
    assert draw(client) == [7]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(draw, [client] * 4, chunksize=2) == [[7]] * 4
    numbers = seq_ids(server.asked(SAMPLE))
    assert len(set(numbers)) == 5
    assert len(server.asked(CREATE_SESSION)) == 1


# -- handles -------------------------------------------------------------------------------------


def test_handle_recreates_client_in_another_process(server, service):
    answer_samples(server, 7)
    client = new_sampler(service())
    elsewhere = tinkex.SamplingClient.from_sampler_handle(
        client.get_sampler_handle(), api_key="tml-other"
    )
    assert draw(elsewhere) == [7]
    (request,) = server.asked(SAMPLE)
    assert request.json["sampling_session_id"] == "s-1:sample:0"
    assert request.json["seq_id"] >= STRIDE
    assert request.headers["x-api-key"] == "tml-other"
    assert elsewhere.holder.session_id == "s-1"
    elsewhere.holder.close().result(10)
    assert server.asked(FINISH) == []


def test_handle_contains_no_key(service):
    handle = new_sampler(service(api_key="tml-very-secret")).get_sampler_handle()
    facts = json.loads(base64.urlsafe_b64decode(handle))
    assert set(facts) == {"base_url", "session_id", "sampling_session_id"}
    assert "secret" not in json.dumps(facts)


def handle_for(base_url: object) -> str:
    facts = {"base_url": base_url, "session_id": "s-1", "sampling_session_id": "s-1:sample:0"}
    return base64.urlsafe_b64encode(json.dumps(facts).encode()).decode()


def test_handle_of_the_configured_host_uses_the_configured_key(server, service, monkeypatch):
    answer_samples(server, 7)
    handle = new_sampler(service()).get_sampler_handle()
    monkeypatch.setenv("TINKER_BASE_URL", server.url + "/")
    monkeypatch.setenv("TINKER_API_KEY", "tml-configured")
    elsewhere = tinkex.SamplingClient.from_sampler_handle(handle)
    assert draw(elsewhere) == [7]
    assert server.asked(SAMPLE)[0].headers["x-api-key"] == "tml-configured"
    elsewhere.holder.close().result(10)


@pytest.mark.parametrize("source", ["environment", "process", "command", "login"])
def test_handle_of_another_host_does_not_get_the_configured_key(
    server, monkeypatch, tmp_path, source
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("TINKER_BASE_URL", "https://service.example")
    ran = tmp_path / "ran"
    if source == "environment":
        monkeypatch.setenv("TINKER_API_KEY", "tml-configured")
    elif source == "command":
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"touch {ran}; echo tml-configured")
    elif source == "login":
        (tmp_path / ".tinker").mkdir()
        stored = {"default": 1, "keys": {"1": {"key": "tml-configured"}}}
        (tmp_path / ".tinker" / "credentials.json").write_text(json.dumps(stored))
    if source == "process":
        tinkex.config.set_defaults(api_key="tml-configured")
    try:
        with pytest.raises(ConfigError, match="api_key") as refused:
            tinkex.SamplingClient.from_sampler_handle(handle_for(server.url))
    finally:
        tinkex.config.reset_defaults()
    text = str(refused.value)
    assert server.url in text
    assert "https://service.example" in text
    assert "from_sampler_handle(handle, api_key=" in text
    assert not ran.exists()
    assert not server.requests
    assert str(pickle.loads(pickle.dumps(refused.value))) == text


def test_other_secrets_of_the_configured_host_do_not_go_to_another_one(
    server, service, monkeypatch
):
    answer_samples(server, 7)
    monkeypatch.setenv("TINKER_BASE_URL", "https://service.example")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", "our-id")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", "our-secret")
    monkeypatch.setenv("TINKEX_DEFAULT_HEADERS", '{"x-gateway": "our-secret"}')
    monkeypatch.setenv("TINKEX_DEFAULT_QUERY", '{"token": "our-secret"}')
    handle = new_sampler(service(default_headers={}, default_query={})).get_sampler_handle()
    server.requests.clear()
    elsewhere = tinkex.SamplingClient.from_sampler_handle(handle, api_key="tml-theirs")
    assert draw(elsewhere) == [7]
    assert server.asked(SAMPLE)[0].headers["x-api-key"] == "tml-theirs"
    for request in server.requests:
        assert "our-" not in str(request.headers)
        assert "our-" not in str(request.query)
    elsewhere.holder.close().result(10)


@pytest.mark.parametrize("address", [7, None, "file:///etc", "https://", "https://u:p@x y"])
def test_handle_with_a_bad_address_is_refused(address):
    with pytest.raises(InvalidInputError):
        tinkex.SamplingClient.from_sampler_handle(handle_for(address), api_key="tml-x")


@pytest.mark.parametrize(
    "handle", ["", "x", "!!!", base64.urlsafe_b64encode(b"[]").decode(), "e30="]
)
def test_invalid_handle_is_refused(handle):
    with pytest.raises(InvalidInputError, match="handle"):
        tinkex.SamplingClient.from_sampler_handle(handle, api_key="tml-x")


def test_repr_contains_no_key(service):
    client = service(api_key="tml-very-secret", default_headers={"authorization": "Bearer secret"})
    sampler = new_sampler(client)
    shown = [client, sampler, client.config, sampler.holder, client.create_rest_client()]
    assert not [text for text in map(repr, shown) if "secret" in text]
