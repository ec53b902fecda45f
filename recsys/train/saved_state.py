"""What of a model's state a run can save."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from recsys._support.safetensors_dtypes import DTYPES
from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["is_expanded", "require_savable"]


def is_expanded(tensor: Tensor) -> bool:
    """Whether several values of a tensor are one in memory, so that it cannot be overwritten."""
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def require_savable(model: nn.Module, location: str) -> None:
    """Check that a run can save a model, before it trains for hours.

    Args:
        model: The model; values of tables on device "meta" are not looked at.
        location: What the error names first.

    Raises:
        ConfigError: an entry of its state dict is an extra state, or a tensor that is lazy, sparse,
            expanded, or of a dtype that safetensors has no name for.
    """
    with DisableTorchFunctionSubclass():  # internal read of the tables
        for key, value in model.state_dict().items():
            if (
                not isinstance(value, torch.Tensor)
                or key.endswith("_extra_state")
                or is_lazy(value)
                or value.layout is not torch.strided
                or value.dtype not in DTYPES.values()
                or is_expanded(value)
            ):
                raise ConfigError(
                    f"{location}: {key} of its state dict cannot be saved: it must be a dense "
                    f"tensor that has a shape, in one of {sorted(map(str, DTYPES.values()))}; "
                    "convert it, or register it with persistent=False"
                )
