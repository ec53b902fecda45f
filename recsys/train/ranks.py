"""The processes that train a run together: this one alone, or those that `torchrun` starts.

    rank, num_ranks          the number of this process, and how many there are
    gather, gather_objects   what every process gave
    any_of                   whether a process has set a flag
    agree                    all processes were given the same

The last two lines, and both of `gather`, are collectives: every process calls them, in the same
order. One process gets its own back. Several processes must see the same file system.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from recsys._support.machine import num_cores
from recsys.errors import (
    ConfigError,
    NonFiniteGradient,
    OtherRankFailed,
    RecsysError,
    TrainingDiverged,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

__all__ = [
    "agree",
    "any_of",
    "gather",
    "gather_objects",
    "joined",
    "num_ranks",
    "rank",
    "share_of_cores",
]


def num_ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process. The first, 0, writes the run folder."""
    return dist.get_rank() if num_ranks() > 1 else 0


def share_of_cores() -> int:
    """This process's share of the cores of its machine; 0 for one process, which may have all."""
    of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 0 if num_ranks() == 1 else max(1, num_cores() // of_machine)


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes that a launcher has started, until the end of the `with` block.

    They are those of the default process group. Without one, the group is made here, if the
    environment has `RANK` and a `WORLD_SIZE` above 1, as under `torchrun`.

    Raises:
        MissingDependency: there are several, and TorchRec is not installed.
        OtherRankFailed: the connection to another process is lost.
    """
    has_group = dist.is_available() and dist.is_initialized()
    is_launched = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if num_ranks() == 1 and (has_group or not is_launched):
        yield
        return
    import recsys.distributed  # noqa: F401  # needs TorchRec, as what follows does

    # TorchRec calls a function of torch that warns once.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        if not has_group:
            _make_group()
        try:
            yield
        except NonFiniteGradient:  # the process that has the row raises it alone
            raise
        except TrainingDiverged:
            # All raise it. `torchrun` stops the first, which writes the record, when others end.
            dist.barrier()
            raise
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        if isinstance(error, RecsysError) or not is_lost:
            raise
        raise OtherRankFailed(
            f"process {os.environ.get('RANK', '')} lost its connection to another process: it has "
            "raised an error, which it shows, or was killed, which torchrun shows as an exit code "
            "such as -9 (often for lack of memory); --resume continues from the newest complete "
            "checkpoint, and torchrun --max-restarts 3 with --resume does so by itself"
        ) from error
    finally:
        if not has_group and dist.is_initialized():
            dist.destroy_process_group()


def _make_group() -> None:
    """Make the process group of the processes that were started.

    After a restart, the store of `torchrun` still has the addresses of the processes before, which
    gloo would wait for. So each start has names of its own.
    """
    from torch.distributed.rendezvous import rendezvous

    store, number, world = next(rendezvous("env://"))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"start-{start}", store)  # type: ignore[attr-defined]
    # Processes wait for each other's disks. One that ends is noticed at once: its sockets close.
    limit = timedelta(days=1)
    dist.init_process_group("gloo", timeout=limit, store=store, rank=number, world_size=world)


def gather(most: int, *tensors: Tensor) -> list[Tensor]:
    """One-dimensional tensors of all processes, process after process. A collective.

    Args:
        most: The most numbers that a tensor of a process has; the same on all.
        tensors: Are sent as float32.
    """
    if num_ranks() == 1:
        return list(tensors)
    own = torch.zeros(len(tensors), 1 + most)
    for row, tensor in zip(own, tensors, strict=True):
        row[0] = len(tensor)
        row[1 : 1 + len(tensor)] = tensor
    of_ranks = [torch.empty_like(own) for _ in range(num_ranks())]
    dist.all_gather(of_ranks, own)
    return [
        torch.cat([found[row, 1 : 1 + int(found[row, 0])] for found in of_ranks])
        for row in range(len(tensors))
    ]


def gather_objects(value: Any) -> list[Any]:
    """What every process gives, by rank. A collective."""
    found = [value] * num_ranks()
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


def any_of(*flags: bool) -> tuple[bool, ...]:
    """For each flag, whether a process has set it. A collective."""
    if num_ranks() == 1:
        return flags
    found = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return tuple(map(bool, found.tolist()))


def agree(given: Mapping[str, Any]) -> None:
    """Check that all processes were given the same. A collective.

    Args:
        given: Values by their names, as a message has them. They are compared by their `repr`.

    Raises:
        ConfigError: a value differs; all raise.
    """
    of_ranks = gather_objects({name: repr(value) for name, value in given.items()})
    first = of_ranks[0]
    for number, other in enumerate(of_ranks):
        for name in first | other:
            here, there = first.get(name, "nothing"), other.get(name, "nothing")
            if here != there:
                raise ConfigError(
                    f"{name} must be the same on every rank, got {here} on rank 0 and {there} on "
                    f"rank {number}; start all of them with the same one"
                )
