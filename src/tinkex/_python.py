"""How processes of this package's own code are started."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["PYTHON"]

#: Without the working directory on the path: a user's `random.py` there must not replace Python's.
PYTHON: Final = (sys.executable, "-P")
