"""What counts as a loss and as a regularizer, and how one is called.

A loss is a function of `(data, logprobs)`. A regularizer is the same, or takes a third argument for its options, or is
an object with `compute(data, logprobs, options)`. All return `(value, metrics)`. In training, `logprobs` is a list
with one tensor per datum; on its own, a pipeline may be given one tensor.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from tinkex.errors import InvalidInputError
from tinkex.types import Datum, RegularizerSpec

from .errors import CustomLossError, CustomLossTimeoutError

if TYPE_CHECKING:
    import torch

__all__ = ["Logprobs", "LossFn", "Regularizer", "call", "check_loss_fn", "checked"]

Logprobs: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
#: `(data, logprobs) -> (loss, metrics)`
LossFn: TypeAlias = "Callable[[list[Datum], Any], tuple[torch.Tensor, Mapping[str, Any]]]"


@runtime_checkable
class Regularizer(Protocol):
    """An object that can be the `fn` of a `RegularizerSpec`; it may have a `name` as well."""

    def compute(
        self, data: Sequence[Datum], logprobs: Logprobs, options: Mapping[str, Any]
    ) -> tuple[torch.Tensor, Mapping[str, Any]]: ...


def checked(
    regularizers: Iterable[RegularizerSpec | Mapping[str, Any]],
) -> tuple[RegularizerSpec, ...]:
    """The specs, if every one can be called and no two share a name."""
    if isinstance(regularizers, RegularizerSpec | Mapping | str) or not isinstance(
        regularizers, Iterable
    ):
        raise InvalidInputError(
            f"expected a list of RegularizerSpec, got {type(regularizers).__name__}",
            field="regularizers",
        )
    specs = tuple(_spec(index, each) for index, each in enumerate(regularizers))
    counted = Counter(spec.name for spec in specs)
    if surplus := list((counted - Counter(set(counted))).elements()):
        raise InvalidInputError(
            f"two regularizers cannot share a name: {', '.join(surplus)}", field="regularizers"
        )
    for spec in specs:
        _takes_options(spec)
    return specs


def _spec(index: int, given: Any) -> RegularizerSpec:
    if not isinstance(given, RegularizerSpec | Mapping):
        raise InvalidInputError(
            f"expected a RegularizerSpec, got {type(given).__name__}",
            field=f"regularizers.{index}",
        )
    try:
        return RegularizerSpec.create(given)
    except InvalidInputError as error:
        raise InvalidInputError(str(error), field=f"regularizers.{index}") from error


def check_loss_fn(loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise InvalidInputError("must be callable", field="loss_fn")
    positional, _ = _arity(loss_fn)
    if positional is not None and not positional[0] <= 2 <= positional[1]:
        raise InvalidInputError(
            f"must take (data, logprobs), but takes {_counted(positional)}", field="loss_fn"
        )


def call(
    spec: RegularizerSpec, data: list[Datum], logprobs: Logprobs, timeout: float | None
) -> Any:
    """What the regularizer returns; an async one runs on an event loop of its own and is cancelled in time."""
    fn = spec.fn if callable(spec.fn) else spec.fn.compute
    arguments: tuple[Any, ...] = (data, logprobs)
    if _takes_options(spec):
        arguments = (*arguments, spec.options)
    if spec.is_async:
        return asyncio.run(_awaited(spec, lambda: fn(*arguments), timeout))
    returned = fn(*arguments)
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise CustomLossError("returned an awaitable; give it is_async=True", name=spec.name)
    return returned


async def _awaited(
    spec: RegularizerSpec, begin: Callable[[], Any], timeout: float | None
) -> Any:
    try:
        async with asyncio.timeout(timeout) as limit:
            returned = begin()  # here, because it may want a running loop
            if not inspect.isawaitable(returned):
                raise CustomLossError("is_async, but returned no awaitable", name=spec.name)
            return await returned
    except TimeoutError as error:
        if limit.expired():
            raise late(timeout, spec.name) from error
        raise


def late(timeout: float | None, name: str | None) -> CustomLossTimeoutError:
    return CustomLossTimeoutError(f"did not return within {timeout:g} s", name=name)


def _takes_options(spec: RegularizerSpec) -> bool:
    """Whether it wants a third argument; refuses what can be called neither way."""
    if not callable(spec.fn):
        positional, third = _arity(spec.fn.compute)
        wanted = "compute must take (data, logprobs, options)"
    else:
        positional, third = _arity(spec.fn)
        wanted = "must take (data, logprobs) or (data, logprobs, options)"
    if positional is None:  # a builtin does not say what it takes
        return not callable(spec.fn)
    least, most = positional
    if least <= 3 <= most and (least == 3 or third in {"options", "opts"}):
        return True
    if least <= 2 <= most:
        return False
    raise CustomLossError(f"{wanted}, but takes {_counted(positional)}", name=spec.name)


def _arity(fn: Callable[..., Any]) -> tuple[tuple[int, int] | None, str | None]:
    """The fewest and the most positional arguments a function takes, and what the third is called."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None, None
    places = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    least = sum(p.default is p.empty for p in places)
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return (99, 99), None  # cannot be called by position at all
    most = 99 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(places)
    return (least, most), places[2].name if len(places) > 2 else None


def _counted(positional: tuple[int, int]) -> str:
    least, most = positional
    if least == 99:
        return "keywords that it requires"
    return f"{least} arguments" if least == most else f"{least} to {most} arguments"
