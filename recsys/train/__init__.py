"""Training runs, from a configuration to a folder of results: `from recsys.train import train`.

`trainer.py` says at its top where a step ends, a checkpoint is cut, and a model is evaluated.
"""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from recsys.train.callbacks import (
        Callback,
        EarlyStopping,
        MLflow,
        TensorBoard,
        WeightsAndBiases,
    )
    from recsys.train.export import export_run_checkpoint
    from recsys.train.predict import Predictor
    from recsys.train.recommend import Recommender
    from recsys.train.trainer import train

__all__ = [
    "Callback",
    "EarlyStopping",
    "MLflow",
    "Predictor",
    "Recommender",
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
            "Callback": "callbacks",
            "EarlyStopping": "callbacks",
            "MLflow": "callbacks",
            "Predictor": "predict",
            "Recommender": "recommend",
            "TensorBoard": "callbacks",
            "WeightsAndBiases": "callbacks",
            "export_run_checkpoint": "export",
            "train": "trainer",
        },
    )
