"""Splitting a call into requests, and combining the results."""

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

cut: Any = split  # untyped: the tests split numbers, each standing for a datum of that weight

# -- split ---------------------------------------------------------------------------------------


@given(
    weights=st.lists(st.integers(0, 20), max_size=40),
    max_items=st.integers(1, 6),
    max_bytes=st.integers(1, 30),
)
def test_split_keeps_all_data_in_order_within_the_limits(weights, max_items, max_bytes):
    data: Any = list(enumerate(weights))
    chunks: Any = list(
        cut(data, max_items=max_items, max_bytes=max_bytes, weigh=lambda each: each[1])
    )
    assert [each for chunk in chunks for each in chunk] == data
    assert all(0 < len(chunk) <= max_items for chunk in chunks)
    for chunk in chunks:
        assert len(chunk) == 1 or sum(weight for _, weight in chunk) <= max_bytes


@given(weights=st.lists(st.integers(0, 20), max_size=40), max_bytes=st.integers(1, 30))
def test_chunk_ends_only_if_the_next_datum_does_not_fit(weights, max_bytes):
    data: Any = list(enumerate(weights))
    chunks: Any = list(cut(data, max_items=5, max_bytes=max_bytes, weigh=lambda each: each[1]))
    for before, after in pairwise(chunks):
        too_many = len(before) == 5
        assert too_many or sum(weight for _, weight in [*before, after[0]]) > max_bytes


def test_oversized_datum_becomes_its_own_chunk_without_empty_chunks():
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
def test_default_limits_are_1024_datums_and_5_million_bytes(count, weight, sizes):
    data: Any = [weight] * count
    assert [len(chunk) for chunk in cut(data, weigh=int)] == sizes


# -- sizes ---------------------------------------------------------------------------------------


def test_datum_bytes_is_the_size_on_the_wire():
    assert datum_bytes(datum(1, 2, 3)) == 3 * 4 + 3 * 8 + 3 * 4
    image = types.ImageChunk(data=b"x" * 50, format="png")
    pointer = types.ImageAssetPointerChunk(location="héllo", format="png")
    sound = types.DmelChunk(dmel=b"\x00\x01\x05")
    mixed = types.ModelInput(chunks=[image, pointer, sound])
    assert datum_bytes(types.Datum(mixed, {})) == 50 + 6 + 3


def test_sparse_tensor_counts_values_and_indices():
    sparse = types.TensorData([1.0, 2.0], "float32", [2, 5], [0, 1, 2], [0, 4])
    weighed = types.Datum(types.ModelInput.empty(), {"weights": sparse})
    values, indices = 2 * 4, 3 * 8 + 2 * 8
    assert datum_bytes(weighed) == values + indices


def test_prompt_counts_10_bytes_per_token():
    assert input_bytes(types.ModelInput.from_ints([1, 2, 3, 4, 5])) == 50
    image = types.ImageChunk(data=b"x" * 50, format="png")
    assert input_bytes(types.ModelInput(chunks=[image])) == 50


# -- combining -----------------------------------------------------------------------------------


def result(kind: str, count: int, metrics: dict[str, float]) -> types.ForwardBackwardOutput:
    outputs = [{"n": types.TensorData([number], "int64", [1])} for number in range(count)]
    return types.ForwardBackwardOutput(kind, outputs, metrics)


def test_single_result_is_reduced_too():
    only = result("a", 3, {"loss": 0.1, "a:mean": 0.1, "a:slack": 3.0, "b:hash_unordered": 7.0})
    metrics = {"loss": 0.1, "a:mean": 0.1, "a:slack": 0.0, "b:hash_unordered": hashed(7.0)}
    assert combine([only]) == types.ForwardBackwardOutput("a", only.loss_fn_outputs, metrics)


