"""Where a run is, and its reports: lines of the history, and the progress bar."""

from __future__ import annotations

import sys
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm  # in a notebook, its own bar

from recsys.errors import TrainingDiverged
from recsys.train.metrics import auc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from recsys.datasets.loader import BatchLoader
    from recsys.pipeline.fae import HotColdLoader
    from recsys.pipeline.stalls import StageClock
    from recsys.train.callbacks import RunCallbacks
    from recsys.train.run_folder import RunFolder

__all__ = ["LOWER_LR", "Progress"]

LOWER_LR = "lower optimizer.lr or dense_optimizer.lr"


class Progress:
    """Counts steps; each report writes a history line and advances the bar.

    `train_loss` and `train_auc` cover the samples since the last report. Each sample is predicted
    before the model trains on it. An evaluation writes a history line of its own, and does not
    start a new report interval.

    Evaluations and learning rates go by full steps: those that a run without skipping needs for
    the same samples. A run that skips makes fewer steps, and how many is not known beforehand.
    Checkpoints go by the steps that were made.

    Args:
        folder: Folder of the history.
        clock: Clock of the run.
        loader: Loader of the training split.
        epochs: Epochs of the run.
        callbacks: Get every line of the history.
        skips: Whether the run skips samples: then positions also count the samples trained on.

    Attributes:
        num_steps: Steps so far.
        num_samples: Samples so far; with skipping those seen, skipped ones included.
        num_trained_samples: Samples that it was trained on so far.
        num_all_samples: Samples that the run will see.
        num_full_steps: Full steps of the run.
    """

    def __init__(
        self,
        folder: RunFolder,
        clock: StageClock,
        loader: BatchLoader | HotColdLoader,
        epochs: int,
        callbacks: RunCallbacks,
        *,
        skips: bool = False,
    ) -> None:
        self._folder, self._clock, self._callbacks = folder, clock, callbacks
        self._skips, self._batch_size = skips, loader.batch_size
        self._full_steps_per_epoch = len(loader)
        self._samples_per_epoch = len(loader.source.splits["train"])
        self.num_all_samples = epochs * self._samples_per_epoch
        self.num_full_steps = epochs * self._full_steps_per_epoch
        self.num_steps = self.num_samples = self.num_trained_samples = 0
        self._full_step_before = 0
        self._measured: dict[str, float | None] = {}  # by its name in the bar
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []  # since the last report
        self._reported = (0, 0.0)
        self._bar: Any = None

    def bar(self, *, is_drawn: bool) -> tqdm[Any]:
        """The bar that reports advance from now on; a context manager."""
        self._bar = tqdm(
            total=self.num_all_samples,
            initial=self.num_samples,
            desc="train",
            unit_scale=True,
            disable=not is_drawn,
            mininterval=0.1 if sys.stderr.isatty() else 10,  # fewer lines in a log file
            # The rate of tqdm would include evaluations; the postfix has one without them.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} samples [{elapsed}<{remaining}{postfix}]",
        )
        return self._bar

    def add(
        self, loss: Tensor, logits: Tensor, labels: Tensor, num_seen: int | None = None
    ) -> None:
        """Add one step.

        Args:
            loss: The loss of its mini-batch.
            logits: Predictions of its samples.
            labels: Labels of its samples.
            num_seen: With skipping, the samples that the run has seen so far.
        """
        self._full_step_before = self.full_step
        self.num_steps += 1
        self.num_trained_samples += len(labels)
        self.num_samples = self.num_trained_samples if num_seen is None else num_seen
        self._steps.append((loss * len(labels), logits, labels))

    @property
    def full_step(self) -> int:
        """Full steps so far."""
        if not self._skips:
            return self.num_steps
        epoch, rest = divmod(self.num_samples, self._samples_per_epoch)
        return epoch * self._full_steps_per_epoch + rest // self._batch_size

    def has_passed(self, times: int, num_steps: int) -> bool:
        """Whether the last step reached or passed a moment that comes `times` in `num_steps`.

        They are full steps, and spread evenly; the last of every `num_steps` is such a moment.
        """
        steps = self._full_step_before, self.full_step
        before, now = (step * times // num_steps for step in steps)
        return now > before

    def add_evaluation(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Write a history line about an evaluation made after the last step."""
        self._measured[f"{split}_auc"] = metrics["auc"]
        entry = {**self.position(), split: metrics}
        self._folder.append_history(entry)
        self._callbacks.evaluation(entry)

    def report(self) -> None:
        """Write a history line about the steps since the last report, if there are any.

        Raises:
            TrainingDiverged: their mean loss is not finite.
        """
        if not self._steps:
            return
        num_samples, seconds = self._reported
        self._reported = (self.num_samples, self._clock.train_seconds)
        num_samples, seconds = self.num_samples - num_samples, self._clock.train_seconds - seconds
        losses, all_logits, all_labels = zip(*self._steps, strict=True)
        self._steps = []
        logits = torch.cat(all_logits).float().cpu().numpy()
        labels = torch.cat(all_labels).cpu().numpy()
        loss = float(torch.stack(losses).sum()) / len(labels)
        entry = {
            **self.position(),
            "epoch": (self.num_samples - 1) // self._samples_per_epoch,
            "samples_per_second": num_samples / seconds,
            "train_loss": loss,
            "train_auc": auc(logits, labels) if isfinite(loss) else None,
        }
        self._folder.append_history(entry)
        self._callbacks.report(entry)
        self._measured |= {"loss": loss, "auc": entry["train_auc"]}
        shown = {name: f"{value:.4f}" for name, value in self._measured.items() if value}
        shown["samples/s"] = f"{self.throughput()['samples_per_second']:,.0f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(num_samples)
        if not isfinite(loss):
            raise TrainingDiverged(f"the mean loss since the last report is {loss}; {LOWER_LR}")

    def end(self, num_seen: int) -> None:
        """With skipping: report the last steps, and count samples skipped after the last step.

        Raises:
            TrainingDiverged: as `report`.
        """
        self.report()
        self._bar.update(num_seen - self.num_samples)
        self.num_samples = num_seen

    def state_dict(self) -> dict[str, int]:
        """The counters after a report."""
        return {
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "num_trained_samples": self.num_trained_samples,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the steps of `state`; the clock has its state already."""
        self.num_steps, self.num_samples = state["num_steps"], state["num_samples"]
        self.num_trained_samples = state["num_trained_samples"]
        self._reported = (self.num_samples, self._clock.train_seconds)

    def position(self) -> dict[str, Any]:
        """Steps, samples and seconds of training so far."""
        trained = {"num_trained_samples": self.num_trained_samples} if self._skips else {}
        return {
            "step": self.num_steps,
            "num_samples": self.num_samples,
            **trained,
            "train_seconds": self._clock.train_seconds,
        }

    def throughput(self) -> dict[str, float | None]:
        """Samples seen per second of training; evaluations are not timed."""
        position = self.position()
        seconds = position["train_seconds"]
        return {
            "samples_per_second": self.num_samples / seconds if seconds else None,
            "num_steps": position.pop("step"),
            **position,
        }
