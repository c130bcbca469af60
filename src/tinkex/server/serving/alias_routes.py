"""The calls behind `tinkex alias`: list, create and delete aliases. They are not part of the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request

from tinkex.server.decoding import checked_json
from tinkex.server.local_operations import PUT_ALIAS
from tinkex.types._aliases import AliasInfo, AliasList

from .aliases import PATH
from .requests import ServingRequest, read

if TYPE_CHECKING:
    from tinkex.server.service import Service
    from tinkex.server.tables import AliasRow

__all__ = ["ONE", "PATH", "AliasRequest", "delete", "listed", "put"]

ONE: Final = f"{PATH}/{{name:path}}"


class AliasRequest(ServingRequest):
    name: str
    path: str


async def listed(service: Service, owner: str, _: Request) -> AliasList:
    return AliasList(aliases=[_info(row) for row in await service.aliases.listed(owner)])


async def put(service: Service, owner: str, request: Request) -> AliasInfo:
    hold = service.bodies.budget.hold(owner)
    try:
        received = await service.bodies.receive(PUT_ALIAS, request, hold)
        asked = read(AliasRequest, checked_json(PUT_ALIAS, received.body))
        return _info(await service.aliases.put(owner, asked.name, asked.path))
    finally:
        hold.release()


async def delete(service: Service, owner: str, request: Request) -> dict[str, Any]:
    await service.aliases.delete(owner, request.path_params["name"])
    return {}


def _info(row: AliasRow) -> AliasInfo:
    return AliasInfo(name=row.name, path=row.path, created_at=row.created_at.isoformat())
