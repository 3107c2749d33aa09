"""The command line: `app` holds what all commands share, the other modules one command or a few that belong together."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Entry point of the `graphalign` command."""
    import graphalign.cli.clusters
    import graphalign.cli.drift
    import graphalign.cli.find
    import graphalign.cli.gap
    import graphalign.cli.patch
    import graphalign.cli.render
    import graphalign.cli.source
    import graphalign.cli.targets  # noqa: F401  (these register their commands)
    from graphalign.cli.app import TERMINATED, app

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that `finally` blocks end the engine's processes
    app()
    raise AssertionError("unreachable: typer exits")
