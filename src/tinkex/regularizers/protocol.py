"""The signatures of losses and regularizers, and how they are called.

A loss is a function of `(data, logprobs)`. A regularizer has the same signature, or also takes its options: as a third
argument, as `options=`, or one by one as `**options`. It can also be an object with such a `compute` method. All return
`(value, metrics)`. In training, `logprobs` is a list with one tensor per datum; a pipeline used alone also accepts one
tensor.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import torch

from tinkex.errors import InvalidInputError
from tinkex.types import Datum, RegularizerSpec

from .errors import CustomLossError, CustomLossTimeoutError

__all__ = ["Logprobs", "LossFn", "Regularizer", "call", "check_loss_fn", "checked", "late"]

Logprobs: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
#: `(data, logprobs) -> (loss, metrics)`
LossFn: TypeAlias = Callable[[list[Datum], Any], tuple[torch.Tensor, Mapping[str, Any]]]

_OPTIONS: Final = frozenset({"options", "opts"})
_BY_PLACE: Final = frozenset(
    {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
)


@runtime_checkable
class Regularizer(Protocol):
    """An object that can be the `fn` of a `RegularizerSpec`; it may have a `name` as well."""

    def compute(
        self, data: Sequence[Datum], logprobs: Logprobs, options: Mapping[str, Any]
    ) -> tuple[torch.Tensor, Mapping[str, Any]]: ...


def checked(
    regularizers: Iterable[RegularizerSpec | Mapping[str, Any]],
) -> tuple[RegularizerSpec, ...]:
    """The specs; an error if one cannot be called or if two have the same name."""
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
        _further_arguments(spec)
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
    """The result of the regularizer; an async one runs on its own event loop and is cancelled after `timeout`."""
    positional, named = _further_arguments(spec)
    begin = partial(_function(spec), data, logprobs, *positional, **named)
    if spec.is_async:
        return asyncio.run(_awaited(spec, begin, timeout))
    returned = begin()
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise CustomLossError("returned an awaitable; set is_async=True", name=spec.name)
    return returned


async def _awaited(spec: RegularizerSpec, begin: Callable[[], Any], timeout: float | None) -> Any:
    try:
        async with asyncio.timeout(timeout) as limit:
            returned = begin()  # called here, because it may need a running loop
            if not inspect.isawaitable(returned):
                raise CustomLossError(
                    "has is_async=True, but returned no awaitable", name=spec.name
                )
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


def _further_arguments(spec: RegularizerSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The options as positional or as named arguments; an error if the function cannot be called."""
    if inspect.isclass(spec.fn):
        raise CustomLossError(f"{spec.fn.__name__} is a class; pass an instance", name=spec.name)
    fn = _function(spec)
    if (signature := _signature(fn)) is None:
        return (), {}
    if _takes_third(fn, signature):
        return (spec.options,), {}
    named = _named_options(signature, spec.options)
    try:
        signature.bind(None, None, **named)
    except TypeError as error:
        raise CustomLossError(
            f"must take (data, logprobs) or (data, logprobs, options), not {signature}: {error}",
            name=spec.name,
        ) from None
    return (), named


def _takes_third(fn: Callable[..., Any], signature: inspect.Signature) -> bool:
    if not _accepts(fn, 2):
        return _accepts(fn, 3)
    third = [*signature.parameters.values()][
        2:3
    ]  # the third parameter takes options only if its name says so
    return any(each.name in _OPTIONS and each.kind in _BY_PLACE for each in third)


def _named_options(signature: inspect.Signature, options: Mapping[str, Any]) -> dict[str, Any]:
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name in _OPTIONS:
            # Without options the function keeps its own default, such as one from partial().
            is_needed = parameter.default is parameter.empty
            return {parameter.name: options} if options or is_needed else {}
        if parameter.kind is parameter.VAR_KEYWORD:
            return dict(options)
    return {}


def _accepts(fn: Callable[..., Any], count: int) -> bool:
    if (signature := _signature(fn)) is None:
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # a C function without a signature
        return None
