"""Names that stand for checkpoints, in requests for a model by name: an addition of the local service to the protocol."""

from __future__ import annotations

from ._base import ResponseModel

__all__ = ["AliasInfo", "AliasList"]


class AliasInfo(ResponseModel):
    name: str
    path: str
    created_at: str


class AliasList(ResponseModel):
    aliases: list[AliasInfo]
