"""`python -m frankenstein_hf.commands`, the command `frankenstein`."""

from .app import main

main()
