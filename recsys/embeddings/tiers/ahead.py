"""Tickets made ahead: rows of later mini-batches are fetched while earlier ones are computed.

    prefetch   -> a ticket, whose rows are fetched in the background, queued with its ids
    forward    <- the ticket of exactly these ids, if there is one; other tickets stay queued
    split      -> tickets for some of its samples each, for the lookups of these samples alone
    pressure   -> tickets are released, the last one first, before a lookup is refused

A ticket made ahead holds slots as any other does, never copies of rows. So a row that an earlier
mini-batch updates has its newest value when the later lookup comes (C1).

Letters: B samples, F features, N values; M samples chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from recsys.batch import places_of_samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.tiers.residency import Ticket

__all__ = ["AheadQueue", "InputIds", "Prefetched"]


class InputIds(NamedTuple):
    """The ids of a lookup, in memory of their own: the caller may overwrite its input.

    Attributes:
        values: Rows, (N,).
        offsets: Where bags begin, (F * B + 1,); None where bag i is value i.
        batch_size: B, in bags of a feature.
    """

    values: Tensor
    offsets: Tensor | None
    batch_size: int

    @classmethod
    def copy(cls, bags: Bags) -> InputIds:
        """Copy those of a module's input."""
        offsets = None if bags.offsets is None else _tensor_of(bags.offsets).clone()
        return cls(_tensor_of(bags.values).clone(), offsets, bags.batch_size)

    def are_of(self, bags: Bags) -> bool:
        """Whether these are the ids of this input; the host waits for a device."""
        if self.batch_size != bags.batch_size:
            return False
        if not torch.equal(self.values, _tensor_of(bags.values)):
            return False
        offsets = None if bags.offsets is None else _tensor_of(bags.offsets)
        if self.offsets is not None and offsets is not None:
            return torch.equal(self.offsets, offsets)
        known = self.offsets if offsets is None else offsets
        if known is None:
            return True
        # Offsets may be given although bag i is value i.
        one_by_one = torch.arange(len(known), dtype=known.dtype, device=known.device)
        return torch.equal(known, one_by_one)

    def samples_with(self, is_meant: Tensor, positions: Sequence[int]) -> Tensor:
        """Which samples have a value that is meant.

        Args:
            is_meant: For every value.
            positions: Of the features that count.

        Shape:
            is_meant (N,) bool, where the values are; result (B,) bool.
        """
        if not positions or not self.batch_size:
            return is_meant.new_zeros(self.batch_size)
        if self.offsets is None:
            return is_meant.view(-1, self.batch_size)[positions].any(0)
        num_before = torch.nn.functional.pad(is_meant.long().cumsum(0), (1, 0))
        of_bags = num_before[self.offsets.long()].diff()
        return (of_bags.view(-1, self.batch_size)[positions] > 0).any(0)

    def select(self, samples: Tensor) -> tuple[Tensor, InputIds]:
        """The places of some samples' values, and the ids of these samples alone.

        Shape:
            samples (M,) int64; places as many as there are values, int64, where these are.
        """
        samples = samples.to(self.values.device)
        offsets = None
        if self.offsets is None:
            numbers = torch.arange(len(self.values), device=samples.device)
            places = numbers.view(-1, self.batch_size)[:, samples].flatten()
        else:
            places, offsets = places_of_samples(self.offsets, self.batch_size, samples)
        return places, InputIds(self.values[places], offsets, len(samples))


def _tensor_of(ids: Tensor | NDArray[Any]) -> Tensor:
    """Ids as a tensor where they are, whatever the default device is."""
    return ids if isinstance(ids, torch.Tensor) else torch.from_numpy(ids)


class AheadQueue:
    """The tickets of one table group that wait for their lookups, in the order they were made.

    Attributes:
        waiting: These; some may have been released meanwhile.
    """

    def __init__(self) -> None:
        self.waiting: list[Ticket] = []

    def __bool__(self) -> bool:
        """Whether there is one."""
        self.waiting = [ticket for ticket in self.waiting if ticket.is_held]
        return bool(self.waiting)

    def add(self, tickets: Sequence[Ticket], ids: InputIds) -> None:
        """Queue tickets until the lookup of these ids comes."""
        for ticket in tickets:
            ticket.ids, ticket.queue = ids, self
        if self:  # drops those that were released
            self.waiting += tickets
        else:
            self.waiting = list(tickets)

    def replace(self, whole: Ticket, parts: Sequence[Ticket]) -> None:
        """Queue the parts of a ticket in its place."""
        place = self.waiting.index(whole)
        self.waiting[place : place + 1] = parts

    def take(self, lookups: Lookups, bags: Bags) -> Ticket | None:
        """A ticket for a lookup that has come; None if none was made ahead.

        Args:
            lookups: What is looked up where.
            bags: The input.
        """
        for ticket in self.waiting:
            if ticket.is_held and ticket.is_for(lookups, bags):
                return ticket.take(bags)
        return None

    def give_up_last(self) -> bool:
        """Release the ticket made last; whether there was one."""
        if not self:
            return False
        self.waiting.pop().release()
        return True

    def give_up_all(self) -> None:
        """Release every ticket."""
        while self.give_up_last():
            pass


