"""Content types of the protocol."""

from typing import Final

__all__ = ["PROTOBUF"]

PROTOBUF: Final = "application/x-protobuf"
