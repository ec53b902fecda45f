"""The checkpoints of one run: when they are written."""

from __future__ import annotations

import shutil
import warnings
from time import perf_counter
from typing import TYPE_CHECKING, Any

from recsys.errors import RecsysError
from recsys.train.checkpoint import Checkpoints, newest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from recsys.config import CheckpointConfig

__all__ = ["RunCheckpoints"]


class RunCheckpoints:
    """Writes checkpoints after a time or a number of steps, whichever comes first.

    The folder is made when the first checkpoint is half an interval away. Copying of rows begins
    then, so that the first checkpoint finds most of them copied.

    Args:
        config: When a checkpoint is due.
        folder: The folder of the run's checkpoints.
        model: The model.
        optimizers: Its optimizers.
        after: The number of the checkpoint in `folder` that the run continues from. None for a new
            run, or if it continues from one elsewhere: then every row is saved again.
        numbers_after: Checkpoints get the numbers after this one; above 0 the run continues. With
            several processes, one that cannot be written has a number, too, so that all agree.
        newest_of_all: With several processes, which save together: the number of the newest
            complete checkpoint that all have, or None. A collective. None for one process.
        when_complete: Is called once there is a checkpoint in `folder` that all processes have,
            and that the run continues from, or has written.

    Attributes:
        has_saved: Whether a checkpoint of this run was written, by this process or an earlier one.
            With several processes, whether they have tried to: it is the same on all.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        after: int | None,
        numbers_after: int = 0,
        newest_of_all: Callable[[], int | None] | None = None,
        when_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._folder = config, folder
        self._model, self._optimizers = model, optimizers
        self._made: Checkpoints | None = None
        self._has_failed = False  # to make the folder, since the last checkpoint was due
        self._number = self._known = numbers_after if after is None else after
        self._complete_from = numbers_after + 1 if after is None else after
        self._saved_at: dict[str, int] = {}  # position of the last `save`
        self._complete: list[dict[str, int]] = []
        self.has_saved = after is not None or numbers_after > 0
        self._newest_of_all, self._when_complete = newest_of_all, when_complete
        self._is_complete = False
        self._waited = 0.0  # seconds
        self._since = perf_counter()
        self._described: dict[str, Any] | None = None
        if after is not None:
            self._made = self._make(after)

    def start(self) -> None:
        """Count the time to the next checkpoint from now on."""
        self._since = perf_counter()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after a step; prepares one that is near.

        Args:
            step: Steps so far.
        """
        every_steps, every_seconds = self._config.every_steps, self._config.every_seconds
        seconds, steps = perf_counter() - self._since, step % every_steps if every_steps else 0
        is_near = 0 < every_steps <= 2 * steps or 0 < every_seconds <= 2 * seconds
        if self._made is None and is_near and not self._has_failed:
            made = self._begin()
            if made is not None:
                made.prepare()
        return 0 < every_seconds <= seconds or (every_steps > 0 and steps == 0)

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a checkpoint; returns when its rows are copied. A collective.

        If the folder cannot be made, this warns, and training goes on.

        Args:
            state: The state of everything but the model and its optimizers, as of `Run`.
        """
        begin = perf_counter()
        self.wait_for_all()
        self._waited += perf_counter() - begin
        made = self._made or self._begin()
        number, are_several = None, self._newest_of_all is not None
        if are_several:  # also where the folder cannot be made
            number = self._number = self._number + 1
        if made is not None:
            made.save(state=state, number=number)
        progress = state["progress"]
        self._saved_at = {"step": progress["num_steps"], "num_samples": progress["num_samples"]}
        self.has_saved |= made is not None or are_several
        self._has_failed = False
        self.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._made is not None:
            self._made.wait()

    def wait_for_all(self) -> None:
        """Wait until the last checkpoint of every process is written. A collective.

        The newest one that all have is kept until there is a newer one.
        """
        number = None if self._made is None else self._made.wait()
        if self._newest_of_all is not None:
            number = self._newest_of_all()
        if number is None or self._made is None:
            return
        self._made.pin(number)
        self._note(number)
        if not self._is_complete and number >= self._complete_from:
            self._is_complete = True
            self._when_complete()

    def newly_complete(self) -> list[dict[str, int]]:
        """The checkpoints that were found complete since the last call; waits for none.

        Each has its `number`, and the `step` and `num_samples` after which it was saved. Several
        processes find out what all have in `wait_for_all`.
        """
        if self._made is not None and self._newest_of_all is None:
            self._note(self._made.newest)
        found, self._complete = self._complete, []
        return found

    def end(self) -> None:
        """Wait until the last checkpoint of every process is written, and end. A collective."""
        if self.has_saved:
            self.wait_for_all()
        self.close()

    def close(self) -> None:
        """Wait until the last checkpoint is written, and end."""
        if self._made is None:
            return
        if not self.has_saved:  # the first one is prepared, but was not due yet
            self.give_up()
            return
        self._made.wait()
        self._describe(self._made)
        self._made.close()

    def give_up(self) -> None:
        """End at once: a checkpoint that is not written yet is dropped."""
        if self._made is None:
            return
        self._describe(self._made)
        self._made.give_up()
        if newest(self._folder) is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def describe(self) -> dict[str, Any] | None:
        """For a run record, after the end: what was written; None if nothing was prepared."""
        return self._described

    def _note(self, number: int | None) -> None:
        """Note a complete checkpoint. One that was not known is that of the last `save`."""
        if number is not None and number > self._known:
            self._known = number
            self._complete.append({"number": number, **self._saved_at})

    def _describe(self, made: Checkpoints) -> None:
        found = made.describe()
        self._described = found | {"exposed_seconds": found["exposed_seconds"] + self._waited}

    def _begin(self) -> Checkpoints | None:
        """Make the folder; a failure warns, and the next checkpoint tries again."""
        try:
            self._made = self._make(None)
        except RecsysError:
            raise
        except OSError as error:
            self._has_failed = True
            warnings.warn(
                f"no checkpoint can be written to {self._folder}, and training goes on ({error}); "
                "free some space, or check the disk",
                stacklevel=3,
            )
        return self._made

    def _make(self, after: int | None) -> Checkpoints:
        return Checkpoints(
            self._folder,
            model=self._model,
            optimizers=self._optimizers,
            buffer_bytes=self._config.buffer_bytes,
            after=after,
            numbers_after=self._number,
        )