class Prefetched:
    """What `prefetch` of a module has claimed for one lookup.

    You need not keep it: the module keeps the tickets until the lookup comes, or another lookup
    needs the slots.

    Args:
        tickets: What was claimed; none where every row is resident.
        has_room: Whether there were slots for it.

    Attributes:
        has_room: As above.
        can_split: Whether `split` may be called: not for a lookup that needs the whole mini-batch.
    """

    def __init__(self, tickets: Iterable[Ticket], *, has_room: bool = True) -> None:
        self._tickets = list(tickets)
        self.has_room = has_room
        self.can_split = True
        self._bags_per_sample = 1

    @property
    def is_held(self) -> bool:
        """Whether slots are kept for the lookup."""
        return any(ticket.is_held for ticket in self._tickets)

    @property
    def is_given_up(self) -> bool:
        """Whether another lookup needed the slots, or `cancel` was called."""
        return any(not ticket.is_held and not ticket.is_taken for ticket in self._tickets)

    @property
    def is_here(self) -> bool:
        """Whether all rows were fetched."""
        return all(ticket.is_here for ticket in self._tickets)

    def cancel(self) -> None:
        """Give the slots back, unless the lookup has come; it then claims slots of its own."""
        for ticket in self._tickets:
            ticket.release()

    @classmethod
    def all_of(cls, claims: Sequence[Prefetched]) -> Prefetched:
        """Join what was claimed for several lookups of one mini-batch: all of it, or nothing.

        Bags of the lookups are no samples, so it cannot be split.
        """
        has_room = all(each.has_room for each in claims)
        if not has_room:
            for each in claims:
                each.cancel()
        kept = [part for each in claims for part in each._tickets] if has_room else []
        found = cls(kept, has_room=has_room)
        found.can_split = False
        return found

    def make_samples_of(self, num_bags: int) -> None:
        """Count so many bags, one after the other, as one sample from now on."""
        self._bags_per_sample = num_bags

    def batch_sizes(self) -> set[int]:
        """B of every ticket: more than one value where tickets are for different samples.

        It has no meaning without `can_split`.
        """
        return {ticket.batch_size // self._bags_per_sample for ticket in self._tickets}

    def missing_samples(self) -> list[Tensor]:
        """For each ticket: which samples had a row to be fetched when it was made, (B,) bool."""
        num_bags = self._bags_per_sample
        return [ticket.missing_samples().view(-1, num_bags).any(1) for ticket in self._tickets]

    def split(self, parts: Sequence[tuple[Tensor, bool]]) -> list[Prefetched]:
        """Claims for the lookups of some samples each, in place of the whole.

        A part whose rows were all in slots does not wait for those of the others. All slots stay
        claimed until the last part gives them back.

        Args:
            parts: Samples, (M,) int64 on the CPU, and whether some of them are `missing_samples`.

        Raises:
            ValueError: `can_split` is off.
        """
        if not self.can_split:
            raise ValueError(
                "a claim for mode='max' or scale_grad_by_freq=True is for the distinct rows of a "
                "whole mini-batch and cannot be split; look up the whole mini-batch"
            )
        bags = torch.arange(self._bags_per_sample, device="cpu")
        of_bags = [
            ((samples.unsqueeze(1) * len(bags) + bags).flatten(), was_missing)
            for samples, was_missing in parts
        ]
        found: list[list[Ticket]] = []
        try:
            found.extend(ticket.split(of_bags) for ticket in self._tickets)  # some, if one fails
        except BaseException:
            for part in (part for tickets in found for part in tickets):
                part.release()
            raise
        return [Prefetched(tickets[number] for tickets in found) for number in range(len(parts))]
