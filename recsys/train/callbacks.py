"""Callbacks: code that a run calls while it trains, for early stopping and logging.

`Callback` is the base class. `EarlyStopping` ends a run. `TensorBoard`, `MLflow` and
`WeightsAndBiases` log it; each imports its package when it is made. `RunCallbacks` calls the
callbacks of one run.
"""

from __future__ import annotations

import importlib
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys._support.user_code import current_folder_last, import_class
from recsys.config import IS_HIGHER_BETTER, RANKING_METRICS, EarlyStoppingConfig, TrainConfig, flat
from recsys.errors import CallbackFailed, ConfigError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import ExitStack

    from recsys.batch import SampleSource

__all__ = [
    "Callback",
    "EarlyStopping",
    "MLflow",
    "RunCallbacks",
    "TensorBoard",
    "WeightsAndBiases",
    "callbacks_of",
    "require_metric",
]


class Callback:
    """A run calls its methods while it trains. They do nothing: override those that you need.

    All are called between two steps, by the thread that trains; of several processes, on the first
    alone. Their time counts as the run's stage `other`, or as evaluation in `on_validation_end`. An
    error that one raises ends the run as `CallbackFailed`.
    """

    def on_train_start(self, run_dir: Path, record: Mapping[str, Any]) -> None:
        """Before the first step.

        Args:
            run_dir: The folder of the run. It exists from now on.
            record: As in `run.json`, as far as it is known: `config`, `environment`, `data`,
                `resumed`, and `throughput`, whose `num_samples` is above 0 if the run continues.
        """

    def on_report(self, report: Mapping[str, Any]) -> None:
        """After a report on training; there are about 100 in a run, or one each step.

        Args:
            report: The line of `history.jsonl`: `step`, `num_samples` seen so far, `train_loss`,
                `train_auc`, `samples_per_second` and more.
        """

    def on_validation_end(self, evaluation: Mapping[str, Any]) -> bool | None:
        """After an evaluation during training; the one after the last step is in the record.

        Args:
            evaluation: The line of `history.jsonl`: `step`, `num_samples`, and the metrics under
                the name of the split.

        Returns:
            True to end training after this step.
        """
        return None

    def on_fit_end(self, record: Mapping[str, Any]) -> None:
        """At the end of the run, after its files are written, if `on_train_start` has returned.

        Args:
            record: As in `run.json`. `status` is "finished", "interrupted", "diverged" or "failed".
        """

    def state_dict(self) -> dict[str, Any]:
        """What a run that continues from a checkpoint needs: JSON types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; called before `on_train_start`, unless the state is empty.

        Args:
            state: What `state_dict` returned.
        """


_NO_EVALUATION: dict[str, Any] = {
    "split": None,
    "best": None,
    "best_step": 0,
    "num_without": 0,
    "improved": None,  # the value of the last improvement
}


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations in a row without an improvement.

    The evaluations are those on `eval.split` during training, every `eval.every_steps`, and with
    keep="best" one after the last step.

    Args:
        patience: Evaluations, at least 1.
        metric: As the key `early_stopping.metric`.
        min_delta: An evaluation is an improvement if it is better than the last improvement by more
            than this. The first one is an improvement.
        keep: The weights that the run saves and evaluates at its end: "best", those of the best
            evaluation, or "last", those of its last step. Of "best" the run folder has a copy,
            written after each evaluation that is better than all before.

    Raises:
        ConfigError: an argument is out of range, or the metric is another one.
    """

    def __init__(
        self, patience: int, *, metric: str = "auc", min_delta: float = 0.0, keep: str = "best"
    ) -> None:
        if patience < 1:
            raise ConfigError(f"EarlyStopping: patience must be at least 1, got {patience}")
        keys: dict[str, Any] = {"metric": metric, "min_delta": min_delta, "keep": keep}
        self._keys = EarlyStoppingConfig(patience=patience, **keys)
        self.keeps_best, self.is_of_ranking = keep == "best", metric in RANKING_METRICS
        self._state = dict(_NO_EVALUATION)

    def on_validation_end(self, evaluation: Mapping[str, Any]) -> bool:
        """Compare with the last improvement; True once patience is used up.

        Raises:
            ConfigError: the metric is null, because all labels are equal.
        """
        split, step = "test" if evaluation.get("test") else "validation", evaluation["step"]
        value = evaluation[split].get(self._keys.metric)
        if value is None:
            raise ConfigError(
                f"{self._keys.metric} of the evaluation at step {step} is null: its samples, or "
                "those of each group, have one label; raise eval.max_samples, or choose a metric "
                "that its line in history.jsonl has"
            )
        if split != self._state["split"]:  # a run that continues may evaluate on another one
            self._state = _NO_EVALUATION | {"split": split}
        if self._gain(value, "best") > 0:
            self._state |= {"best": value, "best_step": step}
        if self._gain(value, "improved") > self._keys.min_delta:
            self._state |= {"improved": value, "num_without": 0}
        else:
            self._state["num_without"] += 1
        return bool(self._state["num_without"] >= self._keys.patience)

    def on_fit_end(self, record: Mapping[str, Any]) -> None:
        """Forget this run: the object may be given to another one."""
        self._state = dict(_NO_EVALUATION)

    @property
    def best_step(self) -> int:
        """The step of the best evaluation; 0 if none is known."""
        return int(self._state["best_step"])

    def state_dict(self) -> dict[str, Any]:
        """What was compared, the best evaluation, and the last improvement.

        `num_without` counts the evaluations after the last improvement by more than `min_delta`,
        and the best one may be among them.
        """
        return {"metric": self._keys.metric, "min_delta": self._keys.min_delta, **self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; the best value of another metric means nothing, and is dropped."""
        if state["metric"] == self._keys.metric:
            self._state = {key: state[key] for key in _NO_EVALUATION}

    def forget_best(self) -> None:
        """Forget the best evaluation: its weights are lost."""
        self._state |= {"best": None, "best_step": 0}

    def _gain(self, value: float, than: str) -> float:
        earlier = self._state[than]
        if earlier is None:
            return inf
        return float(value - earlier if IS_HIGHER_BETTER[self._keys.metric] else earlier - value)


