"""Tickets made ahead: rows of later mini-batches are fetched while earlier ones are computed.

    prefetch   makes a ticket, queues it with its ids, and fetches its rows in the background
    forward    takes the queued ticket with exactly its ids, if there is one
    split      replaces a ticket by several, each for some of its samples
    pressure   if a lookup lacks slots, queued tickets are released, the last one first

A ticket made ahead holds slots like any other, never copies of rows. So if an earlier mini-batch
updates a row, the later lookup reads the new value (C1).

Letters: B samples, F features, N values; M samples chosen.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from recsys._support.torch_compat import base_of, version_of
from recsys.batch import places_of_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.tiers.ticket import Ticket

__all__ = ["AheadQueue", "InputIds", "Prefetched", "tensor_of"]


class InputIds(NamedTuple):
    """A copy of the ids of a lookup: the caller may overwrite its input.

    Attributes:
        values: Rows, (N,).
        offsets: Where bags begin, (F * B + 1,); None if bag i is value i.
        batch_size: B, the number of bags per feature.
        padding: An id without a row; None for none.
        given: The tensors that the ids were made from; empty on the CPU.
    """

    values: Tensor
    offsets: Tensor | None
    batch_size: int
    padding: int | None = None
    given: Sequence[_Given] = ()

    @classmethod
    def copy(cls, bags: Bags, values: Tensor | None = None) -> InputIds:
        """Copy the ids of a module's input; `values` are copied already unless they are None."""
        offsets = None if bags.offsets is None else tensor_of(bags.offsets).clone()
        given = [_Given.of(each) for each in _given(bags)]
        values = tensor_of(bags.values).clone() if values is None else values
        return cls(values, offsets, bags.batch_size, _padding_of(bags), given)

    def in_place_of(self, bags: Any) -> Any:
        """The input, on a device with these ids: its claim may be made later than others write."""
        if not isinstance(bags.values, torch.Tensor):
            return bags
        return bags._replace(values=self.values, offsets=self.offsets)

    def are_given_by(self, bags: Bags) -> bool:
        """Whether an input is made from the same tensors, which no operation has written to since.

        On a device, only this shows without waiting that ids are equal.
        """
        if not self.given or not self._are_like(bags):
            return False
        found = _given(bags)
        if len(found) != len(self.given):
            return False
        return all(known.is_still(now) for known, now in zip(self.given, found, strict=True))

    def are_of(self, bags: Bags) -> bool:
        """Whether these ids equal those of an input; the host waits if they are on a device."""
        if not self._are_like(bags):
            return False
        if not torch.equal(self.values, tensor_of(bags.values)):
            return False
        offsets = None if bags.offsets is None else tensor_of(bags.offsets)
        if self.offsets is not None and offsets is not None:
            return torch.equal(self.offsets, offsets)
        known = self.offsets if offsets is None else offsets
        if known is None:
            return True
        # One of the two may have offsets although bag i is value i.
        one_by_one = torch.arange(len(known), dtype=known.dtype, device=known.device)
        return torch.equal(known, one_by_one)

    def _are_like(self, bags: Bags) -> bool:
        return self.batch_size == bags.batch_size and self.padding == _padding_of(bags)

    def samples_with(self, is_selected: Tensor, positions: Sequence[int]) -> Tensor:
        """Which samples have a selected value.

        Args:
            is_selected: Whether each value is selected.
            positions: Positions of the features to consider.

        Shape:
            is_selected (N,) bool, on the device of the values; result (B,) bool.
        """
        if not positions or not self.batch_size:
            return is_selected.new_zeros(self.batch_size)
        if self.offsets is None:
            return is_selected.view(-1, self.batch_size)[positions].any(0)
        num_before = torch.nn.functional.pad(is_selected.long().cumsum(0), (1, 0))
        of_bags = num_before[self.offsets.long()].diff()
        return (of_bags.view(-1, self.batch_size)[positions] > 0).any(0)

    def select(self, samples: Tensor) -> tuple[Tensor, InputIds]:
        """Select samples; returns the places of their values, and their ids.

        Shape:
            samples (M,) int64; places (number of selected values,) int64, on the values' device.
        """
        samples = samples.to(self.values.device)
        offsets = None
        if self.offsets is None:
            num_features = len(self.values) // self.batch_size if self.batch_size else 0
            first_values = torch.arange(num_features, device=samples.device) * self.batch_size
            places = (first_values.unsqueeze(1) + samples).flatten()
        else:
            places, offsets = places_of_samples(self.offsets, self.batch_size, samples)
        return places, InputIds(self.values[places], offsets, len(samples), self.padding)


