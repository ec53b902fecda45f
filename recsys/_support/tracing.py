"""`torch.fx`: a module of ours is one call in a traced model, as a module of torch.nn's is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Proxy

if TYPE_CHECKING:
    from torch import nn

__all__ = ["leaf_call"]


def leaf_call(module: nn.Module, *arguments: Any, **more: Any) -> Any:
    """The call of a module whose arguments are being traced; None where they are not.

    Args:
        module: Inside the model that is traced.
        arguments: Of its forward.
        more: Likewise, by name.

    Raises:
        TypeError: the module is the whole model that is traced, or has forward hooks.
    """
    for each in arguments:
        if isinstance(each, Proxy):
            tracer: Any = each.tracer
            if module is tracer.root:
                raise TypeError(
                    f"torch.fx cannot trace {type(module).__name__} alone, which is a call in a "
                    "traced model; trace a model that has it inside"
                )
            if module._forward_hooks or module._forward_pre_hooks:
                raise TypeError(
                    f"torch.fx: {type(module).__name__} has forward hooks, which would be in the "
                    "traced model and be called once more by the module; remove them, trace, and "
                    "register them again"
                )
            path = tracer.path_of_module(module)
            return tracer.create_proxy("call_module", path, arguments, more)
    return None
