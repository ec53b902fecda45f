"""The private parts of torch that recsys uses, each with the reason why no public one will do.

No other module of recsys names them. A torch release may change any of them without notice:
`tests/_support/test_torch_compat.py` has a test for each, which says what recsys expects of it.

Where torch has a function, the name here is that very function: calls on the path of every lookup
take no detour. Two kinds of private names stay with the modules that use them. One is attributes
that subclasses everywhere rely on: `nn.Module._parameters`, `_modules`, `_buffers`,
`_forward_hooks`, `_apply`, and `Optimizer._optimizer_step_pre_hooks`. The other is the marks of
`torch.distributed.optim._apply_optimizer_in_backward`, which `in_backward` of `recsys.embeddings`
reads if that module has been imported.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _are_functorch_transforms_active,
    _current_graph_task_id,
    _get_tracing_state,
    _will_engine_execute_node,
)
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,
    _profiler_enabled,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import is_batchedtensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "GLOBAL_STEP_POST_HOOKS",
    "GLOBAL_STEP_PRE_HOOKS",
    "MODULE_HOOKS",
    "NO_PASS",
    "DisableTorchFunctionSubclass",
    "active_ddp_module",
    "are_functorch_transforms_active",
    "current_pass",
    "has_gradient_hooks",
    "is_batched",
    "is_graph_kept",
    "is_node_in_pass",
    "is_profiler_enabled",
    "onednn_linear",
    "plain_apply",
    "plain_data",
    "plain_grad",
    "plain_requires_grad",
    "queue_callback",
    "set_plain_data",
    "set_plain_grad",
    "set_plain_requires_grad",
    "top_saved_tensors_hooks",
    "tracing_state",
    "version_of",
]

# -- What a tensor is, past its class.

# `DisableTorchFunctionSubclass`, imported above: a context in which a subclass of Tensor is a plain
# tensor to every operation. For internal reads of tables, whose subclass writes rows back first.

# The versions that autograd counts writes in place by.
version_of: Callable[[Tensor], int] = inspect.getattr_static(torch.Tensor, "_version").__get__

# Attributes that `recsys.embeddings` overrides for tables; these are torch's own.
_GRAD: Any = inspect.getattr_static(torch.Tensor, "grad")
_DATA: Any = inspect.getattr_static(torch.Tensor, "data")
_REQUIRES_GRAD: Any = inspect.getattr_static(torch.Tensor, "requires_grad")
plain_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
set_plain_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
plain_data: Callable[[Tensor], Tensor] = _DATA.__get__
set_plain_data: Callable[[Tensor, Tensor], None] = _DATA.__set__
plain_requires_grad: Callable[[Tensor], bool] = _REQUIRES_GRAD.__get__
set_plain_requires_grad: Callable[[Tensor, bool], None] = _REQUIRES_GRAD.__set__


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a hook waits for the tensor's gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


# -- What autograd does at the moment.

NO_PASS = -1  # what `current_pass` returns outside of backward
# The number of the backward pass that this thread runs.
current_pass: Callable[[], int] = _current_graph_task_id
# Whether that pass runs a node; torch.autograd.grad runs those alone that its inputs need.
is_node_in_pass: Callable[[Any], bool] = _will_engine_execute_node
# Whether that pass keeps its graph for another backward.
is_graph_kept: Callable[[], bool] = _get_current_graph_task_keep_graph
# Calls a function at the end of that pass.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
# Called with True, the hooks that pack saved tensors, as activation checkpointing has them do; None
# where there are none. Checkpointing counts saved tensors when it computes anew.
top_saved_tensors_hooks: Callable[[bool], Any] = _top_saved_tensors_default_hooks


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What `function.apply` calls when it has looked for tensors of functorch's transforms.

    Looking takes longer than a small lookup. For functions that are called where there are none.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


# -- Who else is at work.

# Not None while `torch.jit.trace` records the operations of this thread.
tracing_state: Callable[[], Any] = _get_tracing_state
# torch.func: vmap, grad and the like.
are_functorch_transforms_active: Callable[[], bool] = _are_functorch_transforms_active
# Whether vmap has made a tensor.
is_batched: Callable[[Tensor], bool] = is_batchedtensor
# The module whose forward DistributedDataParallel runs; None outside of such a forward.
active_ddp_module: Callable[[], Any] = partial(
    getattr, DistributedDataParallel, "_active_ddp_module"
)


# A step of an optimizer is reported to a profiler, and to hooks of every optimizer, by number.
is_profiler_enabled: Callable[[], bool] = _profiler_enabled
GLOBAL_STEP_PRE_HOOKS = _global_optimizer_pre_hooks
GLOBAL_STEP_POST_HOOKS = _global_optimizer_post_hooks

# The attributes of a module that hold its hooks. A module that replaces another one shares these
# very dictionaries, because a handle removes its hook from the dictionary it was registered in.
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

# -- oneDNN's matrix product, which no public operation calls in float32.

# `onednn_linear(left, right, bias, "none", [], "")` is `left @ right.T + bias`, in float32 on the
# CPU: left (B, I), right (O, I), bias (O,) or None. It is None if torch is built without oneDNN.
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
