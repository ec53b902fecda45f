"""`EarlyStopping`: ends training once evaluations stop improving."""

from __future__ import annotations

import warnings
from math import inf
from typing import TYPE_CHECKING, Any

from recsys._support.sizes import counted
from recsys.config_callbacks import IS_HIGHER_BETTER, EarlyStoppingConfig
from recsys.errors import ConfigError
from recsys.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["EarlyStopping"]

_UNDEFINED = ("auc", "gauc", "normalized_entropy")  # where all labels are equal


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations in a row without an improvement.

    The evaluations are those on `eval.split` during training, every `eval.every_steps`. The model
    of the run is that of its last step, not that of the best evaluation.

    Args:
        patience: Evaluations, at least 1.
        metric: "auc", "gauc" or "accuracy", of which higher is better, or "logloss" or
            "normalized_entropy".
        min_delta: An evaluation is an improvement if it is better than the last improvement by more
            than this. The first one is an improvement.

    Raises:
        ConfigError: an argument is out of range, or the metric is another one.
    """

    def __init__(self, patience: int, *, metric: str = "auc", min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ConfigError(f"EarlyStopping: patience must be at least 1, got {patience}")
        try:
            EarlyStoppingConfig(patience=patience, metric=metric, min_delta=min_delta)
        except ConfigError as error:
            raise ConfigError(f"EarlyStopping: {error}") from None
        self._patience, self._metric, self._min_delta = patience, metric, min_delta
        self._split: str | None
        self._best: float | None
        self._improved: float | None  # value of the last improvement
        self._best_step: int
        self._num_without: int
        self._forget()

    def require(self, config: TrainConfig, source: SampleSource) -> None:
        """Check that evaluations have the metric; warn if they are on the test split.

        Args:
            config: Of the run.
            source: Its data.

        Raises:
            ConfigError: they do not have it.
        """
        from recsys.datasets.checks import num_groups_of_both_kinds
        from recsys.datasets.store import Store  # imports PyTorch

        store = source if isinstance(source, Store) else None
        if self._metric == "gauc" and (store is None or store.groups is None):
            raise ConfigError(
                "early_stopping.metric 'gauc' is for data with groups, and the data has none; "
                "choose 'auc' or another one"
            )
        if self._metric in _UNDEFINED and store is not None and "ranking" in store.meta:
            raise ConfigError(
                f"early_stopping.metric {self._metric!r} is null for data whose evaluations have "
                "positives alone; choose 'logloss'"
            )
        split = config.eval.split
        if self._metric == "gauc" and store and not num_groups_of_both_kinds(store, split):
            raise ConfigError(
                f"early_stopping.metric 'gauc' needs groups with both labels, and no group of the "
                f"{split} part has both; choose 'auc', or another group in the schema"
            )
        if config.eval.split == "test":
            warnings.warn(
                "early stopping on eval.split 'test' chooses the step whose test metrics look "
                "best, so they are too good; set eval.split to 'validation', or "
                "ablate.target_split in an ablation with a target",
                stacklevel=2,
            )

    def warn_of_no_effect(self, num_evaluations: int) -> None:
        """Warn if the run has too few evaluations to stop it.

        Args:
            num_evaluations: Of the run, before its last step.
        """
        if num_evaluations <= self._patience:
            warnings.warn(
                f"training never ends early: the patience of early stopping is {self._patience}, "
                f"and the run has {counted(num_evaluations, 'evaluation')} before its last step; "
                "lower it, or eval.every_steps",
                stacklevel=3,
            )

    def on_evaluation(self, evaluation: Mapping[str, Any]) -> bool:
        """Compare with the last improvement; True once patience is used up.

        Raises:
            ConfigError: the metric is null, because all labels are equal.
        """
        split = "test" if evaluation.get("test") else "validation"
        value = evaluation[split][self._metric]
        if value is None:
            raise ConfigError(
                f"{self._metric} of the evaluation at step {evaluation['step']} is null: its "
                "samples, or those of each group, have one label; raise eval.max_samples, or "
                "choose metric 'logloss'"
            )
        if split != self._split:  # a run that continues may evaluate on another one
            self._forget()
            self._split = split
        if self._gain(value, self._best) > 0:
            self._best, self._best_step = value, evaluation["step"]
        if self._gain(value, self._improved) > self._min_delta:
            self._improved, self._num_without = value, 0
        else:
            self._num_without += 1
        return self._num_without >= self._patience

    def on_end(self, record: Mapping[str, Any]) -> None:
        """Forget this run: the object may be given to another one."""
        self._forget()

    def describe(self) -> dict[str, Any]:
        """For the run record: what was compared, and the best evaluation.

        `num_without` counts the evaluations after the last improvement by more than `min_delta`,
        and the best one may be among them.
        """
        return {
            "metric": self._metric,
            "min_delta": self._min_delta,
            "split": self._split,
            "best": self._best,
            "best_step": self._best_step,
            "num_without": self._num_without,
        }

    def state_dict(self) -> dict[str, Any]:
        """The best evaluation, the last improvement, and how many have followed it."""
        return {**self.describe(), "improved": self._improved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; the best value of another metric means nothing, and is dropped."""
        keys = ("split", "best", "best_step", "num_without", "improved")
        found = [state[key] for key in keys]  # all or none
        if state["metric"] == self._metric:
            self._split, self._best, self._best_step, self._num_without, self._improved = found

    def _forget(self) -> None:
        self._split = self._best = self._improved = None
        self._best_step = self._num_without = 0

    def _gain(self, value: float, earlier: float | None) -> float:
        if earlier is None:
            return inf
        return value - earlier if IS_HIGHER_BETTER[self._metric] else earlier - value
