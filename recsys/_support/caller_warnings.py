"""Warnings that name the line of the user's code that led to them, from any depth of calls."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_caller"]

_SKIPPED = ("recsys", "torch", "contextlib")


def warn_caller(message: str) -> None:
    """Warn, with the innermost line outside recsys and torch as the place."""
    stacklevel, frame = 1, sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _SKIPPED:
        stacklevel, frame = stacklevel + 1, frame.f_back
    warnings.warn(message, stacklevel=stacklevel + 1)
