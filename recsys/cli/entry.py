"""Where the command line begins."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from recsys.cli.help import COMMANDS, outline
from recsys.cli.output import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Without a command, as in `recsys --help`, PyTorch is not imported: that takes seconds.

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
        parser, _ = outline()
        if given and not given[0].startswith("-"):
            close = difflib.get_close_matches(given[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "`recsys --help` lists the commands"
            parser.error(f"there is no command {given[0]!r}; {hint}")
        parser.parse_args(given or ["--help"])  # prints, and exits
    try:
        from recsys.cli.commands import run  # takes a second, in which Ctrl-C may come

        return run(given)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
