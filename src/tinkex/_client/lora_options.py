"""The options of a new adapter, given one by one, as one object, or both."""

from __future__ import annotations

from typing import Any, Final, cast

from tinkex.types import LoraConfig

from .checks import check_count
from .session import refusing_bad_values

__all__ = ["RANK", "TRAINED", "lora_config"]


class _Default(int):
    """A default that can be told from the same value given by a caller, and is equal to it in every other way."""

    def __repr__(self) -> str:
        return repr(bool(self)) if self == 1 else int.__repr__(self)


RANK: Final[int] = _Default(32)
TRAINED: Final[bool] = cast("bool", _Default(1))


def lora_config(base: LoraConfig | None, **options: Any) -> LoraConfig:
    """`base` with the options that the caller has given, even where they equal their defaults."""
    given = {
        name: value
        for name, value in options.items()
        if value is not None and not isinstance(value, _Default)
    }
    if "rank" in given:
        check_count("rank", given["rank"], 1)
    with refusing_bad_values():
        return LoraConfig(**{**(base or LoraConfig()).model_dump(), **given})
