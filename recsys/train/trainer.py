"""One training run, from a configuration to a folder of results.

`_prepare` builds the parts of a run, and `_train` trains, evaluates and saves the results.
"""

from __future__ import annotations

import gc
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from recsys._support.config_fields import flat
from recsys._support.files import alone_in, make_folders
from recsys._support.machine import (
    describe_environment,
    return_freed_memory,
    seconds_without_core,
    set_num_threads,
    tune_allocator,
)
from recsys.config import TrainConfig, describe_config
from recsys.errors import TrainingDiverged
from recsys.pipeline.stalls import StageClock, describe_stalls
from recsys.train.callbacks.run_callbacks import RunCallbacks, callbacks_of
from recsys.train.checkpoint.contents import errors_of_state
from recsys.train.judge.evaluation import evaluate_split, with_ranking
from recsys.train.loop.full_steps import FullSteps
from recsys.train.loop.interrupts import interrupts
from recsys.train.loop.progress import Progress
from recsys.train.loop.settings_warnings import (
    warn_of_no_effect,
    warn_of_other_rates,
    warn_of_threads,
)
from recsys.train.parts.build import (
    INIT_FROM_NEEDS,
    autocast,
    build_loader,
    build_pipeline,
    choose_plan,
    cold_folder,
    compile_kernels,
    describe_schedule,
    describe_source,
    describe_tiers,
    open_first_model,
    open_source,
)
from recsys.train.ranks.launched import processes_of
from recsys.train.run_files.curves import plot_curves
from recsys.train.run_files.run_folder import RunFolder
from recsys.train.training_loop import Run, build_schedulers, continue_at, fit, num_seen_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.batch import SampleSource
    from recsys.train.callbacks.callback import Callback
    from recsys.train.loop.interrupts import Interrupted
    from recsys.train.loop.resume import Reopened
    from recsys.train.ranks.processes import Processes

__all__ = ["train"]


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
            "build_config, which makes one of nested keys, and load_config, of a TOML file"
        )
    with ExitStack() as stack:
        stack.callback(_free_memory)  # last: the model is gone then
        # Code of the user's, such as a callback, may change the current folder.
        processes = stack.enter_context(processes_of(Path(run_dir).absolute()))
        given = {"--resume": resume, "--checkpoint": checkpoint}
        processes.require_same(flat(describe_config(config)) | given)
        earlier = None
        if resume:
            earlier = stack.enter_context(processes.reopened(config, checkpoint))
        if earlier is not None and earlier.record is not None:
            return earlier.record
        show = show_progress and not processes.rank
        # In no variable here: the model is gone when contexts end, before its files are deleted.
        return _train(_prepare(config, processes, earlier, stack, callbacks, show), stack)


def _free_memory() -> None:
    """Delete the tables of a run, with their files, and return their memory to the system."""
    gc.collect()  # a table group and its fetcher have each other
    return_freed_memory()


def _train(run: Run, stack: ExitStack) -> dict[str, Any]:
    """Train, save and evaluate the model of a run, and write its record; `stack` ends after it."""
    callbacks, checkpoints, progress = run.callbacks, run.checkpoints, run.progress
    split = run.config.eval.split
    metrics: dict[str, Any] = {"test": None, "validation": None}
    record: dict[str, Any] = {
        "status": "failed",
        "config": describe_config(run.config),
        "environment": describe_environment(),
        "data": describe_source(run.loader.source),
        "metrics": metrics,
        "throughput": progress.throughput(),
        "resumed": run.resumed,
    }
    stack.push(lambda _, error, __: callbacks.end(record, error))
    try:
        with interrupts(has_checkpoints=checkpoints is not None) as interrupted:
            callbacks.start(run.folder.path, record)
            begin = time.perf_counter(), seconds_without_core()
            with progress:
                fit(run, interrupted)
            record["threads"] = _threads(run, *begin)
            metrics[split] = progress.last_evaluation
            is_finished = _save_and_evaluate(run, metrics, interrupted)
            record["status"] = "finished" if is_finished else "interrupted"
    except KeyboardInterrupt:
        metrics[split] = metrics[split] or progress.last_evaluation
        record["status"] = "interrupted"
        if checkpoints is not None:
            checkpoints.give_up()
        raise
    except TrainingDiverged:
        metrics |= dict.fromkeys(metrics)  # drop the metrics from before it diverged
        record["status"] = "diverged"
        raise
    finally:
        _write_record(run, record)
    plot_curves(run.folder)
    return record


