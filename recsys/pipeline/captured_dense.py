"""The dense part of a step, replayed as CUDA graphs: one for forward, one for backward.

Launching the operations of the MLPs one by one takes the host longer than the GPU needs for them.
Lookups, row updates and optimizers are not captured, so nothing about them changes. `dense_graphs`
has the graphs; this module decides which steps replay them, and hands their gradients on.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from recsys._support.cuda.graphs import current_stream
from recsys._support.torch_compat import (
    has_global_hooks,
    has_gradient_hooks,
    plain_grad,
    set_plain_grad,
)
from recsys._support.user_warnings import warn_caller
from recsys.embeddings.lookup.abstract_tables import AbstractTables
from recsys.embeddings.lookup.fused_lookup import keep_gradient
from recsys.models.archs import AbstractPooledModel, SparseArch
from recsys.models.dlrm import DLRMTrain
from recsys.pipeline.dense_graphs import DenseGraphs, form_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CapturedDense", "may_capture"]

# Device types whose work can be captured. Tests add "cpu".
_CAN_CAPTURE = {"cuda"}
_EMBEDDINGS = "model.sparse_arch."


class CapturedDense:
    """Captures the dense part of a model in its first training step, and replays it from then on.

    A mini-batch unlike the first one runs op by op, as does everything outside of `one_step`. If
    nothing can be captured or replayed, one warning says why, and training goes on op by op.

    Args:
        model: The model that is trained.

    Attributes:
        reason: Why nothing is captured; empty as long as graphs are, or may be, replayed.
        num_replays: Steps whose dense part was replayed.
        pool: The memory pool of the graphs, from `torch.cuda.graph_pool_handle`; None for their
            own. Set it before the first step. Models that share a pool must never be between
            forward and the optimizers' steps at the same time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = cast("DLRMTrain", model)
        self.reason = ""
        self.num_replays = 0
        self.pool: Any = None
        self._graphs: DenseGraphs | None = None
        self._state: list[Any] = []  # result of `_state` at the capture
        self._replayed: _Replayed | None = None  # the forward whose backward is to come
        self._tables = [each for each in model.modules() if isinstance(each, AbstractTables)]
        # Of rows that recsys updates, gradients are in ledgers.
        updated = {
            weight for each in self._tables if each.row_updater for weight in each.parameters()
        }
        self._parameters = [pair for pair in model.named_parameters() if pair[1] not in updated]
        self._was_called = self._has_warned = False
        self._num_misfits = 0  # steps in a row that were not replayed
        obstacle = _obstacle(model)
        if obstacle:
            self._give_up(obstacle)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles capture anew: graphs read the parameters of this model."""
        return vars(self) | {"_graphs": None, "_replayed": None, "pool": None}

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Let the first forward of the model in this context replay its dense part.

        Gradients must be None when it begins, and backward and the optimizers' steps must come
        before the next one.
        """
        if not self._is_ready():
            yield
            return
        self._was_called, self._replayed = False, None
        attributes = vars(self._model)  # setting those of a module takes ten times as long
        attributes.update(run_dense=self._run, vectors=self._vectors())
        try:
            yield
        except BaseException:
            self._replayed = None  # it keeps what autograd saved of the lookups
            raise
        finally:
            attributes.update(run_dense=None, vectors=None)
        if not self._was_called:
            self.leave_out("they have sample weights, or the model was not called")

    def leave_out(self, reason: str) -> None:
        """Note that a step was not replayed; the second one in a row is warned of, once.

        Args:
            reason: Why, about mini-batches in general.
        """
        self._num_misfits += 1
        if self._num_misfits > 1:
            self._warn(f"mini-batches run op by op now, because {reason}")

    def _is_ready(self) -> bool:
        if self.reason:
            return False
        for name, parameter in self._parameters:
            # It may be in the memory that the next replay overwrites.
            if plain_grad(parameter) is not None:
                self.leave_out(
                    f"the gradient of {name!r} is kept from one step to the next; let the "
                    "pipeline's optimizers set it to None in zero_grad"
                )
                return False
        updaters = [each.row_updater for each in self._tables]
        if any(each.group.ledger for updater in updaters if updater for each in updater.groups):
            self.leave_out("gradients of rows are kept from one step to the next")
            return False
        if self._graphs is None:
            obstacle = _obstacle(self._model)  # such as a hook that is newer than the pipeline
            if obstacle:
                self._give_up(obstacle)
        elif self._state != _state(self._model):
            self._graphs = None
            self._give_up(
                "hooks, parameters, requires_grad or modes of the dense part are others than in "
                "its first step; build a new TrainPipeline to capture it",
                "has no effect any more",
            )
        return not self.reason

    def _vectors(self) -> Tensor | None:
        """Where graphs read pooled vectors, unless others may keep or change results of lookups."""
        arch = self._model.model.sparse_arch
        modules = [arch, arch.embedding_bag_collection] if type(arch) is SparseArch else []
        if self._graphs is None or not modules or any(map(_has_hooks, modules)):
            return None
        return self._graphs.vectors

    def _run(
        self, dense_features: Tensor, embedded_sparse: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """In place of `DLRMTrain.loss_of`."""
        # Replayed twice in a step, graphs would overwrite what the first backward reads.
        self._was_called = True
        vars(self._model)["run_dense"] = None
        inputs = (dense_features, embedded_sparse, labels)
        if self._graphs is None and torch.is_grad_enabled():
            self._graphs = self._capture(inputs)
        if self._graphs is None:
            return self._model.loss_of(*inputs)
        if not torch.is_grad_enabled() or self._graphs.form != form_of(inputs):
            self.leave_out("they have other shapes, dtypes or precision than the first one")
            return self._model.loss_of(*inputs)
        self._num_misfits, self.num_replays = 0, self.num_replays + 1
        loss, logits = self._graphs.apply(inputs)
        self._replayed = _Replayed(loss, loss.grad_fn, inputs, current_stream(loss.device))
        return loss, logits

    def _capture(self, inputs: tuple[Tensor, ...]) -> DenseGraphs | None:
        self._state = _state(self._model)
        try:
            return DenseGraphs(self._model, _dense_parameters(self._model), inputs, self.pool)
        except Exception as error:  # torch's, the GPU's, or the model's; without graphs it may work
            [line, *_] = [*str(error).splitlines(), ""]
            self._give_up(f"capturing failed with {type(error).__name__}: {line}")
            return None

    def backward(self, total: Tensor) -> None:
        """In place of `total.backward()`, after the forward of a step.

        Args:
            total: The loss, or one made from it, such as a sum with others.
        """
        replayed, graphs, self._replayed = self._replayed, self._graphs, None
        if replayed is None or graphs is None or not _is_only_set(replayed, total, graphs):
            total.backward()  # type: ignore[no-untyped-call]
            return
        # Autograd takes several times as long for each parameter.
        found = graphs.backward(replayed.node.number)
        num_inputs = len(replayed.inputs)
        for parameter, gradient in zip(graphs.parameters, found[num_inputs:], strict=True):
            if gradient is not None:
                set_plain_grad(parameter, gradient)
        pairs = [
            (given, gradient)
            for given, gradient in zip(replayed.inputs, found[:num_inputs], strict=True)
            if gradient is not None
        ]
        if len(pairs) == 1:
            [(given, gradient)] = pairs
            # Results that are there were offered no one else; see `_vectors`.
            is_hidden = given.data_ptr() == graphs.vectors.data_ptr()
            if is_hidden and keep_gradient(given, gradient):
                return
        if pairs:  # in one pass, after which rows may be updated
            # For a CUDA device autograd would hand over to a thread of its own, and back.
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward([each for each, _ in pairs], [each for _, each in pairs])

    def _give_up(self, reason: str, effect: str = "has no effect") -> None:
        self.reason, self._has_warned = reason, False
        self._warn(f"{effect}: {reason}")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_caller(f"capture=True {what}")


class _Replayed(NamedTuple):
    """A forward that was replayed.

    Attributes:
        loss: The loss.
        node: Its node of autograd.
        inputs: Dense features, pooled vectors and labels.
        stream: The stream of the forward.
    """

    loss: Tensor
    node: Any
    inputs: Sequence[Tensor]
    stream: Any


def _is_only_set(replayed: _Replayed, total: Tensor, graphs: DenseGraphs) -> bool:
    """Whether all that backward does with gradients of parameters is to set `grad`."""
    loss = replayed.loss
    return (
        total is loss
        and loss.grad_fn is replayed.node  # not changed in place
        and current_stream(loss.device) == replayed.stream
        and not any(map(_is_gradient_seen, (loss, *replayed.inputs)))
        and not any(map(_has_other_effects, graphs.parameters))
    )


def _is_gradient_seen(tensor: Tensor) -> bool:
    return has_gradient_hooks(tensor) or tensor.retains_grad


def _has_other_effects(parameter: nn.Parameter) -> bool:
    """Whether a parameter has a gradient, or backward calls hooks with it."""
    return (
        plain_grad(parameter) is not None
        or has_gradient_hooks(parameter)
        or hasattr(parameter, "_in_backward_optimizers")  # a hook of its node calls them
    )


def _state(model: DLRMTrain) -> list[Any]:
    """What is fixed in graphs of the dense part, besides their inputs. Every step calls this."""
    found: list[Any] = [has_global_hooks()]
    for module in _dense_modules(model):
        found += (module, module.training, _has_hooks(module))
        if module._parameters:
            for parameter in module._parameters.values():
                if parameter is not None:
                    # `DenseGraphs` keeps the parameter alive, and graphs have its address.
                    found += (id(parameter), parameter.data_ptr(), parameter.requires_grad)
    return found


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _dense_modules(model: DLRMTrain) -> list[nn.Module]:
    """The modules of the dense part, the model of logits included, whose forward is replaced."""
    found: list[nn.Module] = []
    waiting: list[nn.Module | None] = [model.loss_fn, model.model]
    embeddings = model.model.sparse_arch
    while waiting:
        module = waiting.pop()
        if module is not None and module is not embeddings:
            found.append(module)
            if module._modules:
                waiting += module._modules.values()
    return found


def _dense_parameters(model: DLRMTrain) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if not name.startswith(_EMBEDDINGS)]


