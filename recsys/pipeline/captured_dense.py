"""The dense part of a step, replayed as CUDA graphs: one for forward, one for backward.

pooled vectors, dense features, labels -> captured forward  -> loss, logits
gradient of the loss                   -> captured backward -> gradients of vectors and parameters

Launching the operations of the MLPs one by one takes the host longer than the GPU needs for them.
Lookups, row updates and optimizers are not captured, so nothing about them changes.

The results of a graph, gradients included, are in memory that its next replay overwrites, and
backward overwrites what it reads of forward. So each graph is replayed once between `zero_grad` and
`step`, and the loss and the logits are copied.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from recsys._support.graphs import graph_on, restored
from recsys._support.torch_compat import has_global_hooks, plain_grad
from recsys.embeddings.lookup.device_tables import AbstractTables
from recsys.models.archs import AbstractPooledModel, SparseArch
from recsys.models.dlrm import DLRMTrain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CapturedDense"]

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
        self._num_backward = 0  # the replay whose backward was the last one
        self.pool: Any = None
        self._graphs: _Graphs | None = None
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

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Let the first forward of the model in this context replay its dense part.

        Gradients must be None when it begins, and backward and the optimizers' steps must come
        before the next one.
        """
        if not self._is_ready():
            yield
            return
        self._was_called = False
        attributes = vars(self._model)  # setting those of a module takes ten times as long
        attributes.update(run_dense=self._run, vectors=self._vectors())
        try:
            yield
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
        elif self._graphs.state != _state(self._model):
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
        if not torch.is_grad_enabled() or self._graphs.form != _form(inputs):
            self.leave_out("they have other shapes, dtypes or precision than the first one")
            return self._model.loss_of(*inputs)
        self._num_misfits, self.num_replays = 0, self.num_replays + 1
        loss, logits = self._graphs.replay(*inputs, *self._graphs.parameters)
        loss = loss.clone()
        if loss.requires_grad:
            loss.register_hook(partial(self._require_first_backward, self.num_replays))  # type: ignore[no-untyped-call]
        return loss, logits.detach().clone()

    def _require_first_backward(self, number: int, _: Tensor) -> None:
        """Check that a backward is the first one of the last replay; see the top of this module."""
        if number != self.num_replays or number == self._num_backward:
            raise RuntimeError(
                "capture=True: backward runs once for each step, and before the next one, because "
                "its graph overwrites what it reads; compute a second gradient of the loss, or "
                "that of an earlier step, with capture=False"
            )
        self._num_backward = number

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Graphs | None:
        try:
            return _captured(self._model, inputs, self.pool)
        except Exception as error:  # torch's, the GPU's, or the model's; without graphs it may work
            [line, *_] = [*str(error).splitlines(), ""]
            self._give_up(f"capturing failed with {type(error).__name__}: {line}")
            return None

    def _give_up(self, reason: str, effect: str = "has no effect") -> None:
        self.reason, self._has_warned = reason, False
        self._warn(f"{effect}: {reason}")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"capture=True {what}", stacklevel=5)


class _Graphs(NamedTuple):
    """What was captured.

    Attributes:
        replay: Maps dense features, pooled vectors, labels and parameters to loss and logits.
        parameters: Those of the dense part.
        vectors: Where the graphs read the pooled vectors, (B, F, D).
        form: Result of `_form`, at that time.
        state: Result of `_state`, at that time.
    """

    replay: Callable[..., tuple[Tensor, Tensor]]
    parameters: list[nn.Parameter]
    vectors: Tensor
    form: list[Any]
    state: list[Any]


class _DensePart(nn.Module):
    """`loss_of` as the forward of a module, for `functional_call`."""

    def __init__(self, train_model: DLRMTrain) -> None:
        super().__init__()
        self.train_model = train_model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.train_model.loss_of(*inputs)


def _captured(model: DLRMTrain, inputs: tuple[Tensor, ...], pool: Any) -> _Graphs:
    """Capture the dense part for inputs like these, which stay as they are."""
    form, state, device = _form(inputs), _state(model), inputs[1].device
    named = dict(_dense_parameters(model))
    names = [f"train_model.{name}" for name in named]
    part = _DensePart(model)
    autocast = partial(
        torch.autocast,
        device.type,
        torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,  # copies of parameters must be made anew in each replay
    )

    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        # Forward alone: backward runs without autocast, as it does outside of graphs.
        with autocast():
            values = dict(zip(names, tensors[len(inputs) :], strict=True))
            loss, logits = functional_call(part, values, tensors[: len(inputs)])
            return loss, logits.detach()  # otherwise backward would add its gradient, zeros

    # Graphs read parameters in place, and copies of the inputs, which each replay writes. Aliases
    # have no autograd nodes or hooks of the parameters, which would otherwise be captured, or
    # belong to the stream of the capture.
    samples = [
        *(_like(each.detach().clone(), each) for each in inputs),
        *(_like(each.detach(), each) for each in named.values()),
    ]
    if pool is None and device.type == "cuda":
        pool = torch.cuda.graph_pool_handle()
    # For a forward that is not captured: nodes of the samples would belong to this stream.
    others = [_like(each.detach(), each) for each in samples]
    with (
        restored(device, pool),
        torch.autocast(device.type, enabled=False),
        warnings.catch_warnings(),
    ):
        # Of the samples, whose gradients are returned and not accumulated.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        _require_leaves(forward(*others)[0], others)
        replay = _make_graphed(forward, tuple(samples), pool, device)
    return _Graphs(replay, list(named.values()), samples[1].detach(), form, state)


def _like(alias: Tensor, original: Tensor) -> Tensor:
    return alias.requires_grad_(original.requires_grad)


def _require_leaves(loss: Tensor, samples: list[Tensor]) -> None:
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


def _make_graphed(
    function: Callable[..., tuple[Tensor, Tensor]],
    samples: tuple[Tensor, ...],
    pool: Any,
    device: torch.device,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`make_graphed_callables` on a device; it has no argument for how it captures."""
    graph = torch.cuda.graph
    if device.type == "cuda":
        torch.cuda.graph = graph_on(device)  # type: ignore[assignment, misc]
    try:
        found = torch.cuda.make_graphed_callables(
            function, samples, allow_unused_input=True, pool=pool
        )
    finally:
        torch.cuda.graph = graph  # type: ignore[misc]
    return cast("Callable[..., tuple[Tensor, Tensor]]", found)


def _form(inputs: tuple[Tensor, ...]) -> list[Any]:
    """What inputs and settings must have in common with those of the capture."""
    device_type = inputs[1].device.type
    return [
        *((each.shape, each.dtype, each.device, each.requires_grad) for each in inputs),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.backends.cuda.matmul.fp32_precision,
    ]


def _state(model: DLRMTrain) -> list[Any]:
    """What is fixed in graphs of the dense part, besides their inputs. Every step calls this."""
    found: list[Any] = [has_global_hooks()]
    for module in _dense_modules(model):
        found += (module, module.training, _has_hooks(module))
        if module._parameters:
            for parameter in module._parameters.values():
                if parameter is not None:
                    # `_Graphs` keeps the parameter alive, and graphs have its address.
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


def _dense_parameters(model: DLRMTrain) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, each) for name, each in model.named_parameters() if not name.startswith(_EMBEDDINGS)
    ]


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
