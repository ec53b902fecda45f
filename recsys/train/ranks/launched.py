"""Whether a run has one process or several. Importing this imports no PyTorch."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from recsys.train.ranks.processes import Processes

__all__ = ["is_launched", "processes_of"]


def is_launched() -> bool:
    """Whether `torchrun` has started this process together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def processes_of(run_dir: Path) -> Iterator[Processes]:
    """The processes that train a run: those of the default process group, or this one alone.

    Under `torchrun`, the group is made here if the program has made none.

    Args:
        run_dir: The folder of the run.

    Raises:
        MissingDependency: there are several, and TorchRec is not installed.
    """
    from torch import distributed

    from recsys.train.ranks.processes import Processes

    is_joined = distributed.is_available() and distributed.is_initialized()
    if not (distributed.get_world_size() > 1 if is_joined else is_launched()):
        if not is_joined:
            _warn_of_other_launchers()
        yield Processes(run_dir)
        return
    from recsys.train.ranks.ranks import joined  # TorchRec is imported only where it is needed

    with joined(run_dir) as ranks:
        yield ranks


def _warn_of_other_launchers() -> None:
    """Warn where another program than `torchrun` wants several processes: each trains alone."""
    wanted = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and wanted != "1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        warnings.warn(
            f"this process trains alone, on all samples: RANK and WORLD_SIZE={wanted} are set, but "
            "torchrun did not start it; start it by `torchrun --nproc-per-node N -m -- recsys "
            "train ...`, or unset RANK and WORLD_SIZE",
            stacklevel=4,
        )
