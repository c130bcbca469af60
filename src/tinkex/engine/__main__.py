"""Entry point of `python -m tinkex.engine`, the process that the service starts."""

import os

from .process import main

# torch's threads spin while they wait for each other, by default for milliseconds. On a busy machine they spin while
# the thread they wait for cannot run. torch reads the variable when it is imported, so it must be set before.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

main()
