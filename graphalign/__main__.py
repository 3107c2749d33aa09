"""`python -m graphalign` is the command `graphalign`."""

from graphalign.cli import main

main()
