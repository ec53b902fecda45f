"""Reports of a run while it trains: history lines, and the progress bar with warnings above it."""

from __future__ import annotations

import sys
import warnings
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

import torch
from tqdm.auto import tqdm  # in a notebook, its own bar

from recsys._support.machine import peak_memory_bytes
from recsys.errors import TrainingDiverged
from recsys.train.callbacks import RunCallbacks
from recsys.train.metrics import auc

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

    from recsys.pipeline.stalls import StageClock
    from recsys.train.metrics import Metrics
    from recsys.train.run_folder import RunFolder

__all__ = ["LOWER_LR", "Progress"]

LOWER_LR = "lower optimizer.lr or dense_optimizer.lr"


class Progress:
    """Collects steps; each report writes a history line and advances the bar. A context manager.

    `train_loss` and `train_auc` cover the samples since the last report. Each sample is predicted
    before the model trains on it. An evaluation writes a history line of its own, and does not
    start a new report interval.

    Args:
        folder: Folder of the history.
        clock: Clock of the run.
        num_samples: Samples that the run will see.
        split: Split of the evaluations during training.
        show: Draw the bar.
        skips: Whether the run skips samples: then positions also count the samples trained on.
        callbacks: Get every line of the history.

    Attributes:
        num_steps: Steps so far.
        num_samples: Samples so far; with skipping those seen, skipped ones included.
        num_trained_samples: Samples that it was trained on so far.
        peak_memory_bytes: Peak of the process when the `with` block ends; None before, and where
            the system does not report it.
        last_evaluation: Metrics of the last evaluation during training, if any.
    """

    def __init__(
        self,
        folder: RunFolder,
        clock: StageClock,
        num_samples: int,
        split: str,
        *,
        show: bool,
        skips: bool = False,
        callbacks: RunCallbacks | None = None,
    ) -> None:
        self.num_steps = 0
        self.num_samples = self.num_trained_samples = 0
        self._skips = skips
        self.peak_memory_bytes: int | None = None
        self.last_evaluation: dict[str, Any] | None = None
        self._split = split
        self._folder = folder
        self._clock = clock
        self._callbacks = callbacks or RunCallbacks()
        self._bar = tqdm(
            total=num_samples,
            desc="train",
            unit_scale=True,
            disable=not show,
            delay=1e-9,  # drawn by `__enter__`: an error may come first
            mininterval=0.1 if sys.stderr.isatty() else 10,  # fewer lines in a log file
            # The rate of tqdm would include evaluations; the postfix has one without them.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} samples [{elapsed}<{remaining}{postfix}]",
        )
        self._losses: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._reported = (0, 0.0)

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
        self.num_steps += 1
        self.num_trained_samples += len(labels)
        self.num_samples = self.num_trained_samples if num_seen is None else num_seen
        self._losses.append(loss * len(labels))
        self._logits.append(logits)
        self._labels.append(labels)

    def add_evaluation(self, evaluation: Metrics) -> None:
        """Write a history line about an evaluation made after the last step."""
        self.last_evaluation = evaluation.as_dict()
        entry = {**self.position(), self._split: self.last_evaluation}
        self._folder.append_history(entry)
        self._callbacks.evaluation(entry)

    @property
    def has_unreported_steps(self) -> bool:
        """Whether there was a step since the last report."""
        return bool(self._losses)

    def require_finite(self) -> None:
        """Check the losses since the last report.

        Raises:
            TrainingDiverged: one is not finite.
        """
        if self._losses and not torch.stack(_on_one_device(self._losses)).isfinite().all():
            raise self._diverged("not finite")

    def report(self, epoch: int) -> None:
        """Write a history line about the steps since the last report.

        Raises:
            TrainingDiverged: their mean loss is not finite.
        """
        num_samples, seconds = self._reported
        self._reported = (self.num_samples, self._clock.train_seconds)
        num_samples, seconds = self.num_samples - num_samples, self._clock.train_seconds - seconds
        logits = torch.cat(_on_one_device(self._logits)).float().cpu().numpy()
        labels = torch.cat(_on_one_device(self._labels)).cpu().numpy()
        loss = float(torch.stack(_on_one_device(self._losses)).sum()) / len(labels)
        self._losses, self._logits, self._labels = [], [], []
        entry = {
            **self.position(),
            "epoch": epoch,
            "samples_per_second": num_samples / seconds,
            "train_loss": loss,
            "train_auc": auc(logits, labels) if isfinite(loss) else None,
        }
        self._folder.append_history(entry)
        self._callbacks.report(entry)
        shown = {"loss": f"{loss:.4f}", "auc": _rounded(entry["train_auc"])}
        if self.last_evaluation is not None:
            shown[f"{self._split}_auc"] = _rounded(self.last_evaluation["auc"])
        if self._skips:
            shown["skipped"] = f"{1 - self.num_trained_samples / self.num_samples:.0%}"
        shown["samples/s"] = f"{self.throughput()['samples_per_second']:,.0f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(num_samples)
        if not isfinite(loss):
            raise self._diverged(loss)

    def end(self, epoch: int, num_seen: int) -> None:
        """With skipping: report the last steps, and count samples skipped after the last step.

        Raises:
            TrainingDiverged: as `report`.
        """
        self._bar.update(num_seen - self.num_samples)
        if self.has_unreported_steps:
            self.report(epoch)
        self.num_samples = num_seen

    def state_dict(self) -> dict[str, Any]:
        """The counters and the last evaluation in JSON types, and the steps since the last report.

        Shape:
            losses (n,), the loss of each of these steps times its number of samples; logits (m,)
            and labels (m,) of their samples; all on the CPU.
        """
        return {
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "num_trained_samples": self.num_trained_samples,
            "split": self._split,
            "last_evaluation": self.last_evaluation,
            "reported_samples": self._reported[0],
            "reported_seconds": self._reported[1],
            "losses": torch.stack(self._losses).cpu() if self._losses else torch.empty(0),
            "logits": torch.cat(self._logits).cpu() if self._logits else torch.empty(0),
            "labels": torch.cat(self._labels).cpu() if self._labels else torch.empty(0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the steps of `state`, before the first step of this run.

        An evaluation on another split is forgotten: its metrics are not those of this run's split.
        """
        self.num_steps, self.num_samples = state["num_steps"], state["num_samples"]
        self.num_trained_samples = state["num_trained_samples"]
        self.last_evaluation = state["last_evaluation"] if state["split"] == self._split else None
        self._reported = (state["reported_samples"], state["reported_seconds"])
        self._losses = list(state["losses"].unbind())
        logits, labels = state["logits"], state["labels"]
        self._logits, self._labels = ([logits], [labels]) if len(logits) else ([], [])
        # The rate is that of this process.
        self._bar.initial = self._bar.n = state["reported_samples"]

    def _diverged(self, loss: float | str) -> TrainingDiverged:
        return TrainingDiverged(f"by step {self.num_steps} the loss is {loss}; {LOWER_LR}")

    def position(self) -> dict[str, Any]:
        """Steps, samples and seconds of training so far."""
        return {
            "step": self.num_steps,
            "num_samples": self.num_samples,
            **self._trained(),
            "train_seconds": self._clock.train_seconds,
        }

    def throughput(self) -> dict[str, float | None]:
        """Samples seen per second of training; evaluations are not timed."""
        seconds = self._clock.train_seconds
        return {
            "samples_per_second": self.num_samples / seconds if seconds else None,
            "num_samples": self.num_samples,
            **self._trained(),
            "num_steps": self.num_steps,
            "train_seconds": seconds,
        }

    def _trained(self) -> dict[str, int]:
        return {"num_trained_samples": self.num_trained_samples} if self._skips else {}

    def __enter__(self) -> Self:
        self._bar.delay = 0
        self._bar.refresh()
        if not self._bar.disable:
            self._show_warning = warnings.showwarning
            warnings.showwarning = self._show_above_bar
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.peak_memory_bytes = peak_memory_bytes()
        if not self._bar.disable:
            warnings.showwarning = self._show_warning
        self._bar.close()

    def _show_above_bar(self, *args: Any, **more: Any) -> None:
        """`warnings.showwarning`, with the bar out of the way."""
        with tqdm.external_write_mode(file=sys.stderr):
            self._show_warning(*args, **more)


def _on_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors on the device of the last one; those of a loaded state are on the CPU."""
    return [each.to(tensors[-1].device) for each in tensors]


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
