"""Modules that are imported at their first use.

A program that makes a client needs neither numpy nor protobuf yet, and they take as long to import as the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Lazy", "np"]


class Lazy:
    """Stands for a module. Each attribute is looked up there once and then kept."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


if TYPE_CHECKING:
    import numpy as np
else:
    np = Lazy("numpy")
