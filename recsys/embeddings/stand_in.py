"""What holds the place of a table in a copy, until the module that has it takes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["StandIn"]


class StandIn(nn.Module):
    """A table without rows."""

    sparse = True

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(0, weight.shape[1], dtype=weight.dtype, device=weight.device)
        )
