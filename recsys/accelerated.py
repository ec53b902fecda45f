"""What `accelerate` did, in words: what was exchanged, what was not and why, what to expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsys.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.fused_optimizer import FusedOptimizer
    from recsys.embeddings.row_updater import RowUpdater

__all__ = ["Accelerated", "LeftAlone", "Replacement", "describe_outlook"]

_NAMED = 3  # places of modules that are named before the rest is left out


@dataclass(frozen=True)
class Replacement:
    """A module that was exchanged.

    Attributes:
        names: Where it is in the model; several where it is used in several places.
        kind: The class that is there now.
        num_tables: 1, or those of a collection.
        num_rows: Of all its tables.
        note: What it computes differently from the module that was there, and why; mostly "".
    """

    names: tuple[str, ...]
    kind: str
    num_tables: int
    num_rows: int
    note: str = ""


@dataclass(frozen=True)
class LeftAlone:
    """A module with a table that was not exchanged.

    Attributes:
        names: Where it is in the model.
        kind: Its class.
        reason: Why not.
    """

    names: tuple[str, ...]
    kind: str
    reason: str


@dataclass(frozen=True, repr=False)
class Accelerated:
    """What `accelerate` or `restore` did; printed, a few lines.

    Attributes:
        replacements: In the order of the model.
        left_alone: What was not exchanged, and why.
        moved_by: What moves the rows now, in words; by each optimizer.
        rules: What they do differently from before, and why; mostly none.
        row_optimizer: `torch.optim`'s face of a formula of ours, for its `param_groups` and state;
            None where an optimizer of the user's moves the rows.
        tiers: Where rows are, in words.
        expected: What speed to expect, in words.
    """

    replacements: tuple[Replacement, ...]
    left_alone: tuple[LeftAlone, ...]
    moved_by: tuple[str, ...]
    rules: tuple[str, ...]
    row_optimizer: FusedOptimizer | None = None
    tiers: str = ""
    expected: str = ""

    def __repr__(self) -> str:
        lines = []
        for kind in dict.fromkeys(each.kind for each in self.replacements):
            of_kind = [each for each in self.replacements if each.kind == kind]
            num_tables = sum(each.num_tables for each in of_kind)
            num_rows = sum(each.num_rows for each in of_kind)
            tables = "1 table" if num_tables == 1 else f"{num_tables} tables"
            places = _some([", ".join(each.names) for each in of_kind])
            lines.append(f"{kind}: {tables} of {num_rows:,} rows at {places}")
        for reason in dict.fromkeys(each.reason for each in self.left_alone):
            places = _some([each.names[0] for each in self.left_alone if each.reason == reason])
            lines.append(f"left as it was: {places}: {reason}")
        outlook = [each for each in (self.tiers, self.expected) if each]
        return "\n".join([*lines, *self.moved_by, *self.notes, *outlook])

    @property
    def notes(self) -> list[str]:
        """What is computed differently, and why."""
        of_modules = [f"{each.names[0]}: {each.note}" for each in self.replacements if each.note]
        return [*of_modules, *self.rules]


def describe_outlook(updaters: Sequence[RowUpdater]) -> tuple[str, str]:
    """Where rows are, and what speed to expect, in words.

    Args:
        updaters: All that move rows; none where torch does.
    """
    if not updaters:
        return "", "expect the speed of before: recsys moves no rows here"
    whole = f"{format_bytes(sum(each.resident_bytes() for each in updaters))} of rows and state"
    num_tables = sum(each.num_tables for each in updaters)
    num_groups = sum(each.num_groups for each in updaters)
    tables = "1 table is" if num_tables == 1 else f"{num_tables} tables are"
    calls = "1 kernel call" if num_groups == 1 else f"{num_groups} kernel calls"
    speed = f"expect shorter steps: {tables} updated by {calls} a step"
    tiers = [each for updater in updaters for each in updater.tiers()]
    if not tiers:
        return f"all {whole} are in fast memory", speed
    hot_bytes = format_bytes(sum(each.hot.num_bytes for each in tiers))
    place = "in memory" if all(each.files is None for each in tiers) else "in files"
    speed += (
        ", and rows that are not in fast memory have to be fetched, which "
        "recsys.pipeline.TrainPipeline does ahead of the step"
    )
    return f"{hot_bytes} of fast memory for {whole}; what does not fit waits {place}", speed


def _some(places: Sequence[str]) -> str:
    if len(places) <= 2 * _NAMED:
        return ", ".join(places)
    return f"{', '.join(places[:_NAMED])}, ... {places[-1]}"
