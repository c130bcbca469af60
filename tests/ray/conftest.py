"""The tests in `inside` run in a network namespace of their own, in an environment with Ray; `test_real_ray.py` starts them."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TINKEX_RAY_NAMESPACE") else ["inside"]
