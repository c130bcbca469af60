"""Cutting a call into requests and putting the results together again."""

from __future__ import annotations

import math
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex import types
from tinkex._client.chunking import combine, datum_bytes, input_bytes, reduce_metrics, split

from .helpers import datum

Parts = list[tuple[dict[str, float], int]]

cut: Any = split  # of numbers here, which stand for datums of that weight

# -- cutting -------------------------------------------------------------------------------------


@given(
    weights=st.lists(st.integers(0, 20), max_size=40),
    max_items=st.integers(1, 6),
    max_bytes=st.integers(1, 30),
)
def test_cutting_loses_nothing_keeps_order_and_respects_the_limits(weights, max_items, max_bytes):
    data: Any = list(enumerate(weights))
    chunks: Any = list(
        cut(data, max_items=max_items, max_bytes=max_bytes, weigh=lambda each: each[1])
    )
    assert [each for chunk in chunks for each in chunk] == data
    assert all(0 < len(chunk) <= max_items for chunk in chunks)
    for chunk in chunks:
        assert len(chunk) == 1 or sum(weight for _, weight in chunk) <= max_bytes


@given(weights=st.lists(st.integers(0, 20), max_size=40), max_bytes=st.integers(1, 30))
def test_a_chunk_ends_only_when_the_next_datum_does_not_fit(weights, max_bytes):
    data: Any = list(enumerate(weights))
    chunks: Any = list(cut(data, max_items=5, max_bytes=max_bytes, weigh=lambda each: each[1]))
    for before, after in pairwise(chunks):
        too_many = len(before) == 5
        assert too_many or sum(weight for _, weight in [*before, after[0]]) > max_bytes


def test_a_datum_too_large_for_any_chunk_is_one_alone_and_leaves_no_empty_one():
    data: Any = [1, 9, 1, 1]
    assert list(cut(data, max_bytes=3, weigh=int)) == [[1], [9], [1, 1]]
    assert list(cut(data[1:2], max_bytes=3, weigh=int)) == [[9]]


@pytest.mark.parametrize(
    ("count", "weight", "sizes"),
    [
        (1024, 1, [1024]),
        (1025, 1, [1024, 1]),
        (51, 100_000, [50, 1]),
        (9, 600_000, [8, 1]),
        (0, 1, []),
    ],
)
def test_the_limits_are_1024_datums_and_5_million_bytes(count, weight, sizes):
    data: Any = [weight] * count
    assert [len(chunk) for chunk in cut(data, weigh=int)] == sizes


# -- weighing ------------------------------------------------------------------------------------


def test_a_datum_weighs_what_it_takes_on_the_wire():
    assert datum_bytes(datum(1, 2, 3)) == 3 * 4 + 3 * 8 + 3 * 4
    image = types.ImageChunk(data=b"x" * 50, format="png")
    pointer = types.ImageAssetPointerChunk(location="héllo", format="png")
    sound = types.DmelChunk(dmel=b"\x00\x01\x05")
    mixed = types.ModelInput(chunks=[image, pointer, sound])
    assert datum_bytes(types.Datum(mixed, {})) == 50 + 6 + 3


def test_a_sparse_tensor_weighs_its_values_and_its_indices():
    sparse = types.TensorData([1.0, 2.0], "float32", [2, 5], [0, 1, 2], [0, 4])
    weighed = types.Datum(types.ModelInput.empty(), {"weights": sparse})
    values, indices = 2 * 4, 3 * 8 + 2 * 8
    assert datum_bytes(weighed) == values + indices


def test_a_prompt_weighs_ten_bytes_a_token():
    assert input_bytes(types.ModelInput.from_ints([1, 2, 3, 4, 5])) == 50
    image = types.ImageChunk(data=b"x" * 50, format="png")
    assert input_bytes(types.ModelInput(chunks=[image])) == 50


# -- combining -----------------------------------------------------------------------------------


def result(kind: str, count: int, metrics: dict[str, float]) -> types.ForwardBackwardOutput:
    outputs = [{"n": types.TensorData([number], "int64", [1])} for number in range(count)]
    return types.ForwardBackwardOutput(kind, outputs, metrics)


def test_one_result_is_reduced_too():
    only = result("a", 3, {"loss": 0.1, "a:mean": 0.1, "a:slack": 3.0, "b:hash_unordered": 7.0})
    metrics = {"loss": 0.1, "a:mean": 0.1, "a:slack": 0.0, "b:hash_unordered": hashed(7.0)}
    assert combine([only]) == types.ForwardBackwardOutput("a", only.loss_fn_outputs, metrics)


