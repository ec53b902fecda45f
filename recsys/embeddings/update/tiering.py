"""Divides the budget of fast memory among the table groups of one updater."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from recsys._support.sizes import format_bytes, round_up_bytes
from recsys.embeddings.rows.table_parameter import move_table
from recsys.embeddings.tiers.budget import (
    divide_budget,
    divide_for_pinned,
    enough_bytes,
    order_pinned,
)
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from weakref import ref

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import nn

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.tiers.residency import Residency
    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.embeddings.update.group_updater import GroupUpdater

    Pinned = Mapping[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]]

__all__ = [
    "divide_again",
    "divide_first",
    "make_room",
    "move_slots",
    "move_tables",
    "require_own_memory",
    "stay_resident",
]


def divide_first(
    groups: Sequence[GroupUpdater], budget_bytes: int, pinned: Pinned, *, may_stay: bool
) -> list[tuple[int, NDArray[np.int32]]] | None:
    """Divide the budget for the first time.

    Args:
        groups: All groups of one updater.
        budget_bytes: Limit for slots and row maps.
        pinned: For each table: the rows with a permanent slot, and how often each is looked up.
        may_stay: Whether rows stay in the tables if all of them fit.

    Returns:
        The number of slots and the pinned rows of each group; None if no slots are needed.

    Raises:
        BudgetTooSmall: the budget is smaller than the row maps.
        ValueError: a table is a part of a larger tensor, or slots are needed for tables on the
            "meta" device.
    """
    on_meta = [each.group for each in groups if each.group.tables[0].device.type == "meta"]
    if not on_meta:
        # Tables on a device are copied to the host anyway.
        in_host_memory = [each.group for each in groups if each.group.kernels.errors is None]
        require_own_memory(
            pair for each in in_host_memory for pair in zip(each.names, each.tables, strict=True)
        )
    rows = [order_pinned(each.group.tables, pinned) for each in groups]
    sizes = [each.space_size() for each in groups]
    divided = divide_for_pinned(budget_bytes, sizes, rows, may_stay=may_stay)
    if divided is not None and on_meta:
        raise ValueError(
            f"table {on_meta[0].names[0]!r}: a cold tier needs rows in memory, got device 'meta'; "
            "build the module under torch.device('cpu'), or leave budget= out"
        )
    return divided


def stay_resident(
    groups: Sequence[GroupUpdater],
    budget: int | str,
    num_bytes: int,
    device: torch.device | None,
) -> None:
    """Warn that all rows fit, and move them to the device of the slots.

    Args:
        groups: All groups of one updater.
        budget: As it was given.
        num_bytes: Bytes of all rows and their state.
        device: Device of the slots; None for that of the tables.
    """
    shown = budget if isinstance(budget, str) else format_bytes(budget)
    warnings.warn(
        f"budget={shown!r}: all {format_bytes(num_bytes)} of rows and state fit; no cold tier is "
        "needed",
        stacklevel=5,
    )
    if device is not None:
        for each in groups:
            move_tables(each.group, device)


def move_tables(group: TableGroup, device: torch.device) -> None:
    """Move the tables of a group to another device; the next step moves their state."""
    for table in group.tables:
        move_table(table, device)
    group.forget_space()


def move_slots(group: TableGroup, device: torch.device) -> None:
    """Move the slots of a group to another device.

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
            f"{num_claimed} of them are in use; delete the loss and outputs of earlier lookups"
        )
    tiers.move_to(device)
    group.forget_space()


def make_room(
    groups: Sequence[GroupUpdater],
    budget_bytes: int,
    short: ref[Residency],
    num_needed: int,
    num_distinct: Mapping[TableGroup, int],
    tracker_bytes: int,
) -> None:
    """Divide the budget again, after a mini-batch found too few slots in one group.

    Args:
        groups: All groups of one updater.
        budget_bytes: Limit for slots and row maps.
        short: The group's residency.
        num_needed: Slots that it needs.
        num_distinct: Distinct rows that the mini-batch needs of each group.
        tracker_bytes: Bytes of the budget that a tracker takes.

    Raises:
        BudgetTooSmall: the budget is too small for the mini-batch; or slots that would have to be
            removed are claimed by other mini-batches.
    """
    needs = []
    for each in groups:
        tiers = _tiers_of(each)
        tiers.ahead.give_up_all()
        is_short = tiers.residency is short()
        needs.append(num_needed if is_short else num_distinct.get(each.group, 0))
    before = [max(each.least_slots, need) for each, need in zip(groups, needs, strict=True)]
    # If what earlier mini-batches needed does not fit as well, this one alone counts.
    least, slots = _divide_slots(groups, budget_bytes, [before, needs], tracker_bytes)
    _require_unused(groups, slots, needs, tracker_bytes)
    _resize_all(groups, slots, least)


