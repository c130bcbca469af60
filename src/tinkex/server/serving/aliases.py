"""Aliases: short names of checkpoints, per owner, for programs that ask for a model by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from tinkex.errors import InvalidInputError, NotFoundError
from tinkex.server.checkpoints import Checkpoints, check_samplable, tinker_path
from tinkex.server.database import Database
from tinkex.server.tables import AliasRow
from tinkex.types.paths import SCHEME

__all__ = ["PATH", "Aliases"]

PATH: Final = "/local/aliases"
#: Aliases of one key: every list of models shows all of them.
MAX_ALIASES: Final = 1_000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")


class Aliases:
    """The aliases of all owners."""

    def __init__(
        self,
        database: Database,
        checkpoints: Checkpoints,
        base_models: Callable[[], list[str]],
        now: Callable[[], datetime],
    ) -> None:
        self._db, self._store = database, database.store
        self._checkpoints = checkpoints
        self._base_models = base_models
        self._now = now

    async def path(self, owner: str, name: str) -> str | None:
        """The checkpoint of an alias; None if there is no such alias."""
        row = await self._db(self._store.alias, owner, name)
        return None if row is None else row.path

    async def listed(self, owner: str) -> list[AliasRow]:
        return await self._db(self._store.aliases, owner)

    async def put(self, owner: str, name: Any, path: Any) -> AliasRow:
        """Create an alias, or change an existing one to another checkpoint."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidInputError(
                "must be 1 to 128 letters, digits and any of . _ : @ / -", field="name"
            )
        if name.startswith(SCHEME):
            raise InvalidInputError(f"must not begin with {SCHEME}, as paths do", field="name")
        if name in self._base_models():
            raise InvalidInputError(f"{name!r} is the name of a base model", field="name")
        if not isinstance(path, str):
            raise InvalidInputError("must be the path of a checkpoint", field="path")
        row, _ = await self._checkpoints.readable(owner, path)
        check_samplable(row, "path")
        known = await self.listed(owner)
        if len(known) >= MAX_ALIASES and all(each.name != name for each in known):
            raise InvalidInputError(
                f"a key has at most {MAX_ALIASES} aliases; delete some", field="name"
            )
        alias = AliasRow(owner, name, tinker_path(row), self._now())
        await self._db(self._store.put_alias, alias)
        return alias

    async def delete(self, owner: str, name: str) -> None:
        if not await self._db(self._store.delete_alias, owner, name):
            raise NotFoundError(f"There is no alias {name!r:.200}.")
