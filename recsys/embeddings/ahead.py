"""Claims made ahead: rows of mini-batches to come are fetched while others are computed on.

    prefetch   -> a claim, whose rows come in the background
    forward    <- the claim of the very same ids, if there is one; any other is left alone
    split      -> claims of some of its samples each, for the forwards of these alone
    pressure   -> claims are given up, the last one first, before a lookup is refused

A claim is a ticket like any other, so it holds slots, never copies of rows: a row that is moved by
the mini-batches before is the newest when its own comes (C1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from recsys.embeddings.claimed_ids import ClaimedIds
    from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups
    from recsys.embeddings.residency import Ticket

__all__ = ["AheadClaim", "AheadClaims", "Prefetched"]


class AheadClaim:
    """What will be looked up in the tables of one group, and its slots.

    Args:
        lookups: What is looked up where.
        ids: The input.
        layers: The lookups of each ticket.
        tickets: Have the slots.
        kept_in: Those of the group, which it is one of.

    Attributes:
        is_taken: Whether its lookup has come.
        bags_per_sample: How many bags are of one sample: more than one of sequences of ids.
    """

    def __init__(
        self,
        lookups: Lookups,
        ids: ClaimedIds,
        layers: Sequence[Lookups],
        tickets: Sequence[Ticket],
        kept_in: AheadClaims,
    ) -> None:
        self._lookups, self._ids, self._layers = lookups, ids, layers
        self._tickets: Sequence[Ticket] | None = tickets
        self._kept_in = kept_in
        self.is_taken = False
        self.bags_per_sample = 1

    @property
    def batch_size(self) -> int:
        """B."""
        return self._ids.batch_size // self.bags_per_sample

    @property
    def is_held(self) -> bool:
        """Whether it has its slots still."""
        return self._tickets is not None

    def is_of(self, lookups: Lookups, bags: Bags) -> bool:
        """Whether these are the very same ids, looked up in the same tables."""
        return (
            np.array_equal(self._lookups.tables, lookups.tables)
            and np.array_equal(self._lookups.positions, lookups.positions)
            and self._ids.are_of(bags)
        )

    @property
    def is_here(self) -> bool:
        """Whether all of its rows have come."""
        return all(ticket.is_here for ticket in self._tickets or ())

    def missing_samples(self) -> Tensor:
        """Which samples had a row to be fetched when it was made, (B,) bool, on the CPU."""
        found = torch.zeros(self._ids.batch_size, dtype=torch.bool)
        for layer, ticket in zip(self._layers, self._tickets or (), strict=True):
            found |= self._ids.samples_with(ticket.was_missing(), layer.positions.tolist()).cpu()
        return found.view(-1, self.bags_per_sample).any(1)

    def split(self, parts: Sequence[tuple[Tensor, bool]]) -> list[AheadClaim]:
        """Claims of some of its samples each, in its place.

        Args:
            parts: Samples, (M,) int64 on the CPU, and whether some of them are `missing_samples`.
        """
        tickets, claims = self.take(), []
        for samples, was_missing in parts:
            first_bags = samples.unsqueeze(1) * self.bags_per_sample
            bags = (first_bags + torch.arange(self.bags_per_sample)).flatten()
            places, ids = self._ids.select(bags)
            own = [ticket.share(places, was_missing=was_missing) for ticket in tickets]
            claims.append(AheadClaim(self._lookups, ids, self._layers, own, self._kept_in))
            claims[-1].bags_per_sample = self.bags_per_sample
        self._kept_in.replace(self, claims)
        return claims

    def take(self) -> Sequence[Ticket]:
        """Its tickets, which are the caller's from now on."""
        tickets, self._tickets = self._tickets, None
        assert tickets is not None
        self.is_taken = True
        return tickets

    def give_up(self) -> None:
        """Give the slots back; a second time does nothing."""
        tickets, self._tickets = self._tickets, None
        for ticket in tickets or ():
            ticket.release()


