"""Modules and names that are imported at their first use.

A program that makes a client needs neither numpy nor protobuf yet, and they take as long to import as the client.
Of the protocol's two hundred types most programs need few, and the class of each takes part of a millisecond to make.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Lazy", "lazy_names", "np"]


class Lazy:
    """Stands for a module. Each attribute is looked up there once and then kept."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


def lazy_names(
    package: str, names: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package whose names are imported at their first use.

    `names` has the names of each module, separated by spaces. `modules` are modules that are public names themselves.
    """
    home_of = {name: home for home, listed in names.items() for name in listed.split()}
    public = sorted([*home_of, *modules])

    def find(name: str) -> Any:
        if (home := home_of.get(name)) is not None:
            value = getattr(import_module(home, package), name)
            setattr(
                sys.modules[package], name, value
            )  # the next use finds it without this function
            return value
        if name in modules or f".{name}" in names:
            return import_module(f".{name}", package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return public, find, lambda: public


if TYPE_CHECKING:
    import numpy as np
else:
    np = Lazy("numpy")
