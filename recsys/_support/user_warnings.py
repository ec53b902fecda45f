"""Warnings for users: of which line they speak, and how a program prints them."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["plain_warnings", "warn_caller"]

_SKIPPED = ("recsys", "torch", "contextlib", "copy")


def warn_caller(message: str) -> None:
    """Warn, with the innermost line outside recsys and torch as the place."""
    stacklevel, frame = 1, sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _SKIPPED:
        stacklevel, frame = stacklevel + 1, frame.f_back
    warnings.warn(message, stacklevel=stacklevel + 1)


@contextmanager
def plain_warnings(program: str) -> Iterator[None]:
    """Print warnings as "PROGRAM: warning: MESSAGE" within the `with` block, without source code.

    Other categories than `UserWarning`, which recsys raises, are printed as before.
    """
    with_source = warnings.formatwarning

    def format_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if category is not UserWarning:
            return with_source(message, category, filename, lineno, line)
        return f"{program}: warning: {message}\n"

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = with_source