class AheadClaims:
    """Those of one table group, in the order in which they were made."""

    def __init__(self) -> None:
        self._claims: list[AheadClaim] = []

    def __bool__(self) -> bool:
        """Whether there is one."""
        self._claims = [claim for claim in self._claims if claim.is_held]
        return bool(self._claims)

    def add(
        self,
        lookups: Lookups,
        ids: ClaimedIds,
        layers: Sequence[Lookups],
        tickets: Sequence[Ticket],
    ) -> AheadClaim:
        """Make a claim, and keep it until its lookup comes; arguments as for `AheadClaim`."""
        claim = AheadClaim(lookups, ids, layers, tickets, self)
        if self:  # forgets those that were given up
            self._claims.append(claim)
        else:
            self._claims = [claim]
        return claim

    def replace(self, claim: AheadClaim, parts: Sequence[AheadClaim]) -> None:
        """Keep parts in the place of a claim, whose tickets they have."""
        place = self._claims.index(claim)
        self._claims[place : place + 1] = parts

    def take(self, lookups: Lookups, bags: Bags) -> Sequence[Ticket] | None:
        """The tickets of a lookup; None where nobody has claimed them ahead.

        Args:
            lookups: What is looked up where.
            bags: The input.
        """
        for claim in self._claims:
            if claim.is_held and claim.is_of(lookups, bags):
                return claim.take()
        return None

    def give_up_last(self) -> bool:
        """Give up the claim made last; whether there was one."""
        if not self:
            return False
        self._claims.pop().give_up()
        return True

    def give_up_all(self) -> None:
        """Give up every claim."""
        while self.give_up_last():
            pass


class Prefetched:
    """What `prefetch` of a module has claimed for one lookup.

    It need not be kept: the module keeps the claim until the lookup comes, or slots are needed for
    another.

    Args:
        claims: Of each table group; none where every row is resident.
        has_room: Whether there were slots for it.

    Attributes:
        has_room: As above.
        can_split: Whether `split` may be called: not for a lookup that needs the whole mini-batch.
    """

    def __init__(self, claims: Iterable[AheadClaim], *, has_room: bool = True) -> None:
        self._claims = list(claims)
        self.has_room = has_room
        self.can_split = True

    @property
    def is_held(self) -> bool:
        """Whether slots are kept for the lookup."""
        return any(claim.is_held for claim in self._claims)

    @property
    def is_given_up(self) -> bool:
        """Whether slots were needed for another lookup, or `cancel` was called."""
        return any(not claim.is_held and not claim.is_taken for claim in self._claims)

    @property
    def is_here(self) -> bool:
        """Whether all rows have come."""
        return all(claim.is_here for claim in self._claims)

    def cancel(self) -> None:
        """Give the slots back, if the lookup has not come; it is computed right all the same."""
        for claim in self._claims:
            claim.give_up()

    @classmethod
    def all_of(cls, claims: Sequence[Prefetched]) -> Prefetched:
        """What is claimed for several lookups of one mini-batch, as one: all of it, or nothing.

        Bags of the lookups are no samples, so it cannot be split.
        """
        has_room = all(each.has_room for each in claims)
        if not has_room:
            for each in claims:
                each.cancel()
        kept = [part for each in claims for part in each._claims] if has_room else []
        found = cls(kept, has_room=has_room)
        found.can_split = False
        return found

    def make_samples_of(self, num_bags: int) -> None:
        """Take so many bags, one behind the other, for one sample from now on."""
        for claim in self._claims:
            claim.bags_per_sample = num_bags

    def batch_sizes(self) -> set[int]:
        """B of every claim: more than one where not all of them are of the same samples.

        It has no meaning without `can_split`.
        """
        return {claim.batch_size for claim in self._claims}

    def missing_samples(self) -> list[Tensor]:
        """By claim: which samples had a row to be fetched when it was made, (B,) bool."""
        return [claim.missing_samples() for claim in self._claims]

    def split(self, parts: Sequence[tuple[Tensor, bool]]) -> list[Prefetched]:
        """What is claimed for the lookups of some samples each, in place of the whole.

        A part whose rows were all in slots does not wait for those of the others. All slots stay
        claimed until the last of them is given back.

        Args:
            parts: As for `AheadClaim.split`.

        Raises:
            ValueError: `can_split` is off.
        """
        if not self.can_split:
            raise ValueError(
                "a claim for mode='max' or scale_grad_by_freq=True is for the distinct rows of a "
                "whole mini-batch and cannot be split; look up the whole mini-batch"
            )
        found: list[list[AheadClaim]] = []
        try:
            found.extend(claim.split(parts) for claim in self._claims)  # some, of an error
        except BaseException:
            for claim in (part for claims in found for part in claims):
                claim.give_up()
            raise
        return [Prefetched(claims[number] for claims in found) for number in range(len(parts))]
