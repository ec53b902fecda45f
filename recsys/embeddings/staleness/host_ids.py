"""The ids of a lookup on the host, as arguments of the kernels of this room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys.embeddings.kernels.cpu.places import LEFT_OUT
from recsys.errors import MalformedBags

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.rows.bags import Bags, Lookups
    from recsys.embeddings.rows.ledger import Call

__all__ = ["NO_LOOKUP", "HostIds", "given_ids", "kept_ids"]

NO_LOOKUP = np.uint64(2**64 + LEFT_OUT)  # an id that is no lookup, on a device
_NO_OFFSETS: NDArray[np.int32] = np.empty(0, np.int32)


class HostIds(NamedTuple):
    """Ids, and which are looked up where.

    Attributes:
        tables: Of each lookup, (L,) uint64.
        positions: Of each lookup's feature, (L,) uint64.
        ids: (N,).
        offsets: Where bags begin, and the end of the last; empty if bag i is id i.
        is_one_hot: Whether bag i is id i.
        num_samples: B.
    """

    tables: NDArray[np.uint64]
    positions: NDArray[np.uint64]
    ids: NDArray[Any]
    offsets: NDArray[Any]
    is_one_hot: int
    num_samples: int


def given_ids(lookups: Lookups, bags: Bags) -> HostIds:
    """The ids of an input; those of a device are copied to the host, which waits.

    Raises:
        MalformedBags: offsets do not ascend from 0 to N.
    """
    ids = bags.ids.reshape(-1).cpu().numpy()
    if bags.offsets is not None:
        offsets = bags.offsets.cpu().numpy()
        if len(offsets) == bags.num_bags:
            offsets = np.append(offsets, offsets.dtype.type(len(ids)))
        if not _ascends(offsets, len(ids)):
            raise MalformedBags(
                f"offsets must ascend from 0 to the number of ids, which is {len(ids)}"
            )
    elif len(ids) == bags.num_bags:
        offsets = _NO_OFFSETS
    else:
        offsets = np.arange(bags.num_bags + 1) * (len(ids) // bags.num_bags)
    return _host_ids(lookups, ids, offsets, bags.num_samples)


def kept_ids(call: Call) -> HostIds:
    """The ids of a lookup that waits for its update; see `given_ids`."""
    kept = call.kept.cpu().numpy()
    ids, offsets = kept[: call.num_ids], _NO_OFFSETS
    if call.num_bounds:
        offsets = kept[call.num_ids : call.num_ids + call.num_bounds + 1]
        if not (call.kept.is_cpu or _ascends(offsets, len(ids))):  # the lookup raises the error
            ids, offsets = ids[:0], np.zeros_like(offsets)
    return _host_ids(call.lookups, ids, offsets, call.num_samples)


def _ascends(offsets: NDArray[Any], num_ids: int) -> bool:
    """Whether kernels may follow the offsets."""
    return bool(offsets[0] == 0 and offsets[-1] <= num_ids and (np.diff(offsets) >= 0).all())


def _host_ids(
    lookups: Lookups, ids: NDArray[Any], offsets: NDArray[Any], num_samples: int
) -> HostIds:
    tables, positions, _ = lookups.arrays.astype(np.uint64)
    return HostIds(tables, positions, ids, offsets, int(offsets is _NO_OFFSETS), num_samples)
