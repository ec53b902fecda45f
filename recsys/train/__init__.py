"""Training runs, from a configuration to a folder of results: `from recsys.train import train`."""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from recsys.train.trainer import train

__all__ = ["train"]

if not TYPE_CHECKING:
    # `recsys` itself imports checkpoints from here.
    __getattr__, __dir__ = lazy_names(__name__, {"train": "trainer"})
