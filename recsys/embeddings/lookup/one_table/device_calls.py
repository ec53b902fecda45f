"""Tables on a device that a model looks up one by one: one autograd node for many calls.

The host sets the time of such a step, so a call does only what it must: it launches one kernel.

    poll      errors of earlier steps are raised by the first call of a step
    report    one for all calls of a step, before its backward; see `DeferredErrors.expect`
    ids       copied in backward, in one launch for all calls of a node; an update then joins them

Bags of one id each, of shape (B, 1) or given to `nn.Embedding`, need no offsets. Weights, and
offsets with the end of the last bag, use `fused_lookup`.

With rows in two tiers, a call reads rows where they are, if the device reaches the tables, and the
update claims slots for the rows of all calls (`late_claims`). While claims are made ahead, a call
takes its claim or makes one, and then has a node of its own, as in `BagCalls`.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled

from recsys._support.memory import lasting_tensors
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
from recsys.embeddings.lookup.fused_lookup import Part
from recsys.embeddings.lookup.one_table.bag_call import Call
from recsys.embeddings.lookup.one_table.shared_nodes import (
    Kind,
    SharedNodes,
    can_share_node,
    empty_output,
)
from recsys.embeddings.lookup.prefetch_requests import PrefetchRequest
from recsys.embeddings.rows.bag_input import BagInput
from recsys.embeddings.rows.ledger import next_lookup
from recsys.embeddings.rows.row_space import compute_dtype
from recsys.embeddings.tiers.ticket import NotEnoughSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        is_mean: bool,
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
            or weights is not None
            or num_bags < 1
            or not ids.numel()
            or not _is_plain(ids, group.device)
            or not (offsets is None or _fit(offsets, ids, num_bags))
        ):
            return None
        [number] = lookups.distinct_tables
        table, errors = group.tables[number], self.errors
        with DisableTorchFunctionSubclass():  # internal read of a table
            needs_grad = is_grad_enabled() and plain_requires_grad(table)
            if not (can_share_node() if needs_grad else active_ddp_module() is None):
                return None
            tiers = group.tiers
            # Without a claim: in evaluation, or if the update makes it.
            is_in_place = tiers is not None and (
                tiers.may_claim_later if needs_grad else tiers.are_reached
            )
            if tiers is not None and not is_in_place and not needs_grad:
                return None
            if not errors.num_expected:
                errors.poll()
            stream = current_stream_number(group.device)
            made: Any = _made(ids, offsets, num_bags, stream, is_mean=is_mean, padding=left_out)
            found = None if is_in_place else _resolve(group, lookups, made)
            if found is None and not is_in_place:
                return None
            space: Any = group.space([number]) if found is None else found.space
            tables = space.tables if found is None else found.tables
        ticket = None if found is None else found.ticket
        kind = Kind((num_bags, group.dim), compute_dtype(table.dtype), group.device, stream)
        output = None
        if needs_grad:
            output = self._nodes.next_output(kind, is_shared=ticket is None)
        result = empty_output(kind) if output is None else output.result
        # To autograd, kernels that are operations of torch must not seem to change the output.
        pooled = result.detach()
        if found is None:
            assert tiers is not None
            tiers.look_up(space, lookups, made, pooled)
        else:
            found.kernels.pooled_lookup(space, lookups, found.bags, pooled)
        num_rows = tables[number].shape[0]
        errors.expect(partial(_bad_id, made, bags, num_rows, group.names[number]))
        if errors.num_expected >= len(group.names):
            errors.report_expected()
        if output is not None:
            rows = None if ticket is None else ticket.rows  # a claim made ahead has copied them
            output.node.calls[output.number] = Call(
                lookups,
                made if rows is None else rows,
                padding_idx,
                ticket,
                made.given,
                list(map(version_of, made.given)),
                table,
                tables,
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
        made: Any = _made(ids, None, num_bags)
        [number] = lookups.distinct_tables
        explain = partial(_id_error, made, bags, group.sizes()[number], group.names[number])
        return PrefetchRequest(Part(group, lookups, made), explain)

    def close(self) -> None:
        """Close the nodes, because a backward or a step begins."""
        self._nodes.close()


def _fit(offsets: Tensor, ids: Tensor, num_bags: int) -> bool:
    """Whether offsets are those of all bags, without the end of the last one."""
    return (
        offsets.numel() == num_bags
        and offsets.dtype == ids.dtype
        and offsets.device == ids.device
        and not offsets.is_inference()
    )


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


def _made(
    ids: Tensor,
    offsets: Tensor | None,
    num_bags: int,
    stream: int = 0,
    *,
    is_mean: bool = False,
    padding: int | None = None,
) -> TorchBags:
    """The bags of a call; no one else can write to the offsets of the result.

    Args:
        ids: One for each bag, or equally many, (B, L); with offsets, one bag after the other.
        offsets: Where bags begin, without the end of the last one; None for equally many ids.
        num_bags: B.
        stream: The current stream; see `current_stream_number`.
        is_mean: Whether a bag is averaged.
        padding: An id that adds nothing to its bag; None for none.
    """
    # A column of a matrix stays a view of it in `reshape`, and kernels read contiguous memory.
    values, num_ids, bounds = ids.reshape(-1).contiguous(), ids.numel(), None
    given: Sequence[Tensor] = (ids,)
    if offsets is not None:
        given = (ids, offsets)
        bounds = torch.cat(
            (offsets, _numbers(num_ids, num_ids + 1, 1, ids.dtype, ids.device, stream))
        )
    elif num_ids != num_bags:
        length = num_ids // num_bags
        bounds = _numbers(0, num_ids + 1, length, ids.dtype, ids.device, stream)
    is_mean = is_mean and bounds is not None  # of one row, the mean is the sum
    return TorchBags(values, bounds, None, num_bags, is_mean, padding, given, is_whole=True)


@lru_cache(maxsize=64)
def _numbers(
    first: int, end: int, step: int, dtype: torch.dtype, device: torch.device, stream: int
) -> Tensor:
    """`torch.arange`, kept, because a launch costs the host time; each stream has its own."""
    with lasting_tensors():
        return torch.arange(first, end, step, dtype=dtype, device=device)


def _bad_id(
    bags: TorchBags, shape: tuple[int, ...], num_rows: int, table: str
) -> IdOutOfRange | None:
    """The exception for the first value that is not a row; see `DeferredErrors.expect`.

    Args:
        bags: The input.
        shape: Shape of the bags.
        num_rows: E.
        table: Name of the table.
    """
    bad = _as_input(bags, shape).first_bad(num_rows)
    return None if bad is None else _id_error(bags, shape, num_rows, table, bad)


def _id_error(
    bags: TorchBags, shape: tuple[int, ...], num_rows: int, table: str, position: int
) -> IdOutOfRange:
    """The exception for the value at a position; other arguments as for `_bad_id`."""
    return _as_input(bags, shape).id_error(position, num_rows, table)


def _as_input(bags: TorchBags, shape: tuple[int, ...]) -> BagInput:
    is_one_hot = bags.offsets is None
    return BagInput(bags.values, bags.bounds(), None, is_one_hot, shape=torch.Size(shape))
