"""Tokens by call, run, model and kind, and their cost."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from tinkex import types
from tinkex.errors import InvalidInputError
from tinkex.telemetry import Prices, Rates, Usage, bus, estimate
from tinkex.telemetry.events import SampleStop, TrainingPass
from tinkex.telemetry.usage import Tokens

from ..client.helpers import SAMPLE, answer_training, datum, new_sampler, new_trainer, sample
from ..client.helpers import sampled as drawn

RUN = {"model_id": "run-1", "base_model": "small"}
PRICES = Prices({"small": Rates(training=10, prefill=2, sampled=4, cached_prefill=1)})


def trained(tokens: int, **metadata: object) -> TrainingPass:
    return TrainingPass(1, "forward_backward", 1.0, 1, tokens, None, metadata={**RUN, **metadata})


def sampled(prompt: int, cached: int, tokens: int, **metadata: object) -> SampleStop:
    facts = {"sampling_session_id": "sampler-1", **metadata}
    return SampleStop(2, "sample", 1.0, prompt, cached, tokens, 1, metadata=facts)


def test_tokens_are_counted_by_run_model_and_kind():
    with Usage() as usage:
        bus.emit(trained(100))
        bus.emit(trained(50))
        bus.emit(trained(7, model_id="run-2"))
        bus.emit(sampled(30, 20, 5, **RUN))
        bus.emit(sampled(10, 0, 1, base_model="large"))
    assert usage.by_run() == {
        "run-1": Tokens(training=150, prefill=10, cached_prefill=20, sampled=5),
        "run-2": Tokens(training=7),
        "sampler-1": Tokens(prefill=10, sampled=1),
    }
    assert usage.by_model() == {
        "small": Tokens(training=157, prefill=10, cached_prefill=20, sampled=5),
        "large": Tokens(prefill=10, sampled=1),
    }
    assert usage.tokens == Tokens(157, 20, 20, 6)
    assert usage.tokens.total == 203
    assert usage.summary("run-2").tokens == Tokens(training=7)


def test_latest_calls_are_kept_one_by_one():
    with Usage(keep_calls=2) as usage:
        for tokens in (1, 2, 3):
            bus.emit(trained(tokens))
    assert [(each.operation, each.run, each.model) for each in usage.calls] == [
        ("forward_backward", "run-1", "small")
    ] * 2
    assert [each.tokens.training for each in usage.calls] == [2, 3]
    assert usage.tokens.training == 6


def test_cost_is_tokens_times_rate():
    with Usage(PRICES) as usage:
        bus.emit(trained(1_000_000))
        bus.emit(sampled(3_000_000, 1_000_000, 500_000, **RUN))
    assert usage.cost == 10 + 2 * 2 + 1 + 2
    assert "$17.0000" in str(usage.summary())


def test_missing_price_makes_the_cost_unknown():
    with Usage(PRICES) as usage:
        bus.emit(trained(10))
        assert usage.cost == pytest.approx(0.0001)
        bus.emit(sampled(10, 0, 1, base_model="large"))
    assert usage.cost is None
    assert "unknown" in str(usage.summary())
    usage.prices = Prices({**PRICES.rates, "*": Rates(prefill=1)})
    assert usage.cost is None  # one token was sampled at an unknown price
    usage.prices = Prices({**PRICES.rates, "*": Rates(prefill=1, sampled=0)})
    assert usage.cost == pytest.approx(0.00011)


def test_cached_tokens_cost_the_prefill_rate_by_default():
    assert Rates(prefill=2).cost(Tokens(cached_prefill=1_000_000)) == 2


def test_cost_is_zero_without_usage():
    assert Usage().cost == 0
    assert Usage().tokens == Tokens()
    assert Prices().cost(None, Tokens()) == 0
    assert Prices().cost(None, Tokens(training=1)) is None


@pytest.mark.parametrize("rate", [-1, float("nan")])
def test_invalid_rate_is_refused(rate):
    with pytest.raises(InvalidInputError, match="sampled"):
        Rates(sampled=rate)


def test_the_summary_is_a_table():
    with Usage(PRICES) as usage:
        bus.emit(trained(1_234_567))
    assert str(usage.summary()).splitlines() == [
        "run    model   training  prefill  cached_prefill  sampled      cost",
        "run-1  small  1,234,567        0               0        0  $12.3457",
        "total         1,234,567        0               0        0  $12.3457",
    ]


def test_usage_from_the_service_can_be_priced():
    hour = {"bucket_start": datetime.now(UTC), "bucket_end": datetime.now(UTC)}
    entry = {**hour, "base_model": "small", "session_id": "s-1"}
    infos = [
        {"type": "training", "token_count": 5},
        {"type": "sampling_prefill", "cached": False, "token_count": 4},
        {"type": "sampling_prefill", "cached": True, "token_count": 3},
        {"type": "sampling_sample", "token_count": 2},
        {"type": "checkpoint", "count": 1},
    ]
    usage = Usage(PRICES)
    usage.add_from_service(
        types.BillingUsageResponse.model_validate(
            {"data": [{**entry, "event_info": info} for info in infos]}
        )
    )
    assert usage.by_run() == {"s-1": Tokens(5, 4, 3, 2)}


def test_a_clients_calls_are_counted(server, service):
    answer_training(server)
    server.on(SAMPLE, drawn(7, 8, prompt_cache_hit_tokens=1))
    client = service()
    trainer, sampler = new_trainer(client), new_sampler(client)
    with Usage() as usage:
        trainer.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
        sample(sampler).result()
    assert usage.by_run() == {
        "s-1:train:0": Tokens(training=3),
        "s-1:sample:0": Tokens(prefill=2, cached_prefill=1, sampled=2),
    }
    assert usage.by_model().keys() == {"some/model"}


def test_client_and_service_count_the_same(tinkex_fake):
    client = tinkex_fake.client(telemetry_enabled=False)
    with Usage() as counted:
        trainer = client.create_lora_training_client(tinkex_fake.base_model, rank=4)
        trainer.forward_backward([datum(1, 2, 3), datum(4, 5)], "cross_entropy").result()
        trainer.optim_step().result()
        sampler = trainer.save_weights_and_get_sampling_client()
        sample(sampler).result()
    told = Usage()
    rest, now = client.create_rest_client(), datetime.now(UTC)
    day = timedelta(days=1)
    billed = rest.get_billing_usage(starting_on=now - day, ending_before=now + day).result()
    session_id = client.holder.session_id
    told.add_from_service(billed)
    assert told.by_run()[session_id] == counted.tokens
    assert counted.by_model().keys() == {tinkex_fake.base_model}


# -- prices --------------------------------------------------------------------------------------

TABLE = """
["*"]
training = 0.5
prefill = 0.1
sampled = 1

