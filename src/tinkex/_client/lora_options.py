"""The options of a new adapter: separate arguments, one `LoraConfig`, or both."""

from __future__ import annotations

from typing import Any, Final, cast

from tinkex import types

from .checks import check_count
from .session import refusing_bad_values

__all__ = ["RANK", "TRAINED", "lora_config"]


class _Default(int):
    """A default value that differs only in type from the same value passed by a caller."""

    def __repr__(self) -> str:
        return repr(bool(self)) if self == 1 else int.__repr__(self)


RANK: Final[int] = _Default(32)
TRAINED: Final[bool] = cast("bool", _Default(1))


def lora_config(base: types.LoraConfig | None, **options: Any) -> types.LoraConfig:
    """`base`, overridden by the options that the caller passed, even if they equal the defaults."""
    given = {
        name: value
        for name, value in options.items()
        if value is not None and not isinstance(value, _Default)
    }
    if "rank" in given:
        check_count("rank", given["rank"], 1)
    with refusing_bad_values():
        return types.LoraConfig(**{**(base or types.LoraConfig()).model_dump(), **given})
