"""Taking a mini-batch from a loader while earlier ones wait for their step.

A loader may fill the same tensors again for each mini-batch. A plain loop has used them by then. A
pipeline that takes mini-batches ahead would train on the samples of later ones, without an error.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import versions_of
from recsys.batch import JaggedIds
from recsys.pipeline.model_tables import is_torchrec, items_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["OverwrittenBatch", "take"]

_HOLD_NO_TENSORS = (str, int, float, bytes, type(None), nn.Module)  # the most frequent first
_MOST_ITEMS = 1000  # longer lists are of numbers or texts


class OverwrittenBatch(RuntimeError):
    """The loader has written to a mini-batch that waits."""


def take(iterator: Iterator[Any], waiting: Sequence[Any]) -> Any:
    """`next(iterator)`, which must not write to mini-batches that wait.

    Not noticed are writes that torch does not count, such as those through numpy or `.data`, and
    tensors in objects with `__slots__`, in long lists or nested deeply.

    Args:
        iterator: Returns mini-batches.
        waiting: Mini-batches that it has returned, and that have not been used.

    Raises:
        OverwrittenBatch: it wrote to the memory of one, and has returned this memory again.
        StopIteration: the iterator has ended.
        Exception: any error of the iterator.
    """
    before = [_tensors_in(earlier) for earlier in waiting]
    versions = [versions_of(tensors) for tensors in before]
    batch = next(iterator)
    for earlier, tensors, old in zip(waiting, before, versions, strict=True):
        new = versions_of(tensors)
        # Views have one version, so a write to another part of a large tensor counts, too.
        is_overwritten = new != old and any(
            _overlap(tensor, returned)
            for tensor, *pair in zip(tensors, old, new, strict=True)
            if pair[0] != pair[1]
            for returned in _tensors_in(batch)
        )
        if is_overwritten or (batch is earlier and not _are_same(tensors, _tensors_in(batch))):
            raise OverwrittenBatch(
                "the iterator has filled an earlier mini-batch again, which still waits for its "
                "step; return new tensors for each mini-batch (.clone()), or use "
                "schedule=Sequential() without skip="
            )
    return batch


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have memory in common."""
    (begin, end), (other_begin, other_end) = _memory(tensor), _memory(other)
    return tensor.device == other.device and begin < other_end and other_begin < end


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor, and the one after its last."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    num_spanned = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + num_spanned * tensor.itemsize


def _are_same(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def _tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a mini-batch, also those inside its containers and attributes."""
    found: list[Tensor] = []
    containers: list[tuple[Iterable[Any], int]] = [((batch,), 0)]  # with the depth of their items
    for values, depth in containers:  # the loop goes on with those that it appends
        for value in values:
            if depth and isinstance(value, _HOLD_NO_TENSORS):
                continue
            if isinstance(value, Tensor):
                found.append(value)
            elif type(value) is JaggedIds:
                # Those of one-hot ids are made when asked for.
                offsets = None if value.is_known_one_hot() else value.offsets()
                parts = value.values(), value.weights_or_none(), offsets
                found += [part for part in parts if part is not None]
            elif is_torchrec(value):  # what it computes of these are views and copies
                parts = value.values(), value.weights_or_none(), value.offsets_or_none()
                found += [part for part in (*parts, value.lengths_or_none()) if part is not None]
            elif not (isinstance(value, list | tuple) and len(value) > _MOST_ITEMS):
                containers.append((items_of(value, depth), depth + 1))
    return [tensor for tensor in found if not tensor.is_inference()]  # those have no version
