"""What finished training requests leave of a run: sums until the optimizer step, in bounded memory."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tinkex._wire.operations import OPERATIONS
from tinkex.server.dashboard.recorder import Recorder
from tinkex.server.dashboard.store import MAX_NAMES, MetricStore
from tinkex.server.futures import Promise
from tinkex.server.journal import BodyPosition
from tinkex.server.quotas import KeyLimits, Quotas
from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ModelInput,
    OptimStepResponse,
)


def finished(recorder, seq, value, weights=(1.0,)):
    targets = np.array([5] * len(weights))
    inputs = {"target_tokens": targets, "weights": np.array(weights, np.float32)}
    data = [Datum(ModelInput.from_ints([5] * len(weights)), inputs)]
    operation, request = OPERATIONS["optim_step"], None
    if isinstance(value, ForwardBackwardOutput):
        operation = OPERATIONS["forward_backward"]
        settings = {f"setting-{seq}-{number}": 1.0 for number in range(10)}
        asked = ForwardBackwardInput(data, "cross_entropy", settings)
        request = ForwardBackwardRequest(asked, "run", seq)
    place = BodyPosition(0, 0, 0)
    promise = Promise("id", operation, "ann", "run", seq, "json", 0.0, place, None, {}, request)
    recorder.finished(promise, value)


def passed(**metrics):
    return ForwardBackwardOutput("", [], {"tokens:sum": 1.0, "loss:sum": 1.0, **metrics})


@pytest.fixture
def kept(tmp_path):
    """A store and its recorder, inside a loop; the test gets what runs with them."""

    def run(work):
        async def scenario():
            store = MetricStore(tmp_path, Quotas.of(KeyLimits()).metric_bytes)
            await work(store, Recorder(store, lambda: 1.0))
            await store.stop()

        asyncio.run(scenario())

    return run


def test_names_of_passes_are_no_more_than_a_run_may_have(kept):
    async def work(store, recorder):
        for seq in range(3 * MAX_NAMES // 10):
            finished(
                recorder, seq, passed(**{f"of-{seq}-{number}:sum": 1.0 for number in range(10)})
            )
        progress = recorder.progress("ann", "run")
        assert len(progress.others) == len(progress.config) == MAX_NAMES
        finished(recorder, 1000, passed(**{"of-0-0:sum": 2.0}))
        assert progress.others["of-0-0"][0] == 3.0
        await store.flush()
        stored = store.state("ann", "run")
        assert len(stored["others"]) == MAX_NAMES
        finished(recorder, 1001, OptimStepResponse())
        assert progress.others == {}

    kept(work)


def test_state_that_waits_to_be_written_is_not_changed_by_later_passes(kept):
    async def work(store, recorder):
        finished(recorder, 1, passed(**{"a:sum": 1.0}))
        waiting = store.state("ann", "run")
        finished(recorder, 2, passed(**{"a:sum": 1.0}))
        assert (waiting["passes"], waiting["others"]["a"]) == (1, [1.0, 1.0])
        assert store.state("ann", "run")["others"]["a"] == [2.0, 1.0]

    kept(work)


def test_loss_is_divided_by_the_sum_of_weights_that_single_precision_cannot_hold(kept):
    async def work(store, recorder):
        finished(recorder, 1, passed(**{"loss:sum": 9e38}), weights=[3e38] * 3)
        finished(recorder, 2, OptimStepResponse())
        await store.flush()
        assert store.run("ann", "run").last("loss")["value"] == pytest.approx(1.0)

    kept(work)
