"""The error that clients receive when the disk is full, read-only or broken."""

from __future__ import annotations

import errno
from typing import Final

from tinkex.errors import InternalServerError

__all__ = ["DiskFullError", "as_client_error"]

#: Advice for each write error.
_ADVICE: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free some space, then try again."),
    **dict.fromkeys(
        (errno.EROFS, errno.EIO), "The operator of the service must repair it; then try again."
    ),
}


class DiskFullError(InternalServerError):
    _status = 507


def as_client_error(error: BaseException) -> BaseException:
    """The error to report to clients: `DiskFullError` for a failed disk write, any other error unchanged."""
    if isinstance(error, OSError) and error.errno in _ADVICE:
        return DiskFullError(
            f"The service cannot write to its disk ({error.strerror}). {_ADVICE[error.errno]}"
        )
    return error
