"""Base class of the ready-made penalties: checks the options and defines how they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args, get_origin, get_type_hints

import torch

from tinkex.errors import InvalidInputError
from tinkex.types import Datum

from .protocol import Logprobs

__all__ = ["Penalty", "Reduction", "Values"]

Reduction: TypeAlias = Literal["mean", "sum", "none"]
Values: TypeAlias = tuple[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Penalty:
    """A regularizer with options, set in its constructor or in the `options` of its `RegularizerSpec`."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for option in fields(self):
            hint, value = hints[option.name], getattr(self, option.name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise InvalidInputError(
                    f"must be one of {', '.join(get_args(hint))}, not {value!r}", field=option.name
                )

    def compute(
        self,
        data: Sequence[Datum],
        logprobs: Logprobs,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Values:
        """The penalty and its metrics; differentiable at `logprobs`."""
        return (self._with(options) if options else self)._values(data, logprobs)

    def _with(self, options: Mapping[str, Any]) -> Self:
        known = {option.name.rstrip("_"): option.name for option in fields(self)}
        if unknown := sorted(set(options) - set(known)):
            raise InvalidInputError(
                f"unknown to {self.name}: {', '.join(unknown)}; options are {', '.join(known)}",
                field="options",
            )
        return replace(self, **{known[name]: value for name, value in options.items()})

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        raise NotImplementedError
