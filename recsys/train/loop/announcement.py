"""What a run takes of memory and disk, told before its tables are built."""

from __future__ import annotations

import shutil
import sys
import warnings
from typing import TYPE_CHECKING

from tqdm import tqdm

from recsys._support.sizes import format_bytes
from recsys.train.parts.budget import MemoryNeeds

if TYPE_CHECKING:
    from pathlib import Path

    from recsys.config import TrainConfig
    from recsys.datasets.source import SampleSource

__all__ = ["announce", "warn_of_full_disk"]


def announce(config: TrainConfig, source: SampleSource) -> None:
    """Tell on stderr what the tables of a run take."""
    needs, sizes = MemoryNeeds(config, source), source.table_sizes
    lines = [
        f"{len(sizes)} tables with {sum(sizes.values()):,} rows take "
        f"{format_bytes(needs.everything)} with optimizer state"
    ]
    if config.save_model:
        lines.append(f"their rows in the model file take {format_bytes(needs.rows)}")
    tqdm.write("; ".join(lines), file=sys.stderr)


def warn_of_full_disk(config: TrainConfig, source: SampleSource, run_dir: Path) -> None:
    """Warn if the model file of a run will not fit on its disk.

    Args:
        config: The configuration of the run.
        source: Its data.
        run_dir: Its folder, which exists.
    """
    num_bytes, free = MemoryNeeds(config, source).rows, shutil.disk_usage(run_dir).free
    if config.save_model and num_bytes > free:
        warnings.warn(
            f"{run_dir} has {format_bytes(free)} of free disk, and the rows in the model file take "
            f"{format_bytes(num_bytes)}; make room before training ends, choose another disk by "
            "--run, or set save_model=false",
            stacklevel=2,
        )
