"""Claims for lookups of a later mini-batch: one for each lookup, or one for several of them.

A claim takes much Python, and on a device dozens of launches, however few rows it is for. So
lookups in several tables can share one (`join_inputs`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys.embeddings.kernels.torch.row_space import upload
from recsys.embeddings.rows.lookups import Lookups
from recsys.embeddings.tiers.ahead import InputIds, tensor_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.rows.lookups import Bags
    from recsys.embeddings.tiers.ahead import AheadQueue
    from recsys.embeddings.tiers.residency import Residency
    from recsys.embeddings.tiers.ticket import Ticket

__all__ = ["claim_for_one", "claim_for_several", "join_inputs"]


def claim_for_one(
    residency: Residency, queue: AheadQueue, lookups: Lookups, bags: Bags
) -> list[Ticket]:
    """Claim slots for a lookup; the tickets are queued.

    Args:
        residency: Makes the claim.
        queue: Gets the tickets.
        lookups: Which features will be looked up in which tables.
        bags: The input.

    Returns:
        One ticket; more if a feature is looked up in several tables.

    Raises:
        Exception: any error of `Residency.claim`.
    """
    ids, tickets = InputIds.copy(bags), []
    for layer in lookups.layers():
        ticket = residency.claim(
            layer,
            ids.in_place_of(bags),
            in_background=True,
            may_unpin=False,
            may_wait=_may_wait(queue, layer),
            batch=queue.batch,
        )
        tickets.append(ticket)
    queue.add(tickets, ids)
    return tickets


def claim_for_several(
    residency: Residency, queue: AheadQueue, looked_up: Sequence[tuple[Lookups, Any]]
) -> list[Ticket]:
    """Make one claim for several lookups of a mini-batch; the tickets are queued.

    Args:
        residency: Makes the claim.
        queue: Gets the tickets.
        looked_up: As for `join_inputs`; all have equally many values.

    Returns:
        A ticket for each lookup.

    Raises:
        Exception: any error of `Residency.claim`. A position in it is one among all values.
    """
    joined_lookups, joined_bags = join_inputs(looked_up)
    num_values = joined_bags.batch_size
    whole = residency.claim(
        joined_lookups,
        joined_bags,
        in_background=True,
        may_unpin=False,
        may_wait=all(_may_wait(queue, lookups) for lookups, _ in looked_up),
        batch=queue.batch,
    )
    slots = whole.slot_of_value.reshape(-1, num_values)
    copies = tensor_of(joined_bags.values).view(-1, num_values)  # see `InputIds`
    # Queued only after all are made: an error, such as too little memory, must leave none there.
    made = [
        (whole.share(lookups, slots_N), InputIds.copy(bags, values_N))
        for (lookups, bags), slots_N, values_N in zip(looked_up, slots, copies, strict=True)
    ]
    for ticket, ids in made:
        queue.add([ticket], ids)
    return [ticket for ticket, _ in made]


def join_inputs(looked_up: Sequence[tuple[Lookups, Any]]) -> tuple[Lookups, Any]:
    """The arguments of one claim for several lookups, with a copy of their values.

    A claim depends on which values are looked up in which table, but not on their bags. So each
    lookup has a feature. If all have equally many values, bag i is value i; else each feature is a
    bag.

    Args:
        looked_up: Lookups, each in one table, and their bags, which have values of one dtype, at
            least one each, and one padding.
    """
    first_lookups, first_bags = looked_up[0]
    counts = [len(bags.values) for _, bags in looked_up]
    values = torch.cat([tensor_of(bags.values) for _, bags in looked_up])
    is_tensor = isinstance(first_bags.values, torch.Tensor)
    bags = first_bags._replace(
        values=values if is_tensor else values.numpy(),
        offsets=None,
        weights=None,
        batch_size=counts[0],
        is_mean=False,
    )
    if len(set(counts)) > 1:
        assert is_tensor
        offsets = upload(np.cumsum([0, *counts]), values.device).to(values.dtype)
        bags = bags._replace(offsets=offsets, batch_size=1, counts=counts)
    tables = tuple(lookups.distinct_tables[0] for lookups, _ in looked_up)
    return _side_by_side(tables, first_lookups.width), bags


def _may_wait(queue: AheadQueue, lookups: Lookups) -> bool:
    """Whether waiting for a device is worth it: for the current mini-batch and the next one."""
    return queue.num_before(lookups) <= 1


@lru_cache(maxsize=64)  # kernels keep what they make of the objects
def _side_by_side(tables: tuple[int, ...], dim: int) -> Lookups:
    """A lookup in each of these tables; lookup k is of feature k, and writes the columns there."""
    numbers = np.arange(len(tables), dtype=np.uint64)
    return Lookups(
        tables=np.array(tables, np.uint64),
        positions=numbers,
        columns=numbers * np.uint64(dim),
        width=len(tables) * dim,
    )
