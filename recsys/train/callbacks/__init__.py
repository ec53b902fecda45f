"""Callbacks: code that a run calls while it trains, for logging and early stopping.

A package that a callback logs to is imported when the callback is made.
"""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from recsys.train.callbacks.callback import Callback
    from recsys.train.callbacks.early_stopping import EarlyStopping
    from recsys.train.callbacks.mlflow import MLflow
    from recsys.train.callbacks.tensorboard import TensorBoard
    from recsys.train.callbacks.wandb import WeightsAndBiases

__all__ = ["Callback", "EarlyStopping", "MLflow", "TensorBoard", "WeightsAndBiases"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Callback": "callback",
            "EarlyStopping": "early_stopping",
            "MLflow": "mlflow",
            "TensorBoard": "tensorboard",
            "WeightsAndBiases": "wandb",
        },
    )
