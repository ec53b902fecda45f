"""Claims made ahead: rows of mini-batches to come are fetched while others are computed on.

    prefetch   -> a claim, whose rows come in the background
    forward    <- the claim of the very same ids, if there is one; any other is left alone
    pressure   -> claims are given up, the last one first, before a lookup is refused

A claim is a ticket like any other, so it holds slots, never copies of rows: a row that is moved by
the mini-batches before is the newest when its own comes (C1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups
    from recsys.embeddings.residency import Ticket

__all__ = ["AheadClaim", "AheadClaims", "Prefetched"]


class AheadClaim:
    """What will be looked up in the tables of one group, and its slots.

    Args:
        lookups: What is looked up where.
        bags: The input.
        tickets: Have the slots.

    Attributes:
        is_taken: Whether its lookup has come.
    """

    def __init__(self, lookups: Lookups, bags: Bags, tickets: Sequence[Ticket]) -> None:
        self._places = lookups.tables, lookups.positions
        # Copies: the caller's may be overwritten with other ids, in the same memory.
        self._values, self._offsets = _copied(bags.values), _copied(bags.offsets)
        self._batch_size = bags.batch_size
        self._tickets: Sequence[Ticket] | None = tickets
        self.is_taken = False

    @property
    def is_held(self) -> bool:
        """Whether it has its slots still."""
        return self._tickets is not None

    def is_of(self, lookups: Lookups, bags: Bags) -> bool:
        """Whether these are the very same ids, looked up in the same tables."""
        return (
            self._batch_size == bags.batch_size
            and _is_same(self._places[0], lookups.tables)
            and _is_same(self._places[1], lookups.positions)
            and _is_same(self._values, bags.values)
            and _is_same(self._offsets, bags.offsets)
        )

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

    def add(self, claim: AheadClaim) -> None:
        """Keep a claim until its lookup comes."""
        if self:  # forgets those that were given up
            self._claims.append(claim)
        else:
            self._claims = [claim]

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
    """

    def __init__(self, claims: Iterable[AheadClaim], *, has_room: bool = True) -> None:
        self._claims = list(claims)
        self.has_room = has_room

    @property
    def is_held(self) -> bool:
        """Whether slots are kept for the lookup."""
        return any(claim.is_held for claim in self._claims)

    @property
    def is_given_up(self) -> bool:
        """Whether slots were needed for another lookup, or `cancel` was called."""
        return any(not claim.is_held and not claim.is_taken for claim in self._claims)

    def cancel(self) -> None:
        """Give the slots back, if the lookup has not come; it is computed right all the same."""
        for claim in self._claims:
            claim.give_up()


def _copied(ids: Any) -> Any:
    if ids is None:
        return None
    return ids.clone() if isinstance(ids, Tensor) else ids.copy()


def _is_same(known: Any, other: Any) -> bool:
    """Whether two arrays, or tensors on a device, which the host then waits for, are equal."""
    if known is other or known is None or other is None:
        return known is other
    if isinstance(known, Tensor):
        return torch.equal(known, other)
    return np.array_equal(known, other)
