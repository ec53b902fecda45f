"""Rows that a device copies by itself, from and to tables in host memory that it reaches.

The tables and state arrays are page-locked where they are. Lists of rows may lie on the device: no
list travels to the host, no row is staged, and the host waits for nothing. `Staging` copies rows of
all other cold stores.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.cuda.own_pages import PageLocks
from recsys.embeddings.kernels.torch.row_space import ReachedRows, upload

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.choice import HostCopies
    from recsys.embeddings.kernels.torch.bags import TorchBags
    from recsys.embeddings.kernels.torch.row_space import RowNumbers
    from recsys.embeddings.kernels.torch.slots import TorchSlots, Transfer
    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.rows.row_space import RowSpace

__all__ = ["DeviceCopies"]

# Device types that reach only memory that is page-locked. The CPU, which tests use, reaches all.
_NEED_LOCKS = {"cuda"}


class DeviceCopies:
    """Copies rows and their state by lists, on the stream that is current.

    Args:
        memories: The slots on the device: rows, (S, D), then each state array, (S, size).
        sizes: E of every table.
        spaces: Returns the tables, then each state array, as for `HostStore`.
        kernels: The kernels of the device.
    """

    def __init__(
        self,
        memories: Sequence[Tensor],
        sizes: Sequence[int],
        spaces: Callable[[], Sequence[RowSpace]],
        kernels: HostCopies,
    ) -> None:
        self._memories, self._sizes = list(memories), sizes
        self._spaces, self._kernels = spaces, kernels
        self._device = memories[0].device
        self._addresses: list[list[int]] = []
        self._hosts: list[Any] = []  # `HostRows` of each space
        self._reached: ReachedRows | None = None  # what `look_up` reads
        self._locks: PageLocks | None = None
        # The stream that last read `_hosts`, and `_addresses` then: another list after a `renew`.
        self._recorded: tuple[list[list[int]], Any] = ([], None)

    def are_current(self) -> bool:
        """Whether tables and state are where they were at the last `renew`."""
        return [space.addresses for space in self._spaces()] == self._addresses

    def renew(self) -> bool:
        """Page-lock tables and state where they are now; no copy may be pending.

        Returns:
            Whether the device reaches them. If not, a warning says why, and nothing is locked.
        """
        spaces, before = self._spaces(), self._locks
        self._hosts, self._addresses, self._locks, self._reached = [], [], None, None
        if self._device.type in _NEED_LOCKS:
            tables = [table for space in spaces for table in space.tables]
            try:
                self._locks = PageLocks(tables, self._device)
            except OSError as error:
                warnings.warn(
                    f"{error}, so '{self._device}' cannot read tables in host memory by itself: "
                    "each mini-batch waits for the list of its rows; allow the process to lock "
                    "more memory (ulimit -l)",
                    stacklevel=2,
                )
                return False
            finally:
                if before is not None:  # after the new ones, so that nothing is locked twice
                    before.release()
        make = self._kernels.host_rows
        self._hosts = [make(space.tables, self._device, self._sizes) for space in spaces]
        self._addresses = [space.addresses for space in spaces]
        return True

    @property
    def key(self) -> Hashable:
        """Differs after each `renew` with other tables."""
        return tuple(map(tuple, self._addresses))

    @property
    def reads(self) -> Sequence[Any]:
        """What owns the memory that kernels read, besides lists, tables and slots."""
        return self._hosts

    def fetch(self, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy rows and their state into slots.

        Args:
            rows: Row numbers, counted over all tables, (M,).
            slots: The slot of each row, (M,).
        """
        self._copy(self._kernels.fetch_rows, rows, slots)

    def look_up(
        self,
        numbers: RowNumbers,
        slots: TorchSlots,
        lookups: Lookups,
        bags: TorchBags,
        result: Tensor,
    ) -> int:
        """Pool rows from their slots or, without one, from the tables; no row moves.

        Args:
            numbers: Numbers of the rows of all tables.
            slots: Which row each slot holds.
            lookups: Which features are looked up in which tables.
            bags: The input.
            result: Receives the pooled rows; see `pooled_lookup`.
        """
        if self._reached is None:
            self._reached = ReachedRows(numbers, slots, self._memories[0], self._hosts[0])
        self.keep()
        return self._kernels.pooled_lookup(self._reached, lookups, bags, result)

    def write_back(self, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy rows and their state from slots to the tables; see `fetch`."""
        self._copy(self._kernels.write_rows, rows, slots)

    def launch(self, moves: Transfer) -> None:
        """Write back and fetch what a claim on the device lists; call `keep` before.

        The slots' device must be current.
        """
        self._launch(self._kernels.write_rows, moves.written_rows, moves.written_slots)
        self._launch(self._kernels.fetch_rows, moves.fetched_rows, moves.fetched_slots)

    def keep(self) -> None:
        """Keep what kernels read until the current stream, which launches them, is done with it."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._recorded[0] is not self._addresses or self._recorded[1] != stream:
            self._recorded = self._addresses, stream
            for host in self._hosts:
                host.addresses.record_stream(stream)
                host.first_rows.record_stream(stream)

    def wait(self) -> None:
        """Have the host wait for the copies that the current stream has queued or waits for."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _copy(
        self, copy: Callable[..., None], rows: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> None:
        if not len(rows):
            return
        self.keep()
        with self._current_device():
            self._launch(copy, upload(rows, self._device), upload(slots, self._device))

    def _current_device(self) -> AbstractContextManager[Any]:
        """Triton launches kernels on the current device, so that must be this one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _launch(self, copy: Callable[..., None], rows: Tensor, slots: Tensor) -> None:
        for host, memory in zip(self._hosts, self._memories, strict=True):
            copy(host, rows, slots, memory)
