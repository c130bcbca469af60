"""`python -m tinkex.engine FD`: what the service starts."""

from .process import main

main()
