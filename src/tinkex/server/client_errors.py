"""What clients are told of an error.

The errors of tinkex are written for clients. The text of any other may name files of the machine, statements of the
database or data of others, so clients receive its kind and a reference, and the log has the rest under that reference.
"""

from __future__ import annotations

import errno
import logging
import secrets
from typing import Final

from tinkex.engine.interface import EngineFailedError
from tinkex.errors import InternalServerError, TinkerError

__all__ = ["DiskFullError", "client_error"]

logger = logging.getLogger("tinkex.server")

#: Advice for each write error.
_ADVICE: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free some space, then try again."),
    **dict.fromkeys(
        (errno.EROFS, errno.EIO), "The operator of the service must repair it; then try again."
    ),
}


class DiskFullError(InternalServerError):
    _status = 507


def client_error(error: BaseException, work: str, reference: str | None = None) -> TinkerError:
    """The error to report to the client that asked for `work`.

    `reference` is the id of the request, if the client knows one; otherwise a new one is made.
    """
    if isinstance(error, TinkerError):
        return error
    if isinstance(error, OSError) and error.errno in _ADVICE:
        return DiskFullError(
            f"The service cannot write to its disk ({error.strerror}). {_ADVICE[error.errno]}"
        )
    reference = reference or secrets.token_hex(8)
    logger.error("%s failed; reference %s", work, reference, exc_info=error)
    if isinstance(error, MemoryError):
        told = InternalServerError(
            f"There is too little memory for {work}. Send less at a time, such as fewer or shorter sequences. "
            f"The service's log has the details under the reference {reference}."
        )
    else:
        kind = error.kind if isinstance(error, EngineFailedError) else type(error).__name__
        told = InternalServerError(
            f"The service failed on {work}: {kind}. Its log has the details under the reference {reference}."
        )
    told.request_id = reference
    return told
