"""Training runs, from a configuration to a folder of results: `from recsys.train import train`."""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from recsys.train.callbacks.callback import Callback
    from recsys.train.callbacks.early_stopping import EarlyStopping
    from recsys.train.callbacks.mlflow import MLflow
    from recsys.train.callbacks.tensorboard import TensorBoard
    from recsys.train.callbacks.wandb import WeightsAndBiases
    from recsys.train.exports.export import export_run_checkpoint
    from recsys.train.trainer import train

__all__ = [
    "Callback",
    "EarlyStopping",
    "MLflow",
    "TensorBoard",
    "WeightsAndBiases",
    "export_run_checkpoint",
    "train",
]

if not TYPE_CHECKING:
    # `recsys` itself imports checkpoints from here.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Callback": "callbacks.callback",
            "EarlyStopping": "callbacks.early_stopping",
            "MLflow": "callbacks.mlflow",
            "TensorBoard": "callbacks.tensorboard",
            "WeightsAndBiases": "callbacks.wandb",
            "export_run_checkpoint": "exports.export",
            "train": "trainer",
        },
    )
