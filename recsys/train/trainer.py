"""One training run, from a configuration to a folder of results.

Read it from top to bottom: `train` finds the run to continue, `_build` makes the parts of the run,
and `Trainer.train` trains, evaluates, saves and writes the record. A step ends in
`Trainer._after_step`.
"""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm  # in a notebook, its own bar

from recsys._support.files import alone_in, make_folders
from recsys._support.machine import (
    describe_environment,
    return_freed_memory,
    set_num_threads,
    tune_allocator,
)
from recsys.config import RANKING_METRICS, TrainConfig, describe_config, flat, replace
from recsys.errors import TrainingDiverged
from recsys.pipeline.fae import HotColdLoader
from recsys.pipeline.stalls import StageClock, describe_stalls
from recsys.train.build import (
    INIT_FROM_NEEDS,
    autocast,
    build_loader,
    build_model,
    build_pipeline,
    choose_plan,
    cold_folder,
    describe_schedule,
    describe_tiers,
    open_first_model,
    open_source,
)
from recsys.train.callbacks import RunCallbacks, callbacks_of, require_metric
from recsys.train.checkpoint.contents import Contents, errors_of_state
from recsys.train.checkpoint.restore import restore
from recsys.train.evaluate import evaluate_split, with_ranking
from recsys.train.loop.full_steps import FullSteps
from recsys.train.loop.interrupts import interrupts
from recsys.train.loop.progress import LOWER_LR, Progress
from recsys.train.loop.resume import Reopened, reopened
from recsys.train.loop.run_checkpoints import RunCheckpoints
from recsys.train.loop.settings_warnings import (
    warn_of_other_rates,
    warn_of_threads,
)
from recsys.train.ranks import (
    agree,
    any_of,
    gather_objects,
    joined,
    num_ranks,
    rank,
    share_of_cores,
)
from recsys.train.run_folder import RunFolder, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys._support.machine import Threads
    from recsys.batch import SampleSource
    from recsys.config import LearningRateConfig
    from recsys.datasets.loader import BatchLoader
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.pipeline import TrainPipeline
    from recsys.train.callbacks import Callback
    from recsys.train.loop.interrupts import Interrupted
    from recsys.train.metrics import Metrics
    from recsys.train.rank_model import DividedRows

__all__ = ["train"]

_REPORTS_PER_RUN = 100


