"""Forward and backward of the dense part of a model, as two CUDA graphs.

dense features, pooled vectors, labels -> forward  -> loss, logits
gradient of the loss                   -> backward -> gradients of inputs and parameters

Graphs read parameters in place, and inputs where each replay copies them. Their results, gradients
included, are in memory that the next replay overwrites, and backward overwrites what it reads of
forward. So each of the two is replayed at most once in a step. For autograd, both are one node.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

from recsys._support.cuda.graphs import GraphRecorder, restored
from recsys._support.torch_compat import plain_apply

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from recsys.models.dlrm import DLRMTrain

__all__ = ["DenseGraphs", "form_of"]


class DenseGraphs:
    """The graphs of `DLRMTrain.loss_of`, for inputs like those given.

    Args:
        model: The model; its parameters must stay where they are.
        parameters: The parameters of its dense part.
        inputs: Dense features, pooled vectors and labels; they stay as they are.
        pool: Memory pool of the graphs, from `torch.cuda.graph_pool_handle`; None for their own.

    Attributes:
        parameters: Those of the dense part.
        vectors: Where the graphs read the pooled vectors, (B, F, D).
        form: `form_of` the inputs.

    Raises:
        ValueError: the loss depends on other tensors that require a gradient: they would get none.
        Exception: whatever the model, torch or the GPU raises.
    """

    def __init__(
        self,
        model: DLRMTrain,
        parameters: Iterable[nn.Parameter],
        inputs: Sequence[Tensor],
        pool: Any = None,
    ) -> None:
        self.form = form_of(inputs)
        self.parameters = list(parameters)
        samples = [_like(each.detach().clone(), each) for each in inputs]
        # Aliases have no autograd nodes or hooks of the parameters, which would otherwise be
        # captured, or belong to the stream of the capture.
        samples += [_like(each.detach(), each) for each in self.parameters]
        self._places = [each.detach() for each in samples[: len(inputs)]]
        self.vectors = self._places[1]
        self._required = [number for number, each in enumerate(samples) if each.requires_grad]
        required = [samples[number] for number in self._required]
        num_inputs = sum(number < len(inputs) for number in self._required)
        device = self.vectors.device
        if pool is None and device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
        compute = _forward_of(model, self.parameters, len(inputs), device)
        self._num_forward, self._is_forward_unused = 0, False

        def forward() -> tuple[Tensor, Tensor]:
            self._loss, logits = compute(*samples)
            return self._loss.detach(), logits.detach()

        def backward() -> Sequence[Tensor | None]:
            found = torch.autograd.grad(self._loss, required, self._seed, allow_unused=True)
            return _in_own_memory(found, required, num_inputs, [self._seed, *samples])

        # For a forward that is not captured: nodes of the samples would belong to this stream.
        others = [_like(each.detach(), each) for each in samples]
        with (
            restored(device, pool),
            # Backward runs without autocast, as it does outside of graphs.
            torch.autocast(device.type, enabled=False),
            warnings.catch_warnings(),
        ):
            # Of the samples, whose gradients are returned and not accumulated.
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
            loss, _ = compute(*others)
            _require_leaves(loss, others)
            self._seed = torch.ones_like(loss)
            recorder = GraphRecorder(device, pool)
            recorder.warm_up([forward, backward])
            self._results, self._replay_forward = recorder.record(forward)
            self._gradients, self._replay_backward = recorder.record(backward)

    def apply(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Replay the forward; the loss, for autograd, and the logits.

        Later replays leave them as they are. If `backward` is not called, autograd replays it.

        Args:
            inputs: Dense features, pooled vectors and labels, of the same `form`.
        """
        found: tuple[Tensor, Tensor] = _apply(self, *inputs, *self.parameters)
        return found

    def forward(self, inputs: Sequence[Tensor]) -> tuple[int, Tensor, Tensor]:
        """Replay the forward.

        Args:
            inputs: As of `apply`.

        Returns:
            The number of this replay, the loss and the logits.
        """
        for place, given in zip(self._places, inputs, strict=True):
            if place.data_ptr() != given.data_ptr():
                place.copy_(given.detach())
        self._replay_forward()
        self._num_forward += 1
        self._is_forward_unused = True
        loss, logits = self._results
        return self._num_forward, loss.clone(), logits.clone()

    def backward(self, number: int, seed: Tensor | None = None) -> list[Tensor | None]:
        """Replay the backward of the last forward.

        Args:
            number: The number of that forward.
            seed: The gradient of the loss; None for ones.

        Returns:
            The gradients of inputs and parameters, which the next replay overwrites; None for a
            tensor that requires or gets none.

        Raises:
            RuntimeError: there was another forward since, or this is its second backward.
        """
        if number != self._num_forward or not self._is_forward_unused:
            raise RuntimeError(
                "capture=True: backward runs once for each step, and before the next one, because "
                "its graph overwrites what it reads; compute a second gradient of the loss, or "
                "that of an earlier step, with capture=False"
            )
        self._is_forward_unused = False
        if seed is not None:
            self._seed.copy_(seed)
        self._replay_backward()
        if seed is not None:
            self._seed.fill_(1)
        found: list[Tensor | None] = [None] * (len(self._places) + len(self.parameters))
        for at, gradient in zip(self._required, self._gradients, strict=True):
            # An alias: a caller may give the tensor other memory by `data`.
            found[at] = None if gradient is None else gradient.detach()
        return found


