"""Tables that a model looks up one by one: one autograd node for many calls.

A model with 26 bags calls each of them, and a `torch.autograd.Function` for each call costs Python
in forward and in backward. So the first call of a step makes one node with as many outputs as the
last step had calls, and each call fills the next output:

    step 1    call 0, call 1, call 2    three nodes of one output
    step 2    call 0, call 1, call 2    one node of three outputs
              backward of the node      three entries of the ledger

An output is filled when its bag is called, with the rows and the grad mode of that time, and errors
raise in that call. An output that is not used gets no gradient, and adds nothing to the ledger.
Calls that need more than a sum or mean of rows use `fused_lookup`.

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
from torch.autograd.function import once_differentiable

from recsys._support.memory import empty_rows
from recsys._support.torch_compat import (
    NO_PASS,
    DisableTorchFunctionSubclass,
    active_ddp_module,
    are_functorch_transforms_active,
    current_pass,
    is_graph_kept,
    plain_apply,
    plain_requires_grad,
    top_saved_tensors_hooks,
    tracing_state,
    version_of,
)
from recsys.embeddings.kernels.cpu.one_table import ONE_HOT, REFUSED, TableMemory, pool_one_table
from recsys.embeddings.kernels.cpu.slots import NoSuchRow
from recsys.embeddings.lookup.bag_call import BagArguments, Call, KeptInput
from recsys.embeddings.lookup.result_memory import MAX_KEPT_BYTES
from recsys.embeddings.lookup.sparse_gradients import leave_grads
from recsys.embeddings.rows.ledger import next_lookup
from recsys.embeddings.rows.row_space import compute_dtype
from recsys.embeddings.tiers.ticket import NotEnoughSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.tiers.ticket import Ticket
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["BagCalls"]

_MOST_KINDS = 64  # limit for kinds with open nodes
_Kind = tuple[tuple[int, int], torch.dtype]  # shape and dtype of outputs


class _Pooled(NamedTuple):
    """A filled output, and the fields of its `Call`."""

    output: _Output
    input: KeptInput | Bags
    ticket: Ticket | None
    rows: Sequence[Tensor]


class BagCalls:
    """The lookups in single tables of one group, and their open autograd nodes.

    Args:
        updater: Updates the rows.
        group: Has the tables.
    """

    def __init__(self, updater: RowUpdater, group: TableGroup) -> None:
        # Weak references: this object refers to open nodes, and Python's garbage collector does
        # not see what an autograd node refers to, so a cycle would never be freed.
        self._updater, self._group = ref(updater), ref(group)
        self._memories_of: RowSpace | None = None
        self._memories: list[TableMemory] = []
        self._open: dict[_Kind, _OpenOutputs] = {}
        self._expected: dict[_Kind, int] = {}  # number of calls before nodes were closed

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
        if (
            current_pass() != NO_PASS
            # Checkpointing counts saved tensors when it recomputes; this node saves none.
            or top_saved_tensors_hooks(True) is not None
            or active_ddp_module() is not None
        ):
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
        output = self._next_output((num_bags, memory.dim), memory.dtype)
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
        kind = (bags.batch_size, group.dim), found.space.compute_dtype
        if found.ticket is None:
            output = self._next_output(*kind)
        else:
            [output] = self._make_outputs(kind, 1)
            output.node.hold()
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

    def close(self) -> None:
        """Close all nodes, because a backward or a step begins; the next call makes new ones."""
        for opened in self._open.values():
            if opened.outputs:
                opened.outputs[0].node.hold()
        if self._open:
            self._expected = {kind: opened.num_calls for kind, opened in self._open.items()}
            self._open = {}

    def _next_output(self, shape: tuple[int, int], dtype: torch.dtype) -> _Output:
        """An output that no call has filled yet."""
        kind = shape, dtype
        opened = self._open.get(kind)
        if opened is None:
            if len(self._open) == _MOST_KINDS:  # evaluation with many batch sizes under grad mode
                self.close()
            opened = self._open[kind] = _OpenOutputs()
        opened.num_calls += 1
        try:
            found = opened.outputs.pop()
        except IndexError:
            outputs = self._make_outputs(kind, self._num_expected(kind))
            found = outputs.pop()
            opened.outputs = outputs
        if not opened.outputs:
            found.node.hold()
        return found

    def _num_expected(self, kind: _Kind) -> int:
        """How many outputs the next node should have."""
        num_outputs = self._expected.get(kind, 1)
        if kind not in self._expected and len(self._expected) == 1:
            [num_outputs] = self._expected.values()  # a mini-batch of another size
        group = self._group()
        assert group is not None
        return min(num_outputs, len(group.names))  # evaluation under grad mode never ends a step

    def _make_outputs(self, kind: _Kind, num_outputs: int) -> list[_Output]:
        """The outputs of a new node, the last one first."""
        updater = self._updater()
        assert updater is not None
        node = _Node(self, self._updater, self._group, num_outputs)
        outputs = _make_node(node, updater.grad_anchor, *kind)
        return [_Output(node, number, output) for number, output in enumerate(outputs)][::-1]


class _OpenOutputs:
    """Outputs of the newest node that no call has filled yet.

    The node does not refer to them: that cycle would never be freed.

    Attributes:
        outputs: The outputs.
        num_calls: Calls of this kind since nodes were last closed.
    """

    def __init__(self) -> None:
        self.outputs: list[_Output] = []
        self.num_calls = 0


class _Output(NamedTuple):
    """An output of a node, with its number in the node."""

    node: _Node
    number: int
    result: Tensor


class _Node:
    """The calls of one autograd node."""

    def __init__(
        self,
        opener: BagCalls,
        updater: ref[RowUpdater],
        group: ref[TableGroup],
        num_outputs: int,
    ) -> None:
        self._opener, self._updater, self._group = ref(opener), updater, group
        self._held: tuple[Any, ...] = ()
        self.calls: list[Call | None] = [None] * num_outputs

    def hold(self) -> None:
        """Keep updater and group alive, after calls have taken all outputs of this node."""
        self._held = self._updater(), self._group()

    def take(self, gradients: Sequence[Tensor | None], *, is_kept: bool) -> None:
        """Put the gradients of outputs in the ledger.

        Args:
            gradients: The gradient of each output; None if the output was not used.
            is_kept: Whether a later backward may use the same outputs (`retain_graph=True`).

        Raises:
            RuntimeError: ids were changed in place since the call, or backward runs a second time.
        """
        opener, updater, group = self._opener(), self._updater(), self._group()
        if opener is not None:
            opener.close()
        taken: list[tuple[Call, Tensor]] = []
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            call = self.calls[number]
            if call is None:
                raise RuntimeError(_SECOND_TIME)
            call.require_unchanged()
            taken.append((call, gradient))
        if not is_kept:
            for number, gradient in enumerate(gradients):
                if gradient is not None:
                    self.calls[number] = None
        if updater is None or group is None:  # the module and its optimizer were deleted
            for call, gradient in taken:
                leave_grads([call.entry(gradient)], call.tables, [True] * len(call.tables))
        elif updater.is_in_pass():
            updater.begin_pass()
            for call, gradient in taken:
                if plain_requires_grad(call.table):  # not frozen after the call
                    group.keep(call.entry(gradient))


_SECOND_TIME = (
    "Trying to backward through the graph a second time: the backward of this lookup has already "
    "run; pass retain_graph=True to the first backward"
)


class _LookupNode(torch.autograd.Function):
    """One autograd node; calls of bags fill its outputs later."""

    @staticmethod
    def forward(
        ctx: Any, node: _Node, grad_anchor: Tensor, shape: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.node = node
        return tuple([_empty(shape, dtype) for _ in node.calls])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if is_grad_enabled():  # with create_graph=True; not differentiable a second time
            return _backward_once(ctx, *gradients)
        with DisableTorchFunctionSubclass():  # internal reads of tables
            ctx.node.take(gradients, is_kept=is_graph_kept())
        return None, None, None, None


_backward_once: Callable[..., tuple[None, ...]] = once_differentiable(_LookupNode.backward)
# `apply` without its check for functorch transforms; `_is_plain` has checked.
_make_node: Callable[..., Sequence[Tensor]] = plain_apply(_LookupNode)


def _empty(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Memory for pooled rows, on the CPU whatever the default device is."""
    if shape[0] * shape[1] * dtype.itemsize > MAX_KEPT_BYTES:
        return empty_rows(*shape, dtype=dtype, device=_CPU)
    return torch.empty(shape, dtype=dtype, device=_CPU)


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
    result = _empty((num_bags, group.dim), dtype)
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
    if group.tiers is None or group.kernels.errors is not None:
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
