"""Tables on the CPU that a model looks up one by one: one autograd node for many calls.

A model with 26 bags calls each of them, and a `torch.autograd.Function` for each call costs Python
in forward and in backward. So calls share a node; see `shared_nodes`. An output is filled when its
bag is called, with the rows and the grad mode of that time, and errors raise in that call. Calls
that need more than a sum or mean of rows use `fused_lookup`.

With rows in two tiers, a call claims slots, and holds them until its backward or until its output
is deleted. So it has a node of its own: outputs that share one keep each other alive.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.forward_ad import unpack_dual

from recsys._support.torch_compat import (
    DisableTorchFunctionSubclass,
    active_ddp_module,
    are_functorch_transforms_active,
    plain_requires_grad,
    tracing_state,
    version_of,
)
from recsys.embeddings.kernels.cpu.one_table import ONE_HOT, REFUSED, TableMemory, pool_one_table
from recsys.embeddings.kernels.cpu.slots import NoSuchRow
from recsys.embeddings.lookup.one_table.bag_call import BagArguments, Call, KeptInput
from recsys.embeddings.lookup.one_table.shared_nodes import (
    Kind,
    SharedNodes,
    can_share_node,
    empty_output,
)
from recsys.embeddings.rows.ledger import next_lookup
from recsys.embeddings.rows.row_space import compute_dtype
from recsys.embeddings.tiers.ticket import NotEnoughSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from recsys.embeddings.lookup.one_table.shared_nodes import Output
    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.tiers.ticket import Ticket
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["BagCalls"]


class _Pooled(NamedTuple):
    """A filled output, and the fields of its `Call`."""

    output: Output
    input: KeptInput | Bags
    ticket: Ticket | None
    rows: Sequence[Tensor]


class BagCalls:
    """The lookups in single tables of one group on the CPU.

    Args:
        updater: Updates the rows.
        group: Has the tables.

    Attributes:
        errors: None, because an error raises in the call.
    """

    errors = None

    def __init__(self, updater: RowUpdater, group: TableGroup) -> None:
        self._group = ref(group)  # the group has this object
        self._nodes = SharedNodes(updater, group)
        self._memories_of: RowSpace | None = None
        self._memories: list[TableMemory] = []

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
        """Look up and pool.

        Args:
            lookups: One lookup, in one table of the group.
            ids: As for `pool_one_table`; need not be contiguous.
            offsets: As for `pool_one_table`.
            weights: A factor for each id; None for 1.
            bags: Shape of the result without D: (B,), or several dimensions of bags.
            is_mean: Whether a bag is averaged.
            padding_idx: For bags of one id: a row that is looked up but gets no gradient.
            left_out: A row that bags leave out.

        Shape:
            As for `pool_one_table`.

        Returns:
            The pooled rows, (*bags, D). None if the call needs `fused_lookup`, which also raises
            the errors of invalid input.
        """
        group = self._group()
        if group is None or not _is_plain(ids, offsets):
            return None
        num_bags = prod(bags)
        if num_bags < 1:
            return None
        [number] = lookups.distinct_tables
        table = group.tables[number]
        memory = None if group.tiers is not None else self._memory_of(group, number, table)
        dtype = _dtype_here(group) if memory is None else memory.dtype
        if dtype is None:
            return None
        if weights is not None and not _are_plain_weights(weights, ids, dtype):
            return None
        if weights is not None or left_out is not None:
            memory = None  # its kernel knows neither
        # Often a column of a matrix, x[:, i], which is not contiguous.
        flat = ids if ids.is_contiguous() else ids.contiguous()
        given = BagArguments(flat, offsets, weights, left_out, num_bags, is_mean)
        with DisableTorchFunctionSubclass():  # internal read of a table
            needs_grad = is_grad_enabled() and plain_requires_grad(table)
        if not needs_grad:
            pooled = _read(group, lookups, memory, given, dtype)
            return None if pooled is None else pooled.view(*bags, group.dim)
        if not can_share_node():
            return None
        found: _Pooled | None
        if memory is not None:
            found = self._pool_in_table(memory, given)
        else:
            found = self._pool_copied(group, lookups, given)
        if found is None:
            return None
        (node, output, result), kept, ticket, rows = found
        watched = [each for each in (ids, offsets, weights) if each is not None]
        node.calls[output] = Call(
            lookups,
            kept,
            padding_idx,
            ticket,
            watched,
            list(map(version_of, watched)),
            table,
            rows,
            group.tables,
            next_lookup(),
            bags[:1] in ((), (1,)),
        )
        # A view, because the node calls hooks of all of its outputs, with None where there is no
        # gradient.
        return result.view(*bags, group.dim)

    def _pool_in_table(self, memory: TableMemory, given: BagArguments) -> _Pooled | None:
        """Pool resident rows into the next output."""
        ids, offsets, _, _, num_bags, is_mean = given
        output = self._nodes.next_output(Kind((num_bags, memory.dim), memory.dtype, _CPU))
        kept = np.empty(ids.numel() + num_bags + 1, _ID_TYPES[ids.dtype])
        kind = pool_one_table(memory, ids, offsets, num_bags, output.result, kept, is_mean=is_mean)
        if kind == REFUSED:
            return None
        copied = KeptInput(kept, num_bags, kind == ONE_HOT, is_mean)
        assert self._memories_of is not None
        return _Pooled(output, copied, None, self._memories_of.tables)

    def _pool_copied(
        self, group: TableGroup, lookups: Lookups, given: BagArguments
    ) -> _Pooled | None:
        """Pool rows into the next output; those in two tiers from their slots, into a new one."""
        bags = given.copied()
        if bags is None:
            return None
        try:
            with DisableTorchFunctionSubclass():  # internal read of tables
                [found] = group.resolve(lookups, bags)
        except (NoSuchRow, NotEnoughSlots):
            return None
        kind = Kind((bags.batch_size, group.dim), found.space.compute_dtype, _CPU)
        output = self._nodes.next_output(kind, is_shared=found.ticket is None)
        if found.kernels.pooled_lookup(found.space, lookups, found.bags, output.result) >= 0:
            return None
        return _Pooled(output, bags, found.ticket, found.tables)

    def _memory_of(self, group: TableGroup, number: int, table: nn.Parameter) -> TableMemory | None:
        """The memory of a table; None if the table has moved."""
        space = group.known_space()
        if space is None:
            return None
        if self._memories_of is not space:
            self._memories_of, self._memories = space, list(map(TableMemory, space.tables))
        memory = self._memories[number]
        return memory if table.data_ptr() == memory.address else None

    def request(self, *_: Any) -> None:
        """None: on the CPU `BagLookup.request` makes all requests to fetch rows."""

    def close(self) -> None:
        """Close the nodes, because a backward or a step begins."""
        self._nodes.close()


_CPU = torch.device("cpu")


def _is_plain(ids: Tensor, offsets: Tensor | None) -> bool:
    """Whether a kernel may read offsets directly from memory, and ids if they are contiguous."""
    if ids.dtype not in _ID_TYPES or not ids.is_cpu:
        return False
    if tracing_state() is not None or are_functorch_transforms_active():
        return False
    if ids.is_inference():  # it has no version for backward to compare
        return False
    if offsets is None:
        return True
    if offsets.is_inference():
        return False
    return offsets.dtype is ids.dtype and offsets.is_cpu and offsets.is_contiguous()


def _read(
    group: TableGroup,
    lookups: Lookups,
    memory: TableMemory | None,
    given: BagArguments,
    dtype: torch.dtype,
) -> Tensor | None:
    """Pool rows where they are, without backward; None if the call needs `fused_lookup`."""
    ids, offsets, _, _, num_bags, is_mean = given
    result = empty_output(Kind((num_bags, group.dim), dtype, _CPU))
    if memory is not None:
        kind = pool_one_table(memory, ids, offsets, num_bags, result, None, is_mean=is_mean)
        return None if kind == REFUSED else result
    bags = given.copied()
    if bags is None or active_ddp_module() is not None:
        return None
    with DisableTorchFunctionSubclass():  # internal read of tables
        space = group.space(lookups.distinct_tables)
        if group.tiers is not None:
            bad = group.tiers.look_up(space, lookups, bags, result)
        else:
            bad = group.kernels.pooled_lookup(space, lookups, bags, result)
    return None if bad >= 0 else result


def _dtype_here(group: TableGroup) -> torch.dtype | None:
    """The dtype of rows in two tiers; None if there are none, or if they need `fused_lookup`."""
    if group.tiers is None:
        return None
    dtype = group.tiers.dtype
    return dtype if compute_dtype(dtype) == dtype else None


def _are_plain_weights(weights: Tensor, ids: Tensor, dtype: torch.dtype) -> bool:
    """Whether weights fit ids and rows, and need no gradient, in forward mode neither."""
    if type(weights) is not Tensor or weights.requires_grad or weights.is_inference():
        return False
    if unpack_dual(weights).tangent is not None:  # type: ignore[no-untyped-call]
        return False
    is_alike = weights.dtype is dtype and weights.shape == ids.shape
    return is_alike and weights.is_cpu and weights.layout is torch.strided


_ID_TYPES = {torch.int64: np.int64, torch.int32: np.int32}
