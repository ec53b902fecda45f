"""Forward and backward of the dense part of a model, as two CUDA graphs.

dense features, pooled vectors, labels -> forward  -> loss, logits
gradient of the loss                   -> backward -> gradients of inputs and parameters

Graphs read parameters in place, and inputs where each replay copies them. Their results, gradients
included, are in memory that the next replay overwrites, and backward overwrites what it reads of
forward. So each of the two is replayed at most once in a step.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from recsys._support.graphs import GraphRecorder, restored

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from recsys.models.dlrm import DLRMTrain

__all__ = ["DenseGraphs", "form_of"]


class DenseGraphs:
    """The graphs of `DLRMTrain.loss_of`, for inputs like those given.

    Args:
        model: The model; its parameters must stay where they are.
        named: The parameters of its dense part, by their names in the model.
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
        named: Iterable[tuple[str, nn.Parameter]],
        inputs: Sequence[Tensor],
        pool: Any = None,
    ) -> None:
        self.form = form_of(inputs)
        names, self.parameters = map(list, zip(*named, strict=True))
        samples = [_like(each.detach().clone(), each) for each in inputs]
        # Aliases have no autograd nodes or hooks of the parameters, which would otherwise be
        # captured, or belong to the stream of the capture.
        samples += [_like(each.detach(), each) for each in self.parameters]
        self._places = [each.detach() for each in samples[: len(inputs)]]
        self.vectors = self._places[1]
        self._required = [number for number, each in enumerate(samples) if each.requires_grad]
        required = [samples[number] for number in self._required]
        device = self.vectors.device
        if pool is None and device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
        compute = _forward_of(model, names, len(inputs), device)

        def forward() -> tuple[Tensor, Tensor]:
            self._loss, logits = compute(*samples)
            return self._loss.detach(), logits.detach()

        def backward() -> Sequence[Tensor | None]:
            return torch.autograd.grad(self._loss, required, self._seed, allow_unused=True)

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

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Replay the forward; the loss and the logits, which later replays leave as they are.

        Args:
            inputs: Dense features, pooled vectors and labels, of the same `form`.
        """
        for place, given in zip(self._places, inputs, strict=True):
            if place.data_ptr() != given.data_ptr():
                place.copy_(given.detach())
        self._replay_forward()
        loss, logits = self._results
        return loss.clone(), logits.clone()

    def backward(self, seed: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Replay the backward of the last forward.

        Args:
            seed: The gradient of the loss; None for ones.

        Returns:
            The gradients of inputs and of parameters, which the next replay overwrites; None for a
            tensor that requires or gets none.
        """
        if seed is not None:
            self._seed.copy_(seed)
        self._replay_backward()
        if seed is not None:
            self._seed.fill_(1)
        num_inputs = len(self._places)
        found: list[Tensor | None] = [None] * (num_inputs + len(self.parameters))
        for number, gradient in zip(self._required, self._gradients, strict=True):
            # An alias: a caller may give the tensor other memory by `data`.
            found[number] = None if gradient is None else gradient.detach()
        return found[:num_inputs], found[num_inputs:]


def form_of(inputs: Sequence[Tensor]) -> list[Any]:
    """What inputs and settings must have in common with those of the capture."""
    device_type = inputs[1].device.type
    return [
        *((each.shape, each.dtype, each.device, each.requires_grad) for each in inputs),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.backends.cuda.matmul.fp32_precision,
    ]


def _forward_of(
    model: DLRMTrain, names: Sequence[str], num_inputs: int, device: torch.device
) -> Any:
    """A function of inputs and parameters that computes loss and logits, in the autocast of now."""
    part = _DensePart(model)
    names = [f"train_model.{name}" for name in names]
    autocast = partial(
        torch.autocast,
        device.type,
        torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,  # copies of parameters must be made anew in each replay
    )

    def compute(*tensors: Tensor) -> Any:
        with autocast():
            values = dict(zip(names, tensors[num_inputs:], strict=True))
            return functional_call(part, values, tensors[:num_inputs])

    return compute


class _DensePart(nn.Module):
    """`loss_of` as the forward of a module, for `functional_call`."""

    def __init__(self, train_model: DLRMTrain) -> None:
        super().__init__()
        self.train_model = train_model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.train_model.loss_of(*inputs)


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
