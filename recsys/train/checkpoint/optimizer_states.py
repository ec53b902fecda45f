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
        ValueError, KeyError: it is not a state of this optimizer.
    """
    parameters: dict[Any, Tensor] = {}
    for group, each in zip(optimizer.param_groups, state["param_groups"], strict=True):
        parameters.update(zip(each["params"], group["params"], strict=True))
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
