"""Claims slots at an update, for lookups that have read their rows where these were.

A device that reaches the tables can look rows up without slots. A model that calls its tables one
by one would launch a claim for each of them; here one claim serves all lookups of a step. It makes
the slots, fetches rows that have none, and the update then works on the slots.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from recsys.embeddings.kernels.cpu.slots import NoSuchRow
from recsys.embeddings.rows.lookups import num_distinct_rows
from recsys.embeddings.tiers.ahead_claims import join_inputs
from recsys.embeddings.tiers.ticket import NotEnoughSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from weakref import ref

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.rows.ledger import LedgerEntry
    from recsys.embeddings.tiers.residency import Residency

__all__ = ["claim_slots"]


def claim_slots(
    groups: Sequence[TableGroup],
    make_room: Callable[[ref[Residency], int, Mapping[TableGroup, int]], None],
) -> None:
    """Claim slots for the ledger entries that have none.

    Args:
        groups: All groups of one updater.
        make_room: `RowUpdater.make_room`.

    Raises:
        BudgetTooSmall: the budget has no room for the rows; ledgers are as they were.
        IdOutOfRange: an id is not a row of its table; ledgers are as they were.
    """
    short = [
        group
        for group in groups
        if group.tiers is not None and any(map(_lacks_slots, group.ledger))
    ]
    claimed: Sequence[list[LedgerEntry]] | None = None
    while short and claimed is None:
        try:
            claimed = [_with_slots(group) for group in short]
        # Make room after this block, because the error keeps claimed slots alive.
        except NotEnoughSlots as error:
            residency, num_needed = error.residency, error.num_needed
        if claimed is None:
            needs = {group: _num_distinct(group.ledger) for group in groups}
            make_room(residency, num_needed, needs)
    for group, ledger in zip(short, claimed or (), strict=True):
        group.ledger = ledger


def _lacks_slots(entry: LedgerEntry) -> bool:
    return entry.ticket is None


def _with_slots(group: TableGroup) -> list[LedgerEntry]:
    """The ledger of a group, where every entry has slots: one claim for all inputs of one kind."""
    ledger, tiers = list(group.ledger), group.tiers
    of_kinds: dict[Hashable, list[int]] = {}
    for number, entry in enumerate(ledger):
        bags: Any = entry.bags  # `TorchBags`
        if _lacks_slots(entry):
            of_kinds.setdefault((bags.padding, bags.values.dtype), []).append(number)
    assert tiers is not None
    for numbers in of_kinds.values():
        looked_up = [(ledger[number].lookups, ledger[number].bags) for number in numbers]
        whole = None
        with suppress(NoSuchRow):
            [whole] = tiers.claim(group.space(), *join_inputs(looked_up))
        if whole is None:
            assert group.kernels.errors is not None
            group.kernels.errors.check()  # raises: the lookup has noted which id it is
        assert whole is not None
        counts = [len(rows.values) for _, rows in looked_up]
        slots = whole.slot_of_value.split_with_sizes(counts)
        for number, (lookups, rows), slots_N in zip(numbers, looked_up, slots, strict=True):
            ledger[number] = ledger[number]._replace(
                bags=rows.at_slots(slots_N), rows=rows, ticket=whole.share(lookups, slots_N)
            )
    return ledger


def _num_distinct(ledger: Sequence[LedgerEntry]) -> int:
    return num_distinct_rows((entry.lookups, entry.rows or entry.bags) for entry in ledger)
