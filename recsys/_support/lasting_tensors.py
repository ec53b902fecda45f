"""Tensors that outlast `torch.inference_mode`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["lasting_tensors"]


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Make tensors that may be changed later, in any mode; no operation here is differentiated.

    torch refuses to change a tensor that was made under `torch.inference_mode`, and an evaluation
    may be the first to need what training changes.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