class _Replay(Function):
    """Forward and backward of graphs as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, graphs: DenseGraphs, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Replay the forward; the number of the replay is an attribute of the node."""
        ctx.graphs = graphs
        num_inputs = len(tensors) - len(graphs.parameters)
        ctx.number, loss, logits = graphs.forward(tensors[:num_inputs])
        ctx.mark_non_differentiable(logits)
        ctx.set_materialize_grads(False)
        return loss, logits

    @staticmethod
    def backward(ctx: Any, seed: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Replay the backward; hooks and callers may keep the gradients."""
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "capture=True: gradients of a replayed loss cannot be differentiated again; train "
                "on such a loss with capture=False"
            )
        if seed is None:
            return (None,) * len(ctx.needs_input_grad)
        found = ctx.graphs.backward(ctx.number, seed)
        return None, *(None if each is None else each.clone() for each in found)


_apply = plain_apply(_Replay)


def form_of(inputs: Sequence[Tensor]) -> list[Any]:
    """What inputs and settings must have in common with those of the capture."""
    device_type = inputs[1].device.type
    return [
        *((each.shape, each.dtype, each.device, each.requires_grad) for each in inputs),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.backends.cuda.matmul.fp32_precision,
    ]


def _forward_of(
    model: DLRMTrain, parameters: Sequence[nn.Parameter], num_inputs: int, device: torch.device
) -> Any:
    """A function of inputs and parameters that computes loss and logits, in the autocast of now."""
    part = _DensePart(model)
    numbers = {id(each): number for number, each in enumerate(parameters, num_inputs)}
    # Every attribute once: `functional_call` restores the wrong tensor to an attribute that it sets
    # twice, by two names of a module.
    places = [
        (f"{name}.{key}", numbers[id(each)])
        for name, module in part.named_modules()
        for key, each in module._parameters.items()
        if id(each) in numbers
    ]
    autocast = partial(
        torch.autocast,
        device.type,
        torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,  # copies of parameters must be made anew in each replay
    )

    def compute(*tensors: Tensor) -> Any:
        with autocast():
            values = {name: tensors[number] for name, number in places}
            return functional_call(part, values, tensors[:num_inputs], tie_weights=False)

    return compute


class _DensePart(nn.Module):
    """`loss_of` as the forward of a module, for `functional_call`."""

    def __init__(self, train_model: DLRMTrain) -> None:
        super().__init__()
        self.train_model = train_model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.train_model.loss_of(*inputs)


def _in_own_memory(
    gradients: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    num_inputs: int,
    others: Iterable[Tensor],
) -> list[Tensor | None]:
    """Give parameters gradients with their strides, none in memory of another tensor.

    So does autograd when it sets `grad`. Callers may then change each in place.

    Args:
        gradients: The gradients of inputs, then those of parameters.
        tensors: The inputs and parameters.
        num_inputs: Inputs among them; their gradients stay as they are.
        others: Other tensors whose memory gradients may share.
    """
    found = list(gradients)
    taken = {each.untyped_storage().data_ptr() for each in others}
    for at, (gradient, tensor) in enumerate(zip(gradients, tensors, strict=True)):
        own = gradient
        if own is None:
            continue
        if at >= num_inputs and (
            own.stride() != tensor.stride() or own.untyped_storage().data_ptr() in taken
        ):
            own = torch.empty_like(tensor, requires_grad=False).copy_(own)
        taken.add(own.untyped_storage().data_ptr())
        found[at] = own
    return found


def _like(alias: Tensor, original: Tensor) -> Tensor:
    return alias.requires_grad_(original.requires_grad)


def _require_leaves(loss: Tensor, samples: Sequence[Tensor]) -> None:
    """Check that a loss depends on no other tensors that require a gradient: they would get none.

    Raises:
        ValueError: it does.
    """
    known, seen, waiting = set(map(id, samples)), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if leaf is not None and id(leaf) not in known:
            raise ValueError(
                f"the loss depends on a tensor of shape {tuple(leaf.shape)} that is no parameter "
                "of the dense part, such as one of sparse_arch"
            )
        waiting.extend(following for following, _ in node.next_functions)
