"""The keys `early_stopping` and `callbacks`: when a run ends early, and what else it calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsys._support.config_fields import check_fields, key, keys_set
from recsys._support.user_classes import names_class
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CALLBACKS",
    "IS_HIGHER_BETTER",
    "KEPT",
    "RANKING_METRICS",
    "EarlyStoppingConfig",
    "check_callbacks",
]

CALLBACKS = ("tensorboard", "mlflow", "wandb")
# The metrics of an evaluation during training that say how good predictions are.
IS_HIGHER_BETTER = {
    "auc": True,
    "gauc": True,
    "accuracy": True,
    "logloss": False,
    "normalized_entropy": False,
    "recall_at_k": True,
    "ndcg_at_k": True,
}
RANKING_METRICS = ("recall_at_k", "ndcg_at_k")
KEPT = ("best", "last")


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """When training ends before its last step: once evaluations stop improving."""

    patience: int = key(
        0, "evaluations without an improvement after which training ends; 0: never", least=0
    )
    metric: str = key(
        "auc", "metric of the evaluations on eval.split", choices=tuple(IS_HIGHER_BETTER)
    )
    min_delta: float = key(
        0.0, "an evaluation that is better by more than this is an improvement", least=0
    )

    keep: str = key("best", "weights that the run saves and evaluates at its end", choices=KEPT)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.patience and (unused := keys_set(self)):
            raise ConfigError(
                f"{unused[0]} means nothing with patience 0, got {getattr(self, unused[0])!r}; set "
                "patience, or drop the key"
            )


def check_callbacks(names: Sequence[str]) -> None:
    """Check the key `callbacks`.

    Raises:
        ConfigError: a name is neither one of `CALLBACKS` nor of the form module:Class, or it is
            there twice.
    """
    for name in names:
        if name not in CALLBACKS and not names_class(name):
            raise ConfigError(
                f"callbacks must be of {', '.join(map(repr, CALLBACKS))}, or module:Class; got "
                f"{name!r}; a module is named as in an import, not by its file"
            )
        if list(names).count(name) > 1:
            raise ConfigError(f"callbacks must have each name once, got {name!r} twice; drop one")
