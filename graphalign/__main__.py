"""`python -m graphalign` is the command `graphalign`."""

from graphalign.cli import main

if __name__ == "__main__":
    main()
