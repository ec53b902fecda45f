"""The training loop of a run: steps, and what is due after each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsys.pipeline.fae.hot_cold_loader import HotColdLoader
from recsys.train.judge.evaluation import evaluate_split
from recsys.train.loop.steps import steps_of
from recsys.train.parts.build import autocast
from recsys.train.parts.learning_rates import continue_at

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from torch.optim.lr_scheduler import LambdaLR

    from recsys.config import TrainConfig
    from recsys.datasets.loader import BatchLoader
    from recsys.pipeline import TrainPipeline
    from recsys.train.callbacks.run_callbacks import RunCallbacks
    from recsys.train.loop.full_steps import FullSteps
    from recsys.train.loop.progress import Progress
    from recsys.train.loop.run_checkpoints import RunCheckpoints
    from recsys.train.loop.run_state import RunState
    from recsys.train.metrics.metrics import Metrics
    from recsys.train.ranks.processes import AbstractProcesses, BuiltModel
    from recsys.train.run_files.run_folder import RunFolder

__all__ = ["Run", "fit", "num_seen_by"]

_REPORTS_PER_RUN = 100


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run that trains."""

    config: TrainConfig
    processes: AbstractProcesses
    folder: RunFolder
    loader: BatchLoader | HotColdLoader
    built: BuiltModel
    pipeline: TrainPipeline
    schedulers: Sequence[LambdaLR]
    full_steps: FullSteps
    num_samples: int
    progress: Progress
    state: RunState
    callbacks: RunCallbacks
    checkpoints: RunCheckpoints | None = None

    @property
    def has_saved(self) -> bool:
        """Whether it has written a checkpoint."""
        return self.checkpoints is not None and self.checkpoints.has_saved

    def evaluate(self, split: str) -> Metrics:
        """An evaluation during training."""
        keys = self.config.eval
        with autocast(self.config):
            return evaluate_split(
                self.built.train_model,
                self.loader.source,
                split,
                keys.batch_size,
                keys.max_samples,
                processes=self.processes,
            )

    def save_checkpoint(self) -> None:
        """Save a checkpoint, if the run writes any and its losses are finite.

        Raises:
            TrainingDiverged: a loss since the last report is not finite.
        """
        if self.checkpoints is not None:
            self.pipeline.clock.mark("other")
            self.progress.require_finite()
            self.checkpoints.save(self.state.state_dict())
            self.pipeline.clock.mark("checkpoint")


def fit(run: Run, interrupted: threading.Event) -> None:
    """Train; returns after the last epoch, or once `interrupted` is set.

    It also returns after the step in which a callback asks for it.

    Raises:
        TrainingDiverged: the loss is no longer finite.
    """
    config, pipeline, loader, progress = run.config, run.pipeline, run.loader, run.progress
    if run.callbacks.stopped is not None:  # killed after its last step
        return
    run.built.train_model.train()
    pipeline.clock.start()
    if run.checkpoints is not None:
        run.checkpoints.start()
    for epoch in range(loader.epoch, config.epochs):
        for _, (loss, logits, labels) in steps_of(pipeline, loader, progress, config):
            num_seen = num_seen_by(pipeline)
            full_step = run.full_steps.advance(progress.num_steps + 1, num_seen)
            for scheduler in run.schedulers:
                if num_seen is None:
                    scheduler.step()
                else:
                    continue_at([scheduler], full_step)
            pipeline.clock.mark("update")

            progress.add(loss, logits, labels, num_seen)
            is_last = full_step >= run.full_steps.num_steps
            _evaluate_if_due(run, is_last=is_last)
            if run.full_steps.has_passed_one_of(_REPORTS_PER_RUN):
                progress.report(epoch)
            if _is_over(run, epoch, interrupted, is_last=is_last):
                pipeline.detach()
                return
    if pipeline.skipping is not None:
        progress.end(config.epochs - 1, pipeline.skipping.num_seen)
    if run.has_saved:
        run.save_checkpoint()


def _evaluate_if_due(run: Run, *, is_last: bool) -> None:
    """Evaluate after a step if an evaluation is due, or if the order of samples depends on it."""
    loader, clock = run.loader, run.pipeline.clock
    is_due = not is_last and run.full_steps.is_evaluation_due(run.config.eval.every_steps)
    wants_loss = isinstance(loader, HotColdLoader) and loader.wants_loss
    if not is_due and not wants_loss:
        return
    clock.mark("other")
    # Otherwise the reader would fill its queue during time that is not counted.
    loader.finish_reading()
    clock.mark("load")
    if isinstance(loader, HotColdLoader) and wants_loss:
        loader.observe(run.evaluate("validation").logloss)
    if is_due:
        run.progress.add_evaluation(run.evaluate(run.config.eval.split))
    clock.mark("evaluate")


def _is_over(run: Run, epoch: int, interrupted: threading.Event, *, is_last: bool) -> bool:
    """Whether training ends after a step; saves a checkpoint if it does, or if one is due."""
    progress, callbacks, is_due = run.progress, run.callbacks, False
    if run.checkpoints is not None:
        is_due = not is_last and run.checkpoints.is_due(progress.num_steps)
        callbacks.checkpoints(run.checkpoints.newly_complete())
    is_interrupted, is_due, is_stopped = run.processes.any_of(
        interrupted.is_set(), is_due, callbacks.wants_stop
    )
    if is_stopped:
        callbacks.stop(progress.num_steps)
        if progress.has_unreported_steps:
            progress.report(epoch)
    if is_interrupted or is_due or (is_stopped and run.has_saved):
        run.save_checkpoint()
    run.pipeline.clock.mark("other")
    is_over = is_interrupted or is_stopped
    if is_over and progress.has_unreported_steps:
        # After the checkpoint, so that the next report of a resumed run is a whole one.
        progress.report(epoch)
    return is_over


def num_seen_by(pipeline: TrainPipeline) -> int | None:
    """Samples that a run has seen, skipped ones included; None for a run without skipping."""
    return None if pipeline.skipping is None else pipeline.skipping.num_seen
