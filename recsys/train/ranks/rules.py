"""What `recsys train` does not support on several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.errors import ConfigError
from recsys.train.parts.models import needs_rows

if TYPE_CHECKING:
    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["require_supported"]

_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


def require_supported(config: TrainConfig, source: SampleSource, num_ranks: int) -> None:
    """Check that several processes can train a configuration.

    Args:
        config: The configuration.
        source: The data.
        num_ranks: W, the number of processes.

    Raises:
        ConfigError: they cannot.
    """
    rules = [
        ("embeddings", config.embeddings, ("recsys",)),
        ("device", config.device, ("cpu",)),
        ("init_from", config.init_from, ("",)),
        ("optimizer.name", config.optimizer.name, _OPTIMIZERS),
        ("schedule.name", config.schedule.name, ("", "sequential", "lookahead")),
        ("skip.policy", config.skip.policy, ("none",)),
    ]
    for key, value, allowed in rules:
        if value not in allowed:
            wanted = repr(allowed[0]) if len(allowed) == 1 else f"one of {allowed}"
            raise ConfigError(
                f"{key} must be {wanted} on {num_ranks} processes, got {value!r}; change it, or "
                "train on one process"
            )
    if needs_rows(config.model, source):
        raise ConfigError(
            f"model.name {config.model.name!r} looks rows up without pooling, which {num_ranks} "
            "processes do not support; choose a model that pools, such as 'dlrm', or train on one "
            "process"
        )
    if config.batch_size % num_ranks:
        size = config.batch_size
        raise ConfigError(
            f"batch_size must be a multiple of the number of processes, {num_ranks}, got {size}; "
            f"start a number that divides {size}, or, for a new run, set it to "
            f"{-(-size // num_ranks) * num_ranks}"
        )
    last = len(source.splits["train"]) % config.batch_size
    if 0 < last < num_ranks:
        raise ConfigError(
            f"the last mini-batch of an epoch has {last} samples, fewer than the {num_ranks} "
            f"processes, with batch_size {config.batch_size}; start fewer processes, or, for a new "
            "run, choose another batch_size"
        )
