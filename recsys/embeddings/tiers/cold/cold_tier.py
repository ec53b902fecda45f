"""The arguments `cold_tier` and `cold_path`: what they may be, and the files they ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recsys.embeddings.rows.row_space import compute_dtype
from recsys.embeddings.tiers.cold import COLD_TIERS
from recsys.embeddings.tiers.cold.cold_files import ColdFiles
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["open_cold_files", "require_budget_of_files", "require_cold_tier", "require_memory"]


def open_cold_files(
    cold_tier: str,
    cold_path: Path | str | None,
    tables: Mapping[str, tuple[Sequence[int], torch.dtype]],
    *,
    has_budget: bool,
    formula: RowOptimizer | None,
    frozen: Collection[str] = (),
) -> ColdFiles | None:
    """Open the files that a module's arguments ask for; None for cold_tier="host".

    Args:
        cold_tier: One of `COLD_TIERS`.
        cold_path: The folder, for "file" only.
        tables: Shape and dtype of every table, by name.
        has_budget: Whether the module has a budget, its own or from a plan.
        formula: Updates the rows; its state will be on the disk, too.
        frozen: Names of the tables that it does not update.

    Raises:
        ColdTierError: the folder cannot be used; see `ColdFiles`.
        ConfigError: the arguments contradict each other.
    """
    require_cold_tier(cold_tier, cold_path)
    if cold_tier == "host":
        return None
    if cold_path is None:
        raise ConfigError("cold_tier='file' needs cold_path=, a folder for its files")
    require_budget_of_files(has_budget=has_budget)
    state_bytes = 0
    if formula is not None:
        for name, ((num_rows, dim), dtype) in tables.items():
            of_row = sum(formula.state_sizes(dim).values()) * compute_dtype(dtype).itemsize
            state_bytes += 0 if name in frozen else num_rows * of_row
    return ColdFiles(cold_path, tables, state_bytes)


def require_cold_tier(cold_tier: str, cold_path: Path | str | None) -> None:
    """Check that a cold tier exists, and that a folder is given for files alone.

    Raises:
        ConfigError: otherwise.
    """
    if cold_tier not in COLD_TIERS:
        raise ConfigError(f"cold_tier must be one of {COLD_TIERS}, got {cold_tier!r}")
    if cold_tier == "host" and cold_path is not None:
        raise ConfigError(
            f"cold_path is the folder of cold_tier='file', got {str(cold_path)!r} and "
            "cold_tier='host'; leave it out, or say cold_tier='file'"
        )


def require_budget_of_files(*, has_budget: bool) -> None:
    """Check that a module with rows in files has a budget.

    Raises:
        ConfigError: it has none.
    """
    if not has_budget:
        raise ConfigError(
            "cold_tier='file' needs budget=, the fast memory for rows that are used often, and an "
            "optimizer= that updates them"
        )


def require_memory(device: torch.device | str | None) -> None:
    """Check that a module with rows in files is not on the meta device, before files are made.

    Raises:
        ConfigError: the device is "meta".
    """
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type == "meta":
        raise ConfigError(
            "cold_tier='file' is for device 'cpu' or 'cuda', got 'meta'; leave device= out, or "
            "keep rows in memory"
        )
