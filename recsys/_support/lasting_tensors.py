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
    """Make tensors that may be changed later; no operation in this context is differentiated.

    torch refuses to change one that was made under `torch.inference_mode`. An evaluation may be the
    first to need what training changes.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
