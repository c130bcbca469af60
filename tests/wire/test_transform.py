import copy
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import orjson
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, RootModel

from tinkex._wire.transform import (
    NOT_GIVEN,
    OMIT,
    NotGiven,
    Omit,
    coalesce,
    given,
    is_omit,
    not_given,
    transform,
)
from tinkex.errors import InvalidInputError

SENTINELS = pytest.mark.parametrize("sentinel", [NOT_GIVEN, OMIT])


class Key(StrEnum):
    SEED = "seed"


@dataclass(frozen=True, slots=True)
class Point:
    x: Any = NOT_GIVEN
    y: Any = None


@dataclass
class Path:
    points: list[Point] = field(default_factory=list)


class Model(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str
    when: date | None = None
    extra: Any = NOT_GIVEN
    inner: "Model | None" = None


class TestSentinels:
    @SENTINELS
    def test_is_falsy(self, sentinel):
        assert not sentinel

    def test_are_distinct(self):
        assert len({NOT_GIVEN, OMIT}) == 2

    def test_repr(self):
        assert (repr(NOT_GIVEN), repr(OMIT)) == ("NOT_GIVEN", "OMIT")

    def test_constructor_returns_the_singleton(self):
        assert NotGiven() is NOT_GIVEN
        assert Omit() is OMIT

    @SENTINELS
    def test_copies_are_the_same_object(self, sentinel):
        assert copy.copy(sentinel) is sentinel
        assert copy.deepcopy({"a": [sentinel]})["a"][0] is sentinel

    @SENTINELS
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_pickles_to_the_same_object(self, sentinel, protocol):
        assert pickle.loads(pickle.dumps([sentinel], protocol)) == [sentinel]
        assert pickle.loads(pickle.dumps(sentinel, protocol)) is sentinel

    @pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}, NotGiven, Omit])
    def test_other_falsy_values_are_given(self, value):
        assert given(value)
        assert not not_given(value)
        assert not is_omit(value)
        assert coalesce(value, "default") is value

    def test_predicates(self):
        assert (given(NOT_GIVEN), not_given(NOT_GIVEN), is_omit(NOT_GIVEN)) == (False, True, False)
        assert (given(OMIT), not_given(OMIT), is_omit(OMIT)) == (False, False, True)

    @SENTINELS
    def test_coalesce(self, sentinel):
        assert coalesce(sentinel) is None
        assert coalesce(sentinel, 3) == 3


class TestShapes:
    def test_none_stays_none(self):
        assert transform(None) is None
        assert transform(None, drop_none=True) is None

    @SENTINELS
    def test_data_that_is_not_given_becomes_none(self, sentinel):
        assert transform(sentinel) is None

    @pytest.mark.parametrize(
        "value", [True, 3, 0.5, "text", b"bytes", date(2025, 1, 2), Point, {3}]
    )
    def test_other_values_pass_through(self, value):
        assert transform(value) is value
        assert transform({"key": value})["key"] is value

    def test_mappings(self):
        assert transform(MappingProxyType({"a": MappingProxyType({"b": 1})})) == {"a": {"b": 1}}

    def test_lists_and_tuples(self):
        assert transform({"a": ([1, (2,)], [])}) == {"a": [[1, [2]], []]}

    def test_dataclasses(self):
        path = Path([Point(1, 2), Point()])

        assert transform(path) == {"points": [{"x": 1, "y": 2}, {"y": None}]}

    def test_pydantic_models(self):
        model = Model(name="a", inner=Model(name="b", when=date(2025, 1, 2)))

        assert transform([model], formats={"when": "iso8601"}, drop_none=True) == [
            {"name": "a", "inner": {"name": "b", "when": "2025-01-02"}}
        ]

    def test_pydantic_root_models(self):
        assert transform({"a": RootModel[list[Model]]([Model(name="b")])}, drop_none=True) == {
            "a": [{"name": "b"}]
        }

    def test_models_are_recognised_by_their_method(self):
        class Dumps:
            def model_dump(self):
                return {"a": OMIT, "b": 1}

        assert transform(Dumps()) == {"b": 1}

    def test_keys_become_strings(self):
        assert transform({1: "a", Key.SEED: 2, None: 3, (1, 2): 4}) == {
            "1": "a",
            "seed": 2,
            "None": 3,
            "(1, 2)": 4,
        }
        assert all(type(key) is str for key in transform({Key.SEED: 2}))

    def test_input_is_not_changed(self):
        data = {"a": [NOT_GIVEN, {"b": OMIT}], "c": None}
        before = copy.deepcopy(data)

        transform(data, aliases={"a": "z"}, drop_none=True)

        assert data == before


