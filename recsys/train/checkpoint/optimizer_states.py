"""Checks the state of an optimizer from a file before the optimizer takes it.

torch accepts nearly any state. If an array is too small, a fused kernel then writes out of bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["check_optimizer_state"]

# Arrays of torch's optimizers that have one number for each number of the parameter.
_OF_PARAMETER = {
    "acc_delta",
    "ax",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "prev",
    "square_avg",
    "step_size",
    "sum",
}


def check_optimizer_state(optimizer: Optimizer, state: Any, tables: Collection[int]) -> None:
    """Check a state.

    Args:
        optimizer: Will take it.
        state: As `optimizer.state_dict()` returns it.
        tables: The `id` of parameters whose state is checked elsewhere.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is not a state of this optimizer.
    """
    own, saved = optimizer.param_groups, state["param_groups"]
    if len(own) != len(saved):
        raise ValueError(
            f"an optimizer has {len(own)} param groups, and the state has {len(saved)}"
        )
    parameters: dict[Any, Tensor] = {}
    for group, each in zip(own, saved, strict=True):
        for name, value in each.items():
            if name == "params":
                parameters.update(zip(value, group["params"], strict=True))
            elif not _is_setting(value, group.get(name)):
                raise TypeError(f"{name} of a param group cannot be {str(value)[:50]}")
    for key, values in state["state"].items():
        parameter = parameters[key]
        if id(parameter) in tables:
            continue
        for name, value in values.items():
            if name not in _OF_PARAMETER or value is None:
                continue
            # Known from the start is the state of TorchRec's RowWiseAdagrad, (E, 1).
            known = optimizer.state.get(parameter, {}).get(name)
            shape = (known if isinstance(known, torch.Tensor) else parameter).shape
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                raise ValueError(f"{name} of parameter {key} must have shape {tuple(shape)}")


def _is_setting(value: Any, own: Any) -> bool:
    """Whether a setting is of the kind of an optimizer's own one."""
    if own is None or value is None:
        return value is None or _is_number(value) or isinstance(value, str)
    if isinstance(own, tuple | list):
        is_alike = isinstance(value, tuple | list) and len(value) == len(own)
        return is_alike and all(map(_is_setting, value, own))
    return _is_number(value) if _is_number(own) else type(value) is type(own)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (
        isinstance(value, torch.Tensor) and value.numel() == 1 and value.dim() <= 1
    )
