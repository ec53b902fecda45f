"""The command line: `recsys`, or `python -m recsys`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from recsys.cli.options import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Help and mistakes in options come at once; a command imports what it needs.

    Args:
        arguments: What follows `recsys`; default: that of this process.

    Returns:
        The process's exit status: 0 done, 2 bad input, 130 interrupted.
    """
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        from recsys.cli.commands import run  # takes a second, in which Ctrl-C may come

        return run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # what shells report for a program that Ctrl-C ended
