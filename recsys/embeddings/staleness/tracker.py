"""`StalenessTracker`: finds the rows of a model that have stopped changing.

    take mini-batch k   use_flags_of(k), all_stale(...), add_inputs(...)
    train on it         begin_step(k), forward, backward, update, end_step(num_seen)

The tracker cuts training into windows of steps. At the end of each it measures how far the followed
rows have moved, finds the threshold, and decides which rows count as stale. A decision after s
steps holds for mini-batches s + `LEAD` and later, so it depends neither on how far a schedule looks
ahead nor on when its threads run. Everything happens in the calling thread.

A row is followed from the end of a window in which it was updated often enough. Then it has a
snapshot, and its history begins. It is followed as long as it is stale, or among the rows that are
updated most.

Letters: B samples, M rows, S sampled inputs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from recsys._support.untrusted import require_same, require_state
from recsys.embeddings.staleness.marks import RowMarks, UpdateWatch, marks_bytes
from recsys.embeddings.staleness.settings import LEAD, Staleness
from recsys.embeddings.tables_module import table_modules_in
from recsys.embeddings.tiers.write_back import write_back
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.rows.bags import Bags
    from recsys.embeddings.rows.tables import TableGroup

__all__ = [
    "MOST_INPUTS",
    "StalenessTracker",
    "groups_in",
    "input_levels",
    "table_rows",
    "tracked_bytes",
]

MOST_INPUTS = 4096  # the newest inputs, which the threshold is found from
_MOST_SHARE = 1.5  # times the share: what inputs with equal levels may add to it
_REST = 4  # windows in which a stale row is not judged before its trial
_FLAG_BYTES = 2 * 8  # in the lists of rows that are stale now, and for mini-batches taken ahead
_NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)


class StalenessTracker:
    """Follows the rows of a model and says which of them are stale.

    In a loop of your own, where `parts` is what `lookups(...)` of the modules returns:

        tracker.add_inputs(num_seen, parts, B, samples)  # some samples of mini-batch k
        tracker.begin_step(k)
        ...  # forward, backward, update
        num_seen += B
        tracker.end_step(num_seen)
        tracker.use_flags_of(k + 1)
        tracker.all_stale(next_parts, B)

    The tracker itself skips nothing, except that with `freezes_rows` stale rows are not updated.

    Mini-batches are numbered 0, 1, 2 ... over the whole training; mini-batch k is trained in step
    k. A sample's stream index is its number in the stream of raw samples, skipped ones included;
    `num_seen` raw samples are used up.

    Args:
        modules: A model, or modules of it. Their rows are updated by recsys. Other tables of their
            optimizer are followed, too, and freeze with them.
        staleness: The settings.
        share: The share of inputs all of whose rows are to be stale; see `share` below.
        freezes_rows: Whether steps leave out stale rows: no update, no write-back.

    Attributes:
        staleness: As given.
        share: The target share. It may be changed at any time; the next window's end uses it. With
            0, no row is stale from then on.
        freezes_rows: As given.
        num_steps: Steps so far, and the number of the next mini-batch.

    Raises:
        ConfigError: `share` is not in [0, 1].
        ValueError: there is no recsys module, the rows of one are not updated by recsys, or another
            tracker has them.
    """

    def __init__(
        self,
        modules: nn.Module | Iterable[nn.Module],
        staleness: Staleness = Staleness(),  # noqa: B008  # frozen
        *,
        share: float = 0.2,
        freezes_rows: bool = False,
    ) -> None:
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise ConfigError(f"share must be a number in [0, 1], got {share!r}")
        self.staleness, self.share, self.freezes_rows = staleness, share, freezes_rows
        self._marks = RowMarks(groups_in([modules] if isinstance(modules, nn.Module) else modules))
        self._followed = FollowedRows(self._marks, staleness, freezes_rows=freezes_rows)
        self._watch = UpdateWatch(self._marks)
        self.reset()

    def reset(self) -> None:
        """Forget all that was found: no row is stale or followed, as after no step.

        `share` stays. To continue after some steps without a state, set `num_steps` then.
        """
        self.cancel_step()
        self.num_steps = self._num_seen = 0
        self._threshold: float | None = None
        self._stale_share: float | None = None
        # The stream index and the rows of each input. Those of mini-batches ahead come last.
        self._inputs: list[tuple[int, NDArray[np.int64]]] = []
        # The first mini-batch that a decision holds for, and its stale rows.
        self._flags = [(0, _NO_ROWS)]
        self._watch.num_lookups = self._watch.num_left_out = 0
        self._followed.reset()
        self._marks.set_stale(_NO_ROWS)
        self._marks.set_counts(_NO_ROWS, _NO_ROWS.astype(np.uint16))

    def begin_step(self, number: int, *, freezes: bool = True) -> None:
        """Called before a step on mini-batch `number`, in training.

        Args:
            number: Number of the mini-batch.
            freezes: With `freezes_rows`, whether stale rows are left out of this step; False in the
                unskipped steps of a guard.

        Raises:
            ValueError: `number` is not `num_steps`.
        """
        if number != self.num_steps:  # windows and flags would be those of other steps
            raise ValueError(
                f"begin_step: mini-batch {self.num_steps} must come next, got {number}; count them "
                "over all epochs, and call end_step after each step (after cancel_step the number "
                "stays); to continue without a state, set num_steps"
            )
        if self.freezes_rows:
            self.use_flags_of(number)
            self._watch.freezes = freezes
        self._watch.is_counting = number % self.staleness.count_every == 0

    def end_step(self, num_seen: int) -> None:
        """Called after the step; at a window's end it decides which rows are stale.

        Args:
            num_seen: Raw samples used up so far, skipped ones included.

        Raises:
            ConflictingWrite: tables were written to while slots held updated rows.
            TiersFailed: a transfer of rows has failed.
        """
        self.cancel_step()
        self.num_steps += 1
        self._num_seen = num_seen
        if self.num_steps % self.staleness.window == 0:
            self._end_window(self.num_steps // self.staleness.window - 1)
        # A raw mini-batch that the last mini-batch was made of may be taken again.
        if len(self._flags) > 1 and self._flags[1][0] < self.num_steps:
            del self._flags[0]

    def cancel_step(self) -> None:
        """Called instead of `end_step` after a step that raised; the next one has its number."""
        self._watch.is_counting, self._watch.freezes = False, None

    def use_flags_of(self, number: int) -> None:
        """Mark as stale the rows that count as stale for mini-batch `number`.

        The numbers may fall again, down to the last step's: after look-ahead was dropped, a raw
        mini-batch that its mini-batch was made of in part is taken again.

        Args:
            number: Number of a mini-batch.
        """
        rows = next((rows for first, rows in self._flags[::-1] if first <= number), _NO_ROWS)
        if rows is not self._marks.stale:
            self._marks.set_stale(rows)

    def all_stale(self, parts: Sequence[tuple[Part, Bags]], batch_size: int) -> Tensor:
        """Which samples are stale: they look up rows, and stale ones only; (B,) bool on the CPU.

        Call `use_flags_of` first. A feature without ids does not matter, but a sample without any
        id is not stale. Nor is a sample of a lookup in tables that the tracker does not follow.

        Args:
            parts: All lookups of the mini-batch, with B bags for each feature.
            batch_size: B.

        Raises:
            ValueError: a lookup has another number of bags.
            MalformedBags: offsets do not ascend.
        """
        return torch.from_numpy(self._marks.all_stale(parts, batch_size))

    def add_inputs(
        self,
        first_index: int,
        parts: Sequence[tuple[Part, Bags]],
        batch_size: int,
        samples: Tensor,
    ) -> None:
        """Add samples of a mini-batch to those that the threshold is found from.

        A window's end uses the last 4096 that are used up by then. If the stream index falls again,
        because look-ahead was dropped, the samples from there on are forgotten.

        Args:
            first_index: Number of the mini-batch's first sample in the stream.
            parts: All lookups of the mini-batch; see `all_stale`.
            batch_size: B.
            samples: Numbers of the samples in the mini-batch, (S,) int64 ascending.
        """
        chosen = samples.cpu().numpy()
        if len(chosen):
            indices = (first_index + chosen).tolist()
            rows = self._marks.rows_of_samples(parts, batch_size, chosen)
            del self._inputs[bisect_left(self._inputs, indices[0], key=itemgetter(0)) :]
            self._inputs += zip(indices, rows, strict=True)
        self._used_inputs()

    def _used_inputs(self) -> list[tuple[int, NDArray[np.int64]]]:
        """The last 4096 inputs that are used up; those before them are forgotten."""
        num_used = bisect_left(self._inputs, self._num_seen, key=itemgetter(0))
        del self._inputs[: max(0, num_used - MOST_INPUTS)]
        return self._inputs[: min(num_used, MOST_INPUTS)]

    @property
    def has_stale_rows(self) -> bool:
        """Whether a row is marked as stale now."""
        return len(self._marks.stale) > 0

    def stale_rows(self) -> dict[str, NDArray[np.int64]]:
        """The rows of each table that are marked as stale now, ascending, by the table's name.

        If tables of two optimizers have one name, the number of the optimizer comes before it.
        """
        return self._marks.by_table(self._marks.stale)

    @property
    def num_bytes(self) -> int:
        """Bytes of marks, snapshots and history; they come on top of a budget of the tables.

        Without the ids of 4096 sampled inputs, and of those of mini-batches that are taken ahead.
        """
        groups = self._marks.groups
        return tracked_bytes([table for group in groups for table in group.tables], self.staleness)

    def report(self) -> dict[str, Any]:
        """What was found so far, in JSON types.

        Returns:
            `memory_bytes`; with `freezes_rows`, `num_lookups` of updates and how many of them were
            `num_lookups_left_out` (0 without); the `threshold`, or null if no row can be stale;
            `stale_share` of the sampled inputs at the last window's end, or null; `stale_rows` by
            table, on trial or not; and `num_followed` rows.
        """
        history = self._followed.history
        stale = self._marks.by_table(history["row"][history["is_stale"]])
        return {
            "memory_bytes": self.num_bytes,
            "num_lookups": self._watch.num_lookups,
            "num_lookups_left_out": self._watch.num_left_out,
            "threshold": self._threshold,
            "stale_share": self._stale_share,
            "stale_rows": {name: len(rows) for name, rows in stale.items()},
            "num_followed": len(history),
        }

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step, in JSON types and tensors.

        Mini-batches taken beyond that step do not count: they are taken again.
        """
        inputs, (rows, counts) = self._used_inputs(), self._marks.counted()
        looked_up = [of_input for _, of_input in inputs]
        return {
            "settings": asdict(self.staleness),
            "sizes": list(self._marks.sizes),
            "num_steps": self.num_steps,
            "num_seen": self._num_seen,
            "threshold": self._threshold,
            "stale_share": self._stale_share,
            "lookups": [self._watch.num_lookups, self._watch.num_left_out],
            "inputs": [
                torch.tensor([index for index, _ in inputs], dtype=torch.int64),
                torch.tensor(list(map(len, looked_up)), dtype=torch.int64),
                torch.from_numpy(np.concatenate([_NO_ROWS, *looked_up])),
            ],
            "flags": [[first, torch.from_numpy(rows.copy())] for first, rows in self._flags],
            "history": torch.from_numpy(self._followed.history.view(np.uint8).copy()),
            "snapshots": [rows.cpu().clone() for rows in self._followed.snapshots],
            "counted": [torch.from_numpy(rows), torch.from_numpy(counts.astype(np.int16))],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, after rows and optimizers were loaded. `share` is not part of it.

        Args:
            state: What `state_dict` returned.

        Raises:
            ConfigError: `state` is not of a tracker with the same settings and tables; nothing has
                changed.
        """
        found = require_state("tracker state", state, self.state_dict())
        require_same(
            "tracker", found, {"settings": asdict(self.staleness), "sizes": self._marks.sizes}
        )
        self.reset()
        self.num_steps, self._num_seen = found["num_steps"], found["num_seen"]
        self._threshold, self._stale_share = found["threshold"], found["stale_share"]
        self._watch.num_lookups, self._watch.num_left_out = found["lookups"]
        indices, lengths, rows = (tensor.cpu().numpy() for tensor in found["inputs"])
        of_inputs = np.split(rows.copy(), lengths.cumsum()[:-1])
        self._inputs = list(zip(indices.tolist(), of_inputs, strict=False))
        self._flags = [(first, rows.cpu().numpy().copy()) for first, rows in found["flags"]]
        history = found["history"].cpu().numpy().copy()
        self._followed.history = history.view(self._followed.history.dtype)
        self._followed.snapshots = [rows.clone() for rows in found["snapshots"]]
        rows, counts = (tensor.cpu().numpy() for tensor in found["counted"])
        self._marks.set_counts(rows, counts.astype(np.uint16))
        self.use_flags_of(self.num_steps)

    def close(self) -> None:
        """Stop following rows; this can be called again."""
        self._watch.close()

    def __del__(self) -> None:
        """Stop following rows when the tracker is deleted."""
        if hasattr(self, "_watch"):  # else `__init__` raised
            self.close()

    def _end_window(self, window: int) -> None:
        followed, inputs = self._followed, [rows for _, rows in self._used_inputs()]
        levels = followed.judge(window)
        of_inputs = input_levels(inputs, followed.history["row"].copy(), levels)
        threshold = self._find_threshold(of_inputs)
        followed.history["is_stale"] = levels <= threshold
        self._threshold = threshold if np.isfinite(threshold) else None
        self._stale_share = float((of_inputs <= threshold).mean()) if inputs else None
        self._flags.append((self.num_steps + LEAD, followed.stale_in(window + 1)))
        followed.follow()

    def _find_threshold(self, levels: NDArray[np.float64]) -> float:
        """The level at rank share * S of the sampled inputs: it is exact, and takes one sort.

        Equal levels at that rank may exceed the share, by a half at most; else the next lower one
        is the threshold. So it is if the level is infinite. With no such level it is -inf.

        Args:
            levels: Levels of the sampled inputs, (S,).
        """
        ordered, wanted = np.append(np.sort(levels), inf), self.share * len(levels)
        too_high = ordered[min(len(levels), int(_MOST_SHARE * wanted))]
        chosen = ordered[: int(wanted)]
        return float(chosen[chosen < too_high].max(initial=-inf))


def groups_in(models: Iterable[nn.Module]) -> list[TableGroup]:
    """The groups that the optimizers of all recsys modules update, each once.

    Raises:
        ValueError: there is no recsys module, or the rows of one are not updated by recsys.
    """
    found: dict[TableGroup, None] = {}
    for model in models:
        for name, module in table_modules_in(model).items():
            updates = module.updates()
            if not updates:
                table = next((table.name for table in module.tables()), name)
                raise ValueError(
                    f"table {table!r} of {name!r}: only rows that recsys updates can be followed; "
                    "train it (requires_grad), give the module a recsys optimizer (optimizer=) or "
                    "use recsys.accelerate; or use a policy that follows no rows, such as "
                    "Importance, or give a StalenessTracker the other modules only"
                )
            found |= dict.fromkeys(update.group for update in updates)
    if not found:
        raise ValueError(
            "the model has no module of recsys.embeddings, so no row can be followed; use "
            "recsys.accelerate(model, optimizer=...) first"
        )
    return list(found)


def history_type(patience: int) -> np.dtype[Any]:
    """What is kept about a followed row.

    Fields:
        row: Its number, counted over all tables.
        judged_in: The last window in which its drift was measured.
        num_judged: Windows in a row in which it was measured.
        is_stale: Whether it is stale; also while it is on trial.
        drifts: Its last `patience` drifts, the oldest first.
    """
    return np.dtype(
        [
            ("row", np.int64),
            ("judged_in", np.int32),
            ("num_judged", np.int32),
            ("is_stale", np.bool_),
            ("drifts", np.float32, (patience,)),
        ]
    )


def tracked_bytes(tables: Sequence[Tensor], staleness: Staleness) -> int:
    """The most bytes that a tracker takes: marks, snapshots, history, and lists of stale rows.

    Args:
        tables: All tables that it follows; only their shapes and dtypes are read.
        staleness: The settings.
    """
    num_rows = sum(map(len, tables))
    of_row = max(table.shape[1] * table.dtype.itemsize for table in tables)
    of_row += history_type(staleness.patience).itemsize + _FLAG_BYTES
    return marks_bytes(num_rows) + min(staleness.max_rows, num_rows) * of_row


def table_rows(marks: RowMarks, rows: NDArray[np.int64]) -> Iterator[tuple[slice, Tensor]]:
    """The newest values of rows, (M,) ascending, table by table, where kernels run.

    Yields:
        Which of the rows are of the table, and their values.

    Raises:
        ConflictingWrite: a table was written to while slots had newer rows.
        TiersFailed: a transfer of rows has failed.
    """
    ends, number = np.searchsorted(rows, marks.first_rows).tolist(), 0
    for group in marks.groups:
        write_back(group)
        for table in group.tensors[: len(group.tables)]:  # not their states
            chosen = slice(ends[number], ends[number + 1])
            at = torch.from_numpy(rows[chosen] - marks.first_rows[number])
            yield chosen, table.index_select(0, at.to(table.device)).to(group.device)
            number += 1


def input_levels(
    inputs: Sequence[NDArray[np.int64]], rows: NDArray[np.int64], levels: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The level of each input, (S,): the greatest level of its rows; infinite if it has no rows.

    Args:
        inputs: The rows of each input.
        rows: The rows that have a level, (M,) ascending; the level of others is infinite.
        levels: Their levels, (M,).
    """
    looked_up = np.concatenate([np.empty(0, np.int64), *inputs])
    positions = np.searchsorted(rows, looked_up)
    of_rows = np.append(levels, inf)[positions]
    of_rows[np.append(rows, -1)[positions] != looked_up] = inf
    found = np.full(len(inputs), -inf)
    np.maximum.at(found, np.arange(len(inputs)).repeat(list(map(len, inputs))), of_rows)
    found[found == -inf] = inf
    return found


class FollowedRows:
    """The followed rows.

    Args:
        marks: Bits and counts of all rows.
        staleness: The settings.
        freezes_rows: Whether steps leave out stale rows.

    Attributes:
        history: A `history_type` for each followed row, (M,), ascending by row.
        snapshots: The rows when the window began, table by table.
    """

    def __init__(self, marks: RowMarks, staleness: Staleness, *, freezes_rows: bool) -> None:
        self._marks, self._staleness, self._freezes_rows = marks, staleness, freezes_rows
        self.reset()

    def reset(self) -> None:
        """Follow no row."""
        self.history: NDArray[Any] = np.empty(0, history_type(self._staleness.patience))
        self.snapshots = [now for _, now in table_rows(self._marks, self.history["row"])]

    def judge(self, window: int) -> NDArray[np.float64]:
        """Measure how far each row has moved in a window.

        Args:
            window: Number of the window that ends.

        Returns:
            The level of each row, (M,): the greatest of its last `patience` drifts; infinite if it
            is unknown.
        """
        settings, history = self._staleness, self.history
        num_judged, drifts = history["num_judged"], history["drifts"]
        updates = self._marks.counts_of(history["row"]).astype(np.int64) * settings.count_every
        is_judged = updates >= settings.min_updates
        # A row that was stale in the window before is so for 32 steps more. If it freezes, it does
        # not move in these, so it is judged by the next window.
        rests = history["is_stale"] & (window - history["judged_in"] <= _REST + self._freezes_rows)
        if self._freezes_rows:
            is_judged &= ~rests
        drifts[is_judged, :-1] = drifts[is_judged, 1:]
        drifts[is_judged, -1] = self._measure()[is_judged]
        history["judged_in"][is_judged] = window
        num_judged[is_judged] += 1
        num_judged[~is_judged & ~rests] = 0
        return np.where(num_judged >= settings.patience, drifts.max(1), inf).astype(np.float64)

    def _measure(self) -> NDArray[np.float32]:
        """The drift of each row, (M,): the mean change of its numbers; 16 bits count as 32.

        That of a row that is no number, then or now, is infinite.
        """
        found = np.empty(len(self.history), np.float32)
        of_tables = table_rows(self._marks, self.history["row"])
        for before, (chosen, now) in zip(self.snapshots, of_tables, strict=True):
            dtype = torch.promote_types(now.dtype, torch.float32)
            change = (now.to(dtype) - before.to(now.device, dtype)).abs().mean(1).float()
            found[chosen] = change.nan_to_num(nan=inf, posinf=inf).cpu().numpy()
        return found

    def stale_in(self, window: int) -> NDArray[np.int64]:
        """The rows that count as stale in a window: stale and not on trial, ascending."""
        history = self.history
        is_resting = history["is_stale"] & (window - history["judged_in"] <= _REST)
        return history["row"][is_resting].copy()

    def follow(self) -> None:
        """Choose the rows to follow in the next window, take their snapshots, and count anew."""
        settings, history = self._staleness, self.history
        stale = history["row"][history["is_stale"]]
        rows, counts = self._marks.counted(-(-settings.min_updates // settings.count_every))
        is_other = ~np.isin(rows, stale, assume_unique=True)
        rows, counts = rows[is_other], counts[is_other]
        most = min(settings.max_rows, sum(self._marks.sizes)) - len(stale)
        rows = rows[np.argsort(np.uint16(2**15) - counts, kind="stable")[:most]]
        rows = np.sort(np.concatenate([stale, rows]))
        self.history = np.zeros(len(rows), history.dtype)
        self.history["row"] = rows
        _, new, old = np.intersect1d(rows, history["row"], True, True)
        self.history[new] = history[old]
        self.snapshots = [now for _, now in table_rows(self._marks, rows)]
        self._marks.set_counts(rows[:0], counts[:0])
