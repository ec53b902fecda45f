"""Claims slots at an update, for lookups that have read their rows where these were.

A device that reaches the tables can look rows up without slots. A model that calls its tables one
by one would launch a claim for each of them; here one claim serves all lookups of a step. It makes
the slots, fetches rows that have none, and the update then works on the slots.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import ref

from recsys.embeddings.kernels.cpu.slots import NoSuchRow
from recsys.embeddings.rows.lookups import num_distinct_rows
from recsys.embeddings.tiers.ahead_claims import join_inputs
from recsys.embeddings.tiers.ticket import NotEnoughSlots
from recsys.errors import BudgetTooSmall, IdOutOfRange

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.rows.ledger import LedgerEntry
    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.tiers.residency import Residency

    _MakeRoom = Callable[[ref[Residency], int, Mapping[TableGroup, int]], None]

__all__ = ["claim_slots"]


def claim_slots(groups: Sequence[TableGroup], make_room: _MakeRoom) -> None:
    """Claim slots for the ledger entries that have none.

    Args:
        groups: All groups of one updater.
        make_room: `RowUpdater.make_room`.

    Raises:
        BudgetTooSmall: the budget has no room for the rows; ledgers are as they were.
        IdOutOfRange: an id is not a row of its table; ledgers are as they were.
    """
    for group in groups:
        group.backward_streams.wait()
    _make_room_for_grads(groups, make_room)
    short = [
        group
        for group in groups
        if group.tiers is not None and any(map(_lacks_slots, group.ledger))
    ]
    claimed: Sequence[list[LedgerEntry]] | None = None
    while short and claimed is None:
        try:
            claimed = _claim_all(short)
        # Make room after this block, because the error keeps claimed slots alive.
        except NotEnoughSlots as error:
            residency, num_needed = error.residency, error.num_needed
        if claimed is None:
            make_room(residency, num_needed, _num_distinct(groups))
    for group, ledger in zip(short, claimed or (), strict=True):
        group.ledger = ledger


def _make_room_for_grads(groups: Sequence[TableGroup], make_room: _MakeRoom) -> None:
    """Make room for rows that a `weight.grad` has: their lookups may have claimed no slots.

    Without room, `TableGroup.take_ledger` raises the error.
    """
    for group in groups:
        tiers = group.tiers
        if tiers is None or not tiers.are_reached or not group.has_grads():
            continue
        if sum(len(bags.values) for _, bags in _inputs(group)) <= tiers.hot.num_slots:
            continue
        needs = _num_distinct(groups)
        if needs[group] > tiers.hot.num_slots:
            with suppress(BudgetTooSmall):
                make_room(ref(tiers.residency), needs[group], needs)


def _lacks_slots(entry: LedgerEntry) -> bool:
    return entry.ticket is None


def _claim_all(groups: Sequence[TableGroup]) -> list[list[LedgerEntry]]:
    """The ledger of each group, where every entry has slots."""
    ledgers = [list(group.ledger) for group in groups]
    try:
        for group, ledger in zip(groups, ledgers, strict=True):
            of_kinds: dict[Hashable, list[int]] = {}
            for number, entry in enumerate(ledger):
                bags: Any = entry.bags  # `TorchBags`
                if _lacks_slots(entry):
                    of_kinds.setdefault((bags.padding, bags.values.dtype), []).append(number)
            for numbers in of_kinds.values():
                _claim_together(group, ledger, numbers)
    except BaseException:
        for ledger in ledgers:
            ledger.clear()  # otherwise a stored traceback would keep the slots claimed
        raise
    return ledgers


def _claim_together(group: TableGroup, ledger: list[LedgerEntry], numbers: Sequence[int]) -> None:
    """Make one claim for the entries of these numbers, whose inputs are of one kind."""
    tiers = group.tiers
    assert tiers is not None
    looked_up = [(ledger[number].lookups, ledger[number].bags) for number in numbers]
    counts = [len(rows.values) for _, rows in looked_up]
    bad = -1
    try:
        [whole] = tiers.claim(group.space(), *join_inputs(looked_up))
    except NoSuchRow as error:
        bad = error.position
    if bad >= 0:
        assert group.kernels.errors is not None
        group.kernels.errors.check()  # raises, unless it did: the lookup has noted the id
        [table] = looked_up[bisect_right(list(accumulate(counts)), bad)][0].distinct_tables
        raise IdOutOfRange(
            f"table {group.names[table]!r}: a gradient is for an id that is not in "
            f"[0, {tiers.sizes[table]}), as an earlier error said; drop the gradients "
            "(optimizer.zero_grad()) before the next step"
        )
    slots = whole.slot_of_value.split_with_sizes(counts)
    for number, (lookups, rows), slots_N in zip(numbers, looked_up, slots, strict=True):
        # The claim for one lookup may be one made ahead, whose slots cannot be shared again.
        ticket = whole if len(numbers) == 1 else whole.share(lookups, slots_N)
        ledger[number] = ledger[number]._replace(
            bags=rows.at_slots(slots_N), rows=rows, ticket=ticket
        )


def _num_distinct(groups: Sequence[TableGroup]) -> dict[TableGroup, int]:
    """How many rows an update of each group needs; the host waits for a device."""
    return {group: num_distinct_rows(_inputs(group)) for group in groups}


def _inputs(group: TableGroup) -> list[tuple[Lookups, Any]]:
    """The lookups of an update, and their input by rows."""
    of_ledger = [(entry.lookups, entry.rows or entry.bags) for entry in group.ledger]
    return [*group.inputs_of_grads(), *of_ledger]