def train(
    config: TrainConfig,
    run_dir: str | Path,
    *,
    resume: bool = False,
    checkpoint: int | None = None,
    show_progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a model, save it, evaluate it, and write the results to a run folder.

    The first Ctrl-C, or SIGTERM, ends training after the current step; a checkpoint, the model and
    the measurements are written. During the evaluation after the last step it ends the run after
    the metrics of the split that is evaluated. The second Ctrl-C interrupts at once and writes only
    the measurements.

    Args:
        config: The configuration.
        run_dir: A new or empty folder; `RunFolder` lists the files.
        resume: Continue the run in `run_dir` from its newest complete checkpoint, after the last
            sample that it was trained on. Without one, training starts from the first sample. Some
            keys of `config` may differ from the run's, such as `budget`, `schedule` and `epochs`.
        checkpoint: With `resume`, continue from the checkpoint with this number.
        show_progress: Tell how many threads compute, and draw a progress bar.
        callbacks: Are called while the run trains, and may end it, besides those that `config`
            names. Of several processes, only those of the first one are called.

    Returns:
        The run record, as in `run.json`; `status` is "finished" or "interrupted". Of several
        processes, only the first knows more than the step about why training was `stopped_early`.

    Raises:
        AlreadyExists: `run_dir` is not empty; or, with `resume`, it holds a finished run without a
            checkpoint.
        BudgetTooSmall: the budget is below the least one, which the message names.
        CallbackFailed: a callback raised an error.
        CheckpointError: the checkpoint is damaged. The message names one that is whole.
        ConfigError, StoreError: the configuration does not fit the data or the run to resume, or
            there is no data, or `run_dir` cannot be written to.
        MissingDependency: a package that a callback logs to is not installed.
        TypeError: `config` is no `TrainConfig`.
        TrainingDiverged: the loss is no longer finite. The record is written with the `status`
            "diverged" and without metrics. After any other error it is written with "failed".
    """
    if not isinstance(config, TrainConfig):
        raise TypeError(
            f"config must be a TrainConfig, got {type(config).__name__}; recsys.config has "
            "load_config, which makes one of a TOML file and settings"
        )
    with ExitStack() as stack:
        stack.callback(_free_memory)  # last: the model is gone then
        # Code of the user's, such as a callback, may change the current folder.
        run_dir = Path(run_dir).absolute()
        stack.enter_context(joined())
        given = {"--resume": resume, "--checkpoint": checkpoint}
        agree(flat(describe_config(config)) | given)
        own_dir = run_dir
        if rank():  # the files of a further process are deleted in the end
            own_dir = Path(stack.enter_context(TemporaryDirectory(prefix="recsys-"))) / "run"
        earlier = None
        if resume:
            earlier = _reopened(config, run_dir, own_dir, checkpoint, stack)
        if earlier is not None and earlier.record is not None:
            return earlier.record
        show = show_progress and not rank()
        # In no variable here: the model is gone when contexts end, before its files are deleted.
        return _build(config, run_dir, own_dir, earlier, stack, callbacks, show).train(stack)


def _free_memory() -> None:
    """Delete the tables of a run, with their files, and return their memory to the system."""
    gc.collect()  # a table group and its fetcher have each other
    return_freed_memory()


def _reopened(
    config: TrainConfig, run_dir: Path, own_dir: Path, number: int | None, stack: ExitStack
) -> Reopened | None:
    """Open the run to continue, on the first process; the others learn what it has found."""
    earlier = None if rank() else stack.enter_context(reopened(config, run_dir, number))
    found = gather_objects(None if earlier is None else earlier[1:])[0]
    if rank() and found is not None:
        return Reopened(RunFolder.create(own_dir, found[0]), *found)
    return earlier


def _build(
    config: TrainConfig,
    run_dir: Path,
    own_dir: Path,
    earlier: Reopened | None,
    stack: ExitStack,
    given: Sequence[Callback],
    show_progress: bool,
) -> Trainer:
    """Build the parts of a run, make its folder, and restore the run to continue.

    Args:
        config: The configuration.
        run_dir: The folder of the run.
        own_dir: Where this process writes its reports: the same for the first one.
        earlier: The run to continue; None for a new one.
        stack: Is closed after the run.
        given: The callbacks, besides those that `config` names.
        show_progress: Draw a progress bar.
    """
    callbacks, source, first_model = _checked(config, own_dir, earlier, given)
    cold_path = cold_folder(config, run_dir)
    agree({"the data's fingerprint": source.fingerprint})
    threads = set_num_threads(config.num_threads or share_of_cores())
    tune_allocator()
    plan = choose_plan(config, source)
    loader = build_loader(config, source, plan, rank(), num_ranks())
    of_tables = replace(config, cold_path=cold_path)
    model, saved, optimizers, divided = _build_model(of_tables, source, plan)
    if first_model is not None:
        first_model.load_model(saved, INIT_FROM_NEEDS)
    full_steps = FullSteps(loader, config.epochs)
    folder = _new_folder(config, own_dir, stack) if earlier is None else earlier.folder
    clock = StageClock()
    if not rank():
        warn_of_threads(config.num_threads)
    pipeline = build_pipeline(
        model, optimizers, config, clock, full_steps.num_steps, is_divided=divided is not None
    )
    num_samples = config.epochs * len(source.splits["train"])
    progress = Progress(
        folder,
        clock,
        num_samples,
        config.eval.split,
        show=show_progress,
        skips=pipeline.skipping is not None,
        callbacks=callbacks,
    )
    run = Trainer(
        config=config,
        folder=folder,
        checkpoints_folder=RunFolder(run_dir).checkpoints_folder,
        loader=loader,
        model=model,
        saved=saved,
        optimizers=optimizers,
        divided=divided,
        pipeline=pipeline,
        schedulers=_build_schedulers(config.lr_schedule, optimizers, full_steps.num_steps),
        full_steps=full_steps,
        num_samples=num_samples,
        progress=progress,
        callbacks=callbacks,
        threads=threads,
        shows_progress=show_progress,
    )
    if earlier is not None:
        run.resume(earlier)
    if show_progress:
        tqdm.write(run.threads.describe(), file=sys.stderr)
        for last in run.resumed[-1:]:
            number, step = last["checkpoint"], last["step"]
            tqdm.write(f"continues at step {step:,}, from checkpoint {number}", file=sys.stderr)
    if config.checkpoint.is_on:
        after = None if earlier is None else earlier.saved
        run.checkpoints = RunCheckpoints(
            config.checkpoint,
            run.checkpoints_folder,
            saved,
            optimizers,
            after,
            None if divided is None else divided.share_to_save(RunFolder(run_dir), after),
        )
    return run


def _build_model(
    config: TrainConfig, source: SampleSource, plan: HotPlan | None
) -> tuple[nn.Module, nn.Module, list[Optimizer], DividedRows | None]:
    """The model, as `Trainer` describes it: all of it, or the share of one of several processes."""
    if num_ranks() > 1:
        from recsys.train.rank_model import build_rank_model  # imports TorchRec

        return build_rank_model(config, source, plan)
    model, optimizers = build_model(config, source, plan)
    return model, model.model, optimizers, None


def _build_schedulers(
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


def _checked(
    config: TrainConfig,
    own_dir: Path,
    earlier: Reopened | None,
    given: Sequence[Callback],
) -> tuple[RunCallbacks, SampleSource, RunFolder | None]:
    """The callbacks, the data, and the run of `init_from`, which all fit the run and its place."""
    callbacks = RunCallbacks(epochs=config.epochs) if rank() else callbacks_of(config, given)
    source = open_source(config)
    is_new = earlier is None or earlier.saved is None
    if num_ranks() > 1:
        from recsys.train.rank_model import require_supported  # imports TorchRec

        # A checkpoint has the rows, so a run that continues does not read `init_from`.
        require_supported(
            config if is_new else replace(config, init_from=""),
            source,
            num_ranks(),
            keeps_best=callbacks.keeps_best is not None,
        )
    first_model = open_first_model(config, source) if is_new else None
    if config.early_stopping.patience:
        require_metric(config, source)
    if earlier is None:
        RunFolder.require_place(own_dir)
    return callbacks, source, first_model


def _new_folder(config: TrainConfig, path: Path, stack: ExitStack) -> RunFolder:
    """Make the folder of a new run, and lock it until the stack is closed."""
    make_folders(path)
    stack.enter_context(alone_in(path, "recsys train"))
    return RunFolder.create(path, config)  # is refused if another run began first


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run that trains.

    Attributes:
        folder: Where this process writes its reports.
        checkpoints_folder: That of the run, which is in the folder of the first process.
        model: Maps a mini-batch to (loss, (loss, logits, labels)).
        saved: The model with the rows of this process, by the keys of a plain model: what
            checkpoints save.
        optimizers: Of the dense part, then of the rows.
        divided: Which process has which rows; None if this one has all.
        threads: The threads that compute. A resumed run keeps a number that was chosen for it:
            floats of the dense part may be summed in another order by another number.
        resumed: For each time that the run was continued from a checkpoint: the `step` it continued
            after, and the number of the `checkpoint`.
        model_step: The step whose weights were saved and evaluated; None before the end.
    """

    config: TrainConfig
    folder: RunFolder
    checkpoints_folder: Path
    loader: BatchLoader | HotColdLoader
    model: nn.Module
    saved: nn.Module
    optimizers: Sequence[Optimizer]
    divided: DividedRows | None
    pipeline: TrainPipeline
    schedulers: Sequence[LambdaLR]
    full_steps: FullSteps
    num_samples: int
    progress: Progress
    callbacks: RunCallbacks
    threads: Threads
    shows_progress: bool
    checkpoints: RunCheckpoints | None = None
    model_step: int | None = None
    resumed: list[dict[str, int]] = field(default_factory=list)

    @property
    def has_saved(self) -> bool:
        """Whether it has written a checkpoint."""
        return self.checkpoints is not None and self.checkpoints.has_saved

    def train(self, stack: ExitStack) -> dict[str, Any]:
        """Train, save and evaluate the model, and write the record; `stack` ends after it."""
        callbacks, progress, split = self.callbacks, self.progress, self.config.eval.split
        metrics: dict[str, Any] = {"test": None, "validation": None}
        source = self.loader.source
        record: dict[str, Any] = {
            "status": "failed",
            "started": datetime.now().astimezone().isoformat(" ", "seconds"),
            "config": describe_config(self.config),
            "environment": describe_environment(),
            "data": {**source.describe(), "fingerprint": source.fingerprint},
            "metrics": metrics,
            "throughput": progress.throughput(),
            "threads": self.threads._asdict(),
            "resumed": self.resumed,
        }
        stack.push(lambda _, error, __: callbacks.end(record, error))
        try:
            with interrupts(has_checkpoints=self.checkpoints is not None) as interrupted:
                callbacks.start(self.folder.path, record)
                stopping = callbacks.keeps_best
                if stopping is not None and not self.folder.best_file(stopping.best_step).is_file():
                    stopping.forget_best()  # of a checkpoint, and a better one followed it
                with progress:
                    self.fit(interrupted)
                metrics[split] = progress.last_evaluation
                is_finished = self._finish(metrics, interrupted)
                record["status"] = "finished" if is_finished else "interrupted"
        except KeyboardInterrupt:
            metrics[split] = metrics[split] or progress.last_evaluation
            record["status"] = "interrupted"
            if self.checkpoints is not None:
                self.checkpoints.give_up()
            raise
        except TrainingDiverged:
            metrics |= dict.fromkeys(metrics)  # drop the metrics from before it diverged
            record["status"] = "diverged"
            raise
        finally:
            try:
                if self.checkpoints is not None and record["status"] in ("failed", "diverged"):
                    self.checkpoints.close()
            finally:
                record |= self._measured()
                write_json(self.folder.record_file, record)
        return record

    def fit(self, interrupted: Interrupted) -> None:
        """Train; returns after the last epoch, or once `interrupted` is set.

        It also returns after the step in which a callback asks for it.

        Raises:
            TrainingDiverged: the loss is no longer finite.
        """
        pipeline, progress = self.pipeline, self.progress
        if self.callbacks.stopped is not None:  # killed after its last step
            return
        self.model.train()
        pipeline.clock.start()
        if self.checkpoints is not None:
            self.checkpoints.start()
        for epoch in range(self.loader.epoch, self.config.epochs):
            for _, (loss, logits, labels) in self._steps():
                if self._after_step(epoch, loss, logits, labels, interrupted):
                    pipeline.detach()
                    return
        if pipeline.skipping is not None:
            progress.end(self.config.epochs - 1, pipeline.skipping.num_seen)
        if self.has_saved:
            self.save_checkpoint()

    def _steps(self) -> Iterator[tuple[Tensor, Any]]:
        """Steps over the rest of an epoch; their errors name the step."""
        try:
            yield from self.pipeline.steps(self.loader)
        except TrainingDiverged as error:
            advice = str(error).replace("lower the learning rate", LOWER_LR)  # by the keys
            raise type(error)(f"step {self.progress.num_steps + 1}: {advice}") from error

    def _after_step(
        self, epoch: int, loss: Tensor, logits: Tensor, labels: Tensor, interrupted: Interrupted
    ) -> bool:
        """What is due after a step: rates, evaluation, report, checkpoint; whether training ends.

        Args:
            epoch: The epoch, from 0.
            loss: Of the mini-batch, like the arguments after it.
            logits: Of its samples.
            labels: Of its samples.
            interrupted: Set once the run shall end.
        """
        progress, clock, num_seen = self.progress, self.pipeline.clock, self._num_seen
        full_step = self.full_steps.advance(progress.num_steps + 1, num_seen)
        is_last = full_step >= self.full_steps.num_steps
        self._set_rates(full_step)
        clock.mark("update")
        progress.add(loss, logits, labels, num_seen)
        self._evaluate_if_due(is_last=is_last)
        if self.full_steps.has_passed_one_of(_REPORTS_PER_RUN):
            progress.report(epoch)
        is_due = False
        if self.checkpoints is not None:
            is_due = not is_last and self.checkpoints.is_due(progress.num_steps)
            self.callbacks.checkpoints(self.checkpoints.newly_complete())
        is_interrupted, is_due, is_stopped = any_of(
            interrupted.is_set(), is_due, self.callbacks.wants_stop and not is_last
        )
        if is_stopped:
            self.callbacks.stop(progress.num_steps)
            if progress.has_unreported_steps:
                progress.report(epoch)
        if is_interrupted or is_due or (is_stopped and self.has_saved):
            self.save_checkpoint()
        clock.mark("other")
        is_over = is_interrupted or is_stopped
        if is_over and progress.has_unreported_steps:
            # After the checkpoint, so that the next report of a resumed run is a whole one.
            progress.report(epoch)
        return is_over

    @property
    def _num_seen(self) -> int | None:
        """Samples that the run has seen, skipped ones included; None without skipping."""
        return None if self.pipeline.skipping is None else self.pipeline.skipping.num_seen

    def _set_rates(self, step: int) -> None:
        """Set schedulers, and the rates of their optimizers, to the state after a full step.

        Rates are a function of the step, so nothing of them needs to be saved.
        """
        for scheduler in self.schedulers:
            scheduler.last_epoch = step
            groups = scheduler.optimizer.param_groups
            for group, rate, factor in zip(
                groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = rate * factor(step)

    def _evaluate_if_due(self, *, is_last: bool) -> None:
        """Evaluate if an evaluation is due, or if the order of samples depends on it."""
        loader, clock = self.loader, self.pipeline.clock
        if is_last:  # evaluated as a whole afterwards
            is_due = self.callbacks.keeps_best is not None
        else:
            is_due = self.full_steps.is_evaluation_due(self.config.eval.every_steps)
        wants_loss = isinstance(loader, HotColdLoader) and loader.wants_loss
        if not is_due and not wants_loss:
            return
        clock.mark("other")
        if isinstance(loader, HotColdLoader) and wants_loss:
            loader.observe(self.evaluate("validation").logloss)
        if is_due:
            self.progress.add_evaluation(self.evaluate(self.config.eval.split))
            stopping = self.callbacks.keeps_best
            if stopping is not None and stopping.best_step == self.progress.num_steps:
                self.folder.keep_best(self.saved, stopping.best_step)
        clock.mark("evaluate")

    def evaluate(self, split: str) -> Metrics:
        """An evaluation during training."""
        keys = self.config.eval
        source = self.loader.source
        with autocast(self.config):
            found = evaluate_split(
                self.model,
                source,
                split,
                keys.batch_size,
                keys.max_samples,
                is_divided=self.divided is not None,
            )
            if self.config.early_stopping.metric in RANKING_METRICS:
                found = with_ranking(found, self.model, source, split, keys)
        return found

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

    def _finish(self, metrics: dict[str, Any], interrupted: Interrupted) -> bool:
        """Save the model, and evaluate it if it was trained to the end; whether it is finished.

        Arguments are as for `_evaluate_at_end`.
        """
        checkpoints, callbacks, clock = self.checkpoints, self.callbacks, self.pipeline.clock
        is_whole = self.progress.num_samples == self.num_samples or callbacks.stopped is not None
        if checkpoints is not None and not is_whole:
            checkpoints.wait()
        stopping, step = callbacks.keeps_best, self.progress.num_steps
        if is_whole and stopping is not None and stopping.best_step not in (0, step):
            step = stopping.best_step
            self.folder.load_model(self.saved, file=self.folder.best_file(step))
        self.model_step = step
        if not self.config.save_model:
            self.folder.model_file.unlink(missing_ok=True)  # of the run before it was continued
        elif self.divided is None:
            self.folder.save_model(self.saved)
        else:
            self.divided.save(self.folder, self.saved)
        is_finished = False
        if is_whole:
            clock.start()
            is_finished = self._evaluate_at_end(metrics, interrupted)
            clock.mark("evaluate")
        if is_finished:
            if self.config.save_model:  # else it is the one copy of these weights
                self.folder.drop_best()
            self.folder.append_history({**self.progress.position(), **metrics})
        if checkpoints is not None:
            checkpoints.end()
            callbacks.checkpoints(checkpoints.newly_complete())
        return is_finished

    def _evaluate_at_end(self, metrics: dict[str, Any], interrupted: Interrupted) -> bool:
        """Evaluate the whole test and validation splits.

        Args:
            metrics: Gets the metrics of each split as soon as they are known, as the record holds
                them.
            interrupted: Once it is set, no further split is evaluated. A signal from before does
                not count: the training that it ended is over.

        Returns:
            Whether both splits were evaluated.
        """
        model, source = self.model, self.loader.source
        keys = self.config.eval
        interrupted.clear()
        interrupted.ends_after = "the metrics of this split"
        with autocast(self.config):
            for split in ("test", "validation"):
                if any(any_of(interrupted.is_set())):
                    return False
                found = evaluate_split(
                    model,
                    source,
                    split,
                    keys.batch_size,
                    is_divided=self.divided is not None,
                    show=self.shows_progress,
                )
                metrics[split] = found.as_dict()
                # A ranking may take minutes, and a second Ctrl-C may end it.
                metrics[split] = with_ranking(found, model, source, split, keys).as_dict()
        return True

    def resume(self, earlier: Reopened) -> None:
        """Restore the run from its checkpoint; without one it starts from the first sample."""
        history_bytes = 0
        if earlier.saved is not None:
            share = None if self.divided is None else self.divided.share()
            contents = Contents(self.saved, self.optimizers, share)
            of_run = restore(self.checkpoints_folder, contents, earlier.saved)["state"]
            if rank():
                of_run["history_bytes"] = 0  # the reports of this process begin anew
            with errors_of_state(f"checkpoint {earlier.saved}"):
                history_bytes = self.load_state_dict(of_run, earlier.saved)
            self._set_rates(self.full_steps.advance(self.progress.num_steps, self._num_seen))
            if not rank():
                warn_of_other_rates(earlier.config, self.config, self.full_steps)
        self.folder.continue_run(self.config, history_bytes)

    def _measured(self) -> dict[str, Any]:
        """What the record of a run that has ended says of its time and its memory."""
        pipeline, progress, checkpoints = self.pipeline, self.progress, self.checkpoints
        processes = None
        if self.divided is not None:
            processes = {"num_ranks": num_ranks(), "placement": self.divided.placement}
        return {
            "throughput": progress.throughput(),
            "stalls": describe_stalls(pipeline.clock),
            "schedule": describe_schedule(pipeline, self.loader),
            "processes": processes,
            "tiers": describe_tiers(self.saved),
            "skipped": None if pipeline.skipping is None else pipeline.skipping.report(),
            "checkpoints": None if checkpoints is None else checkpoints.describe(),
            "stopped_early": self.callbacks.stopped,
            "model_step": self.model_step,
            "peak_memory_bytes": progress.peak_memory_bytes,
        }
