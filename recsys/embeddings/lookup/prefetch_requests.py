"""Requests to fetch rows of a later mini-batch, so that several lookups can make one claim.

A model may have dozens of separate bags. If each made a claim of its own, claims could take longer
than the rest of a step. So bags with tables in one group make one together.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.embeddings.kernels.cpu.slots import NoSuchRow
from recsys.embeddings.lookup.fused_lookup import Part, prefetch_parts, require_grad
from recsys.embeddings.tiers.ahead import Prefetched
from recsys.embeddings.tiers.ticket import NotEnoughSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from torch import Tensor

    from recsys.embeddings.tiers.ticket import Ticket

__all__ = ["PrefetchRequest", "prefetch_together"]


class PrefetchRequest(NamedTuple):
    """A later lookup in one table.

    Attributes:
        part: What will be looked up.
        explain: As for `fused_lookup`.
        first_bags: As for `Prefetched.make_samples`; None if each bag is a sample.
    """

    part: Part
    explain: Callable[[int], Exception]
    first_bags: Tensor | None = None

    def claim(self) -> Prefetched:
        """Claim slots for this lookup alone.

        Raises:
            Exception: the result of `explain`, for an id that is not a row.
        """
        return self._with_samples(prefetch_parts([self.part], self.explain))

    @property
    def kind(self) -> Hashable | None:
        """Requests of equal kinds can make one claim; None for one that needs its own."""
        group, _, bags = self.part
        if not len(bags.values):
            return None
        return group, bags.values.dtype, len(bags.values), getattr(bags, "padding", None)

    def made(self, ticket: Ticket) -> Prefetched:
        """The result of `claim`, given the ticket."""
        needs_slots = partial(require_grad, [self.part])
        return self._with_samples(Prefetched([ticket], needs_slots=needs_slots))

    def _with_samples(self, claimed: Prefetched) -> Prefetched:
        if self.first_bags is not None:
            claimed.make_samples(self.first_bags)
        return claimed


def prefetch_together(requests: Iterable[PrefetchRequest]) -> Iterator[Prefetched]:
    """Start to fetch the rows for lookups of a mini-batch, with few claims.

    Args:
        requests: The lookups.

    Returns:
        The claims, each as it is made; the last one if there are too few slots for it.

    Raises:
        Exception: an id is not a row; the caller cancels the claims so far.
    """
    of_kind: dict[Hashable, list[PrefetchRequest]] = {}
    for request in requests:
        with DisableTorchFunctionSubclass():  # internal reads of tables
            kind = request.kind if require_grad([request.part]) else None
        if kind is None:
            yield request.claim()  # an empty one if rows are read in place
        else:
            of_kind.setdefault(kind, []).append(request)
    for same in of_kind.values():
        joined = _join(same) if len(same) > 1 else None
        if joined is None:
            yield from (request.claim() for request in same)
        else:
            yield joined


def _join(requests: Sequence[PrefetchRequest]) -> Prefetched | None:
    """Make one claim for requests of one kind.

    Returns:
        The claim; None if an id is not a row, because only a claim of its own finds out which.
    """
    group = requests[0].part.group
    tiers = group.tiers
    assert tiers is not None
    looked_up = [(request.part.lookups, request.part.bags) for request in requests]
    used = [table for lookups, _ in looked_up for table in lookups.distinct_tables]
    with DisableTorchFunctionSubclass():  # internal reads of tables
        try:
            tickets = tiers.claim_ahead(group.space(used), looked_up)
        except NoSuchRow:
            return None
        except NotEnoughSlots:
            return Prefetched((), has_room=False)
    return Prefetched.all_of(
        [request.made(ticket) for request, ticket in zip(requests, tickets, strict=True)]
    )
