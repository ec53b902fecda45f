"""The saved state of a tracker: made, and checked when it is read, because kernels trust it.

Letters: G groups, M rows, S inputs, V rows of inputs, D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.states import SavedState
from recsys.embeddings.staleness.followed_rows import GroupState
from recsys.embeddings.staleness.row_marks import MOST_COUNTED
from recsys.embeddings.staleness.sampled_inputs import MOST_INPUTS, InputRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.staleness.followed_rows import FollowedRows
    from recsys.embeddings.staleness.sampled_inputs import SampledInputs

__all__ = [
    "group_state",
    "inputs_state",
    "read_group_state",
    "read_inputs_state",
    "read_rows",
]

_GROUP_KEYS = ("sizes", "history", "before", "counted", "counts", "lookups")


def group_state(followed: FollowedRows) -> dict[str, Any]:
    """The state of a group."""
    rows, counts = followed.marks.counted()
    return {
        "sizes": list(followed.marks.sizes),
        "history": torch.from_numpy(followed.history.view(np.uint8).copy()),
        "before": followed.snapshots.cpu().clone(),
        "counted": torch.from_numpy(rows),
        "counts": torch.from_numpy(counts.astype(np.int16)),
        "lookups": list(followed.marks.lookups),
    }


def read_group_state(entries: Any, followed: FollowedRows) -> GroupState:
    """Check the state of a group.

    Args:
        entries: What `group_state` returned once.
        followed: The rows that will continue with it.

    Raises:
        ConfigError: `entries` is no such state, or of other tables.
    """
    found = SavedState("staleness state: groups", entries, _GROUP_KEYS)
    if found["sizes"] != followed.marks.sizes:
        raise found.error("sizes", f"{followed.marks.sizes}, the rows of each table")
    num_rows = sum(followed.marks.sizes)
    values, kind = found["history"], followed.history.dtype
    is_whole = isinstance(values, torch.Tensor) and values.dtype is torch.uint8
    if not is_whole or values.dim() != 1 or len(values) % kind.itemsize:
        raise found.error("history", f"a uint8 tensor of {kind.itemsize} bytes for each row")
    history = values.cpu().numpy().copy().view(kind)
    are_rows = _are_rows(history["row"], num_rows, followed.max_rows)
    if not are_rows or (history["is_stale"].view(np.uint8) > 1).any():
        raise found.error("history", f"that of at most {followed.max_rows} rows of {num_rows}")
    wanted = followed.snapshots
    before = found.tensor_of("before", wanted.dtype, (len(history), wanted.shape[1]))
    counted = read_rows(found, "counted", num_rows, num_rows)
    counts = _array(found, "counts", np.dtype(np.int16), (len(counted),))
    if not ((counts >= 1) & (counts <= MOST_COUNTED)).all():
        raise found.error("counts", f"numbers in [1, {MOST_COUNTED}]")
    num_lookups, num_left_out = found.wholes("lookups", 2)
    lookups = num_lookups, num_left_out
    return GroupState(history, before, counted, counts.astype(np.uint16), lookups)


def inputs_state(inputs: SampledInputs, num_seen: int) -> dict[str, Any]:
    """The state of the sampled inputs that are used up."""
    indices, groups = inputs.newest(num_seen)
    return {
        "indices": torch.from_numpy(indices),
        "rows": [torch.from_numpy(each.rows) for each in groups],
        "bounds": [torch.from_numpy(each.bounds) for each in groups],
    }


def read_inputs_state(
    entries: Any, num_groups: int, num_seen: int
) -> tuple[NDArray[np.int64], list[InputRows]]:
    """Check the state of sampled inputs.

    Args:
        entries: What `inputs_state` returned once.
        num_groups: G.
        num_seen: Raw samples used up.

    Returns:
        What `SampledInputs.newest` returned.

    Raises:
        ConfigError: `entries` is no such state.
    """
    place = "staleness state: inputs"
    found = SavedState(place, entries, ("indices", "rows", "bounds"))
    indices = read_rows(found, "indices", num_seen, MOST_INPUTS)
    groups = []
    of_groups = (found.items(key, (num_groups,), "tensors") for key in ("rows", "bounds"))
    for rows, bounds in zip(*of_groups, strict=True):
        of_group = SavedState(place, {"rows": rows, "bounds": bounds}, ("rows", "bounds"))
        ends = _array(of_group, "bounds", np.dtype(np.int64), (len(indices) + 1,))
        if ends[0] != 0 or (ends[1:] < ends[:-1]).any():
            raise of_group.error("bounds", "numbers that begin at 0 and never fall")
        values = _array(of_group, "rows", np.dtype(np.int64), (int(ends[-1]),))
        groups.append(InputRows(values, ends))
    return indices, groups


def read_rows(found: SavedState, key: str, num_rows: int, most: int) -> NDArray[np.int64]:
    """An entry that is an int64 tensor of ascending numbers in [0, num_rows), at most `most`.

    Raises:
        ConfigError: it is not.
    """
    value = found[key]
    if isinstance(value, torch.Tensor) and value.dtype is torch.int64 and value.dim() == 1:
        rows: NDArray[np.int64] = value.cpu().numpy().copy()
        if _are_rows(rows, num_rows, most):
            return rows
    raise found.error(
        key, f"an int64 tensor of at most {most} ascending numbers in [0, {num_rows})"
    )


def _are_rows(rows: NDArray[np.int64], num_rows: int, most: int) -> bool:
    is_in_range = not len(rows) or (rows[0] >= 0 and rows[-1] < num_rows)
    return len(rows) <= most and bool(is_in_range) and bool((rows[1:] > rows[:-1]).all())


def _array(
    found: SavedState, key: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    """An entry that is a tensor of this dtype and shape, as a new array."""
    of_torch = torch.from_numpy(np.empty(0, dtype)).dtype
    copied: NDArray[Any] = found.tensor_of(key, of_torch, shape).cpu().numpy().copy()
    return copied
