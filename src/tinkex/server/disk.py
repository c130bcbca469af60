"""What is said when there is no room to write."""

from __future__ import annotations

import errno
from typing import Final

from tinkex.errors import InternalServerError

__all__ = ["DiskFullError", "as_client_error"]

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFullError(InternalServerError):
    _status = 507


def as_client_error(error: BaseException) -> BaseException:
    """The error that clients are told of: a full disk is one they can understand."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return DiskFullError(
            f"The service cannot write to its disk ({error.strerror}). Free some space and go on."
        )
    return error
