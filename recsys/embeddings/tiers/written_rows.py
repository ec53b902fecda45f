"""Marks rows as changed that a device has written back: only lists on the device name them.

The lists are copied to the host, which does not wait. The rows of a list are marked once it has
arrived; a flush waits for all lists.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.update.changed_rows import ChangedRows

__all__ = ["WrittenRows"]


class _Coming(NamedTuple):
    """A list that is copied to the host."""

    rows: Tensor
    event: torch.cuda.Event | None
    record: ChangedRows


class WrittenRows:
    """Lists of rows on their way to the host, each with the record that gets the rows."""

    def __init__(self) -> None:
        self._coming: deque[_Coming] = deque()

    def add(self, rows: Tensor, record: ChangedRows) -> None:
        """Start to copy a list.

        Args:
            rows: Rows counted over all tables, (M,) on the device; negative for no row.
            record: Gets the rows later.
        """
        if rows.is_cuda:
            copied = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
            copied.copy_(rows, non_blocking=True)
            event = torch.cuda.current_stream(rows.device).record_event()
            self._coming.append(_Coming(copied, event, record))
        else:
            self._coming.append(_Coming(rows.clone(), None, record))

    def mark(self, *, is_complete: bool = False) -> None:
        """Mark the rows of lists that have arrived.

        Args:
            is_complete: Whether the host waits for all lists.
        """
        while self._coming:
            rows, event, record = self._coming[0]
            if event is not None and is_complete:
                event.synchronize()
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                return
            known = rows.numpy()
            record.mark_rows(known[known >= 0])
            self._coming.popleft()
