"""`RunCallbacks`: the callbacks of one run, called in turn."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys._support.user_classes import current_folder_last, import_class
from recsys.errors import CallbackFailed, ConfigError
from recsys.train.callbacks.callback import Callback
from recsys.train.callbacks.early_stopping import EarlyStopping
from recsys.train.callbacks.mlflow import MLflow
from recsys.train.callbacks.tensorboard import TensorBoard
from recsys.train.callbacks.wandb import WeightsAndBiases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["RunCallbacks", "callbacks_of"]

_BUILT_IN: dict[str, Callable[[], Callback]] = {
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
        ValueError: an object is there twice.
    """
    for each in more:
        if not isinstance(each, Callback):
            raise TypeError(
                f"callbacks must be objects of recsys.train.Callback, got {each!r}; derive its "
                "class from Callback, and make an object of it"
            )
    if len({id(each) for each in more}) < len(more):
        raise ValueError("callbacks has the same object twice; leave one out, or make another one")
    stopping, found = config.early_stopping, list[Callback]()
    if stopping.patience:
        found.append(
            EarlyStopping(stopping.patience, metric=stopping.metric, min_delta=stopping.min_delta)
        )
    found += map(_build, config.callbacks)
    return RunCallbacks([*found, *more], config.epochs)


def _build(name: str) -> Callback:
    """The callback that a configuration names.

    Raises:
        ConfigError, MissingDependency: see `callbacks_of`.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
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
        stopped: The step after which a callback has ended training, and why, as in the run record;
            None if none has.
    """

    def __init__(self, callbacks: Iterable[Callback] = (), epochs: int = 0) -> None:
        self._callbacks: dict[str, Callback] = {}
        for each in callbacks:
            name, number = type(each).__name__, 1
            while name in self._callbacks:
                number += 1
                name = f"{type(each).__name__} {number}"
            self._callbacks[name] = each
        self._epochs = epochs
        self._states: dict[str, Any] = {}  # to load
        self._started: list[str] = []
        self._stop_request: dict[str, Any] | None = None
        self.stopped: dict[str, Any] | None = None

    def require(self, config: TrainConfig, source: SampleSource) -> None:
        """Check that the run has what callbacks need; may warn.

        Raises:
            ConfigError: it does not.
        """
        for each in self._callbacks.values():
            if isinstance(each, EarlyStopping):
                each.require(config, source)

    def warn_of_no_effect(self, num_evaluations: int) -> None:
        """Warn if early stopping cannot end the run.

        Args:
            num_evaluations: Of the run, before its last step.
        """
        for each in self._callbacks.values():
            if isinstance(each, EarlyStopping):
                each.warn_of_no_effect(num_evaluations)

    def start(self, run_dir: Path, record: Mapping[str, Any]) -> None:
        """Before the first step: each loads its state, and starts.

        Errors are as for the methods after it.

        Raises:
            CallbackFailed: a callback raised an error.
        """
        for name in self._callbacks:
            # Not earlier: one that loads its state must start, so that its end forgets the run.
            if name in self._states:
                self._call(name, "load_state_dict", self._states[name])
            self._call(name, "on_start", run_dir, record)
            self._started.append(name)

    def report(self, entry: Mapping[str, Any]) -> None:
        """After a report."""
        for name in self._callbacks:
            self._call(name, "on_report", entry)

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """After an evaluation during training."""
        for name, callback in self._callbacks.items():
            if self._call(name, "on_evaluation", entry) and self._stop_request is None:
                self._stop_request = {"step": entry["step"], "callback": name}
                if isinstance(callback, EarlyStopping):
                    self._stop_request |= callback.describe()

    @property
    def wants_stop(self) -> bool:
        """Whether a callback asks that training ends after this step."""
        return self._stop_request is not None

    def stop(self, step: int) -> None:
        """Training ends after this step, because a callback of some process has asked for it."""
        self.stopped = self._stop_request or {"step": step, "callback": None}

    def checkpoints(self, complete: Iterable[Mapping[str, Any]]) -> None:
        """After checkpoints were found complete."""
        for checkpoint in complete:
            for name in self._callbacks:
                self._call(name, "on_checkpoint", checkpoint)

    def end(self, record: Mapping[str, Any], error: BaseException | None = None) -> None:
        """At the end of the run: end those that were started, even if one raises an error.

        Args:
            record: The run record.
            error: The one that ended the run; None if none did. Those of callbacks are warnings
                then.

        Raises:
            CallbackFailed: a callback raised an error.
            KeyboardInterrupt: Ctrl-C interrupted one; the others have ended.
        """
        failures = list[CallbackFailed]()
        interrupt: KeyboardInterrupt | None = None
        for name in self._started:
            try:
                self._call(name, "on_end", record)
            except CallbackFailed as raised:
                failures.append(raised)
            except KeyboardInterrupt as raised:
                interrupt = raised
        raised_first = interrupt or (failures[0] if failures and error is None else None)
        for failure in failures:
            if failure is not raised_first:
                warnings.warn(str(failure), stacklevel=2)
        if raised_first is not None:
            raise raised_first

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
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise CallbackFailed(
                f"callback {name}: {method} raised {type(error).__name__}: {error} "
                f"({Path(place.filename).name}, line {place.lineno}); correct it, or leave the "
                "callback out"
            ) from error