class AbstractLogger(Callback, ABC):
    """Logs measurements over the samples seen.

    They are `train/loss`, `train/auc` and `samples_per_second` of reports, and each metric of an
    evaluation under its split, such as `validation/auc`. At the end of a finished run it logs those
    of both splits as a whole. Counts, and metrics that are null, are left out.
    """

    _id: str | None = None

    @abstractmethod
    def _start(self, run_dir: Path, record: Mapping[str, Any], known: str | None) -> str | None:
        """Begin to log; arguments are as for `on_train_start`.

        Args:
            run_dir: The folder of the run.
            record: The record.
            known: The id of the logger's run that the run continues; None for a new one.

        Returns:
            The id of the logger's run, if it has one.
        """

    @abstractmethod
    def _log(self, values: dict[str, float], num_samples: int) -> None:
        """Log measurements.

        Args:
            values: By name.
            num_samples: Samples seen so far.
        """

    @abstractmethod
    def _close(self, status: str) -> None:
        """End.

        Args:
            status: Of the run, as in its record.
        """

    def on_train_start(self, run_dir: Path, record: Mapping[str, Any]) -> None:
        """Start or continue the logger's run."""
        # The id is set last: an object whose start failed may be given to another run.
        known, self._id = self._id, None
        self._id = self._start(run_dir, record, known)

    def on_report(self, report: Mapping[str, Any]) -> None:
        """Log a report."""
        self._log(_scalars(report), report["num_samples"])

    def on_validation_end(self, evaluation: Mapping[str, Any]) -> None:
        """Log an evaluation."""
        self.on_report(evaluation)

    def on_fit_end(self, record: Mapping[str, Any]) -> None:
        """Log the metrics of a finished run, and end; the object may be given to another run."""
        self._id = None
        if record["status"] == "finished":
            self._log(_scalars(record["metrics"]), record["throughput"]["num_samples"])
        self._close(record["status"])

    def state_dict(self) -> dict[str, Any]:
        """The id of the logger's run."""
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue that run."""
        self._id = state["id"]


class TensorBoard(AbstractLogger):
    """Writes `train/loss`, `validation/auc` and the like over the samples seen.

    A run that continues from a checkpoint hides what was written after it.

    Args:
        folder: Where event files go; None for `tensorboard` in the folder of the run.

    Raises:
        MissingDependency: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._make = _required("torch.utils.tensorboard", "tensorboard", self).SummaryWriter

    def _start(self, run_dir: Path, record: Mapping[str, Any], known: str | None) -> None:
        folder = run_dir / "tensorboard" if self._folder is None else Path(self._folder)
        # TensorBoard shows no event from this step on that was written before.
        self._writer = self._make(folder, purge_step=record["throughput"]["num_samples"] + 1)

    def _log(self, values: dict[str, float], num_samples: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, num_samples)
        self._writer.flush()

    def _close(self, status: str) -> None:
        self._writer.close()


