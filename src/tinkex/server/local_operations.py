"""The calls with a body that only this service has, as rows like those of the protocol: their limits can be changed too."""

from __future__ import annotations

from typing import Final

from tinkex._wire.operations import Body, BodyLimits, Operation, Pool

__all__ = ["LOCAL_OPERATIONS", "PLAY_PROMPT", "PUT_ALIAS"]

PUT_ALIAS: Final[Operation[object]] = Operation(
    "put_alias", "PUT", "/local/aliases", object, object, Pool.REST, body=Body.JSON
)
PLAY_PROMPT: Final[Operation[object]] = Operation(
    "play_prompt",
    "POST",
    "/local/playground",
    object,
    object,
    Pool.REST,
    body=Body.JSON,
    limits=BodyLimits(json=4 << 20, items=1_000),
)
LOCAL_OPERATIONS: Final = (PUT_ALIAS, PLAY_PROMPT)
