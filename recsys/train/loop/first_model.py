"""`init_from`: the first values of a new run are those of a model that another run has saved.

So training goes on with newer data, without the older. It is a new run: optimizers, the order of
samples and schedules of learning rates begin anew.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from recsys.train.parts.build import require_features_of
from recsys.train.run_files.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn

    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["load_first_model", "open_first_model", "require_fitting"]

_WAY_OUT = "init_from needs a run with the same model.* keys, and data prepared --like its store"


def open_first_model(config: TrainConfig, source: SampleSource) -> RunFolder | None:
    """The run that `init_from` names; None without one. Warns if that run did not finish.

    Args:
        config: The configuration of the new run.
        source: Its data.

    Raises:
        ConfigError: the folder is not of a run that ended and saved its model, or the data has
            other features, or encodes values in another way, than that of the run.
    """
    if not config.init_from:
        return None
    folder = RunFolder.open(config.init_from)
    folder.require_model()
    record = folder.read_record()
    require_features_of(record, source)
    if record["status"] != "finished":
        warnings.warn(
            f"init_from: the status of {folder.path} is {record['status']!r}, not 'finished', and "
            "this run begins with the model that it saved when it stopped",
            stacklevel=2,
        )
    return folder


def load_first_model(folder: RunFolder, model: nn.Module) -> None:
    """Copy the saved model of a run into a new model, one tensor at a time.

    Raises:
        ConfigError: its tensors have other names, shapes or dtypes.
    """
    folder.load_model(model, _WAY_OUT)


def require_fitting(folder: RunFolder, model: nn.Module) -> None:
    """Check a model, which may be on device "meta", as `load_first_model` does.

    Raises:
        ConfigError: as `load_first_model`.
    """
    folder.require_fitting_model(model, _WAY_OUT)
