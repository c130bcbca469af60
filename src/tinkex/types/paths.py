"""`tinker://` paths: the names of checkpoints."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias
from urllib.parse import quote

from tinkex.errors import InvalidPathError

from ._base import ResponseModel

__all__ = ["CheckpointType", "ParsedCheckpointTinkerPath"]

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]

SCHEME: Final = "tinker://"
_TYPE_OF_KIND: Final[dict[str, CheckpointType]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_KIND_OF_TYPE: Final = {checkpoint_type: kind for kind, checkpoint_type in _TYPE_OF_KIND.items()}
CONSOLE: Final = "https://tinker.thinkingmachines.ai"


class ParsedCheckpointTinkerPath(ResponseModel):
    """The parts of `tinker://<training run>/<kind>/<name>`.

    `checkpoint_id` is `<kind>/<name>`, the form REST paths use.
    """

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> ParsedCheckpointTinkerPath:
        if not isinstance(tinker_path, str) or not tinker_path.startswith(SCHEME):
            raise InvalidPathError(
                f"must start with {SCHEME}, got {tinker_path!r:.200}", field="tinker_path"
            )
        parts = tinker_path.removeprefix(SCHEME).split("/")
        if len(parts) != 3 or not all(parts):
            raise InvalidPathError(
                f"must be {SCHEME}<run>/<kind>/<name>, got {tinker_path!r:.200}",
                field="tinker_path",
            )
        run, kind, name = parts
        if kind not in _TYPE_OF_KIND:
            raise InvalidPathError(
                f"the kind must be one of {', '.join(_TYPE_OF_KIND)}, not {kind!r:.80}",
                field="tinker_path",
            )
        if name in {".", ".."} or run in {".", ".."}:
            raise InvalidPathError(
                f"{tinker_path!r:.200} points outside its run", field="tinker_path"
            )
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=_TYPE_OF_KIND[kind],
            checkpoint_id=f"{kind}/{name}",
        )

    @classmethod
    def of(
        cls, training_run_id: str, checkpoint_type: CheckpointType, name: str
    ) -> ParsedCheckpointTinkerPath:
        """Compose a path and check it like a given one."""
        if (kind := _KIND_OF_TYPE.get(checkpoint_type)) is None:
            raise InvalidPathError(
                f"must be one of {', '.join(_KIND_OF_TYPE)}, not {checkpoint_type!r:.80}",
                field="checkpoint_type",
            )
        return cls.from_tinker_path(f"{SCHEME}{training_run_id}/{kind}/{name}")

    @property
    def name(self) -> str:
        return self.checkpoint_id.partition("/")[2]


def with_kind(tinker_path: str, checkpoint_type: CheckpointType) -> str:
    """The path with its kind added; SkyRL leaves the kind out of the path of a saved sampler."""
    run, slash, name = tinker_path.removeprefix(SCHEME).partition("/")
    if not tinker_path.startswith(SCHEME) or not (run and slash and name) or "/" in name:
        return tinker_path
    return f"{SCHEME}{run}/{_KIND_OF_TYPE[checkpoint_type]}/{name}"


def console_url(tinker_path: str) -> str:
    """The page of a checkpoint in the hosted service's console."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    run, checkpoint = quote(parsed.training_run_id, safe=""), quote(parsed.checkpoint_id, safe="")
    return f"{CONSOLE}/checkpoints/{run}/{checkpoint}"


def playground_url(tinker_path: str) -> str:
    """The page of the hosted service where a sampler checkpoint can be tried."""
    ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return f"{CONSOLE}/playground?mode=checkpoint&checkpoint={quote(tinker_path, safe='')}"
