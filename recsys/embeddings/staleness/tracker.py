"""`StalenessTracker`: finds the rows of a model that have stopped changing.

    take mini-batch k   use_flags_of(k), all_stale(...), add_inputs(...)
    train on it         begin_step(k), forward, backward, update, end_step(num_seen)

The tracker cuts training into windows of steps. At the end of each it measures how far the followed
rows have moved, finds the threshold, and decides which rows count as stale. A decision after s
steps holds for mini-batches s + `LEAD` and later, so it depends neither on how far a schedule looks
ahead nor on when its threads run. Everything happens in the calling thread.

Letters: B samples, S sampled inputs, G groups, M rows.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from recsys._support.states import SavedState
from recsys._support.user_warnings import warn_caller
from recsys.embeddings.staleness.flag_sets import FlagSet, FlagSets
from recsys.embeddings.staleness.followed_rows import FollowedRows
from recsys.embeddings.staleness.sampled_inputs import (
    SampledInputs,
    bags_per_sample,
    below_ties,
    quantile,
)
from recsys.embeddings.staleness.settings import LEAD, Staleness
from recsys.embeddings.staleness.tracked_tables import groups_in, names_of, require_all_tables
from recsys.embeddings.staleness.tracker_state import (
    group_state,
    inputs_state,
    read_group_state,
    read_inputs_state,
)
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.rows.bags import Bags
    from recsys.embeddings.rows.tables import TableGroup
    from recsys.embeddings.staleness.followed_rows import Decision
    from recsys.embeddings.staleness.sampled_inputs import InputRows

__all__ = ["StalenessTracker"]

_WINDOW_KEYS = (
    "step",
    "threshold",
    "stale_rows",
    "num_followed",
    "num_judged",
    "num_thawed",
    "stale_share",
    "num_inputs",
)
_COUNTS = ("num_steps", "num_seen", "frozen_until")
_STATE_KEYS = ("settings", *_COUNTS, "last_window", "inputs", "flag_sets", "groups")


class StalenessTracker:
    """Follows the rows of a model and says which of them are stale.

    The tracker itself skips nothing, except that with `freezes_rows` stale rows are not updated.

    Mini-batches are numbered 0, 1, 2 ... over the whole training; mini-batch k is trained in step
    k. A sample's stream index is its number in the stream of raw samples, skipped ones included;
    `num_seen` raw samples are used up.

    Args:
        modules: A model, or modules of it. Their rows are updated by recsys. Other tables of their
            optimizer are followed, too.
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
            tracker has them; or `freezes_rows` would freeze rows of modules that are not given.
    """

    def __init__(
        self,
        modules: nn.Module | Iterable[nn.Module],
        staleness: Staleness = Staleness(),  # noqa: B008  # frozen
        *,
        share: float = 0.2,
        freezes_rows: bool = False,
    ) -> None:
        self._groups: list[TableGroup] = []
        self._group_numbers: dict[TableGroup, int] = {}
        self._followed: list[FollowedRows] = []
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise ConfigError(f"share must be a number in [0, 1], got {share!r}")
        self.staleness, self.share, self.freezes_rows = staleness, share, freezes_rows
        models = [modules] if isinstance(modules, nn.Module) else list(modules)
        self._groups = groups_in(models)
        for group in self._groups:
            if group.before_update is not None:
                raise ValueError(
                    f"tables {group.names} already have a StalenessTracker; close it first: "
                    "call its close(), or pipeline.skipping.close() if it is a TrainPipeline's"
                )
        if freezes_rows:
            require_all_tables(models, self._groups)
        self._names = names_of(models, self._groups)
        self._followed = [
            FollowedRows(group, staleness, freezes_rows=freezes_rows) for group in self._groups
        ]
        self._group_numbers = {group: number for number, group in enumerate(self._groups)}
        for group, followed in zip(self._groups, self._followed, strict=True):
            group.before_update = followed.marks.before_update
        self.num_steps = 0
        self._num_seen = 0
        self._frozen_until = 0  # steps up to the last one that left out stale rows
        self._last_window: dict[str, Any] | None = None
        self._inputs = SampledInputs([each.marks.first_rows for each in self._followed])
        self._flag_sets = FlagSets([each.marks for each in self._followed])
        self._warned_of: set[str] = set()

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
        for followed in self._followed:
            followed.marks.is_counting = number % self.staleness.count_every == 0
            followed.marks.is_freezing = self.freezes_rows and freezes
            followed.marks.is_counting_lookups = self.freezes_rows

    def end_step(self, num_seen: int) -> None:
        """Called after the step; at a window's end it decides which rows are stale.

        Args:
            num_seen: Raw samples used up so far, skipped ones included.

        Raises:
            ConflictingWrite: tables were written to while slots held updated rows.
            TiersFailed: a transfer of rows has failed.
        """
        ends_window = (self.num_steps + 1) % self.staleness.window == 0
        self.num_steps += 1
        self._num_seen = num_seen
        if any(followed.marks.is_freezing for followed in self._followed):
            self._frozen_until = self.num_steps
        self.cancel_step()
        if ends_window:
            self._end_window()
        # A raw mini-batch that the last mini-batch was made of may be taken again.
        self._flag_sets.forget_before(self.num_steps - 1)

    def cancel_step(self) -> None:
        """Called instead of `end_step` after a step that raised; the next one has its number."""
        for followed in self._followed:
            marks = followed.marks
            marks.is_counting = marks.is_freezing = marks.is_counting_lookups = False

    def use_flags_of(self, number: int) -> None:
        """Mark as stale the rows that count as stale for mini-batch `number`.

        The numbers may fall again, down to the last step's: after look-ahead was dropped, a raw
        mini-batch that its mini-batch was made of in part is taken again.

        Args:
            number: Number of a mini-batch.
        """
        self._flag_sets.use(number)

    def all_stale(self, parts: Sequence[tuple[Part, Bags]], batch_size: int) -> Tensor:
        """Which samples are stale: they look up rows, and stale ones only; (B,) bool on the CPU.

        Call `use_flags_of` first. A feature without ids does not matter, but a sample without any
        id is not stale. Nor is a sample of a lookup in tables that the tracker does not follow.

        Args:
            parts: All lookups of the mini-batch.
            batch_size: B. A lookup may have several bags for each sample, one after another.
        """
        is_stale, has_rows = np.ones(batch_size, bool), np.zeros(batch_size, bool)
        for (group, lookups), bags in parts:
            number = self._group_numbers.get(group)
            if number is None:
                is_stale[:] = False
                break
            marks, per_sample = self._followed[number].marks, bags_per_sample(bags, batch_size)
            if per_sample == 1:
                marks.all_stale(lookups, bags, is_stale, has_rows)
            elif per_sample:
                of_bags, have_rows = is_stale.repeat(per_sample), has_rows.repeat(per_sample)
                marks.all_stale(lookups, bags, of_bags, have_rows)
                is_stale[:] = of_bags.reshape(batch_size, per_sample).all(1)
                has_rows[:] = have_rows.reshape(batch_size, per_sample).any(1)
        return torch.from_numpy(is_stale & has_rows)

    def add_inputs(
        self,
        first_index: int,
        parts: Sequence[tuple[Part, Bags]],
        batch_size: int,
        samples: Tensor,
    ) -> None:
        """Add samples of a mini-batch to those that the threshold is found from.

        A window's end uses the last 4096 that are used up by then. If the stream index falls again,
        because look-ahead was dropped, the samples from there on are forgotten. With a lookup in
        tables that the tracker does not follow, no sample of the mini-batch counts as stale.

        Args:
            first_index: Number of the mini-batch's first sample in the stream.
            parts: All lookups of the mini-batch.
            batch_size: B.
            samples: Numbers of the samples in the mini-batch, (S,) int64 ascending.
        """
        chosen = samples.cpu().numpy().astype(np.int64)
        is_followed = all(group in self._group_numbers for (group, _), _ in parts)
        numbered = [
            (self._group_numbers[group], lookups, bags)
            for (group, lookups), bags in parts
            if is_followed  # an input without rows is not stale
        ]
        self._inputs.add(first_index + chosen, numbered, batch_size, chosen)
        self._inputs.trim(self._num_seen)

    @property
    def threshold(self) -> float | None:
        """The highest drift of a stale row at the last window's end; None if none was."""
        return None if self._last_window is None else self._last_window["threshold"]

    @property
    def has_stale_rows(self) -> bool:
        """Whether a row is marked as stale now."""
        return any(followed.marks.num_stale for followed in self._followed)

    def stale_rows(self) -> dict[str, NDArray[np.int64]]:
        """The rows of each table that are marked as stale now, ascending, by the table's name."""
        return {
            name: followed.marks.stale_rows(table)
            for names, followed in zip(self._names, self._followed, strict=True)
            for table, name in enumerate(names)
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of marks, snapshots and history; they come on top of a budget of the tables.

        Without the ids of sampled inputs: those of 4096 inputs, of the mini-batch that the oldest
        of them came with, and of mini-batches that are taken ahead.
        """
        return sum(followed.num_bytes for followed in self._followed)

    def report(self) -> dict[str, Any]:
        """What was found so far, in JSON types.

        Returns:
            `memory_bytes`; with `freezes_rows`, `num_lookups` of updates and how many of them were
            `num_lookups_left_out` (0 without); and `last_window`, null before its end: `step` at
            its end; the `threshold`, or null; `stale_rows` by table, on trial or not;
            `num_followed` and `num_judged` rows, and `num_thawed`, those that thawed; `stale_share`
            of the sampled inputs, and `num_inputs`.
        """
        of_groups = [followed.marks.lookups for followed in self._followed]
        num_lookups, num_left_out = (sum(counts) for counts in zip(*of_groups, strict=True))
        return {
            "memory_bytes": self.num_bytes,
            "num_lookups": num_lookups,
            "num_lookups_left_out": num_left_out,
            "last_window": self._last_window,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step, in JSON types and tensors.

        Mini-batches taken beyond that step do not count: they are taken again.
        """
        return {
            "settings": asdict(self.staleness),
            "num_steps": self.num_steps,
            "num_seen": self._num_seen,
            "frozen_until": self._frozen_until,
            "last_window": self._last_window,
            "inputs": inputs_state(self._inputs, self._num_seen),
            "flag_sets": self._flag_sets.state(),
            "groups": [group_state(followed) for followed in self._followed],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, after rows and optimizers were loaded. `share` is not part of it.

        Args:
            state: What `state_dict` returned.

        Raises:
            ConfigError: `state` is not of a tracker with the same settings and tables; nothing has
                changed.
        """
        found = SavedState("staleness state", state, _STATE_KEYS)
        if found["settings"] != asdict(self.staleness):
            raise found.error("settings", f"{asdict(self.staleness)}, those of this run")
        num_steps, num_seen = found.whole("num_steps"), found.whole("num_seen")
        frozen_until = found.whole("frozen_until", most=num_steps)
        last_window = None
        if found["last_window"] is not None:
            known = found.inner("last_window", _WINDOW_KEYS)
            last_window = {key: known[key] for key in _WINDOW_KEYS}
        indices, inputs = read_inputs_state(found["inputs"], len(self._followed), num_seen)
        max_rows = [followed.max_rows for followed in self._followed]
        flag_sets = self._flag_sets.read(found, num_steps, max_rows)
        of_groups = found.items("groups", (len(self._followed),), "states")
        groups = list(map(read_group_state, of_groups, self._followed))
        self.reset()
        self.num_steps, self._num_seen, self._frozen_until = num_steps, num_seen, frozen_until
        self._last_window = last_window
        self._inputs.replace(indices, inputs)
        for followed, group in zip(self._followed, groups, strict=True):
            followed.restore(group)
            followed.marks.lookups = group.lookups
        self._flag_sets.replace(flag_sets, num_steps)

    def reset(self) -> None:
        """Forget all that was found: no row is stale or followed, as after no step.

        `share` stays. To continue after some steps without a state, set `num_steps` then.
        """
        self.cancel_step()
        self.num_steps = self._num_seen = self._frozen_until = 0
        self._last_window = None
        self._inputs.clear()
        for followed in self._followed:
            followed.reset()
            followed.marks.lookups = (0, 0)
        self._flag_sets.clear()

    def close(self) -> None:
        """Stop following rows; this can be called again."""
        for group, followed in zip(self._groups, self._followed, strict=False):
            if group.before_update == followed.marks.before_update:
                group.before_update = None
        self._group_numbers = {}

    def __del__(self) -> None:
        """Stop following rows when the tracker is deleted."""
        if hasattr(self, "_followed") and not sys.is_finalizing():  # `__init__` has begun
            self.close()

    def _end_window(self) -> None:
        window = self.num_steps // self.staleness.window - 1
        for followed in self._followed:
            followed.judge(window, self._frozen_until)
        _, inputs = self._inputs.newest(self._num_seen)
        threshold = self._find_threshold(self._levels_of(inputs), window)
        decisions = [followed.decide(threshold, window) for followed in self._followed]
        known = threshold if np.isfinite(threshold) else None
        self._last_window = self._summary(known, decisions, inputs)
        for followed in self._followed:
            followed.follow()
        flagged = [each.flagged for each in decisions]
        self._flag_sets.add(FlagSet(self.num_steps + LEAD, flagged))

    def _levels_of(self, inputs: Sequence[InputRows]) -> NDArray[np.float64]:
        """The level of each sampled input, (S,), from the rows that it has in each group.

        It is the greatest level of the input's rows; infinite for an input without rows.
        """
        levels = np.full(len(inputs[0].bounds) - 1, -np.inf)
        for followed, rows in zip(self._followed, inputs, strict=True):
            rows.raise_levels(followed.history["row"].copy(), followed.levels, levels)
        levels[levels == -np.inf] = np.inf
        return levels

    def _find_threshold(self, levels: NDArray[np.float64], window: int) -> float:
        """The threshold; -inf if no row is to be stale.

        Args:
            levels: Levels of the sampled inputs, (S,).
            window: Number of the window that ends.
        """
        if not self.share:
            return -np.inf
        if self.staleness.threshold is not None:
            return self.staleness.threshold
        threshold = quantile(levels, self.share)
        if threshold == np.inf or not len(levels):
            known = levels[np.isfinite(levels)]
            threshold = float(known.max()) if len(known) else -np.inf
            # A row has a level after `patience` windows, or one more, at the earliest.
            if window > self.staleness.patience + 1:
                self._warn_of_unknown(len(known), len(levels))
            return threshold
        chosen = below_ties(levels, threshold, self.share)
        if np.count_nonzero(levels <= chosen) < self.share * len(levels) / 2 and chosen < threshold:
            num_tied = np.count_nonzero(levels == threshold)
            self._warn_once(
                "ties",
                f"staleness: {num_tied} of {len(levels)} sampled inputs have the same level, "
                f"{threshold:g}, and with them the share would be far above {self.share}, so they "
                "are not stale: they share a row, or rows do not move, as with learning rate 0 or "
                "with a dtype that rounds small changes away; another share or measure may fit",
            )
        return chosen

    def _warn_of_unknown(self, num_known: int, num_inputs: int) -> None:
        if not num_inputs:
            self._warn_once(
                "unknown",
                "staleness: no inputs were sampled, so no threshold can be found and no row is "
                "stale; call add_inputs, or give a threshold",
            )
            return
        settings = self.staleness
        self._warn_once(
            "unknown",
            f"staleness: a share of {self.share} cannot be reached: only {num_known} of "
            f"{num_inputs} sampled inputs have rows that were all updated at least "
            f"{settings.min_updates} times in each of {settings.patience} windows of "
            f"{settings.window} steps; lower the share or "
            "min_updates, or raise window or max_rows",
        )

    def _warn_once(self, of: str, message: str) -> None:
        if of not in self._warned_of:
            self._warned_of.add(of)
            warn_caller(message)

    def _summary(
        self, threshold: float | None, decisions: Sequence[Decision], inputs: Sequence[InputRows]
    ) -> dict[str, Any]:
        """What `report` says of a window."""
        stale = {
            name: count
            for names, followed in zip(self._names, self._followed, strict=True)
            for name, count in zip(names, followed.num_stale_by_table(), strict=True)
        }
        num_inputs = len(inputs[0].bounds) - 1
        of_inputs = np.full(num_inputs, -np.inf)  # 0 if there are rows, and all of them are stale
        for decision, rows in zip(decisions, inputs, strict=True):
            rows.raise_levels(decision.flagged, np.zeros(len(decision.flagged)), of_inputs)
        return {
            "step": self.num_steps,
            "threshold": threshold,
            "stale_rows": stale,
            "num_followed": sum(len(followed.history) for followed in self._followed),
            "num_judged": sum(each.num_judged for each in decisions),
            "num_thawed": sum(each.num_thawed for each in decisions),
            "stale_share": float((of_inputs == 0).mean()) if num_inputs else None,
            "num_inputs": num_inputs,
        }
