"""The command `reshard`: inspect, plan, convert and verify checkpoints.

`program` defines the commands, each in its own module, and decides exit codes. This file
imports neither click nor rich, so that it can report what to install if they are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code.

    `arguments` are the process's own if None. Exit codes: 0 done, 1 differs, 2 wrong use or bad
    input, 3 failed while running.
    """
    try:
        try:
            import click  # noqa: F401
            import rich  # noqa: F401
        except ImportError as error:
            print(
                f"reshard: the command needs {error.name}: pip install 'reshard[cli]'",
                file=sys.stderr,
            )
            return 2
        from reshard.cli.program import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("reshard: interrupted before anything was done", file=sys.stderr)
        return 3
