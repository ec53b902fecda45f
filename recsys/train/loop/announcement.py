"""Says what memory and disk a run takes, before its tables are built."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from recsys._support.counted import counted
from recsys._support.files import existing
from recsys._support.sizes import format_bytes
from recsys.train.parts.budget import MemoryNeeds

if TYPE_CHECKING:
    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["announce", "are_on_one_disk", "cold_folder", "lack_of_disk", "warn_of_full_disk"]


def announce(config: TrainConfig, source: SampleSource) -> None:
    """Tell on stderr what the tables of a run take."""
    needs, sizes = MemoryNeeds(config, source), source.table_sizes
    lines = [
        f"{counted(len(sizes), 'table')} with {sum(sizes.values()):,} rows take "
        f"{format_bytes(needs.everything)} with optimizer state"
    ]
    if config.save_model:
        lines.append(f"their rows in the model file take {format_bytes(needs.rows)}")
    tqdm.write("; ".join(lines), file=sys.stderr)


def warn_of_full_disk(
    config: TrainConfig, source: SampleSource, run_dir: Path, cold_path: str
) -> None:
    """Warn if the model file of a run will not fit on its disk.

    Args:
        config: The configuration of the run.
        source: Its data.
        run_dir: Its folder, which exists.
        cold_path: The folder of rows in files, which are there; those of state are made later. ""
            if rows are in memory.
    """
    needs = MemoryNeeds(config, source)
    state_bytes = needs.everything - needs.rows if are_on_one_disk(cold_path, run_dir) else 0
    lack = lack_of_disk(config, run_dir, needs.rows, state_bytes)
    if lack:
        warnings.warn(lack, stacklevel=2)


def cold_folder(config: TrainConfig, run_dir: Path) -> str:
    """The folder on whose disk a run has its rows in files; "" if they are in memory.

    Args:
        config: The configuration of the run.
        run_dir: Its folder, which may not exist yet.
    """
    if config.cold_tier == "host":
        return ""
    return config.cold_path or str(existing(run_dir))


def are_on_one_disk(cold_path: str, run_dir: Path) -> bool:
    """Whether rows are in files, on the disk of the run; folders may not exist yet."""
    if not cold_path:
        return False
    one, other = (existing(path).stat().st_dev for path in (Path(cold_path), run_dir))
    return one == other


def lack_of_disk(config: TrainConfig, run_dir: Path, model_bytes: int, cold_bytes: int = 0) -> str:
    """What the disk of a run lacks for its model file, and the way out; "" if it has room.

    Args:
        config: The configuration of the run.
        run_dir: Its folder, which may not exist yet.
        model_bytes: Bytes of the model file, or of the rows in it.
        cold_bytes: Bytes that files of rows and state will take on its disk until the run ends.
    """
    free = shutil.disk_usage(existing(run_dir)).free
    if not config.save_model or model_bytes + cold_bytes <= free:
        return ""
    beside = (
        f" beside the {format_bytes(cold_bytes)} of rows and state in files" if cold_bytes else ""
    )
    return (
        f"{run_dir} has {format_bytes(free)} of free disk, and the model file takes at least "
        f"{format_bytes(model_bytes)}{beside}; make room before training ends, choose another "
        "disk by --run, or set save_model=false"
    )
