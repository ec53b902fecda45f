"""The checkpoints of one run: when they are written."""

from __future__ import annotations

import shutil
import warnings
from time import perf_counter
from typing import TYPE_CHECKING, Any

from recsys.errors import RecsysError
from recsys.train.checkpoint import Checkpoints, newest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from recsys.config import CheckpointConfig
    from recsys.train.checkpoint.contents import Share

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
        after: The number of the checkpoint in `folder` that the run continues from; None for a new
            run.
        share: As for `Checkpoints`; then `save` and `end` are collectives.

    Attributes:
        has_saved: Whether this run has saved a checkpoint, in this process or an earlier one.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        after: int | None,
        share: Share | None = None,
    ) -> None:
        self._config, self._folder, self._share = config, folder, share
        self._model, self._optimizers = model, optimizers
        self._made: Checkpoints | None = None
        self._has_failed = False  # to make the folder, since the last checkpoint was due
        self._known = after  # the newest complete one that was told
        self._saved_at: dict[str, int] = {}  # position of the last `save`
        self._complete: list[dict[str, int]] = []
        self.has_saved = after is not None
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
        """Save a checkpoint; returns when its rows are copied.

        If the folder cannot be made, this warns, and training goes on.

        Args:
            state: The state of everything but the model and its optimizers, as of `Run`.
        """
        made = self._made or self._begin()
        can_save = [made is not None]
        if self._share is not None:
            can_save = self._share.gather(made is not None)
        if made is not None and all(can_save):
            made.wait()
            self._note_complete()
            made.save(state=state)
            progress = state["progress"]
            self._saved_at = {
                "step": progress["num_steps"],
                "num_samples": progress["num_samples"],
            }
            self.has_saved = True
        self._has_failed = False
        self.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._made is not None:
            self._made.wait()

    def newly_complete(self) -> list[dict[str, int]]:
        """The checkpoints that were found complete since the last call; waits for none.

        Each has its `number`, and the `step` and `num_samples` after which it was saved.
        """
        self._note_complete()
        found, self._complete = self._complete, []
        return found

    def end(self) -> None:
        """Wait until the last checkpoint is written, and end."""
        if self.has_saved:
            self.wait()
        self.close()

    def close(self) -> None:
        """End, after the last checkpoint is written. No collective: other processes may be gone."""
        if self._made is None:
            return
        if not self.has_saved:  # the first one is prepared, but was not due yet
            self.give_up()
            return
        self._made.close()
        self._note_complete()
        self._described = self._made.describe()

    def give_up(self) -> None:
        """End at once: a checkpoint that is not written yet is dropped."""
        if self._made is None:
            return
        self._made.give_up()
        self._described = self._made.describe()
        if newest(self._folder) is None and (self._share is None or not self._share.rank):
            shutil.rmtree(self._folder, ignore_errors=True)

    def describe(self) -> dict[str, Any] | None:
        """For a run record, after the end: what was written; None if nothing was prepared."""
        return self._described

    def _note_complete(self) -> None:
        """Note a complete checkpoint. One that was not known is that of the last `save`."""
        number = None if self._made is None else self._made.newest
        if number is not None and number > (self._known or 0) and self._saved_at:
            self._known = number
            self._complete.append({"number": number, **self._saved_at})

    def _begin(self) -> Checkpoints | None:
        """Make the folder; a failure warns, and the next checkpoint tries again."""
        try:
            self._made = self._make(None)
            self._known = self._made.newest
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
            share=self._share,
        )
