"""The wall clock is set forward or back by a day while the service runs: nothing is deleted early, nothing hangs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tinkex.server.clock import ServiceClock

from .test_storage import housed, inputs, new_model, told

START = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
DAY = timedelta(days=1)


class Times:
    """A wall clock that can be set, and a steady one."""

    def __init__(self) -> None:
        self.wall, self.steady = START, 5.0

    def passes(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)
        self.steady += seconds

    def now(self) -> datetime:
        return self.wall

    def monotonic(self) -> float:
        return self.steady


def test_steady_time_is_monotonic_and_expiry_is_the_earlier_clock():
    times = Times()
    clock = ServiceClock(times.now, times.monotonic)
    assert clock.steady() == START.timestamp()
    times.wall += DAY
    times.passes(10)
    assert clock.steady() == START.timestamp() + 10
    assert clock.expiry() == START + timedelta(seconds=10)
    times.wall -= 2 * DAY
    assert clock.expiry() == START - DAY + timedelta(seconds=10)


@pytest.mark.parametrize("jump", [DAY, -DAY, 365 * DAY, -365 * DAY])
def test_setting_the_clock_deletes_no_result_session_checkpoint_or_sampler(tmp_path, jump):
    times = Times()

    async def scenario() -> None:
        async with housed(tmp_path, now=times.now, monotonic=times.monotonic) as (made, client):
            model = await new_model(client)
            asked = {"model_id": model, "seq_id": 1, "forward_input": inputs()}
            unfetched = (await client.post("forward", json=asked)).json()
            save = {"model_id": model, "seq_id": 2, "path": "a", "ttl_seconds": 7200}
            path = (await told(client, "save_weights_for_sampler", save))["path"]
            unnamed = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 4}
            unnamed["ttl_seconds"] = 7200
            sampler = await told(client, "save_weights_for_sampler", unnamed)
            times.wall += jump
            times.passes(60)
            await made.keep_house()
            assert "metrics" in await told(
                client, "retrieve_future", {"request_id": unfetched["request_id"]}
            )
            prompt = {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]}
            sample = {"prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 3}}
            made_of = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 1}
            for source in ({"model_path": path}, made_of):
                assert "sequences" in await told(client, "asample", sample | source)
            step = {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": 0.01}}
            assert "metrics" in await told(client, "optim_step", step)
            # They expire once both clocks have passed their expiry.
            times.passes(7200 + max(0.0, -jump.total_seconds()))
            await made.keep_house()
            gone = await client.post("asample", json=sample | {"model_path": path})
            assert gone.status_code == 404

    asyncio.run(scenario())


def test_work_is_measured_by_the_steady_clock(tmp_path):
    """Otherwise setting the clock back would delay the next snapshot by as much."""
    times = Times()

    async def scenario() -> None:
        async with housed(
            tmp_path, now=times.now, monotonic=times.monotonic, snapshot_every=10.0
        ) as (made, client):
            model_id = await new_model(client)
            [model] = made.models
            done = made.models._promises.finish

            def finish(*args, **options) -> None:
                times.passes(6)  # the duration of each request
                done(*args, **options)

            made.models._promises.finish = finish
            for number in range(1, 5):
                times.wall -= DAY
                step = {"model_id": model_id, "seq_id": number, "adam_params": {}}
                await told(client, "optim_step", step)
                await asyncio.gather(*made.models._tasks)
            assert model.past.snapshot is not None

    asyncio.run(scenario())
