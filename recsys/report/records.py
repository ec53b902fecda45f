"""Finds the record that a folder holds: that of a run, or that of an ablation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["find_record"]


def find_record(folder: Path) -> Path:
    """`ablate.json` or `run.json` of a folder.

    Raises:
        ConfigError: it has neither.
    """
    for name in ("ablate.json", "run.json"):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(
        f"{folder} has neither a run.json nor an ablate.json; name the folder of a run or of an "
        "ablation, after it has ended"
    )