class MLflow(AbstractLogger):
    """Logs keys as parameters, and `train/loss`, `validation/auc` and the like as metrics.

    Where it logs to is as for every program that uses MLflow: `MLFLOW_TRACKING_URI`,
    `MLFLOW_EXPERIMENT_NAME`, or `mlflow.set_tracking_uri`. A run that continues from a checkpoint
    continues its run of MLflow.

    Args:
        options: Of `mlflow.start_run`, such as `tags`; `run_name` is by default that of the folder.

    Raises:
        MissingDependency: mlflow is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._mlflow = _required("mlflow", "mlflow", self)
        self._options = options

    def _start(self, run_dir: Path, record: Mapping[str, Any], known: str | None) -> str:
        if known is not None:
            self._mlflow.start_run(run_id=known)
            return known
        begun = self._mlflow.start_run(**{"run_name": run_dir.resolve().name, **self._options})
        self._mlflow.log_params(flat(record["config"]))
        return str(begun.info.run_id)

    def _log(self, values: dict[str, float], num_samples: int) -> None:
        self._mlflow.log_metrics(values, step=num_samples)

    def _close(self, status: str) -> None:
        statuses = {"finished": "FINISHED", "interrupted": "KILLED"}
        self._mlflow.end_run(statuses.get(status, "FAILED"))


class WeightsAndBiases(AbstractLogger):
    """Logs the configuration, and `train/loss`, `validation/auc` and so on over the samples seen.

    Project, mode and key are as for every program that uses it: `WANDB_PROJECT`, `WANDB_MODE`,
    `WANDB_API_KEY`, or options. A run that continues from a checkpoint continues its run there.

    Args:
        options: Of `wandb.init`, such as `project`; `name` is by default that of the folder.

    Raises:
        MissingDependency: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._wandb = _required("wandb", "wandb", self)
        self._options = options

    def _start(self, run_dir: Path, record: Mapping[str, Any], known: str | None) -> str:
        options = {"name": run_dir.resolve().name, "config": record["config"], **self._options}
        if known is not None:
            options |= {"id": known, "resume": "allow"}
        self._run = self._wandb.init(**options)
        return str(self._run.id)

    def _log(self, values: dict[str, float], num_samples: int) -> None:
        self._run.log(values, step=num_samples)

    def _close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _required(module: str, package: str, callback: Callback) -> Any:
    """A module of an optional package.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"callback {type(callback).__name__} needs {package}, which is not installed "
            f"({error}); install it (pip install {package}), or leave the callback out"
        ) from error


def _scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """The measurements in a line of the history, or in the metrics of a record, by name."""
    found = {
        "samples_per_second": entry.get("samples_per_second"),
        "train/loss": entry.get("train_loss"),
        "train/auc": entry.get("train_auc"),
    }
    for split in ("validation", "test"):
        found |= {f"{split}/{key}": value for key, value in (entry.get(split) or {}).items()}
    return {key: value for key, value in found.items() if isinstance(value, float)}


_BY_NAME: dict[str, Callable[[], Callback]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


def callbacks_of(config: TrainConfig, more: Sequence[Callback] = ()) -> RunCallbacks:
    """The callbacks of a configuration, and more.

    Raises:
        ConfigError: a class of the user's cannot be imported, or needs arguments.
        MissingDependency: a package that one logs to is not installed.
        TypeError: one of `more` is no `Callback`.
    """
    for callback in more:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks must be objects of recsys.train.Callback, got {callback!r}; derive its "
                "class from Callback, and make an object of it"
            )
    stopping = config.early_stopping
    own = [EarlyStopping(**stopping.model_dump())] if stopping.patience else []
    return RunCallbacks([*own, *map(_build, config.callbacks), *more], config.epochs)


def _build(name: str) -> Callback:
    """The callback that a configuration names.

    Raises:
        ConfigError, MissingDependency: see `callbacks_of`.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]()
    found = import_class("callbacks", name, Callback, "recsys.train.Callback")
    try:
        with current_folder_last():
            return found()
    except TypeError as error:
        raise ConfigError(
            f"callbacks {name!r}: the class is built as {found.__name__}(), which raised a "
            f"TypeError: {error}; give its arguments defaults, or pass an object to train()"
        ) from error


