"""Nested state as JSON: every tensor becomes a reference to an array of the checkpoint.

Values are None, bool, int, float, str, tensors, lists, tuples and dictionaries. No class is named
in a file, so reading one can run no code.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["from_tree", "to_tree"]

# An object of a tree with one of these keys stands for a value that JSON does not have.
_ARRAY, _TUPLE, _PAIRS, _FLOAT = "$array", "$tuple", "$pairs", "$float"
_MOST_LEVELS, _MOST_BITS = 100, 10_000  # JSON readers refuse much more


def to_tree(value: Any, name: str, refer: Callable[[str, Tensor], str], num_levels: int = 0) -> Any:
    """Convert nested state to JSON values.

    Args:
        value: The state.
        name: Its name: of tensors in it, and for errors.
        refer: Returns the name of the array that holds a tensor; its first argument is a name for
            a new one.
        num_levels: Lists and dictionaries around it.

    Raises:
        CheckpointError: a value has another type, or is nested too deeply.
    """
    if num_levels > _MOST_LEVELS:
        raise CheckpointError(
            f"{name[:100]}...: a checkpoint holds at most {_MOST_LEVELS} lists in each other; "
            "flatten them"
        )
    if isinstance(value, torch.Tensor):
        return {_ARRAY: refer(name, value)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise CheckpointError(
            f"{name}: a whole number may have {_MOST_BITS} bits, got {value.bit_length()}; save it "
            "as text"
        )
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, list | tuple):
        items = [
            to_tree(each, f"{name}/{place}", refer, num_levels + 1)
            for place, each in enumerate(value)
        ]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        pairs = [
            (key, to_tree(each, f"{name}/{key}", refer, num_levels + 1))
            for key, each in value.items()
        ]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        if all(isinstance(key, str | int) for key, _ in pairs):
            return {_PAIRS: [[key, each] for key, each in pairs]}
    raise CheckpointError(
        f"{name}: a checkpoint holds numbers, texts, tensors, and lists and dictionaries of them, "
        f"got {type(value).__name__}; convert it"
    )


def from_tree(tree: Any, array: Callable[[str], Tensor]) -> Any:
    """Convert JSON values back.

    Args:
        tree: A result of `to_tree`.
        array: Returns the array of a name.
    """
    if isinstance(tree, list):
        return [from_tree(each, array) for each in tree]
    if not isinstance(tree, dict):
        return tree
    marks = [key for key in tree if key.startswith("$")]
    if not marks:
        return {key: from_tree(each, array) for key, each in tree.items()}
    mark, content = marks[0], tree[marks[0]]
    if mark == _ARRAY:
        return array(content)
    if mark == _FLOAT:
        return float(content)
    if mark == _TUPLE:
        return tuple(from_tree(each, array) for each in content)
    return {key: from_tree(each, array) for key, each in content}
