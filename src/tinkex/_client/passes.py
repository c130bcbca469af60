"""A pass in several requests: their encoding, their tags, and what the failure of one means for the others."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from tinkex import types
from tinkex._wire.lazy_codecs import json_codec
from tinkex._wire.operations import Operation, operation
from tinkex._wire.pass_parts import ALL_OR_NOTHING, PASS_HEADER, PassPart
from tinkex.errors import APIConnectionError, TinkerError

from .transport import encode_training

__all__ = ["Parts", "TrainingWire"]

#: A datum in an error message: `data.3.target_tokens` or `data[3]`.
_DATUM: Final = re.compile(r"\bdata(\.|\[)(\d+)")
#: Messages of services that tried to read a protobuf body as JSON.
_NO_PROTOBUF: Final = re.compile(
    r"protobuf|content.?type|media.?type|json_invalid|json decode|valid json|valid dictionary",
    re.IGNORECASE,
)


@dataclass(slots=True)
class TrainingWire:
    """The encoding of a session's passes: protobuf, or JSON for services that accept nothing else."""

    protobuf: bool = True
    #: The service has accepted protobuf before, so a later refusal is about the content.
    confirmed: bool = False

    def encode(
        self, request: types.ForwardBackwardRequest | types.ForwardRequest, *, zstd: bool
    ) -> tuple[Operation[object], bytes, dict[str, str]]:
        """The operation, its body and the headers that describe the body."""
        if self.protobuf:
            return operation("forward_backward"), *encode_training(request, zstd=zstd)
        name = "forward" if isinstance(request, types.ForwardRequest) else "forward_backward"
        return operation(name), json_codec.encode(request), {"content-type": "application/json"}

    def may_fall_back(self, error: TinkerError) -> bool:
        """Whether the error can mean that the service does not accept protobuf."""
        if not self.protobuf or self.confirmed:
            return False
        if error.status_code == 415:
            return True
        text = f"{error} {error.body}"
        return error.status_code in {400, 422} and _NO_PROTOBUF.search(text) is not None


@dataclass(slots=True)
class Parts:
    """The requests of one pass; `sizes` has the number of datums in each."""

    sizes: Sequence[int]
    backward: bool
    accepted: int = 0
    tagged: int = 0  # accepted requests whose tag the service understood
    pass_id: str = ""

    def headers(self, index: int) -> dict[str, str]:
        """The tag of one request. Forward passes and passes of one request need none."""
        if not self.backward or len(self.sizes) == 1:
            return {}
        self.pass_id = self.pass_id or secrets.token_hex(8)
        return {PASS_HEADER: str(PassPart(self.pass_id, index, len(self.sizes)))}

    def note(self, answer: Mapping[str, str]) -> None:
        """Count an accepted request; the headers of its answer show whether the service understood the tag."""
        self.accepted += 1
        self.tagged += answer.get(PASS_HEADER) == ALL_OR_NOTHING

    def explain(self, error: TinkerError, index: int) -> None:
        """Add to the message which datums failed (indices in the caller's list) and what happened to the rest."""
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
