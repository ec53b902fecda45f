"""The command line: `recsys`, or `python -m recsys`."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from recsys.cli.options import COMMANDS, build_parser, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Help and mistakes in options come at once; a command imports what it needs.

    Args:
        arguments: What follows `recsys`; default: that of this process.

    Returns:
        The process's exit status: 0 done, 2 bad input, 130 interrupted, 141 nothing reads the
        output.
    """
    if sys.stderr is None:  # closed, as by 2>&-; what is told there goes nowhere
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for the rest of the process
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] not in COMMANDS:
        parser = build_parser()
        if given and not given[0].startswith("-"):
            close = difflib.get_close_matches(given[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "`recsys --help` lists the commands"
            parser.error(f"there is no command {given[0]!r}; {hint}")
        parser.parse_args(given or ["--help"])  # prints, and exits
    try:
        options = parse(given)
        from recsys.cli.commands import run  # takes a second, in which Ctrl-C may come

        return run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # what shells report for a program that Ctrl-C ended
