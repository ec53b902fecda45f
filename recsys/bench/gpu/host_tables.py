"""Tables in the host's memory, filled once and used by several providers in turn.

Each provider gets tensors of its own on the same memory. They train on one another's rows, which
changes no time: every provider only sees numbers that another one has written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recsys._support.cuda.own_pages import empty_in_own_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["HostTables"]

_BLOCK_ROWS = 1 << 16


class HostTables:
    """The rows of all tables, one after the other.

    Args:
        sizes: Rows per table.
        dim: D.

    Attributes:
        rows: (R, D) float32, in pages of its own, so that tables stay where they are when a
            device is to reach them. Every page is written, since untouched pages would share one
            page of zeros.
    """

    def __init__(self, sizes: Sequence[int], dim: int) -> None:
        self.rows = empty_in_own_pages((sum(sizes), dim), torch.float32)
        self._sizes = list(sizes)
        # Drawing 4 billion numbers would take longer than measuring.
        block = torch.empty(min(_BLOCK_ROWS, len(self.rows)), dim).uniform_(-0.01, 0.01)
        for part in torch.split(self.rows, len(block)):
            part.copy_(block[: len(part)])

    def tables(self) -> list[Tensor]:
        """The rows of each table, (E, D), as new tensors on this memory."""
        parts = torch.split(self.rows, self._sizes)
        # Through numpy, so that each has a storage and a version of its own.
        return [torch.from_numpy(part.numpy()) for part in parts]
