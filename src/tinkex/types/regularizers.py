"""Values of the regularizer subsystem: specifications and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from tinkex.errors import InvalidInputError

__all__ = ["BaseLossOutput", "CustomLossOutput", "RegularizerOutput", "RegularizerSpec"]


@dataclass(frozen=True, slots=True)
class RegularizerSpec:
    """One term of a composed loss: `weight` times the value of `fn`.

    `fn` is a function of `(data, logprobs)` or `(data, logprobs, options)`, or an object with
    `compute(data, logprobs, options)`. With `is_async` it returns an awaitable.
    """

    fn: Any
    weight: float
    name: str
    is_async: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InvalidInputError("must be a non-empty string", field="name")
        if not callable(self.fn) and not callable(getattr(self.fn, "compute", None)):
            raise self._refused("fn", "must be a function or an object with compute()")
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float):
            raise self._refused("weight", f"must be a number, not {type(self.weight).__name__}")
        if not isfinite(self.weight) or self.weight < 0:
            raise self._refused("weight", f"must be 0 or more, not {self.weight}")
        if not isinstance(self.is_async, bool):
            raise self._refused("is_async", "must be True or False")
        if not isinstance(self.options, Mapping):
            raise self._refused("options", "must be a mapping")

    def _refused(self, field: str, message: str) -> InvalidInputError:
        return InvalidInputError(f"{message} (regularizer {self.name!r})", field=field)

    @classmethod
    def create(cls, spec: RegularizerSpec | Mapping[str, Any]) -> RegularizerSpec:
        """Accept a spec or a mapping of its fields; `async` is read as `is_async`.

        A mapping without a name uses the name of its `fn`, if it has one.
        """
        if isinstance(spec, RegularizerSpec):
            return spec
        fields = {("is_async" if key == "async" else key): value for key, value in spec.items()}
        if "name" not in fields and (name := getattr(fields.get("fn"), "name", None)) is not None:
            fields["name"] = name() if callable(name) else name
        for required in ("fn", "weight", "name"):
            if required not in fields:
                raise InvalidInputError("is required", field=required)
        try:
            return cls(**fields)
        except TypeError as error:
            raise InvalidInputError(f"unknown field in regularizer spec: {error}") from error


@dataclass(frozen=True, slots=True)
class RegularizerOutput:
    """The contribution of one regularizer."""

    name: str
    value: float
    weight: float
    contribution: float
    grad_norm: float | None = None
    grad_norm_weighted: float | None = None
    custom: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        spec: RegularizerSpec,
        value: float,
        custom: Mapping[str, Any],
        grad_norm: float | None = None,
    ) -> RegularizerOutput:
        return cls(
            name=spec.name,
            value=value,
            weight=spec.weight,
            contribution=spec.weight * value,
            grad_norm=grad_norm,
            grad_norm_weighted=None if grad_norm is None else spec.weight * grad_norm,
            custom=custom,
        )

    def to_dict(self, *, keep_none: bool = False) -> dict[str, Any]:
        written: dict[str, Any] = {
            "name": self.name,
            "value": self.value,
            "weight": self.weight,
            "contribution": self.contribution,
            "grad_norm": self.grad_norm,
            "grad_norm_weighted": self.grad_norm_weighted,
            "custom": dict(self.custom),
        }
        if keep_none:
            return written
        return {name: value for name, value in written.items() if value is not None}


@dataclass(frozen=True, slots=True)
class BaseLossOutput:
    value: float
    grad_norm: float | None = None
    custom: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CustomLossOutput:
    """A composed loss, split into its parts."""

    loss_total: float
    base_loss: BaseLossOutput | None
    regularizers: Mapping[str, RegularizerOutput] = field(default_factory=dict)
    total_grad_norm: float | None = None

    @property
    def loss(self) -> float:
        return self.loss_total

    @property
    def regularizer_total(self) -> float:
        return sum(output.contribution for output in self.regularizers.values())

    def to_dict(self) -> dict[str, Any]:
        written: dict[str, Any] = {
            "loss_total": self.loss_total,
            "regularizer_total": self.regularizer_total,
            "regularizers": {
                name: output.to_dict(keep_none=True) for name, output in self.regularizers.items()
            },
        }
        if self.base_loss is not None:
            written["base_loss"] = {
                "value": self.base_loss.value,
                "grad_norm": self.base_loss.grad_norm,
                "custom": dict(self.base_loss.custom),
            }
        if self.total_grad_norm is not None:
            written["total_grad_norm"] = self.total_grad_norm
        return written


RegularizerFn = Callable[..., Any]
