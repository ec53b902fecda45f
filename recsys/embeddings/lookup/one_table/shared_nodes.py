"""One autograd node for many lookups: `BagCalls` and `DeviceCalls` fill its outputs.

The first call of a step makes one node with as many outputs as the last step had calls, and each
call fills the next output:

    step 1    call 0, call 1, call 2    three nodes of one output
    step 2    call 0, call 1, call 2    one node of three outputs
              backward of the node      three entries of the ledger

An output that is not used gets no gradient, and adds nothing to the ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import once_differentiable

from recsys._support.memory import empty_rows
from recsys._support.torch_compat import (
    NO_PASS,
    DisableTorchFunctionSubclass,
    active_ddp_module,
    current_pass,
    is_graph_kept,
    outside_graphs,
    plain_apply,
    plain_requires_grad,
    top_saved_tensors_hooks,
)
from recsys.embeddings.lookup.one_table.bag_call import with_own_ids
from recsys.embeddings.lookup.result_memory import MAX_KEPT_BYTES
from recsys.embeddings.lookup.sparse_gradients import leave_grads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.embeddings.lookup.one_table.bag_call import Call
    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["Kind", "Output", "SharedNodes", "can_share_node", "empty_output"]

_MOST_KINDS = 64  # limit for kinds with open nodes


class Kind(NamedTuple):
    """What outputs of one node have in common.

    Attributes:
        shape: Shape of an output, (B, D).
        dtype: The compute dtype of the rows.
        device: Where rows are pooled.
        stream: The stream that pools them; 0 on the CPU. An output's memory is the stream's.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    stream: int = 0


class SharedNodes:
    """The open autograd nodes of one group's lookups.

    Args:
        updater: Updates the rows.
        group: Has the tables.
    """

    def __init__(self, updater: RowUpdater, group: TableGroup) -> None:
        # Weak references: this object refers to open nodes, and Python's garbage collector does
        # not see what an autograd node refers to, so a cycle would never be freed.
        self._updater, self._group = ref(updater), ref(group)
        self._open: dict[Kind, _OpenOutputs] = {}
        self._expected: dict[Kind, int] = {}  # number of calls before nodes were closed

    def close(self) -> None:
        """Close all nodes, because a backward or a step begins; the next call makes new ones."""
        group = self._group()
        if group is not None and group.kernels.errors is not None:
            group.kernels.errors.report_expected()
        for opened in self._open.values():
            if opened.outputs:
                opened.outputs[0].node.hold()
        if self._open:
            self._expected = {kind: opened.num_calls for kind, opened in self._open.items()}
            self._open = {}

    def next_output(self, kind: Kind, *, is_shared: bool = True) -> Output:
        """An output that no call has filled yet.

        Args:
            kind: Its shape, dtype and place.
            is_shared: Whether its node may have outputs of other calls, which keep it alive.
        """
        if not is_shared:
            [found] = self._make_outputs(kind, 1)
            found.node.hold()
            return found
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

    def _num_expected(self, kind: Kind) -> int:
        """How many outputs the next node should have."""
        num_outputs = self._expected.get(kind, 1)
        if kind not in self._expected and len(self._expected) == 1:
            [num_outputs] = self._expected.values()  # a mini-batch of another size
        group = self._group()
        assert group is not None
        return min(num_outputs, len(group.names))  # evaluation under grad mode never ends a step

    def _make_outputs(self, kind: Kind, num_outputs: int) -> list[Output]:
        """The outputs of a new node, the last one first."""
        updater = self._updater()
        assert updater is not None
        node = _Node(self, self._updater, self._group, num_outputs)
        outputs = _make_node(node, updater.grad_anchor, kind)
        return [Output(node, number, output) for number, output in enumerate(outputs)][::-1]


class _OpenOutputs:
    """Outputs of the newest node that no call has filled yet.

    The node does not refer to them: that cycle would never be freed.

    Attributes:
        outputs: The outputs.
        num_calls: Calls of this kind since nodes were last closed.
    """

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.num_calls = 0


class Output(NamedTuple):
    """An output of a node, with its number in the node."""

    node: _Node
    number: int
    result: Tensor


class _Node:
    """The calls of one autograd node."""

    def __init__(
        self,
        opener: SharedNodes,
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
            # Without tables that were frozen after the call.
            taken = [each for each in taken if plain_requires_grad(each[0].table)]
            for call, gradient in with_own_ids(taken):
                group.keep(call.entry(gradient))


_SECOND_TIME = (
    "Trying to backward through the graph a second time: the backward of this lookup has already "
    "run; pass retain_graph=True to the first backward"
)


class _LookupNode(torch.autograd.Function):
    """One autograd node; calls of bags fill its outputs later."""

    @staticmethod
    def forward(ctx: Any, node: _Node, grad_anchor: Tensor, kind: Kind) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.node = node
        return tuple([empty_output(kind) for _ in node.calls])

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if is_grad_enabled():  # with create_graph=True; not differentiable a second time
            return _backward_once(ctx, *gradients)
        with DisableTorchFunctionSubclass():  # internal reads of tables
            ctx.node.take(gradients, is_kept=is_graph_kept())
        return None, None, None


_backward_once: Callable[..., tuple[None, ...]] = once_differentiable(_LookupNode.backward)
# `apply` without its check for functorch transforms; callers have checked.
_make_node: Callable[..., Sequence[Tensor]] = plain_apply(_LookupNode)


def empty_output(kind: Kind) -> Tensor:
    """Memory for pooled rows, on their device whatever the default device is."""
    shape, dtype, device, _ = kind
    if shape[0] * shape[1] * dtype.itemsize > MAX_KEPT_BYTES:
        return empty_rows(*shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


def can_share_node() -> bool:
    """Whether the modes of this thread allow a lookup with gradients to share a node."""
    return (
        current_pass() == NO_PASS
        # Checkpointing counts saved tensors when it recomputes; this node saves none.
        and top_saved_tensors_hooks(True) is None
        and active_ddp_module() is None
    )
