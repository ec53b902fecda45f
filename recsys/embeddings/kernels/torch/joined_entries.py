"""Joins ledger entries, so that one launch locates the lookups of all.

A model that calls its tables one by one leaves an entry for each call. Entries that follow each
other, with equally many bags each, become one, as if a collection had looked up all tables:

    ids         copied into one array, one entry after the other; offsets, too
    gradients   left where they are, if they are columns of one array: the gradients of what
                `torch.cat` or `torch.stack` joined; else copied side by side

Letters: B samples, W columns.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.torch_compat import add_to_each
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Lookups

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import TorchBags

__all__ = ["join_entries"]

# More than this takes a device longer to copy than the host to launch a kernel for each entry.
_MOST_COPIED_BYTES = 64 * 2**20


def join_entries(ledger: Sequence[LedgerEntry]) -> Sequence[LedgerEntry]:
    """Join entries that follow each other: of one-hot bags, or of whole ones without weights.

    Args:
        ledger: Entries in order; bags are `TorchBags`.

    Returns:
        Entries with the same lookups in the same order, for a kernel: without tables and tickets.
    """
    if len(ledger) < 2:
        return ledger
    return [entry for _, same in groupby(ledger, _kind) for entry in _joined(list(same))]


def _kind(entry: LedgerEntry) -> Hashable:
    """Entries of equal kinds can be joined."""
    bags: Any = entry.bags  # `TorchBags`
    is_one_hot, gradient = bags.offsets is None, entry.gradient
    are_joinable = bags.weights is None and (is_one_hot or bags.is_whole)
    if not are_joinable or not bags.batch_size or gradient.dim() != 2:
        return object()
    return bags.batch_size, gradient.dtype, is_one_hot, bags.is_mean, bags.padding


def _joined(entries: Sequence[LedgerEntry]) -> Sequence[LedgerEntry]:
    """Join entries of one kind; they stay as they are if too much would have to be copied."""
    if len(entries) == 1:
        return entries
    gradients = [entry.gradient for entry in entries]
    whole = _as_columns(gradients)
    if whole is None and sum(each.nbytes for each in gradients) <= _MOST_COPIED_BYTES:
        widths = [each.shape[1] for each in gradients]
        whole = torch.cat(gradients, 1), list(accumulate(widths[:-1], initial=0))
    if whole is None:
        return entries
    gradient_BW, columns = whole
    inputs: list[Any] = [entry.bags for entry in entries]
    first = inputs[0]
    lookups = _side_by_side(
        tuple(entry.lookups for entry in entries),
        tuple(bags.num_features for bags in inputs),
        tuple(columns),
        gradient_BW.shape[1],
    )
    values = torch.cat([bags.values for bags in inputs])
    offsets = None if first.offsets is None else _join_offsets(inputs)
    bags: Any = first._replace(values=values, offsets=offsets, given=())
    return [LedgerEntry(lookups, bags, gradient_BW)]


def _join_offsets(inputs: Sequence[TorchBags]) -> Tensor:
    """Where the bags of all entries begin, and the end."""
    offsets: list[Any] = [bags.offsets for bags in inputs]
    firsts = list(accumulate((bags.values.numel() for bags in inputs[:-1]), initial=0))
    ends = [*(each[:-1] for each in offsets[:-1]), offsets[-1]]
    return torch.cat(add_to_each(ends, firsts))


def _as_columns(gradients: Sequence[Tensor]) -> tuple[Tensor, list[int]] | None:
    """The array that gradients are columns of, and the first column of each; None if there is none.

    Two gradients of several rows whose first rows lie in one row of such an array are in it: the
    memory between two rows of one of them is that array's.
    """
    addresses = [gradient.data_ptr() for gradient in gradients]
    low = min(addresses)
    first = gradients[addresses.index(low)]
    num_rows, row = len(first), first.stride(0)
    columns = [(address - low) // first.itemsize for address in addresses]
    ends = [column + each.shape[1] for column, each in zip(columns, gradients, strict=True)]
    width = max(ends)
    if num_rows < 2 or width > row or any(each.stride() != (row, 1) for each in gradients):
        return None
    if any((address - low) % first.itemsize for address in addresses):
        return None
    if any(each.is_neg() for each in gradients):  # torch may store a tensor negated
        return None
    return first.as_strided((num_rows, width), (row, 1)), columns


@lru_cache(maxsize=64)  # kernels keep what they make of the objects
def _side_by_side(
    lookups: tuple[Lookups, ...], features: tuple[int, ...], columns: tuple[int, ...], width: int
) -> Lookups:
    """All lookups as one object.

    Args:
        lookups: Those of each entry.
        features: The number of features in the input of each.
        columns: The first column of each gradient.
        width: W of the array that has them.
    """
    positions = accumulate(features[:-1], initial=0)
    return Lookups(
        tables=np.concatenate([each.tables for each in lookups]),
        positions=np.concatenate(
            [each.positions + np.uint64(at) for each, at in zip(lookups, positions, strict=True)]
        ),
        columns=np.concatenate(
            [each.columns + np.uint64(at) for each, at in zip(lookups, columns, strict=True)]
        ),
        width=width,
    )
