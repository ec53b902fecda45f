"""Counts collectives: how often a process calls them, what it sends, and how long it waits.

    with CountedCollectives() as found:
        step()
    found.uses["all_to_all_single", "float32"].bytes_sent

Bytes are those for *other* ranks; what a rank keeps for itself is left out. They are the contents
of tensors, without headers. A sum over ranks (`all_reduce`) is counted as a ring sends it:
`2 (W - 1) / W` times the tensor. Seconds are those in the call and in `wait` of its result, so
waiting for a slower rank is part of them, and work that a backend does in the background is not.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

__all__ = ["CountedCollectives", "Use"]


@dataclass
class Use:
    """What this process has done with one collective.

    Attributes:
        calls: How often it was called.
        bytes_sent: Bytes for other ranks.
        seconds: Time in calls and in waiting for their results.
    """

    calls: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0


class CountedCollectives:
    """Replaces the collectives of `torch.distributed` while a `with` block runs.

    It counts code that calls them as `torch.distributed.NAME`, as TorchRec and recsys do.

    Attributes:
        uses: By collective and dtype of the tensors.
    """

    def __init__(self) -> None:
        self.uses: dict[tuple[str, str], Use] = defaultdict(Use)
        self._originals = {name: getattr(dist, name) for name in _SENT if hasattr(dist, name)}

    def __enter__(self) -> Self:
        for name, original in self._originals.items():
            setattr(dist, name, self._counting(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            group = given.get("group")
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            tensor, num_bytes = _SENT[name](given, rank, world_size)
            use = self.uses[name, str(tensor.dtype).removeprefix("torch.")]
            use.calls += 1
            use.bytes_sent += num_bytes
            work = _timed(use, partial(original, *args, **kwargs))
            return None if work is None else _TimedWork(work, use)

        return call


class _TimedWork(dist.Work):
    """The result of an asynchronous collective; the time of `wait` is counted."""

    def __init__(self, work: dist.Work, use: Use) -> None:
        super().__init__()
        self._work, self._use = work, use

    def wait(self, *args: Any) -> Any:
        """Wait for the collective."""
        return _timed(self._use, partial(self._work.wait, *args))


def _timed(use: Use, function: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = function()
    use.seconds += time.perf_counter() - begin
    return result


def _of_split(given: Mapping[str, Any], rank: int, world_size: int) -> tuple[Tensor, int]:
    tensor, sizes = given["input"], given.get("input_split_sizes")
    if not sizes:
        return tensor, tensor.nbytes - tensor.nbytes // world_size
    return tensor, tensor.nbytes * (sum(sizes) - sizes[rank]) // max(1, sum(sizes))


def _of_list(name: str, given: Mapping[str, Any], rank: int, _: int) -> tuple[Tensor, int]:
    tensors: Sequence[Tensor] = given[name]
    return tensors[rank], sum(each.nbytes for each in tensors) - tensors[rank].nbytes


def _of_copies(name: str, given: Mapping[str, Any], _: int, world_size: int) -> tuple[Tensor, int]:
    return given[name], given[name].nbytes * (world_size - 1)


def _of_ring(given: Mapping[str, Any], _: int, world_size: int) -> tuple[Tensor, int]:
    return given["tensor"], 2 * given["tensor"].nbytes * (world_size - 1) // world_size


# By collective: one of its tensors, and the bytes for other ranks.
_SENT: dict[str, Callable[[Mapping[str, Any], int, int], tuple[Tensor, int]]] = {
    "all_to_all_single": _of_split,
    "all_to_all": partial(_of_list, "input_tensor_list"),
    "reduce_scatter": partial(_of_list, "input_list"),
    "reduce_scatter_tensor": _of_split,
    "reduce_scatter_single": _of_split,
    "all_gather": partial(_of_copies, "tensor"),
    "all_gather_into_tensor": partial(_of_copies, "input_tensor"),
    "all_gather_single": partial(_of_copies, "input_tensor"),
    "all_reduce": _of_ring,
    "broadcast": partial(_of_copies, "tensor"),
}
