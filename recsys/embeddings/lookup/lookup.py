"""The lookup: one autograd node for all lookups of a pass, and the ledger entries it makes.

A model with 26 bags calls each of them, and an autograd node for each would cost Python in forward
and in backward. So the first call of a pass makes one node with as many outputs as the last pass
had calls, and each call fills the next output when it is made:

    pass 1    call 0, call 1, call 2    three nodes of one output
    pass 2    call 0, call 1, call 2    one node of three outputs
              backward of the node      three entries of the ledger

An output that is not used gets no gradient. A collection is the same with one call.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import count
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
    is_node_in_pass,
    outside_graphs,
    plain_apply,
    queue_callback,
    top_saved_tensors_hooks,
    versions_of,
)
from recsys.embeddings.kernels.cpu.lookup import Input, leave_out, pool, weight_gradients
from recsys.embeddings.kernels.cpu.row_map import IN_FLIGHT, LEFT_OUT, OK, ONE_HOT
from recsys.embeddings.lookup.inputs import explain
from recsys.embeddings.rows.bags import addresses
from recsys.embeddings.rows.grads import leave_to_released
from recsys.embeddings.rows.ledger import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.embeddings.rows.bags import Bags, Lookups
    from recsys.embeddings.rows.tables import TableGroup
    from recsys.embeddings.update.fused_optimizer import FusedOptimizer

__all__ = [
    "Nodes",
    "Part",
    "look_up",
    "new_kept",
    "pool_part",
    "require_one_dtype",
    "weight_gradient",
    "with_dense_rows",
]

Part = tuple["TableGroup", "Lookups"]  # what is looked up in which group
_Kind = tuple[int, int, torch.dtype, torch.device]  # of a result: B, W, dtype and device
_next_lookup = count(1).__next__
# glibc gets larger blocks from the system each time, in small pages.
_MAX_KEPT_BYTES = 32 * 2**20
# After so many a node is left: evaluation in grad mode ends no pass.
_MOST_OUTPUTS, _MOST_OUTPUT_BYTES = 1024, 2**28
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class _Made(NamedTuple):
    """A lookup as its node keeps it.

    Attributes:
        calls: One for each part.
        versions: Of the tables, if weights need a gradient, which the rows of now would falsify.
    """

    calls: Sequence[tuple[TableGroup, Call]]
    versions: Sequence[int]


class Nodes:
    """Makes the autograd nodes of the lookups of all modules with one optimizer.

    Args:
        optimizer: Its `end_pass` is called at the end of each backward pass that has filled a
            ledger; None if the step of a torch optimizer, or the caller's, updates rows.

    Attributes:
        is_sharded: Whether each process updates rows of its own, so that no update is shared.
    """

    def __init__(self, optimizer: FusedOptimizer | None = None) -> None:
        # The reason that a result requires a gradient: tables are no inputs of the node.
        self.anchor = torch.empty(0, requires_grad=True)
        self.anchor_node: Any = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self.is_sharded = False
        # Weak, because graphs keep nodes, and must not keep the optimizer of a deleted module.
        self.optimizer = None if optimizer is None else ref(optimizer)
        self._end: ref[Callable[[], None]] | None = None
        self._block = 0  # of `update_once`, in which the last pass began
        self._made: list[_Made | None] = []
        self._outputs: list[Tensor] = []  # those that no call has filled, the last one first
        self._kind: _Kind = (0, 0, torch.float32, torch.device("cpu"))
        self._num_calls, self._num_expected = 0, 1

    def next_output(self, kind: _Kind) -> tuple[Tensor, list[_Made | None], int]:
        """An output that no call has filled, (B, W); what its node keeps, and its number there."""
        # Checkpointing counts saved tensors when it recomputes, and a lookup that is repeated in a
        # backward has a backward of its own. So there each call has its own node.
        is_alone = top_saved_tensors_hooks(True) is not None or current_pass() != NO_PASS
        if not self._outputs or self._kind != kind or is_alone:
            if self._kind != kind:
                self.close()
            self._kind = kind
            most = _MOST_OUTPUT_BYTES // max(1, kind[0] * kind[1] * kind[2].itemsize)
            wanted = 1 if is_alone else min(self._num_expected - self._num_calls, most)
            self._made = [None] * max(1, wanted)
            outputs = _make_node(self, self._made, self.anchor, None, kind)
            self._outputs = list(outputs)[::-1]
        self._num_calls += 1
        number = len(self._made) - len(self._outputs)
        return self._outputs.pop(), self._made, number

    def begin_pass(self) -> None:
        """Update rows when the backward pass ends that runs now."""
        if self.optimizer is None or (self._end is not None and self._end() is not None):
            return  # or that this one is a part of
        optimizer = self.optimizer()
        if optimizer is not None:
            if self._end is not None:
                optimizer.drop_failed_pass(self._block)
            self._block = optimizer.num_blocks
        end = partial(self._end_pass)
        self._end = ref(end)  # the pass alone keeps it
        queue_callback(end)

    @outside_graphs
    def _end_pass(self) -> None:
        self._end = None
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is not None:
            optimizer.end_pass()

    def close(self) -> None:
        """Make a new node for the next call, because a backward or another shape begins."""
        if self._num_calls:
            self._num_expected = min(self._num_calls, _MOST_OUTPUTS)
            self._num_calls, self._outputs = 0, []


def look_up(
    nodes: Nodes, parts: Sequence[Part], bags: Bags, width: int, untrained_row: int | None = None
) -> Tensor:
    """Look up and pool.

    Args:
        nodes: Makes the node, in grad mode.
        parts: What is looked up in which group; all groups have one compute dtype.
        bags: The input.
        width: W.
        untrained_row: For bags of one id: a row that gets no gradient.

    Returns:
        The pooled rows, (B, W).

    Raises:
        IdOutOfRange: an id is not a row of its table.
        MalformedBags: offsets do not ascend from 0 to N.
        RuntimeError: DistributedDataParallel would leave processes with different rows.
        ValueError: tables or weights have other compute dtypes.
    """
    ids, _, weights, num_samples, num_bags, _ = bags
    num_ids, is_training = ids.numel(), False
    with DisableTorchFunctionSubclass():  # internal reads of tables
        for group, _ in parts[1:]:  # a part whose tables moved changes where others of a group are
            group.notice_moved_tables()
        located = [group.locate(lookups) for group, lookups in parts]
        for one in located:
            is_training = is_training or any(map(_requires_grad, one.tables))
    is_training = is_training and is_grad_enabled()
    dtype = require_one_dtype(parts, weights)
    wrapper = active_ddp_module()
    if wrapper is not None and not nodes.is_sharded and (is_training or wrapper.training):
        raise RuntimeError(
            "DistributedDataParallel: a recsys optimizer does not share its row updates between "
            "processes; build the tables without optimizer=, or call recsys.accelerate without "
            "it, so that their gradients are shared; or train in one process"
        )
    needs_weight_grad = is_grad_enabled() and weights is not None and weights.requires_grad
    is_recorded = is_training or needs_weight_grad
    if is_recorded and current_pass() != NO_PASS:
        nodes.begin_pass()  # the lookup is repeated in a backward, which its own is a part of
    kind = num_samples, width, dtype, parts[0][0].device
    kept = new_kept(parts[0][0], num_ids, num_bags)
    made: list[_Made | None]
    if needs_weight_grad:
        made = [None]
        [result] = _make_node(nodes, made, nodes.anchor, weights, kind)
        output = 0
    elif is_training:
        result, made, output = nodes.next_output(kind)
    else:
        result = _empty(*kind)
    # A copy, because the caller may write to them before the update.
    copied = weights.detach().clone() if weights is not None and is_recorded else None
    number, calls = _next_lookup(), []
    for (group, lookups), one in zip(parts, located, strict=True):
        fetcher, num_bounds = group.fetcher, 0
        if fetcher is not None and is_training and num_samples:
            fetcher.before_lookup(lookups, bags)
        if num_samples:
            num_bounds = pool_part(group, lookups, one.lookups_5L, bags, kept, result)
        num_started = 0 if fetcher is None else fetcher.num_started
        of_input = num_ids, num_samples, num_bounds, copied
        calls.append((group, Call(number, lookups, kept, *of_input, num_started)))
    if is_recorded:
        if untrained_row is not None:
            calls = [(group, _without_row(group, call, untrained_row)) for group, call in calls]
        made[output] = _Made(calls, _versions(calls) if needs_weight_grad else ())
        if len(made) > 1:
            # A node calls hooks of all of its outputs, with None without a gradient.
            result = result.view(num_samples, width)
    return result


def require_one_dtype(parts: Sequence[Part], weights: Tensor | None) -> torch.dtype:
    """The dtype of a lookup; its tables are located, which notices converted ones.

    Raises:
        ValueError: tables or weights have others.
    """
    dtype = parts[0][0].compute_dtype
    if (weights is not None and weights.dtype is not dtype) or any(
        group.compute_dtype is not dtype for group, _ in parts[1:]
    ):
        raise ValueError(
            f"tables and weights that are looked up together must be computed in one dtype, {dtype}"
            "; convert the whole module"
        )
    return dtype


def _without_row(group: TableGroup, call: Call, row: int) -> Call:
    """A lookup of bags of one id, without those of a row."""
    num_ids, kept = call.num_ids, call.kept
    if group.is_on_device:
        ids = kept[:num_ids]
        ids.masked_fill_(ids == row, LEFT_OUT)
        return call
    num_left = leave_out(row, num_ids, kept.numpy())
    if num_left == num_ids:
        return call
    kept = kept[num_ids - num_left :]
    return call._replace(kept=kept, num_ids=num_left, num_bounds=call.num_samples)


def new_kept(group: TableGroup, num_ids: int, num_bags: int) -> Tensor:
    """Room for what a lookup keeps: ids, where bags begin, and on a device how long they are."""
    size = num_ids + num_bags + 1
    if group.is_on_device:
        return torch.empty(size + num_bags, dtype=torch.int32, device=group.device)
    return torch.empty(size, dtype=torch.int32)


def pool_part(
    group: TableGroup,
    lookups: Lookups,
    lookups_5L: Any,
    bags: Bags,
    kept: Tensor,
    result: Tensor,
) -> int:
    """Look up in one group; if a row is on its way, wait for it and look up again.

    Returns:
        `num_bounds` of a `Call`.
    """
    if group.is_on_device:
        group.pool(lookups, lookups_5L, bags, kept, result)  # type: ignore[attr-defined]
        is_one_hot = bags.offsets is None and bags.ids.numel() == bags.num_bags
        return 0 if is_one_hot and bags.weights is None else bags.num_bags
    given = addresses(bags, kept.data_ptr(), is_mean=lookups.is_mean)
    arguments = lookups_5L, given, result.data_ptr(), result.shape[1]
    if group.fetcher is None:
        code = pool(group.kernel, group.for_lookups, *arguments)
    else:
        with group.fetcher.lock:
            group.fetcher.notice_writes()
            code = pool(group.kernel, group.for_lookups, *arguments)
            if code == IN_FLIGHT:
                group.fetcher.settle()
                code = pool(group.kernel, group.for_lookups, *arguments)
    if code not in (OK, ONE_HOT):
        raise explain(group, lookups, bags, code)
    return 0 if code == ONE_HOT else bags.num_bags


def _empty(num_samples: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for pooled rows, (B, W); on the CPU in huge pages if it is large."""
    if device.type != "cpu":
        return torch.empty(num_samples, width, dtype=dtype, device=device)
    size = num_samples * width * dtype.itemsize
    return (empty_rows if size > _MAX_KEPT_BYTES else torch.empty)(num_samples, width, dtype=dtype)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        nodes: Nodes,
        made: list[_Made | None],
        anchor: Tensor,
        weights: Tensor | None,
        kind: _Kind,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.anchor_node = nodes.anchor_node
        # Weak, because Python's garbage collector does not see what a node refers to.
        ctx.nodes, ctx.made = ref(nodes), made
        return tuple([_empty(*kind) for _ in made])

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if is_grad_enabled():  # with create_graph=True; not differentiable a second time
            return _backward_once(ctx, *gradients)
        nodes = ctx.nodes()
        if nodes is not None:
            nodes.close()
            nodes.begin_pass()
        # `torch.autograd.grad` and `backward(inputs=...)` do not update rows.
        is_updating = is_node_in_pass(ctx.anchor_node)
        of_weights = None
        for output, gradient in enumerate(gradients):
            made = ctx.made[output]
            if gradient is None:
                continue
            if made is None:
                raise RuntimeError(
                    "Trying to backward through the graph a second time: the backward of this "
                    "lookup has already run; pass retain_graph=True to the first backward"
                )
            if ctx.needs_input_grad[3]:
                if _versions(made.calls) != made.versions:
                    raise RuntimeError(
                        "rows were updated between a lookup and its backward, and the gradient of "
                        "weights needs the rows as they were; call backward before rows are updated"
                    )
                of_weights = weight_gradient(made.calls, gradient)
            # Of one sample, torch may build the `grad` of another parameter on the same memory.
            if gradient.shape[0] == 1:  # `len` of a tensor is slow
                gradient = gradient.clone()  # noqa: PLW2901
            gradient = with_dense_rows(gradient)  # noqa: PLW2901
            with DisableTorchFunctionSubclass():
                for group, call in made.calls if is_updating else ():
                    trained = group.trained(call.lookups)
                    if group.released:
                        own = call._replace(lookups=trained)
                        trained = leave_to_released(group, own, gradient)
                    if trained.tables:
                        group.ledger.add(call._replace(lookups=trained), gradient)
            if not is_graph_kept():
                ctx.made[output] = None
        return None, None, None, of_weights, None


