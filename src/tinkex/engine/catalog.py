"""The base models of a service: those that its engines have loaded, and those they may load on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from .base_models import PreparedModel
from .checks import check_base

__all__ = ["MAX_CONTEXT", "Catalog"]

#: Used as the context length of a base model that is not loaded yet: more than any model has.
MAX_CONTEXT: Final = 1 << 24


class Catalog:
    """Base models by name; `load` fetches a model and loads it into the engines."""

    def __init__(
        self, load: Callable[[str], Awaitable[PreparedModel]], *, on_demand: bool = False
    ) -> None:
        self._load = load
        self._on_demand = on_demand
        self._models: dict[str, PreparedModel] = {}
        self._loading = asyncio.Lock()

    def add(self, models: Iterable[PreparedModel]) -> None:
        """Add models that the engines have loaded."""
        self._models.update({model.name: model for model in models})

    @property
    def models(self) -> list[PreparedModel]:
        return list(self._models.values())

    def has(self, name: str) -> bool:
        """Whether a base model is loaded."""
        return name in self._models

    def context_length(self, name: str) -> int:
        """The context length of a base model; `MAX_CONTEXT` if it is not loaded yet."""
        model = self._models.get(name)
        return MAX_CONTEXT if model is None else model.context_length

    def check(self, name: str, field: str) -> None:
        """Refuse a base model that this service cannot load."""
        if not self._on_demand:
            check_base(name, self._models, field)

    async def model(self, name: str, field: str) -> PreparedModel:
        """A base model; a service that loads models on demand fetches and loads it first."""
        self.check(name, field)
        if name in self._models:  # no lock: another model may be loading
            return self._models[name]
        async with self._loading:
            if name not in self._models:
                self._models[name] = await self._load(name)
        return self._models[name]