def _require_unused(
    groups: Sequence[GroupUpdater],
    slots: Sequence[int],
    needs: Sequence[int],
    tracker_bytes: int,
) -> None:
    """Check that no group whose number of slots would change has rows in use.

    Args:
        groups: All groups of one updater; one of them has too few slots.
        slots: The number of slots that each would have.
        needs: Slots that each needs for the mini-batch.
        tracker_bytes: Bytes of the budget that a tracker takes.

    Raises:
        BudgetTooSmall: one has.
    """
    used = [_tiers_of(each).residency.num_claimed for each in groups]
    have = [_tiers_of(each).hot.num_slots for each in groups]
    if not any(count and old != new for count, old, new in zip(used, have, slots, strict=True)):
        return
    short = next(number for number in range(len(groups)) if needs[number] > have[number])
    wanted = [
        max(most) for most in zip(needs, used, [each.least_slots for each in groups], strict=True)
    ]
    spaces = [each.space_size() for each in groups]
    enough = enough_bytes(spaces, wanted, _num_planned(groups), tracker_bytes)
    raise BudgetTooSmall(
        f"budget: table {groups[short].group.names[0]!r} and those that share its slots need "
        f"{needs[short]} of them and have {have[short]}, and the budget cannot be divided anew "
        f"while {sum(used)} rows are in use, by lookups of the same mini-batch or of one whose "
        f"loss or outputs still exist; raise it to {enough} ({round_up_bytes(enough)}), and "
        "further for later lookups that need more, or delete the loss and outputs of earlier "
        "mini-batches"
    )


def divide_again(groups: Sequence[GroupUpdater], budget_bytes: int, tracker_bytes: int) -> None:
    """Divide a budget again among groups in two tiers, because of a tracker.

    Args:
        groups: All groups of one updater.
        budget_bytes: Limit for slots, row maps and tracker.
        tracker_bytes: Bytes of it that the tracker takes.

    Raises:
        BudgetTooSmall: the budget is too small for the rows that a mini-batch has needed; or slots
            that would have to be removed are in use.
    """
    needed = [each.least_slots for each in groups]
    least, slots = _divide_slots(groups, budget_bytes, [needed], tracker_bytes)
    for each, num_slots in zip(groups, slots, strict=True):
        tiers = _tiers_of(each)
        tiers.settle()
        num_claimed = tiers.residency.num_claimed
        if num_claimed and tiers.hot.num_slots != num_slots:
            raise BudgetTooSmall(
                f"budget: a staleness tracker needs memory of rows of embedding_dim "
                f"{each.group.dim}, and {num_claimed} of them are in use; delete the loss and "
                "outputs of earlier lookups"
            )
    _resize_all(groups, slots, least)


def _resize_all(groups: Sequence[GroupUpdater], slots: Sequence[int], least: Sequence[int]) -> None:
    """Change the number of slots of groups, and what each has needed; none may be in use."""
    more = [num - _tiers_of(each).hot.num_slots for each, num in zip(groups, slots, strict=True)]
    # Groups that lose slots come first, so that memory never exceeds the budget.
    for number in sorted(range(len(groups)), key=more.__getitem__):
        if more[number]:
            _tiers_of(groups[number]).resize(slots[number])
        groups[number].least_slots = least[number]


def _divide_slots(
    groups: Sequence[GroupUpdater],
    budget_bytes: int,
    wanted: Sequence[Sequence[int]],
    tracker_bytes: int,
) -> tuple[Sequence[int], list[int]]:
    """Divide a budget among groups in two tiers, which stay so.

    Args:
        groups: All groups of one updater.
        budget_bytes: Limit for slots, row maps and tracker.
        wanted: The least number of slots of each group, what is wanted most first. With one of
            them a plan's rows keep their slots, if the budget has room for both.
        tracker_bytes: Bytes of the budget that a tracker takes.

    Returns:
        Those of `wanted` for which there is room, and the number of slots of each group.

    Raises:
        BudgetTooSmall: there is room for none of them.
    """
    sizes, planned = [each.space_size() for each in groups], _num_planned(groups)

    def divide(pinned: Sequence[int] | None, least: Sequence[int]) -> list[int]:
        slots = divide_budget(
            budget_bytes, sizes, least, pinned=pinned, may_stay=False, tracker_bytes=tracker_bytes
        )
        assert slots is not None
        return slots

    choices = [(pinned, each) for pinned in (planned, None) for each in wanted]
    for pinned, least in choices[:-1]:
        with suppress(BudgetTooSmall):
            return least, divide(pinned, least)
    pinned, least = choices[-1]
    return least, divide(pinned, least)


def _num_planned(groups: Sequence[GroupUpdater]) -> list[int]:
    """The number of rows of each group that a plan pins."""
    return [len(_tiers_of(each).pinned) for each in groups]


def _tiers_of(each: GroupUpdater) -> Tiers:
    tiers = each.group.tiers
    assert tiers is not None
    return tiers


def require_own_memory(tables: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse tables for two tiers that share memory: a row would be in two slots.

    Args:
        tables: The tables in host memory, with their names.

    Raises:
        ValueError: a table is a part of a larger tensor, or shares its memory with another one.
    """
    known: dict[int, str] = {}  # names by address
    for name, table in tables:
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
                f"table {name!r}: with a budget a table must have its own memory, and this one is "
                "a part of a larger tensor; give it a clone (weight.data = weight.data.clone())"
            )
