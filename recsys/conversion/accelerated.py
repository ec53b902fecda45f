"""Reports of `accelerate`: which modules it replaced, which not and why, what speed to expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsys._support.sizes import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.update.fused_optimizer import FusedOptimizer
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["Accelerated", "LeftAlone", "Replacement", "describe_outlook"]

_FEW_MODULES = 4  # looked up one by one on CUDA without taking longer
_NAMED = 3  # modules named in a list before it is shortened


@dataclass(frozen=True)
class Replacement:
    """A module that was replaced.

    Attributes:
        names: Its names in the model; several if the model uses it in several places.
        kind: The class that replaces it.
        num_tables: Number of its tables; 1 unless it is a collection.
        num_rows: Rows of all its tables.
    """

    names: tuple[str, ...]
    kind: str
    num_tables: int
    num_rows: int


@dataclass(frozen=True)
class LeftAlone:
    """A module with a table that was not replaced.

    Attributes:
        names: Its names in the model.
        kind: Its class.
        reason: Why it was not replaced.
    """

    names: tuple[str, ...]
    kind: str
    reason: str


@dataclass(frozen=True, repr=False)
class Accelerated:
    """What `accelerate` or `restore` did; prints as a few lines.

    Attributes:
        replacements: The replaced modules, in the order of the model.
        left_alone: The modules that were left to PyTorch, and why.
        updated_by: A sentence per optimizer that says what updates the rows now.
        notes: How these updates differ from those before, and why; usually empty.
        row_optimizer: The `torch.optim.Optimizer` of the rows, with their `param_groups` and state;
            None if an optimizer of the user's updates the rows.
        tiers: A sentence that says where the rows are.
        expected: A sentence that says what speed to expect.
    """

    replacements: tuple[Replacement, ...]
    left_alone: tuple[LeftAlone, ...]
    updated_by: tuple[str, ...]
    notes: tuple[str, ...]
    row_optimizer: FusedOptimizer | None = None
    tiers: str = ""
    expected: str = ""

    def __repr__(self) -> str:
        lines = []
        for kind in dict.fromkeys(each.kind for each in self.replacements):
            of_kind = [each for each in self.replacements if each.kind == kind]
            num_tables = sum(each.num_tables for each in of_kind)
            num_rows = sum(each.num_rows for each in of_kind)
            tables = counted(num_tables, "table")
            places = _some([", ".join(each.names) for each in of_kind])
            lines.append(f"{kind}: {tables} of {num_rows:,} rows at {places}")
        for reason in dict.fromkeys(each.reason for each in self.left_alone):
            places = _some([each.names[0] for each in self.left_alone if each.reason == reason])
            lines.append(f"left to PyTorch: {places}, because {reason}")
        outlook = [each for each in (self.tiers, self.expected) if each]
        return "\n".join([*lines, *self.updated_by, *self.notes, *outlook])


def describe_outlook(updaters: Sequence[RowUpdater], num_modules: int) -> tuple[str, str]:
    """Say where the rows are, and what speed to expect.

    Args:
        updaters: Everything in recsys that updates rows; empty if only torch does.
        num_modules: Number of modules that look them up, each by a call of its own.
    """
    if not updaters:
        return "", "expect the same speed as before: recsys updates no rows here"
    total = f"{format_bytes(sum(each.resident_bytes() for each in updaters))} of rows and state"
    groups = [group for each in updaters for group in each.groups]
    tiers = [each for updater in updaters for each in updater.tiers()]
    device = groups[0].group.device
    speed = "expect shorter steps"
    if device.type != "cpu" and num_modules > _FEW_MODULES:
        speed = (
            f"expect longer steps: {num_modules} modules on CUDA are looked up one by one; use one "
            "HotColdEmbeddingBagCollection, which looks up all tables at once"
        )
    elif not all(is_sparse for group in groups for is_sparse in group.group.are_sparse):
        speed += (
            ", without gradients as large as tables; a loss that also reads a table as a matrix, "
            "such as an L2 penalty, still makes one, and steps several times longer than before"
        )
    elif tiers:
        speed = (
            "expect longer steps: a budget saves fast memory, and rows that are not in it must be "
            "fetched; recsys.pipeline.TrainPipeline fetches them before their step"
        )
    elif not any(group.space_size().state_sizes for group in groups):
        speed += (
            "; steps of fewer than 500 samples may take longer than before, because the optimizer "
            "has no state"
        )
    if not tiers:
        return f"all {total} are in fast memory", speed
    hot_bytes = format_bytes(sum(each.hot.num_bytes for each in tiers))
    place = "in memory" if all(each.files is None for each in tiers) else "in files"
    return f"{hot_bytes} of fast memory for {total}; the other rows are {place}", speed


def _some(places: Sequence[str]) -> str:
    if len(places) <= 2 * _NAMED:
        return ", ".join(places)
    return f"{', '.join(places[:_NAMED])}, ... {places[-1]}"
