"""Entry point of `python -m tinkex.engine`, the process that the service starts."""

from .process import main

main()
