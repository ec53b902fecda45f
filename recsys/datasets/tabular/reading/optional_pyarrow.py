"""pyarrow, which only tables need."""

from __future__ import annotations

from typing import Any

from recsys.errors import MissingDependency

__all__ = ["import_pyarrow"]


def import_pyarrow() -> Any:
    """The package pyarrow.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependency(
            "tables need pyarrow, which is not installed; pip install pyarrow"
        ) from error
    return pyarrow
