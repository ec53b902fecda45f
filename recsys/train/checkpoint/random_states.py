"""The states of the random generators of Python, numpy and torch."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import numpy as np
import torch

__all__ = ["random_states", "set_random_states"]


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


def set_random_states(states: dict[str, Any]) -> None:
    """Set states as `random_states` returns them."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        with suppress(IndexError):  # saved on a machine with more devices
            torch.cuda.set_rng_state_all(states["cuda"])
    random.setstate(states["python"])
    legacy = states["numpy"]
    key = np.array(legacy["state"]["key"], np.uint32)
    np.random.set_state(legacy | {"state": legacy["state"] | {"key": key}})  # noqa: NPY002
