"""The command line: `recsys`, or `python -m recsys`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from recsys._support.user_code import plain_warnings
from recsys.cli.options import parse
from recsys.errors import RecsysError

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
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        from recsys.cli.commands import COMMANDS  # takes a second, in which Ctrl-C may come

        with plain_warnings(f"recsys {options.command}"):
            return COMMANDS[options.command](options) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # what shells report for a program that Ctrl-C ended
    except (RecsysError, OSError) as error:
        print(f"recsys {options.command}: {error}", file=sys.stderr)
        return 2
