"""The states of the random generators of Python, numpy and torch.

numpy and torch accept some damaged states, and then read out of bounds. So a state from a file is
checked here first.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import numpy as np
import torch

__all__ = ["check_random_states", "random_states", "set_random_states"]

_WORDS = 624  # of a Mersenne twister
_TORCH_BYTES = 5056  # its state in torch: seed, left, is_seeded, next, words, and normal numbers


def random_states() -> dict[str, Any]:
    """The states of the random generators that a training loop may use."""
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    legacy["state"]["key"] = legacy["state"]["key"].tolist()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": legacy,
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def check_random_states(states: dict[str, Any]) -> None:
    """Check states from a file before they are set.

    Raises:
        ValueError, TypeError, KeyError: they are damaged.
    """
    version, words, gauss = states["python"]
    if version != 3 or not _are_words(words[:-1]) or not _is_whole(words[-1], _WORDS):
        raise ValueError("the state of Python's random generator is damaged")
    numpy = states["numpy"]
    is_sound = (
        numpy["bit_generator"] == "MT19937"
        and _are_words(numpy["state"]["key"])
        and _is_whole(numpy["state"]["pos"], _WORDS)  # beyond, numpy reads out of bounds
        and _is_whole(numpy["has_gauss"], 1)
        and isinstance(numpy["gauss"], float)
    )
    if not is_sound or not (gauss is None or isinstance(gauss, float)):
        raise ValueError("the state of numpy's random generator is damaged")
    content = states["torch"]
    if content.dtype is not torch.uint8 or content.dim() != 1:
        raise TypeError("the state of torch's random generator must be bytes")
    if len(content) == _TORCH_BYTES:  # torch checks the length
        left = int(content[8:12].clone().view(torch.int32))
        place = int(content[16:24].clone().view(torch.int64))
        if min(left, place) < 0 or left + place > _WORDS + 1:
            raise ValueError("the state of torch's random generator is damaged")


def set_random_states(states: dict[str, Any]) -> None:
    """Set states that `check_random_states` has accepted.

    Raises:
        RuntimeError, TypeError: torch refuses its state.
    """
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        with suppress(IndexError):  # saved on a machine with more devices
            torch.cuda.set_rng_state_all(states["cuda"])
    random.setstate(states["python"])
    legacy = states["numpy"]
    key = np.array(legacy["state"]["key"], np.uint32)
    np.random.set_state(legacy | {"state": legacy["state"] | {"key": key}})  # noqa: NPY002


def _are_words(values: Any) -> bool:
    return len(values) == _WORDS and all(_is_whole(each, 2**32 - 1) for each in values)


def _is_whole(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
