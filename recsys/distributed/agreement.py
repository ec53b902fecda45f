"""An error on one rank ends every rank, instead of leaving the others in a collective.

A collective returns when every rank has called it. If one rank raises before it, the others wait
until the time limit of the process group, which is 30 minutes by default. So the ranks agree on the
outcome of work that may fail on one of them, before they continue with collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from recsys.errors import RecsysError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OtherRankFailed", "on_every_rank"]

_Result = TypeVar("_Result")


class OtherRankFailed(RecsysError, RuntimeError):
    """Another rank raised an error. The message names the rank and has its error."""


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
    has_failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.all_reduce(has_failed, op=dist.ReduceOp.MAX, group=group)
    if not has_failed.item():
        return result
    messages: list[str | None] = [None] * dist.get_world_size(group)
    own = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(messages, own, group=group)
    if error is not None:
        raise error
    rank, message = next((rank, each) for rank, each in enumerate(messages) if each is not None)
    raise OtherRankFailed(f"rank {rank} has failed, so every rank stops: {message}")
