"""Converts a caller's arguments to a request body.

Two values mean "absent", which None cannot mean because None is a value on the wire: `NOT_GIVEN` means that the
caller left an argument out, `OMIT` that its default is left out too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, TypeVar, final, overload

from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = [
    "NOT_GIVEN",
    "OMIT",
    "Format",
    "NotGiven",
    "Omit",
    "coalesce",
    "given",
    "is_omit",
    "not_given",
    "transform",
]

T = TypeVar("T")
D = TypeVar("D")

Format: TypeAlias = Literal["iso8601"] | Callable[[Any], Any]


class _Sentinel:
    """A falsy singleton, the global variable called `_name`; its copies and pickles are the same object."""

    __slots__ = ()
    _name: ClassVar[str]

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


@final
class NotGiven(_Sentinel):
    __slots__ = ()
    _name = "NOT_GIVEN"

    def __new__(cls) -> NotGiven:
        return NOT_GIVEN


@final
class Omit(_Sentinel):
    __slots__ = ()
    _name = "OMIT"

    def __new__(cls) -> Omit:
        return OMIT


NOT_GIVEN: Final = object.__new__(NotGiven)
OMIT: Final = object.__new__(Omit)


def not_given(value: object) -> TypeIs[NotGiven]:
    return value is NOT_GIVEN


def is_omit(value: object) -> TypeIs[Omit]:
    return value is OMIT


def given(value: T | NotGiven | Omit) -> TypeIs[T]:
    """Whether `value` is a real value; None, False and 0 are."""
    return not isinstance(value, _Sentinel)


@overload
def coalesce(value: T | NotGiven | Omit) -> T | None: ...
@overload
def coalesce(value: T | NotGiven | Omit, default: D) -> T | D: ...
def coalesce(value: Any, default: Any = None) -> Any:
    """Return `value`, or `default` if it was not given."""
    return value if given(value) else default


def transform(
    data: Any,
    *,
    aliases: Mapping[Any, str] | None = None,
    formats: Mapping[Any, Format] | None = None,
    drop_none: bool = False,
) -> Any:
    """Return `data` as dicts with string keys, lists and plain values.

    Mappings, dataclasses and pydantic models become dicts, lists and tuples become lists, at every
    depth; sentinels are left out. `aliases` renames keys and `formats` converts values; both are looked
    up by the key itself or by its string form. The result of a format is not converted further.
    `drop_none` also leaves out keys with the value None; None in a list stays.
    """
    aliases = aliases or {}
    formats = _check_formats(formats or {})

    def convert(value: Any) -> Any:
        # First, because most values are tokens in long lists.
        if value is None or isinstance(value, int | float | str | bytes):
            return value
        if isinstance(value, list | tuple):
            return [convert(item) for item in value if given(item)]
        if isinstance(value, Mapping):
            return convert_items(value)
        content = _unpack(value)
        return value if content is value else convert(content)

    def convert_items(items: Mapping[Any, Any]) -> dict[str, Any]:
        result = {}
        for key, value in items.items():
            if not given(value):
                continue
            formatter = _lookup(formats, key)
            converted = convert(value) if formatter is None else _apply(formatter, value)
            if given(converted) and not (drop_none and converted is None):
                result[str(_lookup(aliases, key, key))] = converted
        return result

    return convert(coalesce(data))


def _check_formats(formats: Mapping[Any, Format]) -> Mapping[Any, Format]:
    for key, formatter in formats.items():
        if formatter != "iso8601" and not callable(formatter):
            raise InvalidInputError(f"unknown format {formatter!r} for {key!r}", field="formats")
    return formats


def _unpack(value: Any) -> Any:
    if isinstance(value, type):
        return value
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    # Recognised by its method, so that pydantic is not imported for this check.
    return value.model_dump() if hasattr(value, "model_dump") else value


def _lookup(table: Mapping[Any, Any], key: Any, default: Any = None) -> Any:
    return table[key] if key in table else table.get(str(key), default)


def _apply(formatter: Format, value: Any) -> Any:
    if formatter != "iso8601":
        return formatter(value)
    return value.isoformat() if isinstance(value, date) else value
