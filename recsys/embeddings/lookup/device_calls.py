"""Tables on a device that a model looks up one by one: one autograd node for many calls.

The host sets the time of such a step, so a call does only what it must: it launches one kernel.

    poll      errors of earlier steps are raised by the first call of a step
    report    one for all calls of a step, before its backward; see `DeferredErrors.expect`
    ids       copied in backward, in one launch for all calls of a node; an update then joins them

This is for bags of one id each, which need no offsets: ids of shape (B, 1), and the ids of an
`nn.Embedding`. Other bags, weights and the padding of bags use `fused_lookup`.

With rows in two tiers, a call has a node of its own, as in `BagCalls`.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled

from recsys._support.torch_compat import (
    DisableTorchFunctionSubclass,
    active_ddp_module,
    are_functorch_transforms_active,
    current_stream_number,
    plain_requires_grad,
    tracing_state,
    version_of,
)
from recsys.embeddings.kernels.cpu.slots import NoSuchRow
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.lookup.bag_call import Call
from recsys.embeddings.lookup.fused_lookup import Part
from recsys.embeddings.lookup.prefetch_requests import PrefetchRequest
from recsys.embeddings.lookup.shared_nodes import Kind, SharedNodes, can_share_node, empty_output
from recsys.embeddings.rows.bag_input import BagInput
from recsys.embeddings.rows.ledger import next_lookup
from recsys.embeddings.tiers.ticket import NotEnoughSlots

if TYPE_CHECKING:
    from recsys.embeddings.lookup.table_group import ResolvedLookup, TableGroup
    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.update.row_updater import RowUpdater
    from recsys.errors import IdOutOfRange

__all__ = ["DeviceCalls"]

_ID_TYPES = (torch.int64, torch.int32)


class DeviceCalls:
    """The lookups in single tables of one group on a device.

    Args:
        updater: Updates the rows.
        group: Has the tables.

    Attributes:
        errors: Collects errors that a later call raises.
    """

    def __init__(self, updater: RowUpdater, group: TableGroup) -> None:
        assert group.kernels.errors is not None
        self.errors = group.kernels.errors
        self._group = ref(group)  # the group has this object
        self._nodes = SharedNodes(updater, group)

    def look_up(
        self,
        lookups: Lookups,
        ids: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        bags: tuple[int, ...],
        *,
        is_mean: bool,  # of one row, the mean is the sum
        padding_idx: int | None,
        left_out: int | None,
    ) -> Tensor | None:
        """Look up and pool; see `BagCalls.look_up`.

        Raises:
            IdOutOfRange: an id of an earlier lookup is not a row of its table.
            MalformedBags: the offsets of an earlier lookup are invalid.
            NonFiniteGradient: a gradient of an earlier update has nan or inf in it.
            ValueError: tables were replaced by ones that kernels do not support.
        """
        group, num_bags = self._group(), prod(bags)
        if (
            group is None
            or (offsets is not None or weights is not None or left_out is not None)
            or num_bags < 1
            or ids.numel() != num_bags
            or not _is_plain(ids, group.device)
        ):
            return None
        [number] = lookups.distinct_tables
        table, errors = group.tables[number], self.errors
        with DisableTorchFunctionSubclass():  # internal read of a table
            needs_grad = is_grad_enabled() and plain_requires_grad(table)
            if needs_grad:
                if not can_share_node():
                    return None
            # Rows in two tiers are read where they are.
            elif group.tiers is not None or active_ddp_module() is not None:
                return None
            if not errors.num_expected:
                errors.poll()
            made = _one_hot(ids)
            found = _resolve(group, lookups, made)
        if found is None:
            return None
        space: Any = found.space  # `TorchRows`
        ticket = found.ticket
        kind = Kind(
            (num_bags, group.dim),
            space.compute_dtype,
            space.device,
            current_stream_number(space.device),
        )
        output = None
        if needs_grad:
            output = self._nodes.next_output(kind, is_shared=ticket is None)
        result = empty_output(kind) if output is None else output.result
        # To autograd, kernels that are operations of torch must not seem to change the output.
        found.kernels.pooled_lookup(space, lookups, found.bags, result.detach())
        num_rows = found.tables[number].shape[0]
        errors.expect(partial(_bad_id, made.values, bags, num_rows, group.names[number]))
        if errors.num_expected >= len(group.names):
            errors.report_expected()
        if output is not None:
            rows = None if ticket is None else ticket.rows  # a claim made ahead has copied them
            output.node.calls[output.number] = Call(
                lookups,
                made if rows is None else rows,
                padding_idx,
                ticket,
                (ids,),
                (version_of(ids),),
                table,
                found.tables,
                group.tables,
                next_lookup(),
                bags[:1] in ((), (1,)),
                is_own=rows is not None,
            )
        # A view, as in `BagCalls`.
        return result.view(*bags, group.dim).to(table.dtype)

    def request(
        self, lookups: Lookups, ids: Tensor, bags: tuple[int, ...]
    ) -> PrefetchRequest | None:
        """The request to fetch the rows for `look_up` of the same bags.

        Args:
            lookups: As for `look_up`.
            ids: One for each bag.
            bags: As for `look_up`.

        Returns:
            The request; None if `BagLookup.request` makes it.
        """
        group, num_bags = self._group(), prod(bags)
        if (
            group is None
            or num_bags < 1
            or ids.numel() != num_bags
            or not _is_plain(ids, group.device)
        ):
            return None
        made: Any = _one_hot(ids)
        [number] = lookups.distinct_tables
        explain = partial(_id_error, made.values, bags, group.sizes()[number], group.names[number])
        return PrefetchRequest(Part(group, lookups, made), explain)

    def close(self) -> None:
        """Close the nodes, because a backward or a step begins."""
        self._nodes.close()


def _is_plain(ids: Tensor, device: torch.device) -> bool:
    """Whether kernels may read the ids, and backward may compare their version."""
    return (
        ids.dtype in _ID_TYPES
        and ids.device == device
        and tracing_state() is None
        and not are_functorch_transforms_active()
        and not ids.is_inference()
    )


def _resolve(group: TableGroup, lookups: Lookups, bags: Any) -> ResolvedLookup | None:
    """The arguments of the kernel; None if `fused_lookup` must make room for rows, or refuse."""
    try:
        [found] = group.resolve(lookups, bags)
    except (NoSuchRow, NotEnoughSlots):
        return None
    return found


def _one_hot(ids: Tensor) -> TorchBags:
    """One bag for each id."""
    return TorchBags(ids.reshape(-1), None, None, ids.numel(), is_mean=False, given=(ids,))


def _bad_id(
    values: Tensor, shape: tuple[int, ...], num_rows: int, table: str
) -> IdOutOfRange | None:
    """The exception for the first value that is not a row; see `DeferredErrors.expect`.

    Args:
        values: The ids.
        shape: Shape of the bags.
        num_rows: E.
        table: Name of the table.
    """
    bad = _as_input(values, shape).first_bad(num_rows)
    return None if bad is None else _id_error(values, shape, num_rows, table, bad)


def _id_error(
    values: Tensor, shape: tuple[int, ...], num_rows: int, table: str, position: int
) -> IdOutOfRange:
    """The exception for the value at a position; other arguments as for `_bad_id`."""
    return _as_input(values, shape).id_error(position, num_rows, table)


def _as_input(values: Tensor, shape: tuple[int, ...]) -> BagInput:
    bounds = torch.arange(values.numel() + 1, device=values.device)
    return BagInput(values, bounds, None, is_one_hot=True, shape=torch.Size(shape))