class TestDropping:
    @SENTINELS
    def test_sentinels_are_dropped_and_none_is_kept(self, sentinel):
        assert transform({"a": sentinel, "b": None, "c": [sentinel, None, {"d": sentinel}]}) == {
            "b": None,
            "c": [None, {}],
        }

    def test_drop_none_keeps_false_zero_and_empty(self):
        data: dict[str, Any] = {
            "a": None,
            "b": False,
            "c": 0,
            "d": "",
            "e": [],
            "f": {"g": None, "h": 0},
        }

        assert transform(data, drop_none=True) == {
            "b": False,
            "c": 0,
            "d": "",
            "e": [],
            "f": {"h": 0},
        }

    def test_none_is_kept_in_a_list(self):
        data = {"logprobs": [None, -0.5, {"a": None}]}

        assert transform(data, drop_none=True) == {"logprobs": [None, -0.5, {}]}

    @pytest.mark.parametrize(
        ("value", "body"),
        [
            (None, {"num_samples": 1}),
            (True, {"num_samples": 1, "prompt_logprobs": True}),
            (False, {"num_samples": 1, "prompt_logprobs": False}),
        ],
    )
    def test_three_states_on_the_wire(self, value, body):
        request = {"num_samples": 1, "prompt_logprobs": value, "model_path": None}

        assert orjson.loads(orjson.dumps(transform(request, drop_none=True))) == body


class TestAliases:
    def test_by_original_or_string_key_at_every_depth(self):
        data = {Key.SEED: 1, 2: {"seed": 3}, "other": [{2: 4}]}

        assert transform(data, aliases={"seed": "s", "2": "two"}) == {
            "s": 1,
            "two": {"s": 3},
            "other": [{"two": 4}],
        }
        assert transform({2: 1, "2x": 2}, aliases={2: "two"}) == {"two": 1, "2x": 2}

    def test_original_key_has_priority(self):
        assert transform({2: 1}, aliases={2: "original", "2": "string"}) == {"original": 1}

    def test_dataclass_fields(self):
        assert transform(Point(1, 2), aliases={"x": "X"}) == {"X": 1, "y": 2}


class TestFormats:
    def test_iso8601(self):
        data = {
            "at": datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC),
            "inner": [{"at": datetime(2025, 1, 2, 3, 4, 5)}, {"at": date(2025, 1, 2)}],
            "not_at": date(2025, 1, 2),
        }

        assert transform(data, formats={"at": "iso8601"}) == {
            "at": "2025-01-02T03:04:05+00:00",
            "inner": [{"at": "2025-01-02T03:04:05"}, {"at": "2025-01-02"}],
            "not_at": date(2025, 1, 2),
        }

    @pytest.mark.parametrize("value", ["2025-01-02", None, 17])
    def test_iso8601_does_not_change_other_values(self, value):
        assert transform({"at": value}, formats={"at": "iso8601"}) == {"at": value}

    def test_callable_stops_the_recursion(self):
        result = {"a": NOT_GIVEN}

        assert transform({"x": [1, 2]}, formats={"x": lambda _: result})["x"] is result

    def test_key_is_looked_up_before_it_is_renamed(self):
        assert transform({"x": 1, "y": 1}, aliases={"x": "y", "y": "z"}, formats={"y": str}) == {
            "y": 1,
            "z": "1",
        }

    def test_by_string_key(self):
        assert transform({7: 1}, formats={"7": str}) == {"7": "1"}

    @SENTINELS
    def test_sentinels_are_not_formatted(self, sentinel):
        assert transform({"x": sentinel}, formats={"x": str}) == {}

    def test_a_formatter_may_drop_its_value(self):
        assert transform({"x": 1}, formats={"x": lambda _: OMIT}) == {}
        assert transform({"x": 1}, formats={"x": lambda _: None}, drop_none=True) == {}

    def test_unknown_format(self):
        with pytest.raises(InvalidInputError, match="'rfc822' for 'at'") as caught:
            transform({}, formats={"at": "rfc822"})  # type: ignore[dict-item]

        assert caught.value.field == "formats"


def values_within(data: Any) -> Iterator[Any]:
    yield data
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            yield from values_within(item)


leaves = (
    st.sampled_from([NOT_GIVEN, OMIT, None, False, 0, ""])
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.text()
)
keys = st.text(max_size=3) | st.integers(0, 3) | st.sampled_from(Key)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.builds(Point, inner, inner)
    ),
)


@for_all(trees, st.booleans())
def test_no_sentinel_is_left(data, drop_none):
    assert all(given(value) for value in values_within(transform(data, drop_none=drop_none)))


@for_all(trees)
def test_drop_none_leaves_no_none_in_a_dict(data):
    for value in values_within(transform(data, drop_none=True)):
        assert not isinstance(value, dict) or None not in value.values()


@for_all(trees, st.booleans())
def test_transform_is_idempotent(data, drop_none):
    once = transform(data, drop_none=drop_none)

    assert transform(once, drop_none=drop_none) == once


@for_all(trees)
def test_the_result_is_json(data):
    result = transform(data)

    assert orjson.loads(orjson.dumps(result, option=orjson.OPT_PASSTHROUGH_DATACLASS)) == result