[small]
training = 2
cached_prefill = 0
"""


def test_prices_are_read_from_a_file(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text(TABLE)
    prices = Prices.read(file)
    assert prices.rates == {
        "*": Rates(training=0.5, prefill=0.1, sampled=1),
        "small": Rates(training=2, cached_prefill=0),
    }
    assert prices.cost("small", Tokens(training=1_000_000, cached_prefill=7)) == 2
    assert prices.cost("large", Tokens(cached_prefill=1_000_000)) == 0.1
    other = tmp_path / "prices.json"
    other.write_text(json.dumps({"small": {"training": 2}}))
    assert Prices.read(other).rates == {"small": Rates(training=2)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("training = 1", "'training' is not a table"),
        ("[small]\nwriting = 1", "'small' has unknown keys ['writing']"),
        ("[small]\ntraining = '1'", "'small': training: must be a number, not '1'"),
        ("[small]\ntraining = true", "must be a number"),
        ("[small]\ntraining = -1", "'small': training: must be 0 or more"),
        ("[small]\ntraining = nan", "must be 0 or more"),
        ("[small", "is not valid"),
    ],
)
def test_invalid_price_file_is_refused(tmp_path, text, says):
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(InvalidInputError) as refused:
        Prices.read(file)
    assert refused.value.field == "prices"
    assert says in str(refused.value)


# -- estimates -----------------------------------------------------------------------------------

DATA = [datum(*range(length)) for length in (10, 20, 30)]


@pytest.mark.parametrize(
    ("job", "tokens"),
    [
        ({}, 60),
        ({"steps": 2}, 120),
        ({"steps": 1, "batch_size": 2}, 30),
        ({"steps": 2, "batch_size": 2}, 70),
        ({"steps": 3, "batch_size": 4}, 240),
        ({"batch_size": 2}, 60),
        ({"steps": 2, "custom_loss": True}, 240),
    ],
)
def test_estimate_of_training(job, tokens):
    priced = estimate("small", data=DATA, prices=PRICES, **job)
    assert priced.tokens == Tokens(training=tokens)
    assert priced.cost == pytest.approx(tokens * 10 / 1e6)


def test_estimate_of_sampling():
    prompts = [types.ModelInput.from_ints([1] * length) for length in (5, 7)]
    job = {"prompts": prompts, "num_samples": 4, "max_tokens": 10, "rounds": 3}
    priced = estimate("small", prices=PRICES, **job)  # type: ignore[arg-type]
    assert priced.tokens == Tokens(prefill=36, sampled=240)
    assert str(priced) == "36 prefill, 240 sampled tokens; cost at most $0.0010"


def test_an_estimate_without_prices_still_counts():
    priced = estimate("small", data=DATA)
    assert (priced.tokens.training, priced.cost) == (60, None)
    assert "unknown" in str(priced)


@pytest.mark.parametrize("field", ["steps", "batch_size", "num_samples"])
def test_estimate_refuses_zero_steps_or_samples(field):
    with pytest.raises(InvalidInputError, match=field):
        estimate("small", data=DATA, **{field: 0})  # type: ignore[arg-type]


def test_estimate_equals_the_usage_of_the_run(tinkex_fake):
    client = tinkex_fake.client(telemetry_enabled=False)
    trainer = client.create_lora_training_client(tinkex_fake.base_model, rank=4)
    with Usage() as usage:
        for step in range(5):
            batch = [DATA[(2 * step + offset) % 3] for offset in range(2)]
            trainer.forward_backward(batch, "cross_entropy").result()
    assert estimate("any", data=DATA, steps=5, batch_size=2).tokens == usage.tokens
