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
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from tinkex.errors import InvalidInputError
from tinkex.types import Datum, RegularizerSpec

from .errors import CustomLossError, CustomLossTimeoutError

__all__ = ["Logprobs", "LossFn", "Regularizer", "call", "check_loss_fn", "checked", "late"]

Logprobs: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
#: `(data, logprobs) -> (loss, metrics)`
LossFn: TypeAlias = Callable[[list[Datum], Any], tuple[torch.Tensor, Mapping[str, Any]]]


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
    if not _accepts(loss_fn, 2):
        raise CustomLossError(f"must take (data, logprobs), not {_signature(loss_fn)}")


def call(
    spec: RegularizerSpec, timeout: float | None, data: list[Datum], logprobs: Logprobs
) -> Any:
    """What the regularizer returns; an async one runs on an event loop of its own and is cancelled in time."""
    fn = _function(spec)
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


async def _awaited(spec: RegularizerSpec, begin: Callable[[], Any], timeout: float | None) -> Any:
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


def _function(spec: RegularizerSpec) -> Callable[..., Any]:
    compute = getattr(spec.fn, "compute", None)
    function: Callable[..., Any] = compute if callable(compute) else spec.fn
    return function


def _takes_options(spec: RegularizerSpec) -> bool:
    """Whether it wants a third argument; refuses what can be called neither way."""
    if inspect.isclass(spec.fn):
        raise CustomLossError(f"{spec.fn.__name__} is a class; give an instance", name=spec.name)
    fn = _function(spec)
    if _accepts(fn, 2):  # a third that need not be given is for options only if it says so
        return _third(fn) in {"options", "opts"}
    if _accepts(fn, 3):
        return True
    raise CustomLossError(
        f"must take (data, logprobs) or (data, logprobs, options), not {_signature(fn)}",
        name=spec.name,
    )


def _accepts(fn: Callable[..., Any], count: int) -> bool:
    if (signature := _signature(fn)) is None:
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _third(fn: Callable[..., Any]) -> str | None:
    signature = _signature(fn)
    names = [] if signature is None else list(signature.parameters)
    return names[2] if len(names) > 2 else None


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # written in C, and does not say
        return None
