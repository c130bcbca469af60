"""Aliases of checkpoints, for requests that name a model: an extension of the protocol by the local service."""

from __future__ import annotations

from ._base import ResponseModel

__all__ = ["AliasInfo", "AliasList"]


class AliasInfo(ResponseModel):
    name: str
    path: str
    created_at: str


class AliasList(ResponseModel):
    aliases: list[AliasInfo]
