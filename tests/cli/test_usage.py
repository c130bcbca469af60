"""`tinkex usage` against a service that has been used."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

import tinkex
from tinkex.cli.billing import _windows
from tinkex.testing import service

from ..client.helpers import datum
from .commands import payload, run

TINY = "tinkex/tiny"


@pytest.fixture(scope="module")
def used():
    """A service on which 30 tokens were trained and 3 prompted for 5 sampled."""
    with service("fake") as running:
        client = running.client()
        training = client.create_lora_training_client(running.base_model, rank=4)
        for _ in range(3):
            training.forward_backward([datum(*range(10))], "cross_entropy").result()
            training.optim_step().result()
        sampler = training.save_weights_and_get_sampling_client()
        params = tinkex.SamplingParams(max_tokens=5, seed=1)
        prompt = tinkex.ModelInput.from_ints([1, 2, 3])
        drawn = sampler.sample(prompt, sampling_params=params).result()
        yield running, client.holder.session_id, len(drawn.sequences[0].tokens)


def told(running, *options):
    """What is printed for people."""
    outcome = run("usage", "--base-url", running.url, *options)
    assert outcome.code == 0, outcome.err
    return outcome.out


def usage(running, *options):
    return payload("usage", run("usage", "--base-url", running.url, "--json", *options))


def test_tokens_are_listed_by_kind_and_without_prices_there_is_no_cost(used):
    running, _, drawn = used
    found = usage(running)
    counts = {row["kind"]: row["count"] for row in found["usage"]}
    assert counts.items() >= {"training": 30, "prefill": 3, "sampled": drawn}.items()
    assert found["cost"] is None
    assert "Cost" not in told(running)


def test_amounts_have_units(used):
    running, _, drawn = used
    lines = {line.rsplit("  ", 1)[0].strip(): line.split() for line in told(running).splitlines()}
    assert lines["training"][-2:] == ["30", "tokens"]
    assert lines["sampled"][-2:] == [str(drawn), "tokens"]
    units = {row["kind"]: row["unit"] for row in usage(running)["usage"]}
    assert units["training"] == "tokens"


def test_usage_of_a_month_combines_requests_of_14_days(used):
    running, _, _ = used
    assert usage(running, "--days", 30)["usage"] == usage(running)["usage"]


@pytest.mark.parametrize("days", [1, 14, 15, 30, 366])
def test_windows_cover_a_span_without_gap_or_overlap(days):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    end = start + timedelta(days=days)
    windows = list(_windows(start, end))
    assert (windows[0][0], windows[-1][1]) == (start, end)
    assert all(one[1] == other[0] for one, other in pairwise(windows))
    assert all(timedelta(0) < until - since <= timedelta(days=14) for since, until in windows)


def test_a_span_of_more_than_a_year_is_refused(used):
    running, _, _ = used
    refused = run("billing", "usage", "2020-01-01", "2026-01-01", "--base-url", running.url)
    assert refused.code == 1
    assert "ENDING_BEFORE: must be after STARTING_ON, by at most 366 days" in refused.err


def test_prices_of_a_file_give_each_row_its_cost(used, tmp_path):
    running, session_id, drawn = used
    prices = tmp_path / "prices.toml"
    prices.write_text(f'["{TINY}"]\ntraining = 1000\nprefill = 100\nsampled = 10')
    found = usage(running, "--prices", prices, "--by", "session")
    costs = {row["kind"]: row["cost"] for row in found["usage"] if row["group"] == session_id}
    assert costs["training"] == pytest.approx(0.03)
    assert costs["prefill"] == pytest.approx(0.0003)
    assert costs["sampled"] == pytest.approx(drawn * 1e-5)
    assert found["cost"] == pytest.approx(sum(cost for cost in costs.values() if cost))
    lines = told(running, "--prices", prices, "--by", "model").splitlines()
    assert [line.split()[-1] for line in lines if " training " in line] == ["$0.0300"]
    assert any(" in all " in line for line in lines)


def test_price_option_applies_to_models_that_are_not_in_the_file(used, tmp_path):
    running, _, _ = used
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"other/model": {"training": 1}}))
    every = [f"--price={kind}={rate}" for kind, rate in [("training", 1000), ("prefill", 0)]]
    found = usage(running, "--prices", prices, *every)
    costs = {row["kind"]: row["cost"] for row in found["usage"]}
    assert costs["training"] == pytest.approx(0.03)
    assert costs["prefill"] == 0
    assert costs["sampled"] is None  # no price is given
    assert found["cost"] is None


def test_a_file_of_prices_that_cannot_be_read_is_named(used, tmp_path):
    running, _, _ = used
    prices = tmp_path / "prices.toml"
    prices.write_text("[x]\nwriting = 1")
    refused = run("usage", "--base-url", running.url, "--prices", prices)
    assert refused.code == 1
    assert "has unknown keys ['writing']" in refused.err
