"""Training runs, from a configuration to a folder of results: `from recsys.train import train`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recsys.train.trainer import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    """Import `train` where it is used: `recsys` itself imports checkpoints from here."""
    if name == "train":
        from recsys.train.trainer import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