def _save_and_evaluate(run: Run, metrics: dict[str, Any], interrupted: Interrupted) -> bool:
    """Save the model, and evaluate it if it was trained to the end; whether the run is finished.

    Arguments are as for `_evaluate_at_end`.
    """
    checkpoints, callbacks, clock = run.checkpoints, run.callbacks, run.pipeline.clock
    is_whole = run.progress.num_samples == run.num_samples or callbacks.stopped is not None
    if checkpoints is not None and not is_whole:
        checkpoints.wait()
    if run.config.save_model:
        run.processes.save_model(run.folder, run.built)
    else:
        run.folder.model_file.unlink(missing_ok=True)  # of the run before it was continued
    is_finished = False
    if is_whole:
        clock.start()
        is_finished = _evaluate_at_end(run, metrics, interrupted)
        clock.mark("evaluate")
    if is_finished:
        run.folder.append_history({**run.progress.position(), **metrics})
    if checkpoints is not None:
        checkpoints.end()
        callbacks.checkpoints(checkpoints.newly_complete())
    return is_finished


def _write_record(run: Run, record: dict[str, Any]) -> None:
    """Write the record of a run that has ended in any way."""
    try:
        if run.checkpoints is not None and record["status"] in ("failed", "diverged"):
            run.checkpoints.close()
    finally:
        record |= _measured(run)
        run.folder.write_record(record)