def test_outputs_are_strung_together_in_order_under_the_first_type():
    combined = combine([result("a", 2, {}), result("a", 0, {}), result("a", 3, {})])
    assert [each["n"].tolist() for each in combined.loss_fn_outputs] == [[0], [1], [0], [1], [2]]
    assert combined.loss_fn_output_type == "a"


def test_types_that_differ_are_mentioned(caplog):
    assert combine([result("a", 1, {}), result("b", 1, {})]).loss_fn_output_type == "a"
    assert "a, b" in caplog.text


def test_no_results_are_an_empty_result():
    assert combine([]) == types.ForwardBackwardOutput("", [], {})


# -- reducing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reduced"),
    [
        ("loss:sum", 6.0),
        ("loss:min", 1.0),
        ("loss:max", 5.0),
        ("loss:mean", (1.0 * 1 + 5.0 * 3) / 4),
        ("loss:slack", 5.0 - 4.0),
        ("a:b:sum", 6.0),
        ("loss", 4.0),  # no reduction named: the mean
        ("loss:median", 4.0),  # nor one that is known
        ("sum", 4.0),  # a name, not a reduction
        ("max", 4.0),
    ],
)
def test_a_metric_is_reduced_as_its_name_ends(name, reduced):
    parts: Parts = [({name: 1.0}, 1), ({name: 5.0}, 3)]
    assert reduce_metrics(parts) == {name: pytest.approx(reduced)}


def test_unique_keeps_every_value_under_a_name_of_its_own():
    parts: Parts = [({"seed:unique": value}, 1) for value in (3.0, 4.0, 3.0)]
    assert reduce_metrics(parts) == {"seed:unique": 3.0, "seed:unique_1": 4.0, "seed:unique_2": 3.0}


def test_the_metrics_are_those_of_the_first_part():
    parts: Parts = [({"a:sum": 1.0}, 1), ({"a:sum": 2.0, "b:sum": 9.0}, 1)]
    assert reduce_metrics(parts) == {"a:sum": 3.0}


def test_a_metric_some_parts_lack_is_reduced_over_those_that_have_it():
    parts: Parts = [({"a:mean": 1.0}, 1), ({}, 100), ({"a:mean": 4.0}, 2)]
    assert reduce_metrics(parts) == {"a:mean": 3.0}


def test_parts_without_data_count_alike():
    parts: Parts = [({"a:mean": 1.0, "a:slack": 1.0}, 0), ({"a:mean": 4.0, "a:slack": 4.0}, 0)]
    assert reduce_metrics(parts) == {"a:mean": 2.5, "a:slack": 1.5}


def test_loss_and_its_reductions_are_metrics_of_their_own():
    both: dict[str, float] = {"loss": 1.0, "loss:mean": 2.0, "loss:sum": 3.0}
    combined = combine([result("a", 1, both), result("a", 1, both)])
    assert combined.metrics == {"loss": 1.0, "loss:mean": 2.0, "loss:sum": 6.0}
    assert combined.loss == 6.0


def test_no_parts_have_no_metrics():
    assert reduce_metrics([]) == {}


def hashed(*values: float) -> float:
    return reduce_metrics([({"h:hash_unordered": value}, 1) for value in values])[
        "h:hash_unordered"
    ]


def test_the_unordered_hash_depends_on_the_values_and_on_nothing_else():
    assert len({hashed(*order) for order in permutations((1.0, 2.5, -3.0))}) == 1
    assert hashed(1.0, 2.0) != hashed(1.0, 2.5)
    assert hashed(1.0, 1.0) != hashed(1.0)
    # A number written down once: it must not change from process to process or release to release.
    assert hashed(1.0, 2.5, -3.0) == 124183467993138.0


@pytest.mark.parametrize(
    ("values", "reduced"),
    [
        ([7.0], 7),
        ([2.0**63, 2.0**63, 5.0], 5),
        ([-1.0], 2**64 - 1),
        ([math.nan, 1.0, math.inf], 1),
    ],
)
def test_hashes_of_64_bits_are_added_up(values, reduced):
    assert reduce_metrics([({"h:hash2": value}, 1) for value in values]) == {"h:hash2": reduced}


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6, allow_nan=False), st.integers(0, 100)),
        min_size=1,
        max_size=9,
    )
)
def test_a_mean_lies_between_the_extremes_and_slack_is_never_negative(parts):
    names = ("a:mean", "a:min", "a:max", "a:slack")
    reduced = reduce_metrics([(dict.fromkeys(names, value), weight) for value, weight in parts])
    slack = 1e-6 * max(1.0, *(abs(value) for value, _ in parts))
    assert reduced["a:min"] - slack <= reduced["a:mean"] <= reduced["a:max"] + slack
    assert reduced["a:slack"] >= -slack
    assert math.isfinite(reduced["a:mean"])
