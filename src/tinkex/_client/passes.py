"""One pass in several requests: how they are written and tagged, and what the failure of one means for the others."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from tinkex._wire import json_codec
from tinkex._wire.operations import Operation, operation
from tinkex._wire.pass_parts import ALL_OR_NOTHING, PASS_HEADER, PassPart
from tinkex.errors import APIConnectionError, TinkerError
from tinkex.types import ForwardBackwardRequest, ForwardRequest

from .transport import encode_training

__all__ = ["Parts", "TrainingWire"]

#: How errors name a datum: `data.3.target_tokens` or `data[3]`.
_DATUM: Final = re.compile(r"\bdata(\.|\[)(\d+)")
#: What services say to a body that they cannot read as JSON.
_NO_PROTOBUF: Final = re.compile(
    r"protobuf|content.?type|media.?type|json_invalid|json decode|valid json|valid dictionary",
    re.IGNORECASE,
)


@dataclass(slots=True)
class TrainingWire:
    """How the passes of a session are written: as protobuf, or as JSON for services that read nothing else."""

    protobuf: bool = True
    #: Protobuf was accepted once, so a later refusal is about the content.
    confirmed: bool = False

    def encode(
        self, request: ForwardBackwardRequest | ForwardRequest, *, zstd: bool
    ) -> tuple[Operation[Any], bytes, dict[str, str]]:
        """The operation to send, its body and the headers that say what it is."""
        if self.protobuf:
            return operation("forward_backward"), *encode_training(request, zstd=zstd)
        name = "forward" if isinstance(request, ForwardRequest) else "forward_backward"
        return operation(name), json_codec.encode(request), {"content-type": "application/json"}

    def may_fall_back(self, error: TinkerError) -> bool:
        """Whether a refusal can mean that the service reads no protobuf."""
        if not self.protobuf or self.confirmed:
            return False
        if error.status_code == 415:
            return True
        said = f"{error} {error.body}"
        return error.status_code in {400, 422} and _NO_PROTOBUF.search(said) is not None


@dataclass(slots=True)
class Parts:
    """The requests that one pass is sent in, by the number of data in each."""

    sizes: Sequence[int]
    backward: bool
    pass_id: str = field(default_factory=lambda: secrets.token_hex(8))
    accepted: int = 0
    tagged: int = 0  # accepted requests whose tag the service knows

    def headers(self, index: int) -> dict[str, str]:
        """The tag of one request; a pass of one request needs none."""
        if not self.backward or len(self.sizes) == 1:
            return {}
        return {PASS_HEADER: str(PassPart(self.pass_id, index, len(self.sizes)))}

    def note(self, answer: Mapping[str, str]) -> None:
        """A request was accepted; its headers tell whether the service knows the tag."""
        self.accepted += 1
        self.tagged += answer.get(PASS_HEADER) == ALL_OR_NOTHING

    def explain(self, error: TinkerError, index: int) -> None:
        """Say which data failed, by their index in the caller's list, and what happened to the rest."""
        if len(self.sizes) == 1:
            return
        first = [0, *accumulate(self.sizes)][index]
        said = _DATUM.sub(lambda found: f"data{found[1]}{int(found[2]) + first}", error.message)
        where = f"request {index + 1} of {len(self.sizes)} (data {first} to {first + self.sizes[index] - 1})"
        error.message = f"{said.rstrip('.')}. This was {where} of one call{self._rest(error)}."

    def _rest(self, error: TinkerError) -> str:
        if not self.backward or not self.accepted:
            return ""
        if self.tagged == self.accepted:
            if isinstance(error, APIConnectionError):
                return "; the service counts the gradients of all its requests or of none"
            return "; the service dropped the gradients of the others, so none was accumulated"
        return (
            "; this service keeps the gradients of the requests that succeeded, so a second call would count "
            "them twice. Load the last state (load_state_with_optimizer), or clear them with "
            "optim_step(AdamParams(learning_rate=0)), after which Adam's moments contain them"
        )
