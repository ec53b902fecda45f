"""An error on one rank, or a setting that differs, ends every rank.

Without these checks the others would stay in a collective, or would read what they receive wrongly.

A collective returns when every rank has called it. If one rank raises before it, the others wait
until the time limit of the process group, which is 30 minutes by default. So the ranks agree on the
outcome of work that may fail on one of them, before they continue with collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from recsys.errors import ConfigError, RecsysError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Agreement", "OtherRankFailed", "on_every_rank", "require_same"]

_Result = TypeVar("_Result")


class OtherRankFailed(RecsysError, RuntimeError):
    """Another rank raised an error. The message names the rank and has its error."""


class Agreement:
    """Whether work has failed on a rank; ranks exchange it while they go on with other work.

    Making it is a collective, and so is `wait`, after the same collectives on every rank. In
    between, a rank whose own work has failed must call the collectives of those that go on.

    Args:
        error: The error on this rank, or None.
        group: All ranks of it make one.
        device: The device of tensors that the group's backend exchanges: the CPU for gloo.
    """

    def __init__(
        self, error: Exception | None, group: dist.ProcessGroup | None, device: torch.device | None
    ) -> None:
        self._error, self._group = error, group
        self._has_failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
        self._work = dist.all_reduce(
            self._has_failed, op=dist.ReduceOp.MAX, group=group, async_op=True
        )

    def wait(self) -> None:
        """Raise if a rank has failed.

        Raises:
            Exception: the error on this rank.
            OtherRankFailed: another rank has failed, and this one has not.
        """
        self._work.wait()
        if not self._has_failed.item():
            return
        error = self._error
        messages: list[str | None] = [None] * dist.get_world_size(self._group)
        own = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(messages, own, group=self._group)
        if error is not None:
            raise error
        rank, message = next((rank, each) for rank, each in enumerate(messages) if each is not None)
        raise OtherRankFailed(f"rank {rank} has failed, so every rank stops: {message}")


def on_every_rank(
    work: Callable[[], _Result], group: dist.ProcessGroup | None, device: torch.device | None
) -> _Result:
    """Run work that may fail on one rank; if it does, every rank raises. A collective.

    Without an error it costs one `all_reduce` of one number.

    Args:
        work: Must not call a collective.
        group: All ranks of it call this.
        device: The device of tensors that the group's backend exchanges: the CPU for gloo.

    Raises:
        Exception: the error of `work` on this rank.
        OtherRankFailed: `work` failed on another rank only.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    Agreement(error, group, device).wait()
    return result


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