_backward_once: Callable[..., tuple[Any, ...]] = once_differentiable(_Lookup.backward)
# `apply` without its check for functorch's transforms, which takes longer than a small lookup.
_make_node: Callable[..., Sequence[Tensor]] = plain_apply(_Lookup)


def weight_gradient(calls: Sequence[tuple[TableGroup, Call]], gradient: Tensor) -> Tensor:
    """The gradient of the ids' weights, (N,), from the rows of now.

    Args:
        calls: The parts of one lookup.
        gradient: Of its result, (B, W).
    """
    result = gradient.new_zeros(calls[0][1].num_ids)
    whole = gradient.contiguous()
    for group, call in calls:
        if group.is_on_device:
            group.weight_gradient(call, whole, result)  # type: ignore[attr-defined]
            continue
        given = Input(
            0,
            call.num_ids,
            0,
            0,
            0,
            call.kept.data_ptr(),
            call.num_samples,
            call.num_bounds,
            int(call.lookups.is_mean),
            0,
        )
        lookups_5L = group.locate(call.lookups).lookups_5L
        with nullcontext() if group.fetcher is None else group.fetcher.lock:
            if group.fetcher is not None:
                group.fetcher.settle()
            weight_gradients(group.for_lookups, lookups_5L, given, whole.numpy(), result.numpy())
    return result


def _versions(calls: Sequence[tuple[TableGroup, Call]]) -> list[int]:
    tables = [group.tables[table] for group, call in calls for table in call.lookups.tables]
    return versions_of(tables)


def with_dense_rows(gradient: Tensor) -> Tensor:
    """A gradient (B, W) with contiguous rows; there may be gaps between rows, but no overlap.

    An interaction passes such a part of its own gradient. Copying it would cost a tenth of the
    update.
    """
    stride = gradient.stride()
    if stride[1] != 1 or (stride[0] < gradient.shape[1] and gradient.shape[0] > 1):
        return gradient.contiguous()
    return gradient
