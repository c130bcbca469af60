"""What is said when the disk cannot be written to: it is full, read-only or broken."""

from __future__ import annotations

import errno
from typing import Final

from tinkex.errors import InternalServerError

__all__ = ["DiskFullError", "as_client_error"]

#: What to do about each error of a disk that cannot be written to.
_ADVICE: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free some space and go on."),
    **dict.fromkeys((errno.EROFS, errno.EIO), "Its operator has to mend that; then go on."),
}


class DiskFullError(InternalServerError):
    _status = 507


def as_client_error(error: BaseException) -> BaseException:
    """The error that clients are told of: a disk that cannot be written to is one they can understand."""
    if isinstance(error, OSError) and error.errno in _ADVICE:
        return DiskFullError(
            f"The service cannot write to its disk ({error.strerror}). {_ADVICE[error.errno]}"
        )
    return error
