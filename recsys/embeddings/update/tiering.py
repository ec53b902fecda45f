"""How the table groups of one updater get tiers, and share a budget anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recsys.embeddings.rows.table_parameter import move_table
from recsys.embeddings.tiers.budget import divide_budget, order_pinned
from recsys.embeddings.tiers.table_tiers import Tiers
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from weakref import ref

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.tiers.residency import Residency
    from recsys.embeddings.update.group_updater import GroupUpdater

    Pinned = Mapping[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]]

__all__ = ["divide_first", "make_room", "make_tiers", "move_slots", "move_tables"]


def divide_first(
    groups: Sequence[GroupUpdater], budget_bytes: int, pinned: Pinned, *, may_stay: bool
) -> list[tuple[int, NDArray[np.int32]]] | None:
    """Of each group: how many slots it gets, and which rows have one of their own.

    Args:
        groups: Of one updater.
        budget_bytes: What slots and row maps may take.
        pinned: By table: rows to have slots of their own, and how often each is looked up.
        may_stay: Whether rows that all fit are to stay where they are.

    Returns:
        None where all rows fit without slots.

    Raises:
        BudgetTooSmall: there is not even room for the row maps.
        ValueError: a table is a part of a larger tensor.
    """
    known: dict[int, str] = {}
    for each in groups:
        if each.group.kernels.errors is None:  # from a device, tables move to memory of their own
            _require_own_memory(each.group, known)
    rows = [order_pinned(each.group.tables, pinned) for each in groups]
    try:
        slots = _divide(groups, budget_bytes, [len(each) + 1 for each in rows], may_stay=may_stay)
    except BudgetTooSmall:  # the plan was made for less state, or for more memory
        slots = _divide(groups, budget_bytes, [1] * len(groups), may_stay=may_stay)
    if slots is None:
        return None
    return [
        (num_slots, its_rows[: num_slots - 1])
        for num_slots, its_rows in zip(slots, rows, strict=True)
    ]


def make_tiers(
    group: TableGroup,
    state_sizes: Mapping[str, int],
    num_slots: int,
    pinned: NDArray[np.int32],
    device: torch.device | None,
    files: ColdFiles | None,
) -> None:
    """Keep rows of a group in slots from now on.

    Tables on a device wait in the host's memory from now on, and so does their state.

    Args:
        group: Has the tables.
        state_sizes: Numbers per row of every state array, by name.
        num_slots: S.
        pinned: Rows with a slot of their own, counted over all tables.
        device: Where slots are to be; None for where the tables are.
        files: Have the tables, if files do.
    """
    sizes, dtype = [len(table) for table in group.tables], group.tables[0].dtype
    device = group.tables[0].device if device is None else device
    move_tables(group, torch.device("cpu"))
    group.keep_in(
        Tiers(group.names, sizes, group.dim, dtype, state_sizes, num_slots, pinned, device, files)
    )


def move_tables(group: TableGroup, device: torch.device) -> None:
    """Move the tables of a group to another device; state follows in the next step."""
    for table in group.tables:
        move_table(table, device)
    group.forget_space()


def move_slots(group: TableGroup, device: torch.device) -> None:
    """Have the slots of a group on another device from now on.

    Raises:
        ValueError: slots are in use.
    """
    tiers = group.tiers
    assert tiers is not None
    if tiers.device == device:
        return
    if num_claimed := tiers.residency.num_claimed:
        raise ValueError(
            f"rows in fast memory on '{tiers.device}' cannot be moved to '{device}' while "
            f"{num_claimed} of them are in use; let go of what was computed before (its loss and "
            "outputs)"
        )
    tiers.move_to(device)
    group.forget_space()


def make_room(
    groups: Sequence[GroupUpdater],
    budget_bytes: int,
    short: ref[Residency],
    num_needed: int,
    num_distinct: Mapping[TableGroup, int],
) -> None:
    """Share out the budget anew, for a mini-batch that found too few slots of one row space.

    Args:
        groups: Of one updater.
        budget_bytes: What slots and row maps may take.
        short: Has too few.
        num_needed: As many would do.
        num_distinct: How many rows of each group the mini-batch needs.

    Raises:
        BudgetTooSmall: there is no room for all; or slots that would have to be given up are needed
            by other mini-batches under way.
    """
    needs = []
    for each in groups:
        tiers = each.group.tiers
        assert tiers is not None
        tiers.ahead.give_up_all()
        is_short = tiers.residency is short()
        needs.append(num_needed if is_short else num_distinct.get(each.group, 0))
    least = [max(each.least_slots, need) for each, need in zip(groups, needs, strict=True)]
    # Rows in slots stay in slots. A copy of a file tier has its tables in memory, and there the
    # budget may be enough for all rows without slots, and too small for as many slots.
    try:
        slots = _divide(groups, budget_bytes, least, may_stay=False)
    except BudgetTooSmall:  # not for what others have needed before
        least, slots = needs, _divide(groups, budget_bytes, needs, may_stay=False)
    assert slots is not None
    divided = zip(groups, slots, least, strict=True)
    # Those that give slots up come first, so that memory never exceeds the budget.
    for each, num_slots, count in sorted(divided, key=_growth):
        _resize(each.group, num_slots)
        each.least_slots = count


def _growth(divided: tuple[GroupUpdater, int, int]) -> int:
    """How many slots more than now a group gets."""
    each, num_slots, _ = divided
    assert each.group.tiers is not None
    return num_slots - each.group.tiers.hot.num_slots


def _divide(
    groups: Sequence[GroupUpdater], budget_bytes: int, least: Sequence[int], *, may_stay: bool
) -> list[int] | None:
    sizes = [each.space_size() for each in groups]
    return divide_budget(budget_bytes, sizes, least, may_stay=may_stay)


def _resize(group: TableGroup, num_slots: int) -> None:
    """Go on with another number of slots.

    Raises:
        BudgetTooSmall: slots are in use.
    """
    tiers = group.tiers
    assert tiers is not None
    if tiers.hot.num_slots == num_slots:
        return
    if num_claimed := tiers.residency.num_claimed:
        raise BudgetTooSmall(
            f"budget: another mini-batch needs the memory of rows of embedding_dim {group.dim}, "
            f"and {num_claimed} of them are in use; give a larger budget, or let go of what was "
            "computed before (its loss and outputs)"
        )
    tiers.resize(num_slots)


def _require_own_memory(group: TableGroup, known: dict[int, str]) -> None:
    """Refuse tables for two tiers that share memory: a row would be in two slots.

    Args:
        group: Has the tables.
        known: Names of the updater's tables by the address of their memory; these are added.

    Raises:
        ValueError: a table is a part of a larger tensor, or shares its memory with another one.
    """
    for name, table in zip(group.names, group.tables, strict=True):
        if table.nbytes:
            if (address := table.data_ptr()) in known:
                raise ValueError(
                    f"tables {known[address]!r} and {name!r} are two Parameters on one memory, and "
                    "with a budget each needs its own; give both modules one Parameter (b.weight = "
                    "a.weight), or one of them a clone (weight.data = weight.data.clone())"
                )
            known[address] = name
        if table.untyped_storage().nbytes() > table.nbytes:
            raise ValueError(
                f"table {name!r}: with a budget its rows must have memory of their own, and they "
                "are a part of a larger tensor; give it a clone (weight.data = weight.data.clone())"
            )