class RunCallbacks:
    """Calls the callbacks of a run, and knows whether one has ended it.

    Args:
        callbacks: The callbacks; none on processes other than the first.
        epochs: Of the run. A run that has stopped and continues with more trains on.

    Attributes:
        stop_request: Why a callback asks that training ends after this step; None if none does.
        stopped: The step after which a callback has ended training, and why, as in the run record;
            None if none has.
        stopping: Those that end training.
        keeps_best: The one whose best evaluation the run keeps; None if it keeps its last weights.
    """

    def __init__(self, callbacks: Iterable[Callback] = (), epochs: int = 0) -> None:
        self._callbacks: dict[str, Callback] = {}
        counts: Counter[str] = Counter()
        for callback in callbacks:
            name = type(callback).__name__
            counts[name] += 1
            self._callbacks[name if counts[name] == 1 else f"{name} {counts[name]}"] = callback
        self._epochs = epochs
        self._states: dict[str, Any] = {}  # to load
        self.stop_request: dict[str, Any] | None = None
        self.stopped: dict[str, Any] | None = None
        found = self._callbacks.values()
        self.stopping = [one for one in found if isinstance(one, EarlyStopping)]
        self.keeps_best = next((one for one in self.stopping if one.keeps_best), None)

    def start(self, run_dir: Path, record: Mapping[str, Any], stack: ExitStack) -> None:
        """Before the first step: each loads its state, and starts.

        Errors are as for the methods after it.

        Args:
            run_dir: The folder of the run.
            record: The run record.
            stack: Ends those that have started, even if one raises an error. That error is a
                warning if another one has ended the run.

        Raises:
            CallbackFailed: a callback raised an error.
        """
        for name in self._callbacks:
            # Not earlier: one that loads its state must start, so that its end forgets the run.
            if name in self._states:
                self._call(name, "load_state_dict", self._states[name])
            self._call(name, "on_train_start", run_dir, record)
            stack.push(partial(self._end, name, record))

    def report(self, entry: Mapping[str, Any]) -> None:
        """After a report on training."""
        for name in self._callbacks:
            self._call(name, "on_report", entry)

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """After an evaluation during training."""
        for name, callback in self._callbacks.items():
            if self._call(name, "on_validation_end", entry) and self.stop_request is None:
                self.stop_request = {"step": entry["step"], "callback": name}
                if isinstance(callback, EarlyStopping):
                    self.stop_request |= callback.state_dict()

    def _end(self, name: str, record: Mapping[str, Any], *raised: Any) -> None:
        try:
            self._call(name, "on_fit_end", record)
        except CallbackFailed as failed:
            if raised[1] is None:
                raise
            warnings.warn(str(failed), stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """Whether training was ended, and of how many epochs; states of callbacks, by name."""
        states = {name: self._call(name, "state_dict") for name in self._callbacks}
        return {
            "stopped": self.stopped,
            "epochs": self._epochs,
            "states": {name: state for name, state in states.items() if state},
        }

    def load_state_dict(self, state: Any) -> None:
        """Continue; `start` gives callbacks their states. Those without one begin anew."""
        # Not the epochs in config.toml, which are the new ones once a run was continued.
        self.stopped = None if self._epochs > state["epochs"] else state["stopped"]
        self._states = state["states"]

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of a callback.

        Raises:
            CallbackFailed: it raised an error.
        """
        try:
            return getattr(self._callbacks[name], method)(*arguments)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise CallbackFailed(
                f"callback {name}: {method} raised {type(error).__name__}: {error} "
                f"({Path(frame.filename).name}, line {frame.lineno}); correct it, or leave the "
                "callback out"
            ) from error


def require_metric(config: TrainConfig, source: SampleSource) -> None:
    """Check that the data has the metric of early stopping, if there is any.

    Warns if it is a test metric.

    Raises:
        ConfigError: its evaluations would be null.
    """
    from recsys.datasets.store import Store  # imports PyTorch

    if not config.early_stopping.patience:
        return
    metric, split = config.early_stopping.metric, config.eval.split
    is_ranked = isinstance(source, Store) and "ranking" in source.meta
    has_groups = isinstance(source, Store) and source.groups is not None
    null = ("auc", "gauc", "normalized_entropy", "accuracy") if is_ranked else RANKING_METRICS
    if metric in null or (metric == "gauc" and not has_groups):
        raise ConfigError(
            f"early_stopping.metric {metric!r} is null on this data; choose one of "
            f"{sorted(IS_HIGHER_BETTER.keys() - null)}; 'gauc' needs a group in the schema"
        )
    if split == "test":
        warnings.warn(
            "early stopping on eval.split 'test' chooses the step whose test metrics look best, so "
            "they are too good; set eval.split to 'validation', or ablate.target_split in an "
            "ablation with a target",
            stacklevel=2,
        )