def may_capture(model: nn.Module) -> bool:
    """Whether a model is of a kind that is captured, on a device whose work can be."""
    is_known = _has_forward_of(model, DLRMTrain) and _has_forward_of(
        cast("DLRMTrain", model).model, AbstractPooledModel
    )
    return is_known and any(each.device.type in _CAN_CAPTURE for each in model.parameters())


def _obstacle(model: nn.Module) -> str:
    """Why the dense part of a model cannot be captured; empty if it can."""
    if not _has_forward_of(model, DLRMTrain):
        return f"{type(model).__name__} is no DLRMTrain, of which the dense part is known"
    model = cast("DLRMTrain", model)
    pooled = cast("AbstractPooledModel", model.model)
    if not _has_forward_of(pooled, AbstractPooledModel):
        return (
            f"{type(pooled).__name__} is no model of pooled vectors, such as DLRM, DCNv2 and "
            "DeepFM, of which the dense part is known"
        )
    if has_global_hooks():
        return "there are hooks of all modules, which graphs would not call"
    for module in _dense_modules(model):
        if _has_hooks(module):
            name = next(name for name, each in model.named_modules() if each is module)
            return f"{name!r} has hooks, which graphs would not call"
    for name, _ in model.named_buffers():
        if not name.startswith(_EMBEDDINGS):
            return f"{name!r} is a buffer, which the steps before a capture might change"
    of_embeddings = set(pooled.sparse_arch.parameters())
    devices = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(_EMBEDDINGS):
            devices.add(parameter.device)
            if parameter in of_embeddings:
                return f"{name!r} is also a parameter of the embeddings, which are not captured"
    if len(devices) != 1:
        return f"the dense part is on {len(devices)} devices"
    [device] = devices
    if device.type not in _CAN_CAPTURE:
        return f"the dense part is on '{device}', and only work of a CUDA device can be captured"
    return ""


def _has_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of a kind, and has its forward."""
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in module.__dict__
    )
