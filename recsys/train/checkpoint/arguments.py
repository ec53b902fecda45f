"""The arguments of `Checkpoints.save`: their states, and the position of a loader."""

from __future__ import annotations

from typing import Any

from recsys.errors import ConfigError

__all__ = ["listed", "require_trained_position", "state_of"]


def state_of(argument: str, value: Any) -> Any:
    """The `state_dict` of an argument; None for None.

    Raises:
        ConfigError: it has none.
    """
    if value is None:
        return None
    if not hasattr(value, "state_dict"):
        raise ConfigError(
            f"{argument} must have state_dict and load_state_dict, got {type(value).__name__}; "
            "save what it needs as state"
        )
    return value.state_dict()


def require_trained_position(pipeline: Any, loader: Any) -> None:
    """Check that the loader's position does not count mini-batches that wait in the pipeline.

    Raises:
        ConfigError: it counts some; a run that is resumed would leave them out.
    """
    num_untold = 0 if loader is None else getattr(pipeline, "num_untold", 0)
    if num_untold:
        raise ConfigError(
            f"loader: the {type(loader).__name__} may count {num_untold} mini-batches as used "
            "that wait in the pipeline, because the iterator that was trained on has no "
            "num_waiting; train on a BatchLoader itself, give the iterator num_waiting "
            "(docs/python.md), or, if nothing is skipped, use schedule=Sequential()"
        )


def listed(value: Any) -> list[Any]:
    """One value or several, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]
