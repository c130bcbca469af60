"""The codecs, imported at their first use: a client needs neither before its first request.

The JSON codec knows how each type is written and imports most of them; the other one imports protobuf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._lazy import Lazy

__all__ = ["json_codec", "proto_codec"]

if TYPE_CHECKING:
    from . import json_codec, proto_codec
else:
    json_codec = Lazy("tinkex._wire.json_codec")
    proto_codec = Lazy("tinkex._wire.proto_codec")
