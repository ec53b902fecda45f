"""`Ticket`: holds the slots of a mini-batch's rows; `NotEnoughSlots` says why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
import torch

from recsys.embeddings.tiers.holds import Hold, LookupHold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.tiers.ahead import AheadQueue, InputIds
    from recsys.embeddings.tiers.residency import Residency

__all__ = ["NotEnoughSlots", "Ticket", "Transferred"]


class NotEnoughSlots(Exception):  # stays inside this package: callers name the budget
    """The rows of a mini-batch, together with those of other tickets, exceed the slots.

    Attributes:
        residency: A weak reference to the residency, so that its slots can be freed.
        num_needed: The number of slots with which the claim would succeed.
    """

    def __init__(self, residency: Residency, num_needed: int) -> None:
        super().__init__(num_needed)
        self.residency, self.num_needed = ref(residency), num_needed


class Transferred(NamedTuple):
    """A point in the order of transfers.

    Attributes:
        number: Number of the last transfer in the queue; 0 if it has run.
        event: The event after it on a device; None to wait for all transfers that were made.
    """

    number: int
    event: Any = None


class Ticket:
    """Holds the slots of a mini-batch's rows until its release.

    Deleting a ticket releases it. The parts of a split ticket share its slots, which stay claimed
    until the last part is released.

    Args:
        hold: The slots.
        lookups: Which features are looked up in which tables.
        slot_of_value: The slot of each value.
        after: The transfers to wait for.
        after_hits: The transfers to wait for if all rows needed are hits.
        fetched: The slots whose rows are fetched for this ticket; on a device, negative numbers
            stand for none.

    Attributes:
        lookups: Which features are looked up in which tables; each feature in at most one.
        slot_of_value: The slot of each value, (N,), an array or a tensor on the slots' device;
            arbitrary for a value that is not looked up.
        bags: The input of the lookup with slots in place of rows; None until the lookup.
        rows: The input of the lookup with rows, copied, if the ticket was made ahead on a device;
            else None.
        ids: For a ticket made ahead, a copy of the ids of its lookup.
        queue: For a ticket made ahead, the queue in which it waits for its lookup.
        number: For a ticket made ahead, its number in the queue; a part has that of the whole.
        batch: For a ticket made ahead, the number of its mini-batch in the queue; None for none.
        is_taken: Whether its slots were passed on, to a ticket of the lookup or to parts.
        is_shared: Whether its slots are also those of other lookups, which the claim was for.
    """

    def __init__(
        self,
        hold: Hold,
        lookups: Lookups,
        slot_of_value: Any,
        after: Transferred,
        after_hits: Transferred,
        fetched: Any,
    ) -> None:
        self.lookups, self.slot_of_value = lookups, slot_of_value
        self.bags: Any = None
        self.rows: Any = None
        self.ids: InputIds | None = None
        self.queue: ref[AheadQueue] | None = None  # it has the ticket
        self.number = 0
        self.batch: int | None = None
        self.is_taken = self.is_shared = False
        self._hold: Hold | LookupHold | None = hold
        self._after, self._after_hits = after, after_hits
        # With the event after the claim; more than one for joined tickets.
        self._fetched: list[tuple[Any, Any]] = [(fetched, after_hits.event)]

    @property
    def is_held(self) -> bool:
        """Whether the ticket still holds its slots."""
        return self._hold is not None

    @property
    def held(self) -> Any:
        """The slots, in the type of the slot map; None after the release."""
        return None if self._hold is None else self._hold.slots

    def wait(self) -> None:
        """Wait until every row has been fetched.

        Raises:
            TiersFailed: a transfer has failed.
        """
        residency = self._residency
        if residency.queue.is_done(self._after.number):
            residency.queue.require_intact()
            residency.times.waited_for_nothing()
        else:
            with residency.times.waiting():
                residency.queue.wait(self._after.number)
        ids = () if self.rows is None else (self.rows.values, self.rows.offsets)
        residency.hot.after_transfers(self._after.event, self.slot_of_value, *ids)

    @property
    def batch_size(self) -> int:
        """B, for a ticket made ahead."""
        assert self.ids is not None
        return self.ids.batch_size

    def is_for(self, lookups: Lookups, bags: Any, *, compares: bool = True) -> bool:
        """Whether the ticket was made ahead for these lookups of exactly these ids.

        Args:
            lookups: Which features are looked up in which tables.
            bags: The input.
            compares: Whether to compare ids; if not, only the same tensors are known to be equal.
        """
        own = self.lookups
        is_same = own is lookups or (
            np.array_equal(own.tables, lookups.tables)
            and np.array_equal(own.positions, lookups.positions)
        )
        if not is_same or self.ids is None:
            return False
        return self.ids.are_of(bags) if compares else self.ids.are_given_by(bags)

    def missing_samples(self) -> Tensor:
        """Which samples had a row that was fetched for the ticket, (B,) bool, on the CPU."""
        if self._hold is None:
            return torch.zeros(self.batch_size, dtype=torch.bool)
        assert self.ids is not None
        self._after_claim()
        hot = self._hold.residency.hot
        for slots, event in self._fetched:
            hot.after_transfers(event, slots)
        fetched = torch.cat([hot.tensor(slots) for slots, _ in self._fetched])
        was_fetched_N = hot.are_among(self.slot_of_value, fetched)
        return self.ids.samples_with(was_fetched_N, self.lookups.positions.tolist()).cpu()

    def share(self, lookups: Lookups, slot_of_value: Tensor) -> Ticket:
        """Make the ticket for one of the lookups that the claim was for.

        Args:
            lookups: The lookup.
            slot_of_value: The slots of its values; a view of those of this ticket.
        """
        assert isinstance(self._hold, Hold)
        shared = self._copy()
        shared._hold = LookupHold(self._hold, slot_of_value)
        shared.lookups, shared.slot_of_value, shared.is_shared = lookups, slot_of_value, True
        return shared

    def take(self, bags: Any) -> Ticket:
        """Pass the slots on to a new ticket, for the lookup.

        Args:
            bags: The input of the lookup; its values are rows.
        """
        taken = self._copy()
        if self.ids is not None and isinstance(bags.values, torch.Tensor):
            taken.rows = self.ids.in_place_of(bags)
        taken.bags, taken.ids, taken.queue = bags.at_slots(self.slot_of_value), None, None
        self.is_taken, self._hold = True, None
        return taken

    def join(self, others: Sequence[Ticket]) -> None:
        """Treat this ticket and those made after it as one claim, for lookups of one mini-batch.

        A row that one of them fetches is missing for all of them. Then a part without missing rows
        waits for none of their transfers; on a device, where a claim is made between transfers,
        for those before its own claim.
        """
        joined: dict[Residency, list[Ticket]] = {}
        for ticket in (self, *others):
            if ticket._hold is not None:
                joined.setdefault(ticket._residency, []).append(ticket)
        for tickets in joined.values():
            # Tickets of one claim share a list.
            lists = {id(ticket._fetched): ticket._fetched for ticket in tickets}
            fetched = [each for of_claim in lists.values() for each in of_claim]
            before = tickets[0]._after_hits.number
            for ticket in tickets:
                ticket._fetched = fetched
                ticket._after_hits = ticket._after_hits._replace(number=before)

    def split(self, parts: Sequence[tuple[Tensor, bool]]) -> list[Ticket]:
        """Replace the ticket in its queue by several, each for some samples; they share its slots.

        Args:
            parts: Samples, (M,) int64 on the CPU, and whether some of them are `missing_samples`.
                A part without such samples does not wait for the fetched rows of other parts.
        """
        assert self.ids is not None
        assert self.queue is not None
        self._after_claim()
        tickets = []
        for samples, was_missing in parts:
            places, ids = self.ids.select(samples)
            tickets.append(self._part(places, ids, was_missing=was_missing))
        if (queue := self.queue()) is not None:  # the tables exist
            queue.replace(self, tickets)
        self.is_taken, self._hold = True, None
        return tickets

    def _part(self, places: Tensor, ids: InputIds | None, *, was_missing: bool) -> Ticket:
        """Make the ticket for the values at `places`; see `split` for `was_missing`."""
        part = self._copy()
        part.ids = ids
        is_tensor = isinstance(self.slot_of_value, torch.Tensor)
        part.slot_of_value = self.slot_of_value[places if is_tensor else places.numpy()]
        part._after = self._after if was_missing else self._after_hits
        return part

    def _copy(self) -> Ticket:
        """As `copy.copy`, which takes four times as long."""
        found = Ticket.__new__(Ticket)
        found.__dict__.update(self.__dict__)
        return found

    def release(self) -> None:
        """Release the slots; a second call does nothing."""
        self._hold = None

    def _after_claim(self) -> None:
        """Have the caller's stream wait for what the claim has made."""
        self._residency.hot.after_transfers(self._after_hits.event, self.slot_of_value)

    @property
    def _residency(self) -> Residency:
        # Through the hold, so that a released ticket does not keep the slots' memory alive.
        assert self._hold is not None
        return self._hold.residency
