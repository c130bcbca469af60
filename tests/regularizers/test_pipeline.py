"""Composed losses: values, gradients, order, errors and events."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tinkex.errors import InvalidInputError, TinkerError
from tinkex.regularizers import (
    L1,
    L2,
    CustomLossError,
    CustomLossTimeoutError,
    Entropy,
    Pipeline,
    Regularizer,
    RegularizerSpec,
    grad_norm,
    grad_norm_for_regularizer,
    joined,
    total_grad_norm,
)
from tinkex.telemetry.events import CustomLossEvent, RegularizerEvent, RegularizerStop
from tinkex.types import Datum, ModelInput

from ..late import only_late

X = torch.tensor([-1.0, -2.0, -3.0])
DATA = [Datum(ModelInput.from_ints([1]), {})]


def base(data: Any, logprobs: Any) -> Any:
    parts = [logprobs] if isinstance(logprobs, torch.Tensor) else logprobs
    return -sum(part.sum() for part in parts), {"tokens": torch.tensor(3)}


def spec(fn: Any, weight: float = 1.0, name: str = "mine", **more: Any) -> RegularizerSpec:
    return RegularizerSpec(fn, weight, name, **more)


def squares(data: Any, logprobs: Any) -> Any:
    return logprobs.square().sum(), {"mean": logprobs.detach().mean(), "kind": "square"}


TERMS = [spec(squares, 0.5, "squares"), spec(L1(), 2, "l1"), spec(L2(), 0, "looked at")]


def compute(*regularizers: Any, at: Any = X, loss: Any = base, **options: Any) -> Any:
    return Pipeline(regularizers, **options).compute(DATA, at, loss)


# -- values --------------------------------------------------------------------------------------


def test_total_is_base_loss_plus_weighted_regularizers():
    output = compute(*TERMS)
    assert output.loss_total == 6 + 0.5 * 14 + 2 * 6
    assert output.base_loss.value == 6
    assert output.base_loss.custom == {"tokens": 3}
    assert output.regularizer_total == 19
    assert list(output.regularizers) == ["squares", "l1", "looked at"]
    assert output.regularizers["squares"].contribution == 7
    assert output.regularizers["squares"].custom == {"mean": -2.0, "kind": "square"}
    assert output.regularizers["looked at"].value == 14
    assert output.regularizers["looked at"].contribution == 0
    assert output.base_loss.grad_norm is output.total_grad_norm is None
    assert json.loads(json.dumps(output.to_dict()))["loss_total"] == 25


def test_integer_base_loss_does_not_truncate_other_terms():
    output = compute(spec(squares, 0.25), loss=lambda data, logprobs: (torch.tensor(2), {}))
    assert output.loss_total == 5.5


def test_nested_tensors_in_metrics_become_plain_numbers():
    def loss(data: Any, logprobs: Any) -> Any:
        return logprobs.sum(), {"rows": [X[0], (X, {1: X[1]})], "kind": {"mean": X.mean().numpy()}}

    written = json.loads(json.dumps(compute(loss=loss).to_dict()))
    assert written["base_loss"]["custom"] == {
        "rows": [-1.0, [X.tolist(), {"1": -2.0}]],
        "kind": {"mean": -2.0},
    }


def test_without_regularizers_the_total_is_the_base_loss():
    output = compute(track_grad_norms=True)
    assert (output.loss_total, output.regularizers) == (6, {})
    assert output.total_grad_norm == output.base_loss.grad_norm == pytest.approx(math.sqrt(3))


@pytest.mark.parametrize("limit", [1, 2, None])
def test_parallel_and_sequential_give_the_same_result(limit):
    options = {"track_grad_norms": True}
    one_by_one = compute(*TERMS, parallel=False, **options)
    assert compute(*TERMS, max_concurrency=limit, **options) == one_by_one


def test_the_same_specs_take_one_tensor_or_one_per_datum():
    terms = [spec(L1(), 2, "l1"), spec(joined(squares), 0.5, "squares")]
    together = compute(*terms)
    apart = compute(*terms, at=[X[:1], X[1:]])
    assert apart == together


def test_the_loss_can_be_differentiated_further():
    at = X.clone().requires_grad_()
    Pipeline(TERMS).evaluate(DATA, at, base).loss.backward()
    # -1 of the base loss, 0.5 · 2x of the squares, -2 of L1
    assert at.grad is not None
    assert at.grad.tolist() == [-4.0, -5.0, -6.0]


# -- kinds of regularizers -----------------------------------------------------------------------


class Scaled:
    name = "scaled"

    def compute(self, data: Any, logprobs: Any, options: Any) -> Any:
        return logprobs.sum() * options.get("scale", 1), {}


class ByName:
    def compute(self, data: Any, logprobs: Any, **opts: Any) -> Any:
        return Scaled().compute(data, logprobs, opts)


def scaled(data: Any, logprobs: Any, how: Any) -> Any:
    return Scaled().compute(data, logprobs, how)


@pytest.mark.parametrize(
    "fn",
    [
        Scaled(),
        scaled,
        lambda data, logprobs, options=None: (logprobs.sum() * options["scale"], {}),
        lambda *arguments: (arguments[1].sum() * 5, {}),
        lambda data, logprobs, factor=5: (logprobs.sum() * factor, {}),
        lambda data, logprobs, *opts: (logprobs.sum() * opts[0]["scale"], {}),
        lambda data, logprobs, **options: (logprobs.sum() * options["scale"], {}),
        lambda data, logprobs, scale=1, **more: (logprobs.sum() * scale, {}),
        lambda data, logprobs, *, options=None: (logprobs.sum() * options["scale"], {}),
        lambda data, logprobs, *, opts, **more: (logprobs.sum() * opts["scale"], {}),
        ByName(),
        partial(scaled, how={"scale": 5}),
    ],
)
def test_functions_of_two_or_three_arguments_and_objects(fn):
    assert compute(spec(fn, options={"scale": 5})).regularizers["mine"].value == -30


def test_options_of_a_regularizer_can_be_omitted():
    def by_name(data: Any, logprobs: Any, **options: Any) -> Any:
        return logprobs.sum(), options

    def of_its_own(data: Any, logprobs: Any, options: Any) -> Any:
        return logprobs.sum(), options

    assert compute(spec(by_name)).regularizers["mine"].custom == {}
    bound = partial(of_its_own, options={"kept": 1})
    assert compute(spec(bound)).regularizers["mine"].custom == {"kept": 1}


def test_option_that_clashes_with_an_argument_is_refused():
    with pytest.raises(CustomLossError, match=r"regularizers\.mine: .*'data'"):
        Pipeline([spec(lambda data, logprobs, **options: (0, {}), options={"data": 1})])


def test_object_can_provide_its_name():
    assert isinstance(Scaled(), Regularizer)
    for fn in (Scaled(), L1()):
        (name,) = compute({"fn": fn, "weight": 1}).regularizers
        assert name == fn.name


def test_builtins_are_called_with_two_arguments():
    with pytest.raises(CustomLossError, match="mine: raised TypeError"):
        compute(spec(max))


@pytest.mark.parametrize(
    "fn",
    [
        lambda: (0, {}),
        lambda data: (0, {}),
        lambda data, logprobs, options, more: (0, {}),
        lambda data, logprobs, *, needed: (0, {}),
        L1,
    ],
)
def test_error_names_a_function_with_a_wrong_signature(fn):
    with pytest.raises(CustomLossError) as caught:
        Pipeline([spec(fn)])
    assert caught.value.field == "regularizers.mine"


@pytest.mark.parametrize("loss", [lambda data: 0, lambda: 0, "cross_entropy"])
def test_a_base_loss_takes_two_arguments(loss):
    with pytest.raises(InvalidInputError, match="loss_fn"):
        compute(loss=loss)


def test_duplicate_names_are_refused_and_listed():
    terms = [spec(squares, name=name) for name in ("a", "b", "a", "c", "b", "a")]
    with pytest.raises(InvalidInputError, match=r"cannot share a name: a, a, b$"):
        Pipeline(terms)


@pytest.mark.parametrize(
    ("terms", "named"),
    [
        ([{"fn": squares, "weight": -1, "name": "mine"}], "mine"),
        ([{"fn": squares, "weight": 1}], "name"),
        ([squares], r"regularizers\.0"),
        (spec(squares), "a list"),
        (None, "a list"),
    ],
)
def test_invalid_terms_are_refused(terms, named):
    with pytest.raises(InvalidInputError, match=named):
        Pipeline(terms)


# -- async ---------------------------------------------------------------------------------------


async def later(data: Any, logprobs: Any) -> Any:
    await asyncio.sleep(0)
    return squares(data, logprobs)


def as_task(data: Any, logprobs: Any) -> Any:
    return asyncio.ensure_future(later(data, logprobs))


@pytest.mark.parametrize("fn", [later, as_task])
@pytest.mark.parametrize("parallel", [True, False])
def test_async_regularizers_have_values_and_gradients_too(fn, parallel):
    options = {"track_grad_norms": True, "parallel": parallel}
    output = compute(spec(fn, is_async=True), spec(fn, name="2", is_async=True), **options)
    expected = compute(spec(squares), spec(squares, name="2"), **options)
    assert output == expected


def test_a_pipeline_may_be_computed_inside_an_event_loop():
    async def inside() -> Any:
        return compute(spec(later, is_async=True))

    assert asyncio.run(inside()).loss_total == 20


@pytest.mark.parametrize(("fn", "is_async"), [(later, False), (squares, True)])
def test_async_regularizer_needs_is_async(fn, is_async):
    with pytest.raises(CustomLossError, match="is_async"):
        compute(spec(fn, is_async=is_async))


# -- errors --------------------------------------------------------------------------------------


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_timeout_error_names_the_regularizer(over, monkeypatch):
    def never(data: Any, logprobs: Any) -> Any:
        over.wait()

    # Of a loss and two regularizers the last is late, then the loss of another pipeline.
    only_late(monkeypatch, 2, 3)
    with pytest.raises(CustomLossTimeoutError, match=r"regularizers\.mine: .* 0\.05 s") as caught:
        compute(spec(squares, name="good"), spec(never), timeout=0.05)
    assert isinstance(caught.value, TinkerError)
    with pytest.raises(CustomLossTimeoutError, match="loss_fn"):
        compute(spec(squares), loss=never, timeout=0.05)


def test_async_regularizer_is_cancelled_after_the_timeout(monkeypatch):
    only_late(monkeypatch, 1)
    cancelled = threading.Event()

    async def never(data: Any, logprobs: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(CustomLossTimeoutError, match=r"regularizers\.mine"):
        compute(spec(never, is_async=True), timeout=0.05)
    assert cancelled.wait(10)


def fail(data: Any, logprobs: Any) -> Any:
    raise TimeoutError("of its own")


@pytest.mark.parametrize("parallel", [True, False])
def test_the_first_error_of_the_list_is_raised_with_its_cause(over, parallel):
    def never(data: Any, logprobs: Any) -> Any:
        over.wait()

    terms = [spec(squares, name="good"), spec(fail), spec(never, name="never")]
    with pytest.raises(CustomLossError, match="TimeoutError: of its own") as caught:
        compute(*terms, parallel=parallel, max_concurrency=3)
    assert caught.value.name == "mine"
    assert not isinstance(caught.value, CustomLossTimeoutError)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_errors_can_be_pickled(over, monkeypatch):
    only_late(monkeypatch, 1)
    with pytest.raises(CustomLossTimeoutError) as caught:
        compute(spec(lambda data, logprobs: over.wait()), timeout=0.01)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.name, copy.field) == (
        CustomLossTimeoutError,
        "mine",
        "regularizers.mine",
    )
    assert str(copy) == str(caught.value)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (lambda x: x.sum(), r"\(loss, metrics\)"),
        (lambda x: (x.sum(), 3), "mapping"),
        (lambda x: (x, {}), r"one number, not a tensor of shape \(3,\)"),
        (lambda x: (x.sum() * math.nan, {}), "nan"),
        (lambda x: (x.sum() / 0, {}), "inf"),
        (lambda x: ("1", {}), "tensor"),
    ],
)
def test_error_names_the_function_with_an_invalid_result(returned, named):
    with pytest.raises(CustomLossError, match=rf"regularizers\.mine: .*{named}"):
        compute(spec(lambda data, logprobs: returned(logprobs)))
    with pytest.raises(CustomLossError, match=rf"loss_fn: .*{named}"):
        compute(loss=lambda data, logprobs: returned(logprobs))


def test_weight_that_makes_the_loss_infinite_is_refused():
    with pytest.raises(CustomLossError, match="inf"):
        compute(spec(squares, 1e38))


def test_logprobs_must_be_tensors_of_floats():
    for at in (torch.tensor([1, 2]), [1.0]):
        with pytest.raises(InvalidInputError, match="logprobs"):
            compute(at=at)


# -- gradients -----------------------------------------------------------------------------------


def test_norms_of_gradients():
    x = torch.tensor([3.0, 4.0, 0.0, 0.0])
    assert grad_norm(torch.sum, x) == 2
    assert grad_norm(torch.mean, x) == 0.5
    assert grad_norm(lambda x: x.square().sum(), x) == 10
    assert grad_norm(torch.square, x) == 10
    assert grad_norm(lambda x: torch.tensor(1.0), x) == 0


def test_gradient_norms_of_one_regularizer_and_of_the_whole_loss():
    alone = grad_norm_for_regularizer(spec(squares, 0.5), DATA, X)
    assert alone == pytest.approx(2 * math.sqrt(14))
    assert total_grad_norm(DATA, X, base) == pytest.approx(math.sqrt(3))
    composed = total_grad_norm(DATA, X, base, [spec(squares, 0.5)])
    assert composed == pytest.approx(float((X - 1).norm()))


def test_a_gradient_norm_is_0_where_nothing_depends_on_the_logprobs(caplog):
    assert grad_norm_for_regularizer(spec(lambda data, logp: (1.0, {})), DATA, X) == 0
    assert "does not depend" in caplog.text
    assert total_grad_norm(DATA, X, lambda data, logp: (torch.ones(()), {})) == 0


def test_norms_of_each_term_and_of_the_total():
    output = compute(*TERMS, track_grad_norms=True)
    assert output.base_loss.grad_norm == pytest.approx(math.sqrt(3))
    first = output.regularizers["squares"]
    assert first.grad_norm == pytest.approx(2 * math.sqrt(14))
    assert first.grad_norm_weighted == pytest.approx(math.sqrt(14))
    assert output.total_grad_norm == pytest.approx(math.sqrt(4**2 + 5**2 + 6**2))
    assert output.regularizers["looked at"].grad_norm == pytest.approx(2 * math.sqrt(14))


def test_term_independent_of_the_logprobs_has_no_gradient(caplog):
    def constant(data: Any, logprobs: Any) -> Any:
        return 2.0, {}

    output = compute(spec(constant), track_grad_norms=True)
    assert output.loss_total == 8
    assert output.regularizers["mine"].grad_norm == 0
    assert "'mine' does not depend on the logprobs" in caplog.text
    assert compute(loss=constant, track_grad_norms=True).base_loss.grad_norm is None


def second_only(data: Any, logprobs: Any) -> Any:
    return logprobs[1].square().sum(), {}


def test_gradients_of_leaves_that_a_term_does_not_use_are_zero():
    found = (
        Pipeline([spec(second_only, 0.5)])
        .evaluate(DATA, [X, X], lambda d, x: (x[0].sum(), {}), differentiate=True)
        .gradients
    )
    assert found is not None
    assert [each.tolist() for each in found] == [[1.0] * 3, X.tolist()]


@pytest.mark.parametrize("terms", [[], [spec(second_only, 0)]])
def test_a_datum_that_no_term_trains_on_is_refused(terms):
    pipeline = Pipeline(terms)
    with pytest.raises(CustomLossError, match=r"datum 1, .* add 0 \* logprobs\[1\]\.sum\(\)"):
        pipeline.evaluate(DATA, [X, X], lambda d, x: (x[0].sum(), {}), differentiate=True)
    # Computing values alone needs no gradients.
    assert pipeline.compute(DATA, [X, X], lambda d, x: (x[0].sum(), {})).loss_total == -6


def test_autograd_error_names_the_regularizer():
    def overwritten(data: Any, logprobs: Any) -> Any:
        squared = logprobs.exp()
        loss = squared.square().sum()
        squared.add_(1)
        return loss, {}

    with pytest.raises(CustomLossError, match=r"regularizers\.mine: raised RuntimeError"):
        compute(spec(overwritten), track_grad_norms=True)


def test_terms_can_share_a_part_of_the_graph():
    shared: list[torch.Tensor] = []

    def first(data: Any, logprobs: Any) -> Any:
        shared.append(logprobs.exp())
        return shared[0].sum(), {}

    def second(data: Any, logprobs: Any) -> Any:
        return shared[0].square().sum(), {}

    found = Pipeline([spec(second)]).evaluate(DATA, X, first, differentiate=True).gradients
    assert found is not None
    torch.testing.assert_close(found[0], X.exp() + 2 * (2 * X).exp())


# -- events --------------------------------------------------------------------------------------


@pytest.fixture
def told(heard):
    return heard(CustomLossEvent, RegularizerEvent)


def names(events: list[Any]) -> list[str]:
    return [each.name.removeprefix("tinkex.") for each in events]


@pytest.mark.parametrize("parallel", [True, False])
def test_evaluation_emits_events(parallel, told):
    entropy = spec(Entropy(), 0.5, "entropy")
    compute(entropy, spec(later, is_async=True), parallel=parallel)
    start, end = "regularizer.compute.start", "regularizer.compute.stop"
    middle = [start, start, end, end] if parallel else [start, end, start, end]
    assert names(told) == ["custom_loss.start", *middle, "custom_loss.stop"]
    first, last = told[0], told[-1]
    assert (first.regularizer_count, first.track_grad_norms) == (2, False)
    assert last.regularizer_total == pytest.approx(last.loss_total - 6)
    stop = next(each for each in told if isinstance(each, RegularizerStop))
    assert (stop.regularizer_name, stop.weight, stop.is_async) == ("entropy", 0.5, False)
    assert stop.contribution == stop.value / 2
    assert stop.grad_norm is None
    assert stop.duration >= 0


def test_events_have_gradient_norms_if_tracked(told):
    compute(spec(L2(), 0.5, "l2"), track_grad_norms=True)
    stop = next(each for each in told if isinstance(each, RegularizerStop))
    assert stop.grad_norm == pytest.approx(float(2 * X.norm()))


def test_failures_emit_events(told):
    with pytest.raises(CustomLossError):
        compute(spec(fail))
    *_, one, whole = told
    assert names([one, whole]) == ["regularizer.compute.exception", "custom_loss.exception"]
    assert one.regularizer_name == "mine"
    assert one.reason == whole.reason == "regularizers.mine: raised TimeoutError: of its own"


def test_base_loss_that_cannot_be_called_emits_an_event(told):
    with pytest.raises(CustomLossError):
        compute(loss=lambda data: (0, {}))
    assert names(told) == ["custom_loss.start", "custom_loss.exception"]
