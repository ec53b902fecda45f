"""`torch.fx`: a recsys module is one call in a traced model, like a module of `torch.nn`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Proxy

if TYPE_CHECKING:
    from torch import nn

__all__ = ["leaf_call"]


def leaf_call(module: nn.Module, *arguments: Any) -> Any:
    """Record a module's call in the traced graph; None if the arguments are not being traced.

    Args:
        module: A module inside the traced model.
        arguments: Positional arguments of its forward.

    Raises:
        TypeError: the module has forward hooks.
    """
    for each in arguments:
        if isinstance(each, Proxy):
            tracer: Any = each.tracer
            if module._forward_hooks or module._forward_pre_hooks:
                raise TypeError(
                    f"torch.fx: {type(module).__name__} has forward hooks, which would run twice, "
                    "in the traced graph and in the module; remove them, trace, and register them "
                    "again"
                )
            path = tracer.path_of_module(module)
            return tracer.create_proxy("call_module", path, arguments, {})
    return None
