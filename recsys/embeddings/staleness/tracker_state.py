"""The saved state of a tracker: made, and checked when it is read. It may come from any file.

Letters: G groups, M rows, S inputs, V rows of inputs, D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.states import SavedState
from recsys.embeddings.staleness.row_marks import MOST_COUNTED
from recsys.embeddings.staleness.sampled_inputs import MOST_INPUTS, InputRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.staleness.followed_rows import FollowedRows
    from recsys.embeddings.staleness.sampled_inputs import SampledInputs

__all__ = [
    "GroupState",
    "group_state",
    "inputs_state",
    "read_group_state",
    "read_inputs_state",
    "read_rows",
    "with_frozen_until",
]

_FIELDS = ("next_trial", "period", "num_judged", "has_earlier", "is_stale", "drifts")
_GROUP_KEYS = ("sizes", "row", *_FIELDS, "before", "earlier", "counted", "counts", "lookups")
_MOST = 2**62


class GroupState(NamedTuple):
    """The checked state of a group.

    Attributes:
        history: A `history_type` for each followed row, (M,).
        before: Their snapshots, (M, D).
        earlier: Those of the window before, (M, D); None unless the measure needs them.
        counted: Rows that were updated in the window, ascending.
        counts: How often each was counted.
        lookups: Lookups of updates, and how many of them were left out.
    """

    history: NDArray[Any]
    before: Tensor
    earlier: Tensor | None
    counted: NDArray[np.int64]
    counts: NDArray[np.uint16]
    lookups: tuple[int, int]


def group_state(followed: FollowedRows) -> dict[str, Any]:
    """The state of a group."""
    history = followed.history
    rows, counts = followed.marks.counted()
    before, earlier = followed.snapshots()
    return {
        "sizes": list(followed.marks.sizes),
        **{name: torch.from_numpy(history[name].copy()) for name in ("row", *_FIELDS)},
        "before": before.cpu().clone(),
        "earlier": None if earlier is None else earlier.cpu().clone(),
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
        ConfigError: `entries` is no such state, or of other tables or settings.
    """
    if isinstance(entries, dict):  # earlier versions saved `since`, which nothing reads
        entries = {key: value for key, value in entries.items() if key != "since"}
    found = SavedState("staleness state: groups", entries, _GROUP_KEYS)
    if found["sizes"] != followed.marks.sizes:
        raise found.error("sizes", f"{followed.marks.sizes}, the rows of each table")
    num_rows = sum(followed.marks.sizes)
    rows = read_rows(found, "row", num_rows, followed.max_rows)
    history: Any = np.zeros(len(rows), followed.history.dtype)
    history["row"] = rows
    patience = history.dtype["drifts"].shape[0]
    for name in _FIELDS:
        kind = history.dtype[name]
        most = patience if name == "num_judged" else _MOST
        values = _array(found, name, kind.base, (len(rows), *kind.shape))
        if kind.base.kind == "i" and not ((values >= 0) & (values <= most)).all():
            raise found.error(name, f"numbers in [0, {most}]")
        if kind.base.kind == "f" and not (values >= 0).all():  # nan is not
            raise found.error(name, "numbers of at least 0")
        history[name] = values
    before, earlier = (
        None
        if wanted is None
        else found.tensor_of(name, wanted.dtype, (len(rows), wanted.shape[1]))
        for name, wanted in zip(("before", "earlier"), followed.snapshots(), strict=True)
    )
    if earlier is None and found["earlier"] is not None:
        raise found.error("earlier", "null for this measure")
    assert before is not None
    counted = read_rows(found, "counted", num_rows, num_rows)
    counts = _array(found, "counts", np.dtype(np.int16), (len(counted),))
    if not ((counts >= 1) & (counts <= MOST_COUNTED)).all():
        raise found.error("counts", f"numbers in [1, {MOST_COUNTED}]")
    num_lookups, num_left_out = found.wholes("lookups", 2)
    if num_left_out > num_lookups:
        raise found.error("lookups", "two counts, the second not above the first")
    return GroupState(
        history, before, earlier, counted, counts.astype(np.uint16), (num_lookups, num_left_out)
    )


def with_frozen_until(state: Any) -> Any:
    """A tracker's state with the key `frozen_until`, which earlier versions did not save.

    They assumed that each step had left out stale rows.
    """
    if isinstance(state, dict) and "num_steps" in state:
        return {"frozen_until": state["num_steps"], **state}
    return state


def inputs_state(inputs: SampledInputs, num_seen: int) -> dict[str, Any]:
    """The state of the sampled inputs that are used up."""
    indices, groups = inputs.newest(num_seen)
    return {
        "indices": torch.from_numpy(indices),
        "rows": [torch.from_numpy(each.rows) for each in groups],
        "bounds": [torch.from_numpy(each.bounds) for each in groups],
    }


def read_inputs_state(
    entries: Any, num_rows: Sequence[int], num_seen: int
) -> tuple[NDArray[np.int64], list[InputRows]]:
    """Check the state of sampled inputs.

    Args:
        entries: What `inputs_state` returned once.
        num_rows: The number of rows of each group.
        num_seen: Raw samples used up.

    Returns:
        What `SampledInputs.newest` returned.

    Raises:
        ConfigError: `entries` is no such state.
    """
    place = "staleness state: inputs"
    found = SavedState(place, entries, ("indices", "rows", "bounds"))
    indices = read_rows(found, "indices", num_seen, MOST_INPUTS)
    of_groups = (found.items(key, (len(num_rows),), "tensors") for key in ("rows", "bounds"))
    groups = []
    for count, rows, bounds in zip(num_rows, *of_groups, strict=True):
        of_group = SavedState(place, {"rows": rows, "bounds": bounds}, ("rows", "bounds"))
        ends = _array(of_group, "bounds", np.dtype(np.int64), (len(indices) + 1,))
        if ends[0] != 0 or (ends[1:] < ends[:-1]).any():
            raise of_group.error("bounds", "numbers that begin at 0 and never fall")
        values = _array(of_group, "rows", np.dtype(np.int64), (int(ends[-1]),))
        if not ((values >= -1) & (values < count)).all():
            raise of_group.error("rows", f"rows in [0, {count}), or -1")
        groups.append(InputRows(values, ends))
    return indices, groups


def read_rows(found: SavedState, key: str, num_rows: int, most: int) -> NDArray[np.int64]:
    """An entry that is an int64 tensor of ascending numbers in [0, num_rows), at most `most`.

    Raises:
        ConfigError: it is not.
    """
    value = found[key]
    is_list = isinstance(value, torch.Tensor) and value.dtype is torch.int64 and value.dim() == 1
    if is_list and len(value) <= most:
        rows: NDArray[np.int64] = value.cpu().numpy().copy()
        is_in_range = not len(rows) or (rows[0] >= 0 and rows[-1] < num_rows)
        if is_in_range and (rows[1:] > rows[:-1]).all():
            return rows
    raise found.error(
        key, f"an int64 tensor of at most {most} ascending numbers in [0, {num_rows})"
    )


def _array(
    found: SavedState, key: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    """An entry that is a tensor of this dtype and shape, as a new array."""
    of_torch = torch.from_numpy(np.empty(0, dtype)).dtype
    copied: NDArray[Any] = found.tensor_of(key, of_torch, shape).cpu().numpy().copy()
    return copied
