"""Where a run is, in full steps: the steps that a run without skipping needs for the same samples.

A run that skips samples makes fewer steps, and how many is not known beforehand. What is planned by
steps goes by full steps: evaluations, reports, learning rates and the end of the run. Without
skipping, or as long as nothing is skipped, a step is a full step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsys.datasets.loader import BatchLoader
    from recsys.pipeline.fae import HotColdLoader

__all__ = ["FullSteps"]

_EVALUATIONS_PER_EPOCH = 10


class FullSteps:
    """Counts the full steps of a run.

    Args:
        loader: The loader of the training split.
        epochs: Epochs of the run.

    Attributes:
        num_steps: Full steps of the run.
        step: Full steps so far.
    """

    def __init__(self, loader: BatchLoader | HotColdLoader, epochs: int) -> None:
        self._per_epoch, self._batch_size = len(loader), loader.batch_size
        self._samples_per_epoch = len(loader.source.splits[loader.split])
        self.num_steps = epochs * self._per_epoch
        self._num_evaluations = _EVALUATIONS_PER_EPOCH * epochs
        self.step = self._last = 0

    def advance(self, step: int, num_seen: int | None) -> int:
        """Go on after a step of the run, or after loading its state; returns the full steps.

        Args:
            step: Steps of the run.
            num_seen: Samples that it has used up, skipped ones included; None without skipping.
        """
        self._last = self.step
        if num_seen is None:
            self.step = step
        else:
            epoch, rest = divmod(num_seen, self._samples_per_epoch)
            self.step = epoch * self._per_epoch + rest // self._batch_size
        return self.step

    def has_passed(self, every: int) -> bool:
        """Whether the last advance reached or passed a multiple of `every`."""
        return self.step // every > self._last // every

    def has_passed_one_of(self, times: int) -> bool:
        """Whether it reached or passed one of `times` steps spread evenly over the run.

        The last step is one of them.
        """
        return self.step * times // self.num_steps > self._last * times // self.num_steps

    def is_evaluation_due(self, every_steps: int) -> bool:
        """Whether the last advance reached a step with an evaluation; see `EvalConfig`."""
        if every_steps:
            return self.has_passed(every_steps)
        return self.has_passed_one_of(self._num_evaluations)
