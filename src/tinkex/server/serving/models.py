"""Names of models in requests: a base model, a checkpoint, a base model with a checkpoint, or an alias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from tinkex.errors import InvalidInputError, NotFoundError
from tinkex.server.checkpoints import check_samplable
from tinkex.server.threads import InTurn
from tinkex.types.paths import SCHEME

from .templates import ChatTemplate
from .vocabulary import Vocabularies, Vocabulary

if TYPE_CHECKING:
    from tinkex.server.service import Service

__all__ = ["ServedModel", "ServedModels"]

_SEPARATOR: Final = ";"


@dataclass(frozen=True)
class ServedModel:
    """The model that a request names."""

    name: str
    base_model: str
    model_path: str | None
    vocabulary: Vocabulary
    #: Runs what takes a while, such as reading a long text, in the turn of the key that asked.
    in_turn: InTurn


class ServedModels:
    """Finds models by the names that requests give."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._vocabularies = Vocabularies(service.files)
        self._templates: dict[Vocabulary, ChatTemplate] = {}

    async def find(self, owner: str, name: str) -> ServedModel:
        """The model of this name. If there is none, raises NotFoundError; never falls back to another model."""
        base_model, path = await self._resolved(owner, name)
        try:
            prepared = await self._service.engine.catalog.model(base_model, "model")
        except InvalidInputError as error:
            known = [model.name for model in self._service.engine.catalog.models]
            raise NotFoundError(
                f"There is no model {name!r:.200}: it is neither a base model ({', '.join(known)}), "
                "nor an alias, nor the path of a checkpoint."
            ) from error
        vocabulary = await self._vocabularies.of(prepared)
        return ServedModel(
            name, base_model, path, vocabulary, self._service.bodies.in_thread.of(owner)
        )

    async def vocabulary(self, base_model: str) -> Vocabulary:
        """The tokens of a base model."""
        prepared = await self._service.engine.catalog.model(base_model, "base_model")
        return await self._vocabularies.of(prepared)

    def known_vocabulary(self, base_model: str) -> Vocabulary | None:
        """The same, if it is in memory."""
        for prepared in self._service.engine.catalog.models:
            if prepared.name == base_model:
                return self._vocabularies.known(prepared)
        return None

    def template(self, model: ServedModel) -> ChatTemplate:
        """The chat template of a model, compiled once."""
        vocabulary = model.vocabulary
        if vocabulary not in self._templates:
            self._templates[vocabulary] = ChatTemplate.of(vocabulary)
        return self._templates[vocabulary]

    async def _resolved(self, owner: str, name: str) -> tuple[str, str | None]:
        if not name.strip():
            raise InvalidInputError("must name a model", field="model")
        if any(model.name == name for model in self._service.engine.catalog.models):
            return name, None
        base, separator, path = name.partition(_SEPARATOR)
        if not separator:
            base, path = "", name
        if not path.startswith(SCHEME):
            alias = await self._service.aliases.path(owner, path)
            if alias is None:
                if separator:
                    raise NotFoundError(f"There is no checkpoint or alias {path!r:.200}.")
                return name, None
            path = alias
        of_run = await self._base_of(owner, path)
        if base and base != of_run:
            raise InvalidInputError(
                f"{path!r:.200} was trained on {of_run}, not on {base!r:.200}", field="model"
            )
        return of_run, path

    async def _base_of(self, owner: str, path: str) -> str:
        try:
            row, _ = await self._service.checkpoints.readable(owner, path)
        except InvalidInputError as error:
            raise NotFoundError(f"There is no model {path!r:.200}: {error}") from error
        check_samplable(row, "model")
        return (await self._service.checkpoints.run_of(row)).base_model

    async def listed(self, owner: str) -> list[Mapping[str, Any]]:
        """All names that `/v1/models` shows: base models and the owner's aliases."""
        started = int(self._service.started_at)
        bases = [
            {"id": model.name, "created": started, "root": model.name, "parent": None}
            | {"max_model_len": model.context_length}
            for model in self._service.engine.catalog.models
        ]
        aliases = [
            {"id": row.name, "created": _seconds(row.created_at), "root": row.path, "parent": None}
            for row in await self._service.aliases.listed(owner)
        ]
        return [*bases, *aliases]


def _seconds(when: datetime) -> int:
    return int(when.timestamp())
