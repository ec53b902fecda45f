"""`save_checkpoint` and `load_checkpoint`, for training loops of one's own."""

from __future__ import annotations

import warnings
from collections import Counter
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys.errors import CheckpointError
from recsys.train.checkpoint.checkpoints import Checkpoints, listed
from recsys.train.checkpoint.contents import errors_of_state
from recsys.train.checkpoint.restore import restore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    pipeline: Any = None,
    loader: Any = None,
    schedulers: Any = (),
    state: Any = None,
) -> int:
    """Save everything that training needs to go on exactly; returns when it is on the disk.

    Call it between two steps. Tables are copied in blocks, and rows in fast memory stay there. The
    checkpoint before it in the folder is kept, older ones are deleted. `Checkpoints` writes many
    checkpoints of one run at less cost.

    Args:
        folder: The folder of checkpoints; made if it does not exist.
        model: The model.
        optimizers: Its optimizers. Those that recsys modules have made for their rows need not be
            among them.
        pipeline: A `TrainPipeline`, for its schedule.
        loader: A loader with `state_dict`, for its position.
        schedulers: Learning-rate schedulers, one or several.
        state: Anything else: numbers, texts, tensors, lists and dictionaries of them.

    Returns:
        Number of the checkpoint.

    Raises:
        AlreadyExists: `folder` holds something else.
        CheckpointError: a value cannot be saved.
        ConfigError: `loader` or another argument has no `state_dict`, or `loader` counts
            mini-batches that wait in `pipeline` as used.
        OSError: the disk is full, or cannot be written.
    """
    checkpoints = Checkpoints(folder, model=model, optimizers=optimizers)
    try:
        checkpoints.save(pipeline=pipeline, loader=loader, schedulers=schedulers, state=state)
        number = checkpoints.wait(strict=True)
        assert number is not None
        return number
    finally:
        checkpoints.close()


def load_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    pipeline: Any = None,
    loader: Any = None,
    schedulers: Any = (),
    number: int | None = None,
) -> Any:
    """Restore what `save_checkpoint` saved, and the random states of Python, numpy and torch.

    Nothing is changed before every file is found to be whole. Tables are read in blocks. Budget,
    plan, tier and device may differ from those of the run that was saved. What was saved of a
    pipeline, a loader or schedulers and is not given here is not restored, with a warning.

    The `grad` of every parameter becomes None, because it belongs to the weights before. Torch's
    `load_state_dict` keeps it. Gradients of rows that no update has used are dropped, too.

    Args:
        folder: The folder of checkpoints.
        model: A model of the same shape.
        optimizers: Its optimizers, in the same order.
        pipeline: As for `save_checkpoint`; its state is ignored under another schedule.
        loader: As for `save_checkpoint`.
        schedulers: As for `save_checkpoint`.
        number: Number of the checkpoint; None for the newest complete one.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: there is none, it is damaged (then the message names one that is whole), or
            it is of another model.
        ConfigError: the state of `pipeline` or `loader` is that of another one.
        TypeError: `number` is no whole number.
    """
    folder, number = Path(folder), _whole(number)
    _require_folder(folder)
    found = restore(folder, model, listed(optimizers), number)
    model.zero_grad()  # those of tables that recsys updates are dropped already
    given = {"pipeline": pipeline, "loader": loader}
    for name, target in given.items():
        if target is not None and found[name] is None:
            raise CheckpointError(f"{folder}: the checkpoint was saved without {name}=")
    of_schedulers = listed(schedulers)
    if of_schedulers and len(of_schedulers) != len(found["schedulers"]):
        raise CheckpointError(
            f"{folder}: the checkpoint has {len(found['schedulers'])} schedulers, and "
            f"{len(of_schedulers)} were given; give as many"
        )
    with errors_of_state():
        for name, target in given.items():
            if target is not None:
                target.load_state_dict(found[name])
        for scheduler, each in zip(of_schedulers, found["schedulers"], strict=False):
            own = scheduler.state_dict()
            for key, value in each.items():
                if isinstance(own.get(key), Counter):  # such as the milestones of `MultiStepLR`
                    each[key] = Counter(value)
            scheduler.load_state_dict(each)
    given["schedulers"] = of_schedulers or None
    left_out = [name for name, target in given.items() if target is None and found[name]]
    if left_out:
        arguments = ", ".join(f"{name}=" for name in left_out)
        warnings.warn(
            f"{folder}: the state of {', '.join(left_out)} in the checkpoint is not restored; give "
            f"{arguments} to load_checkpoint, or go on without",
            stacklevel=2,
        )
    return found["state"]


def _whole(number: int | None) -> int | None:
    """The number of a checkpoint.

    Raises:
        TypeError: it is no whole number, such as a text.
    """
    try:
        return None if number is None else index(number)
    except TypeError:
        raise TypeError(
            f"number must be the whole number of a checkpoint, or None, got {number!r}"
        ) from None


def _require_folder(folder: Path) -> None:
    """Check that a path is not a file, nor the folder of a run.

    Raises:
        CheckpointError: it is.
    """
    if folder.is_file():
        raise CheckpointError(
            f"{folder}: must be a folder of checkpoints, and is a file; give the folder that holds "
            "LAST"
        )
    inner = folder / "checkpoints"
    if inner.is_dir():
        raise CheckpointError(f"{folder}: has its checkpoints in {inner}; give that folder")