class _Given(NamedTuple):
    """A tensor of an input, and its version when it was given."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Given:
        """A tensor now; without a version in inference mode, where any write is unseen."""
        return cls(tensor, _UNSEEN if tensor.is_inference() else version_of(tensor))

    def is_still(self, tensor: Tensor) -> bool:
        """Whether a tensor is this one, or the same view of one, and was not written to.

        A tensor from `Tensor.data` has a version of its own, so it is another one.
        """
        own = self.tensor
        is_same = tensor is own or (
            _root_of(tensor) is _root_of(own)
            and (tensor.data_ptr(), tensor.dtype) == (own.data_ptr(), own.dtype)
            and (tensor.shape, tensor.stride()) == (own.shape, own.stride())
        )
        return is_same and self.version != _UNSEEN and version_of(tensor) == self.version


_UNSEEN = -1


def _root_of(tensor: Tensor) -> Tensor:
    base = base_of(tensor)
    return tensor if base is None else base


def _given(bags: Any) -> Sequence[Tensor]:
    """The tensors of an input on a device; none on the CPU, where comparing takes no time."""
    if not isinstance(bags.values, torch.Tensor):
        return ()
    return bags.given or [each for each in (bags.values, bags.offsets) if each is not None]


def _padding_of(bags: Any) -> int | None:
    """An id that needs no row; on the CPU, such ids were left out."""
    padding: int | None = bags.padding if isinstance(bags.values, torch.Tensor) else None
    return padding


def tensor_of(ids: Tensor | NDArray[Any]) -> Tensor:
    """Ids as a tensor where they are, whatever the default device is."""
    return ids if isinstance(ids, torch.Tensor) else torch.from_numpy(ids)


class AheadQueue:
    """The tickets of one table group that wait for their lookups.

    Attributes:
        batch: The number of the mini-batch that tickets are made for; None if each counts as that
            of a mini-batch of its own.
    """

    def __init__(self) -> None:
        # By the tables that are looked up, because a model may have hundreds of separate bags;
        # each list in the order its tickets were made. Some may have been released.
        self._of_tables: dict[tuple[int, ...], list[Ticket]] = {}
        self._num_made = 0
        self.batch: int | None = None

    def __bool__(self) -> bool:
        """Whether a ticket is waiting; forgets released tickets if none is."""
        if any(ticket.is_held for ticket in self._all()):
            return True
        self._of_tables.clear()
        return False

    def waiting(self) -> list[Ticket]:
        """The tickets that wait, in the order they were made."""
        return sorted((each for each in self._all() if each.is_held), key=attrgetter("number"))

    def begin_batch(self) -> None:
        """Count the tickets from now on as those of one more mini-batch.

        Until the first call, each ticket counts as that of a mini-batch of its own.
        """
        self.batch = (self.batch or 0) + 1

    def num_before(self, lookups: Lookups) -> int:
        """The number of earlier mini-batches with waiting tickets for these lookups."""
        found = [each for each in self._held_of(lookups) if each.lookups is lookups]
        if self.batch is None:
            return len(found)
        return len({each.batch for each in found} - {self.batch})

    def num_claims(self) -> int:
        """How many claims the waiting tickets are of; parts of a split ticket have one together."""
        return len({id(each.held) for each in self._all() if each.is_held})

    def add(self, tickets: Sequence[Ticket], ids: InputIds) -> None:
        """Queue tickets until the lookup of these ids."""
        for ticket in tickets:
            ticket.ids, ticket.queue, ticket.batch = ids, ref(self), self.batch
            ticket.number = self._num_made
            self._num_made += 1
            self._keep(ticket.lookups, [*self._held_of(ticket.lookups), ticket])

    def replace(self, whole: Ticket, parts: Sequence[Ticket]) -> None:
        """Queue the parts of a ticket in its place."""
        found = self._held_of(whole.lookups)
        place = found.index(whole)
        self._keep(whole.lookups, [*found[:place], *parts, *found[place + 1 :]])

    def take(self, lookups: Lookups, bags: Bags) -> Ticket | None:
        """Take the ticket that was made ahead for a lookup; None if there is none.

        Args:
            lookups: Which features are looked up in which tables.
            bags: The input.
        """
        found = self._held_of(lookups)
        for compares in (False, True):  # on a device, comparing waits
            for ticket in found:
                if ticket.is_for(lookups, bags, compares=compares):
                    self._keep(lookups, [each for each in found if each is not ticket])
                    return ticket.take(bags)
        return None

    def give_up_last(self) -> None:
        """Release the last ticket, if there is one, and those that share its slots."""
        waiting = self.waiting()
        for ticket in [each for each in waiting if each.held is waiting[-1].held]:
            ticket.release()

    def give_up_batch(self) -> None:
        """Release the tickets of the newest mini-batch."""
        for ticket in self._all():
            if ticket.batch == self.batch:
                ticket.release()

    def give_up_all(self) -> None:
        """Release every ticket."""
        for ticket in self._all():
            ticket.release()
        self._of_tables.clear()

    def _all(self) -> Iterator[Ticket]:
        return chain.from_iterable(self._of_tables.values())

    def _held_of(self, lookups: Lookups) -> list[Ticket]:
        """The waiting tickets for lookups in these tables."""
        found = self._of_tables.get(tuple(lookups.distinct_tables), ())
        return [each for each in found if each.is_held]

    def _keep(self, lookups: Lookups, tickets: list[Ticket]) -> None:
        """Let only these tickets wait for lookups in these tables."""
        tables = tuple(lookups.distinct_tables)
        if tickets:
            self._of_tables[tables] = tickets
        else:
            self._of_tables.pop(tables, None)


class _Claim(NamedTuple):
    """A ticket for one lookup.

    Attributes:
        ticket: As made.
        needs_slots: Whether the lookup takes slots now; None if it always does.
        first_bags: The argument of `Prefetched.make_samples`; None if each bag is a sample.
    """

    ticket: Ticket
    needs_slots: Callable[[], bool] | None
    first_bags: Tensor | None = None


class Prefetched:
    """The slots that `prefetch` of a module has claimed for one lookup.

    You need not keep this object: the module keeps the tickets until the lookup, or until another
    lookup needs the slots.

    Args:
        tickets: The tickets; none if every row is resident.
        has_room: Whether there were enough slots.
        needs_slots: Whether the lookup takes slots now; None if it always does.

    Attributes:
        has_room: Whether there were enough slots.
    """

    def __init__(
        self,
        tickets: Iterable[Ticket],
        *,
        has_room: bool = True,
        needs_slots: Callable[[], bool] | None = None,
    ) -> None:
        self._claims = [_Claim(ticket, needs_slots) for ticket in tickets]
        self.has_room = has_room

    @property
    def is_held(self) -> bool:
        """Whether slots are held for the lookup."""
        return any(each.ticket.is_held for each in self._claims)

    @property
    def is_missed(self) -> bool:
        """Whether slots are held that the lookup, once it was made, should have taken."""
        return any(
            ticket.is_held and (needs_slots is None or needs_slots())
            for ticket, needs_slots, _ in self._claims
        )

    @property
    def is_given_up(self) -> bool:
        """Whether another lookup needed the slots, or `cancel` was called."""
        tickets = [each.ticket for each in self._claims]
        return any(not ticket.is_held and not ticket.is_taken for ticket in tickets)

    def cancel(self) -> None:
        """Release the slots, unless the lookup has taken them; it then claims slots itself."""
        for each in self._claims:
            each.ticket.release()

    @classmethod
    def all_of(cls, claims: Sequence[Prefetched]) -> Prefetched:
        """Join the claims for several lookups of one mini-batch; if one has no room, cancel all.

        Args:
            claims: The claims, made one after the other.
        """
        if not all(each.has_room for each in claims):
            for each in claims:
                each.cancel()
            return cls((), has_room=False)
        found = cls(())
        found._claims = list(chain.from_iterable(each._claims for each in claims))
        tickets = [each.ticket for each in found._claims]
        if tickets:
            tickets[0].join(tickets[1:])
        return found

    def make_samples(self, first_bags: Tensor) -> None:
        """Treat runs of consecutive bags as samples from now on.

        Args:
            first_bags: The first bag of each sample, and at last the number of bags.

        Shape:
            first_bags (B + 1,) int64, on the CPU.
        """
        self._claims = [each._replace(first_bags=first_bags) for each in self._claims]

    def batch_sizes(self) -> set[int]:
        """The distinct values of B; more than one if tickets are for different samples."""
        return {
            ticket.batch_size if first_bags is None else len(first_bags) - 1
            for ticket, _, first_bags in self._claims
        }

    def missing_samples(self) -> list[Tensor]:
        """For each ticket, which samples had rows to fetch when it was made, (B,) bool."""
        return [
            _any_of_bags(ticket.missing_samples(), first_bags)
            for ticket, _, first_bags in self._claims
        ]

    def split(self, parts: Sequence[tuple[Tensor, bool]]) -> list[Prefetched]:
        """Replace this claim by several, each for the lookup of some samples.

        A part whose rows were all in slots does not wait for the rows of other parts. All slots
        stay claimed until the last part is released.

        Args:
            parts: Samples, (M,) int64 on the CPU, and whether some of them are `missing_samples`.
        """
        found: list[list[Ticket]] = []
        try:
            # If one split fails, `found` has those before it.
            for ticket, _, first_bags in self._claims:
                of_bags = [(_bags_of(samples, first_bags), each) for samples, each in parts]
                found.append(ticket.split(of_bags))
        except BaseException:
            for part in (part for tickets in found for part in tickets):
                part.release()
            raise
        made = [Prefetched(()) for _ in parts]
        for each, tickets in zip(self._claims, found, strict=True):
            for claim, ticket in zip(made, tickets, strict=True):
                claim._claims.append(_Claim(ticket, each.needs_slots))
        return made


def _any_of_bags(is_missing: Tensor, first_bags: Tensor | None) -> Tensor:
    """Whether a bag of each sample is missing, (B,); see `Prefetched.make_samples`."""
    if first_bags is None:
        return is_missing
    num_before = torch.nn.functional.pad(is_missing.long().cumsum(0), (1, 0))
    return num_before[first_bags].diff() > 0


def _bags_of(samples: Tensor, first_bags: Tensor | None) -> Tensor:
    """The bags of samples, sample after sample; see `Prefetched.make_samples`."""
    if first_bags is None:
        return samples
    bags, _ = places_of_samples(first_bags, len(first_bags) - 1, samples)
    return bags
