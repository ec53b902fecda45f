"""How a program prints the warnings of recsys: one line, without source code."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["plain_warnings"]


@contextmanager
def plain_warnings(program: str) -> Iterator[None]:
    """Print warnings as "PROGRAM: warning: MESSAGE" within the `with` block.

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
