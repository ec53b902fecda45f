"""The private names of torch that recsys uses, each with what it does.

No other module of recsys uses these names. A torch release may change any of them without notice:
`tests/unit/_support/test_torch_compat.py` states what recsys expects of those that could change.

If torch has a function, the name here is that function itself, so calls in every lookup have no
overhead. Two kinds of private names stay in the modules that use them. One is attributes that
subclasses commonly use: `nn.Module._parameters`, `_modules`, `_buffers`, `_forward_hooks`,
`_apply`, and `Optimizer._optimizer_step_pre_hooks`. The other is the attributes that
`torch.distributed.optim._apply_optimizer_in_backward` sets, which
`recsys.embeddings.update.apply_in_backward` reads if that module has been imported.
"""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _are_functorch_transforms_active,
    _current_graph_task_id,
    _will_engine_execute_node,
)
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,
    _profiler_enabled,
    _top_saved_tensors_default_hooks,
)
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

_F = TypeVar("_F", bound="Callable[..., Any]")

__all__ = [
    "GLOBAL_STEP_POST_HOOKS",
    "GLOBAL_STEP_PRE_HOOKS",
    "MODULE_HOOKS",
    "NO_PASS",
    "DisableTorchFunctionSubclass",
    "active_ddp_module",
    "are_functorch_transforms_active",
    "current_pass",
    "current_stream_number",
    "has_gradient_hooks",
    "is_graph_kept",
    "is_node_in_pass",
    "is_profiler_enabled",
    "not_compiled",
    "onednn_linear",
    "outside_graphs",
    "plain_apply",
    "plain_data",
    "plain_grad",
    "queue_callback",
    "set_plain_data",
    "set_plain_grad",
    "top_saved_tensors_hooks",
    "version_of",
    "versions_of",
]

# -- Tensors.

# `DisableTorchFunctionSubclass`, imported above: a context that skips `__torch_function__`. For
# internal reads of tables, whose `__torch_function__` writes rows back first.

# The version of a tensor, which every in-place operation increments.
version_of: Callable[[Tensor], int] = inspect.getattr_static(torch.Tensor, "_version").__get__


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """The version of each tensor, in half the time that `version_of` takes for each."""
    return [tensor._version for tensor in tensors]


# torch's own implementation of attributes that the Parameter classes of tables override.
_GRAD: Any = inspect.getattr_static(torch.Tensor, "grad")
_DATA: Any = inspect.getattr_static(torch.Tensor, "data")
plain_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
set_plain_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
plain_data: Callable[[Tensor], Tensor] = _DATA.__get__
set_plain_data: Callable[[Tensor, Tensor], None] = _DATA.__set__


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a hook is registered for the tensor's gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


# -- The state of autograd.

NO_PASS = -1  # what `current_pass` returns outside of backward
# The number of the backward pass that this thread is running.
current_pass: Callable[[], int] = _current_graph_task_id
# Whether that pass runs a node; torch.autograd.grad runs only the nodes that its inputs need.
is_node_in_pass: Callable[[Any], bool] = _will_engine_execute_node
# Whether that pass keeps its graph for another backward.
is_graph_kept: Callable[[], bool] = _get_current_graph_task_keep_graph
# Calls a function at the end of that pass. If the pass fails, the function is dropped, not called.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
# Called with True, returns the current hooks for saved tensors, or None. Activation checkpointing
# uses such hooks, and counts the saved tensors when it recomputes.
top_saved_tensors_hooks: Callable[[bool], Any] = _top_saved_tensors_default_hooks


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its check for functorch tensors.

    The check takes longer than a small lookup. Use it only if no functorch transform is active.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


# -- Transforms, tracing, DistributedDataParallel.

# `torch.compiler.disable` that brings the compiler in when the function is first called, and not
# when it is decorated: that takes a second.
not_compiled: Callable[[_F], _F] = _disable_dynamo  # type: ignore[assignment]


def outside_graphs(function: _F) -> _F:
    """`not_compiled`, for a function that is also called where nothing is compiled.

    There it is called as it is, so that the compiler is not brought in.
    """
    break_graph = not_compiled(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (break_graph if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast("_F", call)


# Whether a transform of torch.func is active, such as vmap or grad.
are_functorch_transforms_active: Callable[[], bool] = _are_functorch_transforms_active
# The module whose forward DistributedDataParallel runs; None outside of such a forward.
active_ddp_module: Callable[[], Any] = partial(
    getattr, DistributedDataParallel, "_active_ddp_module"
)


# -- CUDA.

_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def current_stream_number(device: torch.device) -> int:
    """What identifies the current stream of a CUDA device; 0 on the CPU.

    `torch.cuda.current_stream` makes an object, which takes much longer.
    """
    return _raw_stream(device.index) if device.type == "cuda" else 0


# -- Optimizers and hooks.

# Whether a profiler is running, and the hooks of the steps of all optimizers, by number.
is_profiler_enabled: Callable[[], bool] = _profiler_enabled
GLOBAL_STEP_PRE_HOOKS = _global_optimizer_pre_hooks
GLOBAL_STEP_POST_HOOKS = _global_optimizer_post_hooks

# The attributes of a module that hold its hooks. A module that replaces another one uses the same
# dictionary objects, because a handle removes its hook from the dictionary it was registered in.
MODULE_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


# -- oneDNN's matrix product; no public operation calls it in float32.

# `onednn_linear(left, right, bias, "none", [], "")` is `left @ right.T + bias`, in float32 on the
# CPU: left (B, I), right (O, I), bias (O,) or None. It is None if torch is built without oneDNN.
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
