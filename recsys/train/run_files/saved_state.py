"""What of a model's state a run can save, and which of its tensors have several names."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from recsys._support.safetensors_dtypes import DTYPES
from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

__all__ = ["is_expanded", "require_savable", "tied_names"]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of the parameters and buffers that a model holds under several names.

    Returns:
        For each name but the first of such a tensor, the first. All are keys of the state dict.
    """
    keys = set(model.state_dict())
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    named = chain(
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    for name, tensor in named:
        if name in keys and first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


def is_expanded(tensor: Tensor) -> bool:
    """Whether several values of a tensor are one in memory, so that it cannot be overwritten."""
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def require_savable(model: nn.Module, place: str) -> None:
    """Check that a run can save a model and load it again.

    Args:
        model: The model; values of tables on device "meta" are not looked at.
        place: What the error names first.

    Raises:
        ConfigError: an entry of its state dict is a lazy parameter, an extra state, an expanded
            tensor, or one that a checkpoint cannot hold; or two share memory and are not one
            tensor.
    """
    with DisableTorchFunctionSubclass():  # internal read of the tables
        state = model.state_dict()
        for key, value in state.items():
            fault = _fault_of(key, value)
            if fault is not None:
                raise ConfigError(f"{place}: {key} of its state dict {fault}")
        tied = tied_names(model)
        overlapping = _overlapping({key: each for key, each in state.items() if key not in tied})
    if overlapping is not None:
        raise ConfigError(
            f"{place}: {overlapping[0]} and {overlapping[1]} share memory and are not one tensor, "
            "so a saved model would not load as it was; hold one nn.Parameter or buffer under both "
            "names, register the view with persistent=False, or make it in forward"
        )


def _fault_of(key: str, value: Any) -> str | None:
    if key.rpartition(".")[2] == "_extra_state" or not isinstance(value, torch.Tensor):
        return (
            f"is a {type(value).__name__} that a module makes, and a run saves parameters and "
            "buffers; register it as a buffer, or compute it in __init__"
        )
    if is_lazy(value):
        return "is lazy and has no shape yet; give its module its sizes, as nn.Linear has them"
    if value.layout is not torch.strided or value.dtype not in DTYPES.values():
        return (
            f"has dtype {value.dtype} and layout {value.layout}, and a model file has dense "
            f"tensors of {sorted(map(str, DTYPES.values()))}; convert it, or register it with "
            "persistent=False"
        )
    if is_expanded(value):
        return (
            "is expanded, so several of its values are one in memory and a saved model would not "
            "load into it; register its clone()"
        )
    return None


def _overlapping(state: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The names of two tensors that share memory, if any do."""
    spans = []
    for key, each in state.items():
        if each.numel() and not each.is_meta:
            last = sum(
                (n - 1) * stride for n, stride in zip(each.shape, each.stride(), strict=True)
            )
            begin = each.data_ptr()
            spans.append((begin, begin + (last + 1) * each.itemsize, key))
    for (_, end, key), (begin, _, other) in pairwise(sorted(spans)):
        if begin < end:
            return min(key, other), max(key, other)
    return None
