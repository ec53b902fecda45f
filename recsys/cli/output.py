"""Standard output of commands, in the encoding of any terminal, and an exit status."""

from __future__ import annotations

import io
import sys
from contextlib import suppress

__all__ = ["INTERRUPTED", "accept_any_text"]

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def accept_any_text(encoding: str | None = None) -> None:
    """Print letters that an encoding lacks as escapes, as to stderr, in place of an error.

    Args:
        encoding: That of the output from now on; None for the one that it has.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # At last it asks for the position, which a pipe in the place of a file does not have.
        with suppress(OSError):
            sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")
