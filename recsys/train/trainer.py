"""One training run, from a configuration to a folder of results. Read it from top to bottom.

the parts are built          `Trainer.__init__`
a step ends                  `Trainer._after_step`
the model is evaluated       `Trainer._evaluate_if_due`, and after the last step `_finish`;
                             AUC is computed in `recsys/_support/auc.py`, for
                             `recsys/train/metrics.py` and `Progress.report`
a checkpoint is cut          `Trainer.save_checkpoint`, when `_is_checkpoint_due`
what may differ on resume    `recsys/train/resume.py`
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm  # in a notebook, its own bar

from recsys._support.files import alone_in, as_argument, make_folders
from recsys._support.machine import (
    describe_environment,
    peak_memory_bytes,
    return_freed_memory,
    set_num_threads,
    tune_allocator,
)
from recsys.config import RETRIEVAL_MODELS, TrainConfig, describe_config, flat, replace
from recsys.errors import ConfigError, TrainingDiverged
from recsys.pipeline.fae import HotColdLoader
from recsys.pipeline.stalls import StageClock, describe_stalls
from recsys.train.build import (
    build_loader,
    build_model,
    build_pipeline,
    choose_plan,
    cold_folder,
    describe_schedule,
    describe_tiers,
    open_source,
)
from recsys.train.callbacks import Callback, RunCallbacks, callbacks_of, require_metric
from recsys.train.checkpoint import Checkpoints
from recsys.train.checkpoint.restore import EVERYTHING, Contents, errors_of_state, restore
from recsys.train.evaluate import INIT_FROM_NEEDS, evaluate, open_first_model
from recsys.train.progress import LOWER_LR, Progress
from recsys.train.ranks import (
    agree,
    any_of,
    gather_objects,
    joined,
    num_ranks,
    rank,
    share_of_cores,
)
from recsys.train.resume import Reopened, reopened
from recsys.train.run_folder import RunFolder, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


__all__ = ["train"]

_REPORTS_PER_RUN = 100
_EVALUATIONS_PER_EPOCH = 10


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
        CheckpointError: the checkpoint is damaged. The message names another one.
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
        # Last, when the model is gone: its tables and their files are deleted.
        stack.callback(return_freed_memory)
        stack.callback(gc.collect)  # a table group and its fetcher have each other
        # Code of the user's, such as a callback, may change the current folder.
        run_dir = Path(run_dir).absolute()
        stack.enter_context(joined())
        agree(flat(describe_config(config)) | {"--resume": resume, "--checkpoint": checkpoint})
        own_dir = run_dir
        if rank():  # the files of a further process are deleted in the end
            own_dir = Path(stack.enter_context(TemporaryDirectory(prefix="recsys-")))
        opens = resume and not rank()
        found = reopened(config, run_dir, checkpoint, stack) if opens else None
        earlier: Reopened | None = gather_objects(found)[0]  # what the first process has found
        if earlier is not None and earlier.record is not None:
            return earlier.record
        # In no variable here: the model is gone when contexts end, before its files are deleted.
        return Trainer(
            config,
            run_dir,
            own_dir,
            earlier,
            callbacks,
            stack,
            show=show_progress and not rank(),
        ).train(stack)


class Trainer:
    """The parts of a run that trains.

    Args:
        config: The configuration.
        run_dir: The folder of the run.
        own_dir: Where this process writes its reports: the same for the first one.
        earlier: The run to continue; None for a new one.
        callbacks: Besides those that `config` names.
        stack: Is closed after the run.
        show: Draw progress bars.

    Attributes:
        run_dir: As given.
        folder: Where this process writes its reports.
        model: Maps a mini-batch to (loss, (loss, logits, labels)).
        saved: The model with the rows of this process, by the keys of a plain model: what
            checkpoints save.
        optimizers: Of the dense part, then of the rows.
        share: What this process saves and restores.
        checkpoints: Writes the checkpoints of the run; None if it writes none.
        threads: The threads that compute. A resumed run keeps a number that was chosen for it:
            floats of the dense part may be summed in another order by another number.
        metrics: Those of the last evaluation of each split.
        resumed: For each time that the run was continued from a checkpoint: the `step` it continued
            after, and the number of the `checkpoint`.
        model_step: The step whose weights were saved and evaluated; None before the end.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        own_dir: Path,
        earlier: Reopened | None,
        callbacks: Sequence[Callback],
        stack: ExitStack,
        *,
        show: bool,
    ) -> None:
        # What can be refused at once.
        self.config, self.run_dir, self._shows_progress = config, run_dir, show
        self.callbacks = (
            RunCallbacks(epochs=config.epochs) if rank() else callbacks_of(config, callbacks)
        )
        [self._is_ranked_in_training] = any_of(
            config.model.name in RETRIEVAL_MODELS
            or any(callback.is_of_ranking for callback in self.callbacks.stopping)
        )
        self.source = source = open_source(config)
        after = None if earlier is None else earlier.saved
        # A checkpoint has the rows, so a run that continues does not read `init_from`.
        new = config if after is None else replace(config, init_from="")
        if num_ranks() > 1:
            from recsys.train.rank_model import require_supported  # imports TorchRec

            require_supported(new, source, keeps_best=self.callbacks.keeps_best is not None)
        first_model = open_first_model(new, source)
        require_metric(config, source)
        if earlier is None:
            RunFolder.require_place(own_dir)
        of_tables = replace(config, cold_path=cold_folder(config, run_dir))
        agree({"the data's fingerprint": source.fingerprint})

        # The model, and what trains it.
        self.threads = set_num_threads(config.num_threads or share_of_cores())
        tune_allocator()
        plan = choose_plan(config, source)
        self.loader = build_loader(config, source, plan)
        if num_ranks() > 1:
            from recsys.train.rank_model import build_rank_model  # imports TorchRec

            self.model, self.saved, self.optimizers, self.share = build_rank_model(
                of_tables, source, plan
            )
        else:
            self.model, self.optimizers = build_model(of_tables, source, plan)
            self.saved, self.share = self.model.model, EVERYTHING
        if first_model is not None:
            first_model.load_model(self.saved, INIT_FROM_NEEDS)
        self._rates = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers
        ]

        # Its folder, and what is written there.
        self.folder = RunFolder(own_dir)
        if earlier is None:
            make_folders(own_dir)
            stack.enter_context(alone_in(own_dir, "recsys train"))
            RunFolder.require_place(own_dir)
            self.folder.write_config(config)
        clock = StageClock()
        self.pipeline = build_pipeline(
            self.model,
            self.optimizers,
            config,
            clock,
            config.epochs * len(self.loader),
        )
        self.progress = Progress(
            self.folder,
            clock,
            self.loader,
            config.epochs,
            self.callbacks,
            skips=self.pipeline.skipping is not None,
        )
        self._parts: dict[str, Any] = {  # progress after the clock, which it reads
            "loader": self.loader,
            "pipeline": self.pipeline,
            "clock": clock,
            "progress": self.progress,
            "callbacks": self.callbacks,
        }
        self.metrics: dict[str, Any] = {"test": None, "validation": None}
        self.resumed: list[dict[str, int]] = []
        self.model_step: int | None = None
        self._checkpoints_folder = RunFolder(run_dir).checkpoints_folder
        if earlier is not None:
            history_bytes = 0 if after is None else self._resume(after)
            self.folder.continue_run(config, history_bytes)
        self.checkpoints = None
        if config.checkpoint.every_seconds or config.checkpoint.every_steps:
            self.checkpoints = Checkpoints(
                self._checkpoints_folder,
                model=self.saved,
                optimizers=self.optimizers,
                after=after,
                share=self.share,
            )
        self.has_saved = after is not None
        if show:
            tqdm.write(self.threads.describe(), file=sys.stderr)
            for last in self.resumed[-1:]:
                number, step = last["checkpoint"], last["step"]
                tqdm.write(f"continues at step {step:,}, from checkpoint {number}", file=sys.stderr)

    def train(self, stack: ExitStack) -> dict[str, Any]:
        """Train, save and evaluate the model, and write the record; `stack` ends after it."""
        callbacks, progress = self.callbacks, self.progress
        record: dict[str, Any] = {
            "status": "failed",
            "started": datetime.now().astimezone().isoformat(" ", "seconds"),
            "config": describe_config(self.config),
            "environment": describe_environment(),
            "data": {**self.source.describe(), "fingerprint": self.source.fingerprint},
            "metrics": self.metrics,
            "throughput": progress.throughput(),
            "threads": self.threads._asdict(),
            "resumed": self.resumed,
        }
        try:
            with _interrupts() as interrupted:
                callbacks.start(self.folder.path, record, stack)
                stopping = callbacks.keeps_best
                if stopping is not None and not self.folder.best_file(stopping.best_step).is_file():
                    stopping.forget_best()  # of a checkpoint, and a better one followed it
                with progress.bar(is_drawn=self._shows_progress):
                    self.fit(interrupted)
                is_finished = self._finish(interrupted)
                record["status"] = "finished" if is_finished else "interrupted"
        except KeyboardInterrupt:
            record["status"] = "interrupted"
            if self.checkpoints is not None:
                self.checkpoints.give_up()
            raise
        except TrainingDiverged as error:
            self.metrics |= dict.fromkeys(self.metrics)  # drop those from before it diverged
            record["status"] = "diverged"
            advice = str(error).replace("lower the learning rate", LOWER_LR)  # by the keys
            raise type(error)(f"after step {progress.num_steps}: {advice}") from error
        finally:
            skipping, checkpoints = self.pipeline.skipping, self.checkpoints
            try:
                if checkpoints is not None:
                    checkpoints.close()  # writes the one that waits; no collective
                    if checkpoints.newest is None and not rank():
                        rmtree(self._checkpoints_folder, ignore_errors=True)
            finally:
                record |= {
                    "throughput": self.progress.throughput(),
                    "stalls": describe_stalls(self.pipeline.clock),
                    "schedule": describe_schedule(self.pipeline, self.loader),
                    "processes": {"num_ranks": num_ranks()} if num_ranks() > 1 else None,
                    "tiers": describe_tiers(self.saved),
                    "skipped": None if skipping is None else skipping.report(),
                    "checkpoints": None if checkpoints is None else checkpoints.describe(),
                    "stopped_early": self.callbacks.stopped,
                    "model_step": self.model_step,
                    "peak_memory_bytes": peak_memory_bytes(),
                }
                write_json(self.folder.record_file, record)
        # Not before the record: a run that is killed in between needs it again.
        if is_finished and self.config.save_model:  # else it is the one copy of these weights
            self.folder.drop_best()
        return record

    def fit(self, interrupted: threading.Event) -> None:
        """Train; returns after the last epoch, or once `interrupted` is set.

        It also returns after the step in which a callback asks for it.

        Raises:
            TrainingDiverged: the loss is no longer finite.
        """
        pipeline = self.pipeline
        if self.callbacks.stopped is not None:  # killed after its last step
            return
        self.model.train()
        self._set_rates()
        pipeline.clock.start()
        self._cut_time = perf_counter()
        for _epoch in range(self.loader.epoch, self.config.epochs):
            for _, (loss, logits, labels) in pipeline.steps(self.loader):
                if self._after_step(loss, logits, labels, interrupted):
                    pipeline.detach()
                    return
        if pipeline.skipping is not None:
            self.progress.end(pipeline.skipping.num_seen)
        if self.has_saved:
            self.save_checkpoint()

    def _after_step(
        self, loss: Tensor, logits: Tensor, labels: Tensor, interrupted: threading.Event
    ) -> bool:
        """What is due after a step: rates, evaluation, report, checkpoint; whether training ends.

        Args:
            loss: Of the mini-batch, like the arguments after it.
            logits: Of its samples.
            labels: Of its samples.
            interrupted: Set once the run shall end.
        """
        progress, clock, skipping = self.progress, self.pipeline.clock, self.pipeline.skipping
        progress.add(loss, logits, labels, None if skipping is None else skipping.num_seen)
        self._set_rates()
        clock.mark("update")
        is_last = progress.full_step >= progress.num_full_steps
        self._evaluate_if_due(is_last=is_last)
        if progress.has_passed(_REPORTS_PER_RUN, progress.num_full_steps):
            progress.report()
        is_interrupted, is_due, is_stopped = any_of(
            interrupted.is_set(),
            not is_last and self._is_checkpoint_due(),
            self.callbacks.stop_request is not None and not is_last,
        )
        if is_stopped:
            self.callbacks.stopped = self.callbacks.stop_request or {
                "step": progress.num_steps,
                "callback": None,  # of another process
            }
        if is_interrupted or is_stopped:
            progress.report()
        if is_interrupted or is_due or (is_stopped and self.has_saved):
            self.save_checkpoint()
        clock.mark("other")
        return is_interrupted or is_stopped

    def _set_rates(self) -> None:
        """Set learning rates, which are a function of the full step, so none needs to be saved."""
        schedule, progress = self.config.lr_schedule, self.progress
        factor = schedule.factor(progress.full_step, progress.num_full_steps)
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def _evaluate_if_due(self, *, is_last: bool) -> None:
        """Evaluate if an evaluation is due, or if the order of samples depends on it."""
        loader, clock, progress = self.loader, self.pipeline.clock, self.progress
        stopping, keys = self.callbacks.keeps_best, self.config.eval
        if is_last:  # evaluated as a whole afterwards
            is_due = stopping is not None
        elif keys.every_steps:
            is_due = progress.has_passed(1, keys.every_steps)
        else:
            is_due = progress.has_passed(
                _EVALUATIONS_PER_EPOCH * self.config.epochs, progress.num_full_steps
            )
        wants_loss = isinstance(loader, HotColdLoader) and loader.wants_loss
        if not is_due and not wants_loss:
            return
        clock.mark("other")
        if isinstance(loader, HotColdLoader) and wants_loss:
            found = evaluate(
                self.model,
                self.source,
                "validation",
                self.config,
                keys.max_samples,
                is_ranked=False,
            )
            loader.observe(found["logloss"])
        if is_due:
            found = self.metrics[keys.split] = evaluate(
                self.model,
                self.source,
                keys.split,
                self.config,
                keys.max_samples,
                is_ranked=self._is_ranked_in_training,
            )
            progress.add_evaluation(keys.split, found)
            if stopping is not None and stopping.best_step == progress.num_steps:
                self.folder.save_model(self.saved, self.folder.best_file(stopping.best_step))
                self.folder.drop_best(but=stopping.best_step)
        clock.mark("evaluate")

    def _is_checkpoint_due(self) -> bool:
        """Whether a checkpoint is due after this step: after a time or a number of steps.

        Copying of rows begins half an interval before, so that the checkpoint finds most of them
        copied.
        """
        if self.checkpoints is None:
            return False
        keys, seconds = self.config.checkpoint, perf_counter() - self._cut_time
        steps = self.progress.num_steps % keys.every_steps if keys.every_steps else 0
        if 0 < keys.every_steps <= 2 * steps or 0 < keys.every_seconds <= 2 * seconds:
            self.checkpoints.prepare()
        return 0 < keys.every_seconds <= seconds or (keys.every_steps > 0 and steps == 0)

    def save_checkpoint(self) -> None:
        """Cut a checkpoint, if the run writes any and its losses are finite.

        Raises:
            TrainingDiverged: the mean loss since the last report is not finite.
        """
        if self.checkpoints is None:
            return
        self.progress.report()
        clock = self.pipeline.clock
        clock.mark("other")
        self.checkpoints.save(
            state={
                "data": self.source.fingerprint,
                "resumed": list(self.resumed),
                "history_bytes": self.folder.history_bytes(),
                "num_threads": self.threads.num_threads,
                **{name: part.state_dict() for name, part in self._parts.items()},
            }
        )
        self.has_saved, self._cut_time = True, perf_counter()
        clock.mark("checkpoint")

    def _resume(self, number: int) -> int:
        """Continue after a checkpoint; returns the length in bytes that the history had.

        Raises:
            CheckpointError: it is damaged, or of another model.
            ConfigError: it is of other data.
        """

        def require(saved: dict[str, Any]) -> None:
            if (known := saved["state"]["data"]) != self.source.fingerprint:
                raise ConfigError(
                    f"{self.run_dir} was trained on other data: the fingerprint was {known!r} then "
                    f"and is {self.source.fingerprint!r} now; name the data of the run, or go on "
                    "with other data in a new run by --set "
                    f"{as_argument(f'init_from={self.run_dir}')}"
                )

        contents = Contents(self.saved, self.optimizers, self.share)
        state = restore(self._checkpoints_folder, contents, number, require)["state"]
        with errors_of_state(f"checkpoint {number}"):
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
            if self.threads.chosen_by == "free cores":
                num_threads = min(state["num_threads"], self.threads.num_cores)
                torch.set_num_threads(num_threads)
                self.threads = self.threads._replace(
                    num_threads=num_threads, chosen_by="the run so far"
                )
            continued = {"step": self.progress.num_steps, "checkpoint": number}
            self.resumed = [*state["resumed"], continued]
            return 0 if rank() else state["history_bytes"]  # those of a further process begin anew

    def _finish(self, interrupted: threading.Event) -> bool:
        """Save the model, and evaluate it if it was trained to the end; whether it is finished.

        Args:
            interrupted: Once it is set, no further split is evaluated. A signal from before does
                not count: the training that it ended is over.
        """
        folder, callbacks, progress = self.folder, self.callbacks, self.progress
        is_whole = progress.num_samples == progress.num_all_samples or callbacks.stopped is not None
        stopping, self.model_step = callbacks.keeps_best, progress.num_steps
        if is_whole and stopping is not None and stopping.best_step not in (0, self.model_step):
            self.model_step = stopping.best_step
            folder.load_model(self.saved, file=folder.best_file(stopping.best_step))
        if not self.config.save_model:
            folder.model_file.unlink(missing_ok=True)  # of the run before it was continued
        elif num_ranks() == 1:
            folder.save_model(self.saved)
        else:
            from recsys.train.rank_model import save_rank_model  # imports TorchRec

            save_rank_model(RunFolder(self.run_dir).model_file, self.saved, self.share)
        if is_whole:
            interrupted.clear()
            self.pipeline.clock.start()
            for split in self.metrics:
                if any(any_of(interrupted.is_set())):
                    is_whole = False
                    break
                self.metrics[split] = evaluate(
                    self.model, self.source, split, self.config, show=self._shows_progress
                )
            self.pipeline.clock.mark("evaluate")
        if is_whole:
            folder.append_history({**progress.position(), **self.metrics})
        if self.checkpoints is not None:
            self.checkpoints.wait()
        return is_whole


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """A context in which the first Ctrl-C, or SIGTERM, sets an event; a notice tells the user.

    A second Ctrl-C interrupts as usual. Further SIGTERMs change nothing: a supervisor that sends
    several must not end the process before its checkpoint is written. A signal that the process
    ignores, such as Ctrl-C in a job that a script runs in the background, stays ignored.

    Yields:
        The event. In a thread other than the main one it is never set.
    """
    interrupted = threading.Event()

    def on_signal(number: int, _: object) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not interrupted.is_set():
            interrupted.set()
            # Not print: the signal may have interrupted one.
            os.write(
                2, b"\nending soon, with what is trained; press Ctrl-C again to stop at once\n"
            )

    is_main = threading.current_thread() is threading.main_thread()  # only it may handle signals
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):  # None: not set from Python
                stack.callback(signal.signal, number, before)
                signal.signal(number, on_signal)
        yield interrupted
