"""The training loop of a run: steps, and what is due after each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from recsys.errors import TrainingDiverged
from recsys.pipeline.fae.hot_cold_loader import HotColdLoader
from recsys.train.judge.evaluation import evaluate_split
from recsys.train.loop.progress import LOWER_LR
from recsys.train.parts.build import autocast

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from recsys._support.machine import Threads
    from recsys.config import LearningRateConfig, TrainConfig
    from recsys.datasets.loader import BatchLoader
    from recsys.pipeline import TrainPipeline
    from recsys.train.callbacks.run_callbacks import RunCallbacks
    from recsys.train.loop.full_steps import FullSteps
    from recsys.train.loop.progress import Progress
    from recsys.train.loop.run_checkpoints import RunCheckpoints
    from recsys.train.metrics.metrics import Metrics
    from recsys.train.ranks.processes import BuiltModel, Processes
    from recsys.train.run_files.run_folder import RunFolder

__all__ = ["Run", "build_schedulers", "continue_at", "fit", "num_seen_by"]

_REPORTS_PER_RUN = 100


@dataclass(kw_only=True)
class Run:
    """The parts of a run that trains.

    Attributes:
        threads: The threads that compute. A resumed run keeps a number that was chosen for it:
            floats of the dense part may be summed in another order by another number.
        resumed: For each time that the run was continued from a checkpoint: the `step` it continued
            after, and the number of the `checkpoint`.
    """

    config: TrainConfig
    processes: Processes
    folder: RunFolder
    loader: BatchLoader | HotColdLoader
    built: BuiltModel
    pipeline: TrainPipeline
    schedulers: Sequence[LambdaLR]
    full_steps: FullSteps
    num_samples: int
    progress: Progress
    callbacks: RunCallbacks
    threads: Threads
    checkpoints: RunCheckpoints | None = None
    resumed: list[dict[str, int]] = field(default_factory=list)

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
            self.checkpoints.save(self.state_dict())
            self.pipeline.clock.mark("checkpoint")

    def state_dict(self) -> dict[str, Any]:
        """The state between two steps, apart from the model and its optimizers."""
        return {
            "data": self.loader.source.fingerprint,
            "resumed": list(self.resumed),
            "history_bytes": self.folder.history_bytes(),
            "loader": self.loader.state_dict(),
            "pipeline": self.pipeline.state_dict(),
            "progress": self.progress.state_dict(),
            "clock": self.pipeline.clock.state_dict(),
            "callbacks": self.callbacks.state_dict(),
            "num_threads": self.threads.num_threads,
        }

    def load_state_dict(self, state: Any, number: int) -> int:
        """Continue where `state` was saved; the model and its optimizers are restored already.

        Args:
            state: The state.
            number: The number of its checkpoint.

        Returns:
            The length in bytes that the history had.

        Raises:
            KeyError, TypeError: it is no state of a run.
        """
        self.loader.load_state_dict(state["loader"])
        self.pipeline.load_state_dict(state["pipeline"])
        self.progress.load_state_dict(state["progress"])
        self.pipeline.clock.load_state_dict(state["clock"])
        self.callbacks.load_state_dict(state["callbacks"])
        if self.threads.chosen_by == "free cores":
            num_threads = min(state["num_threads"], self.threads.num_cores)
            torch.set_num_threads(num_threads)
            self.threads = self.threads._replace(
                num_threads=num_threads, chosen_by="the run so far"
            )
        continued = {"step": self.progress.num_steps, "checkpoint": number}
        self.resumed = [*state["resumed"], continued]
        return int(state["history_bytes"])


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
        for _, (loss, logits, labels) in _steps(run):
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


def _steps(run: Run) -> Iterator[tuple[Tensor, Any]]:
    """Steps over the rest of an epoch; their errors name the step."""
    try:
        yield from run.pipeline.steps(run.loader)
    except TrainingDiverged as error:
        advice = str(error).replace("lower the learning rate", LOWER_LR)  # by the keys
        raise TrainingDiverged(f"step {run.progress.num_steps + 1}: {advice}") from error


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


def build_schedulers(
    config: LearningRateConfig, optimizers: Sequence[Optimizer], num_steps: int
) -> list[LambdaLR]:
    """Schedulers that are stepped after every training step; none if rates are constant.

    Args:
        config: The schedule, the same for the dense part and the rows.
        optimizers: New optimizers, whose rates are the full ones.
        num_steps: Steps of the run.
    """
    if config.is_constant:
        return []
    return [
        LambdaLR(optimizer, lambda step: config.factor(step, num_steps)) for optimizer in optimizers
    ]


def continue_at(schedulers: Sequence[LambdaLR], step: int) -> None:
    """Set schedulers, and the rates of their optimizers, to the state after `step` steps.

    Rates are a function of the step, so nothing of them needs to be saved.
    """
    for scheduler in schedulers:
        scheduler.last_epoch = step
        groups = scheduler.optimizer.param_groups
        for group, rate, factor in zip(
            groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = rate * factor(step)
