"""A check that `train` was given a configuration, and not the dictionary or the path of one."""

from recsys.config import TrainConfig

__all__ = ["require_config"]


def require_config(config: object) -> None:
    """Check that an argument is a configuration.

    Raises:
        TypeError: it is another object.
    """
    if not isinstance(config, TrainConfig):
        raise TypeError(
            f"config must be a TrainConfig, got {type(config).__name__}; recsys.config has "
            "build_config, which makes one of nested keys, and load_config, of a TOML file"
        )