def test_outputs_are_concatenated_in_order_with_the_first_type():
    combined = combine([result("a", 2, {}), result("a", 0, {}), result("a", 3, {})])
    assert [each["n"].tolist() for each in combined.loss_fn_outputs] == [[0], [1], [0], [1], [2]]
    assert combined.loss_fn_output_type == "a"


def test_different_output_types_are_logged(caplog):
    assert combine([result("a", 1, {}), result("b", 1, {})]).loss_fn_output_type == "a"
    assert "a, b" in caplog.text


def test_combining_no_results_gives_an_empty_result():
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
        ("loss", 4.0),  # no suffix: the mean
        ("loss:median", 4.0),  # unknown suffix: the mean
        ("sum", 4.0),  # a name without a suffix
        ("max", 4.0),
    ],
)
def test_metric_is_reduced_by_the_suffix_of_its_name(name, reduced):
    parts: Parts = [({name: 1.0}, 1), ({name: 5.0}, 3)]
    assert reduce_metrics(parts) == {name: pytest.approx(reduced)}


def test_unique_keeps_every_value_under_its_own_name():
    parts: Parts = [({"seed:unique": value}, 1) for value in (3.0, 4.0, 3.0)]
    assert reduce_metrics(parts) == {"seed:unique": 3.0, "seed:unique_1": 4.0, "seed:unique_2": 3.0}


def test_only_metrics_of_the_first_part_are_kept():
    parts: Parts = [({"a:sum": 1.0}, 1), ({"a:sum": 2.0, "b:sum": 9.0}, 1)]
    assert reduce_metrics(parts) == {"a:sum": 3.0}


def test_metric_missing_in_some_parts_is_reduced_over_the_others():
    parts: Parts = [({"a:mean": 1.0}, 1), ({}, 100), ({"a:mean": 4.0}, 2)]
    assert reduce_metrics(parts) == {"a:mean": 3.0}


def test_parts_without_data_have_equal_weight():
    parts: Parts = [({"a:mean": 1.0, "a:slack": 1.0}, 0), ({"a:mean": 4.0, "a:slack": 4.0}, 0)]
    assert reduce_metrics(parts) == {"a:mean": 2.5, "a:slack": 1.5}


def test_loss_and_its_reductions_are_separate_metrics():
    both: dict[str, float] = {"loss": 1.0, "loss:mean": 2.0, "loss:sum": 3.0}
    combined = combine([result("a", 1, both), result("a", 1, both)])
    assert combined.metrics == {"loss": 1.0, "loss:mean": 2.0, "loss:sum": 6.0}
    assert combined.loss == 6.0


def test_reducing_no_parts_gives_no_metrics():
    assert reduce_metrics([]) == {}


def hashed(*values: float) -> float:
    return reduce_metrics([({"h:hash_unordered": value}, 1) for value in values])[
        "h:hash_unordered"
    ]


def test_unordered_hash_depends_only_on_the_values():
    assert len({hashed(*order) for order in permutations((1.0, 2.5, -3.0))}) == 1
    assert hashed(1.0, 2.0) != hashed(1.0, 2.5)
    assert hashed(1.0, 1.0) != hashed(1.0)
    # A fixed value: it must not change between processes or releases.
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
def test_64_bit_hashes_are_added_modulo_2_to_the_64(values, reduced):
    assert reduce_metrics([({"h:hash2": value}, 1) for value in values]) == {"h:hash2": reduced}


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6, allow_nan=False), st.integers(0, 100)),
        min_size=1,
        max_size=9,
    )
)
def test_mean_is_between_min_and_max_and_slack_is_not_negative(parts):
    names = ("a:mean", "a:min", "a:max", "a:slack")
    reduced = reduce_metrics([(dict.fromkeys(names, value), weight) for value, weight in parts])
    slack = 1e-6 * max(1.0, *(abs(value) for value, _ in parts))
    assert reduced["a:min"] - slack <= reduced["a:mean"] <= reduced["a:max"] + slack
    assert reduced["a:slack"] >= -slack
    assert math.isfinite(reduced["a:mean"])