def _prepare(
    config: TrainConfig,
    processes: Processes,
    earlier: Reopened | None,
    stack: ExitStack,
    given: Sequence[Callback],
    show_progress: bool,
) -> Run:
    """Build the parts of a run, make its folder, and restore the run to continue.

    Args:
        config: The configuration.
        processes: Those that train together.
        earlier: The run to continue; None for a new one.
        stack: Is closed after the run.
        given: The callbacks, besides those that `config` names.
        show_progress: Draw a progress bar.
    """
    callbacks, source, first_model = _checked(config, processes, earlier, given)
    cold_path = cold_folder(config, processes.run_dir)
    processes.require_same({"the data's fingerprint": source.fingerprint})
    threads = set_num_threads(processes.num_threads(config))
    tune_allocator()
    plan = choose_plan(config, source)
    loader = build_loader(config, source, plan, processes.rank, processes.num_ranks)
    built = processes.build_model(replace(config, cold_path=cold_path), source, plan)
    if first_model is not None:
        first_model.load_model(built.saved, INIT_FROM_NEEDS)
    full_steps = FullSteps(loader, config.epochs)
    compile_kernels(config, source)
    folder = _new_folder(config, processes, stack) if earlier is None else earlier.folder
    clock = StageClock()
    with processes.warnings_once():
        warn_of_threads(config.num_threads)
        warn_of_no_effect(config, full_steps)
        callbacks.warn_of_no_effect(full_steps.num_evaluations(config.eval.every_steps))
        pipeline = build_pipeline(
            built.train_model, built.optimizers, config, clock, full_steps.num_steps, processes
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
    run = Run(
        config=config,
        processes=processes,
        folder=folder,
        loader=loader,
        built=built,
        pipeline=pipeline,
        schedulers=build_schedulers(config.lr_schedule, built.optimizers, full_steps.num_steps),
        full_steps=full_steps,
        num_samples=num_samples,
        progress=progress,
        callbacks=callbacks,
        threads=threads,
    )
    if earlier is not None:
        _continue(run, earlier)
    if show_progress:
        tqdm.write(run.threads.describe(), file=sys.stderr)
    run.checkpoints = processes.checkpoints(config, folder, built, earlier)
    return run


def _checked(
    config: TrainConfig,
    processes: Processes,
    earlier: Reopened | None,
    given: Sequence[Callback],
) -> tuple[RunCallbacks, SampleSource, RunFolder | None]:
    """The callbacks, the data, and the run of `init_from`, which all fit the run and its place."""
    callbacks = (
        RunCallbacks(epochs=config.epochs) if processes.rank else callbacks_of(config, given)
    )
    source = open_source(config)
    is_new = earlier is None or earlier.saved is None
    # A checkpoint has the rows, so a run that continues does not read `init_from`.
    processes.require(config if is_new else replace(config, init_from=""), source)
    first_model = open_first_model(config, source) if is_new else None
    callbacks.require(config, source)
    if earlier is None:
        RunFolder.require_place(processes.own_dir)
    return callbacks, source, first_model


def _new_folder(config: TrainConfig, processes: Processes, stack: ExitStack) -> RunFolder:
    """Make the folder of a new run, and lock it until the stack is closed."""
    RunFolder.require_place(processes.own_dir)
    make_folders(processes.own_dir)
    stack.enter_context(alone_in(processes.own_dir, "recsys train"))
    return RunFolder.create(processes.own_dir, config)  # is refused if another run began first


def _continue(run: Run, earlier: Reopened) -> None:
    """Restore a run from its checkpoint; without one it starts from the first sample."""
    history_bytes = 0
    if earlier.saved is not None:
        of_run = run.processes.restore(run.folder, earlier, run.built)
        with errors_of_state(f"checkpoint {earlier.saved.number}"):
            history_bytes = run.load_state_dict(of_run, earlier.saved.number)
        step = run.full_steps.advance(run.progress.num_steps, num_seen_by(run.pipeline))
        continue_at(run.schedulers, step)
        with run.processes.warnings_once():
            warn_of_other_rates(earlier.config, run.config, run.full_steps)
    run.folder.continue_run(run.config, history_bytes)


def _measured(run: Run) -> dict[str, Any]:
    """What the record of a run that has ended says of its time and its memory."""
    pipeline, progress, checkpoints = run.pipeline, run.progress, run.checkpoints
    return {
        "throughput": progress.throughput(),
        "stalls": describe_stalls(pipeline.clock),
        "schedule": describe_schedule(pipeline, run.loader),
        "processes": run.processes.describe(),
        "tiers": describe_tiers(run.built.saved),
        "skipped": None if pipeline.skipping is None else pipeline.skipping.report(),
        "checkpoints": None if checkpoints is None else checkpoints.describe(),
        "stopped_early": run.callbacks.stopped,
        "peak_memory_bytes": progress.peak_memory_bytes,
    }


def _threads(run: Run, begin: float, waited_before: float | None) -> dict[str, Any]:
    """Threads of training, and the share of their time for which they had no core."""
    threads, waited = run.threads, seconds_without_core()
    described: dict[str, Any] = threads._asdict()
    described["share_without_core"] = None
    if waited is not None and waited_before is not None:
        seconds = threads.num_threads * (time.perf_counter() - begin)
        # Waits of threads that have ended are not in the sum any more.
        described["share_without_core"] = min(1.0, max(0.0, waited - waited_before) / seconds)
    return described


def _evaluate_at_end(run: Run, metrics: dict[str, Any], interrupted: Interrupted) -> bool:
    """Evaluate the whole test and validation splits.

    Args:
        run: The run.
        metrics: Gets the metrics of each split as soon as they are known, as the run record holds
            them.
        interrupted: Once it is set, no further split is evaluated. A signal from before does not
            count: the training that it ended is over.

    Returns:
        Whether both splits were evaluated.
    """
    model, source, processes = run.built.train_model, run.loader.source, run.processes
    keys = run.config.eval
    interrupted.clear()
    interrupted.ends_after = "the metrics of this split"
    with autocast(run.config):
        for split in ("test", "validation"):
            if any(processes.any_of(interrupted.is_set())):
                return False
            found = evaluate_split(model, source, split, keys.batch_size, processes=processes)
            metrics[split] = found.as_dict()
            # A ranking may take minutes, and a second Ctrl-C may end it.
            metrics[split] = with_ranking(found, model, source, split, keys).as_dict()
    return True
