import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.types import refuses
from tinkex.types import BaseLossOutput, CustomLossOutput, RegularizerOutput, RegularizerSpec


def penalty(data, logprobs):
    return 0.0, {}


class Penalty:
    def compute(self, data, logprobs, options):
        return 0.0, {}


@pytest.mark.parametrize(
    "fn", [penalty, Penalty(), Penalty().compute], ids=["function", "object", "method"]
)
def test_a_term_is_a_function_or_has_compute(fn):
    spec = RegularizerSpec(fn, 0.5, "penalty")
    assert (spec.fn, spec.weight, spec.name, spec.is_async, spec.options) == (
        fn,
        0.5,
        "penalty",
        False,
        {},
    )


def test_a_term_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RegularizerSpec(penalty, 1, "p").weight = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *[("fn", bad) for bad in (None, 5, object(), "penalty")],
        *[("weight", bad) for bad in (-0.1, math.nan, math.inf, "1", None, True)],
        *[("name", bad) for bad in ("", "  ", None, 5)],
        *[("is_async", bad) for bad in (None, 1, "yes")],
    ],
)
def test_term_refuses_invalid_values(field, bad):
    fields = {"fn": penalty, "weight": 1.0, "name": "p", "is_async": False} | {field: bad}
    with refuses(field, "must be"):
        RegularizerSpec(**fields)
    with refuses(field, "must be"):
        RegularizerSpec.create(fields)


def test_term_can_be_given_as_a_mapping():
    spec = RegularizerSpec.create({"fn": penalty, "weight": 1, "name": "p", "async": True})
    assert spec == RegularizerSpec(penalty, 1, "p", is_async=True)
    assert RegularizerSpec.create(spec) is spec


@pytest.mark.parametrize("missing", ["fn", "weight", "name"])
def test_mapping_must_have_all_required_fields(missing):
    fields = {"fn": penalty, "weight": 1, "name": "p"}
    del fields[missing]
    with refuses(missing, "required"):
        RegularizerSpec.create(fields)


def test_mapping_with_unknown_fields_is_refused():
    with pytest.raises(ValueError, match="strength"):
        RegularizerSpec.create({"fn": penalty, "weight": 1, "name": "p", "strength": 2})


@given(st.floats(0, 1e6), st.floats(-1e6, 1e6), st.none() | st.floats(0, 1e6))
def test_a_term_contributes_weight_times_value(weight, value, norm):
    output = RegularizerOutput.of(RegularizerSpec(penalty, weight, "p"), value, {"a": 1}, norm)
    assert output.contribution == weight * value
    assert output.grad_norm_weighted == (None if norm is None else weight * norm)
    assert output.name == "p"


def test_a_term_without_gradients_leaves_them_out():
    output = RegularizerOutput("p", 2.0, 0.5, 1.0)
    assert output.to_dict() == {
        "name": "p",
        "value": 2.0,
        "weight": 0.5,
        "contribution": 1.0,
        "custom": {},
    }
    assert output.to_dict(keep_none=True)["grad_norm"] is None


def test_composed_loss_has_its_parts():
    terms = {
        "a": RegularizerOutput("a", 2.0, 0.5, 1.0, grad_norm=3.0, grad_norm_weighted=1.5),
        "b": RegularizerOutput("b", 4.0, 0.5, 2.0),
    }
    output = CustomLossOutput(8.0, BaseLossOutput(5.0, custom={"n": 1}), terms, total_grad_norm=9.0)
    assert (output.loss, output.regularizer_total) == (8.0, 3.0)
    assert json.loads(json.dumps(output.to_dict())) == {
        "loss_total": 8.0,
        "regularizer_total": 3.0,
        "regularizers": {name: term.to_dict(keep_none=True) for name, term in terms.items()},
        "base_loss": {"value": 5.0, "grad_norm": None, "custom": {"n": 1}},
        "total_grad_norm": 9.0,
    }


def test_composed_loss_can_have_no_parts():
    assert CustomLossOutput(1.0, None).to_dict() == {
        "loss_total": 1.0,
        "regularizer_total": 0,
        "regularizers": {},
    }


@pytest.mark.parametrize("field", ["fn", "weight", "is_async", "options"])
def test_error_names_the_refused_term(field):
    fields = {"fn": penalty, "weight": 1.0, "name": "leash"} | {field: "bad"}
    with refuses(field, "regularizer 'leash'"):
        RegularizerSpec(**fields)


@pytest.mark.parametrize("name", ["sharp", lambda: "sharp"], ids=["attribute", "method"])
def test_mapping_without_name_uses_the_name_of_its_object(name):
    fn = Penalty()
    fn.name = name  # type: ignore[attr-defined]
    assert RegularizerSpec.create({"fn": fn, "weight": 1}).name == "sharp"
    assert RegularizerSpec.create({"fn": fn, "weight": 1, "name": "mine"}).name == "mine"
