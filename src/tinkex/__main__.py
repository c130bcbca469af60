"""`python -m tinkex`: the command line."""

from tinkex.cli.main import main

main()
