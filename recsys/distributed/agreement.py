"""A setting that differs between ranks is refused before they exchange rows.

Ranks with other settings would wait for each other, or would read what they receive wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from recsys.errors import ConfigError, RecsysError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OtherRankFailed", "require_same"]


class OtherRankFailed(RecsysError, RuntimeError):
    """Another rank raised an error or was killed, so this one lost its connection to it."""


def require_same(given: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Check that every rank has the same values. A collective.

    Args:
        given: Values by their names, as a message has them. They are compared by their `repr`.
        group: All ranks of it call this.

    Raises:
        ConfigError: one differs; every rank raises it.
    """
    of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    own = {name: repr(value) for name, value in given.items()}
    dist.all_gather_object(of_ranks, own, group=group)
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        for name in first | other:
            here, there = first.get(name, "nothing"), other.get(name, "nothing")
            if here != there:
                raise ConfigError(
                    f"{name} must be the same on every rank, got {here} on rank 0 and {there} on "
                    f"rank {rank}; start all of them with the same one"
                )
