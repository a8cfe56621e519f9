"""`python -m interp` is the command line."""

from interp.cli import main

main()
