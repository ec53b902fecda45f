"""What a run says while it trains: where its time goes, how the loss moves, how fast it is."""

from __future__ import annotations

import sys
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

import torch
from tqdm import tqdm

from recsys.machine import peak_memory_bytes
from recsys.metrics import auc

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

    from recsys.metrics import Metrics
    from recsys.pipeline.stalls import StageClock
    from recsys.run_folder import RunFolder

__all__ = ["Progress"]


class Progress:
    """Gathers steps; at each report writes a history line and moves the bar. A context manager.

    `train_loss` and `train_auc` are those of the samples since the last report, each predicted
    before it was learnt from. An evaluation has a line of its own, so that it does not cut short
    what the next report is about.

    Args:
        folder: Where the history goes.
        clock: The run's time.
        num_samples: Samples the run will train on.
        split: The part that is evaluated in between.
        show: Draw the bar.
    """

    def __init__(
        self, folder: RunFolder, clock: StageClock, num_samples: int, split: str, *, show: bool
    ) -> None:
        self.num_steps = 0
        self.num_samples = 0
        self.peak_memory_bytes: int | None = None  # of the process, until the loop ended
        self.last_evaluation: dict[str, Any] | None = None
        self._split = split
        self._folder = folder
        self._clock = clock
        self._bar = tqdm(
            total=num_samples,
            desc="train",
            unit_scale=True,
            disable=not show,
            mininterval=0.1 if sys.stderr.isatty() else 10,  # a log is not a screen
            # Its own rate would count evaluation; ours is in the postfix.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} samples [{elapsed}<{remaining}{postfix}]",
        )
        self._losses: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._reported = (0, 0.0)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Take note of one step."""
        self.num_steps += 1
        self.num_samples += len(labels)
        self._losses.append(loss * len(labels))
        self._logits.append(logits)
        self._labels.append(labels)

    def add_evaluation(self, evaluation: Metrics) -> None:
        """Write a history line of an evaluation behind the last step."""
        self.last_evaluation = evaluation.as_dict()
        self._folder.append_history({**self.position(), self._split: self.last_evaluation})

    def report(self, epoch: int) -> float:
        """Write a history line over the steps since the last one; returns their mean loss."""
        num_samples, seconds = self._reported
        self._reported = (self.num_samples, self._clock.train_seconds)
        num_samples, seconds = self.num_samples - num_samples, self._clock.train_seconds - seconds
        loss = float(torch.stack(self._losses).sum()) / num_samples
        logits = torch.cat(self._logits).float().cpu().numpy()
        labels = torch.cat(self._labels).cpu().numpy()
        self._losses, self._logits, self._labels = [], [], []
        entry = {
            **self.position(),
            "epoch": epoch,
            "samples_per_second": num_samples / seconds,
            "train_loss": loss,
            "train_auc": auc(logits, labels) if isfinite(loss) else None,
        }
        self._folder.append_history(entry)
        shown = {"loss": f"{loss:.4f}", "auc": _rounded(entry["train_auc"])}
        if self.last_evaluation is not None:
            shown[f"{self._split}_auc"] = _rounded(self.last_evaluation["auc"])
        shown["samples/s"] = f"{self.throughput()['samples_per_second']:,.0f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(num_samples)
        return loss

    def position(self) -> dict[str, Any]:
        """How far the run is."""
        return {
            "step": self.num_steps,
            "num_samples": self.num_samples,
            "train_seconds": self._clock.train_seconds,
        }

    def throughput(self) -> dict[str, float | None]:
        """Samples trained on over the time it took, evaluation left out."""
        seconds = self._clock.train_seconds
        return {
            "samples_per_second": self.num_samples / seconds if seconds else None,
            "num_samples": self.num_samples,
            "num_steps": self.num_steps,
            "train_seconds": seconds,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.peak_memory_bytes = peak_memory_bytes()
        self._bar.close()


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
