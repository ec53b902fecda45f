"""`TableGroup`: owns the memory of tables of one dim, and notices when a table has moved.

`tables_module` makes one for each dim, dtype and param group; lookup and update ask it where the
tables are. Invariant: while a group is updated, its tables are the same Parameters in the same
memory, or `place` has laid it out anew.

Tables are allocated separately and stay the user's Parameters. Kernels see them, and the slots, as
one array from the lowest address:

    row r of table t begins at    flat[bases[t] + r * dim]
    slot s begins at              flat[bases[T] + s * dim]
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from recsys._support.memory import empty_rows
from recsys.embeddings.kernels.cpu.lookup import INT32, lookup_kernel
from recsys.embeddings.kernels.cpu.move import NO_BASE
from recsys.embeddings.kernels.cpu.update import Memories, update_rows
from recsys.embeddings.rows.ledger import Ledger, join

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.embeddings.kernels.cpu.update import BadRow
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.bags import Lookups
    from recsys.embeddings.rows.ledger import Entry

__all__ = ["Located", "Memory", "TableGroup", "compute_dtype"]


# For each dtype of a table: the dtype that kernels see, and that of the computation.
class _Dtypes(dict[torch.dtype, tuple[Any, torch.dtype]]):
    def __missing__(self, dtype: torch.dtype) -> tuple[Any, torch.dtype]:
        raise ValueError(
            f"tables must be float32, float64 or bfloat16 for a recsys optimizer, got {dtype}; "
            "convert the module, as by module.bfloat16()"
        )


_DTYPES = _Dtypes(
    {
        torch.float32: (np.float32, torch.float32),
        torch.float64: (np.float64, torch.float64),
        torch.bfloat16: (np.uint16, torch.float32),
    }
)
_MOST_LOCATED = 1024
_MAX_ROWS = 2**31 - 1
_NO_MARKS: NDArray[np.uint8] = np.empty(0, np.uint8)
_address, _requires_grad = torch.Tensor.data_ptr, torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gradients, state and pooled rows of tables of a dtype."""
    return _DTYPES[dtype][1]


class Memory:
    """Arrays of tables, or of their state, and of their slots, as one array for kernels.

    Args:
        tables: (E, dim) each, contiguous, of one dtype; empty for a table without state.
        slots: (S, dim); S may be 0.

    Attributes:
        flat: The memory from the lowest to the highest address, one-dimensional.
        bases: Where each table begins in it, and last the slots, (T + 1,) uint64; `NO_BASE` for one
            that is empty.
        tensors: Views of the tables, which share their versions.
    """

    def __init__(self, tables: Sequence[Tensor], slots: Tensor) -> None:
        self.tensors = [table.detach() for table in tables]  # keeps the memory alive
        self._slots = slots
        held = [tensor for tensor in (*self.tensors, slots) if tensor.numel()]
        low = min((tensor.data_ptr() for tensor in held), default=0)
        high = max((tensor.data_ptr() + tensor.nbytes for tensor in held), default=0)
        memory = (ctypes.c_byte * (high - low)).from_address(low)
        self.flat: NDArray[Any] = np.frombuffer(memory, _DTYPES[slots.dtype][0])  # type: ignore[call-overload]  # ctypes arrays are buffers
        starts = [
            (tensor.data_ptr() - low) // slots.itemsize if tensor.numel() else NO_BASE
            for tensor in (*self.tensors, slots)
        ]
        self.bases = np.array(starts, np.uint64)


class Located(NamedTuple):
    """Where the tables of lookups are, as of these addresses."""

    lookups_5L: Any  # an array of uint64; of a `DeviceGroup`, `DeviceLookups`
    tables: list[nn.Parameter]
    addresses: list[int]


class TableGroup:
    """Tables of one dim and dtype, which one kernel call looks up or updates.

    Args:
        names: Names of the tables, for errors.
        tables: The tables, each once: contiguous, float32, float64 or bfloat16, on the CPU.

    Attributes:
        names: As given.
        tables: As given.
        dim: D.
        dtype: Of the rows.
        compute_dtype: Of gradients, state and pooled rows.
        nothing: An empty array of that dtype, for kernels.
        sizes: Rows of each table.
        first_rows: The number of each table's row 0, and the number of all rows, (T + 1,).
        order: The tables, the largest first.
        ledger: Gradients that wait for the update.
        memories: The tables, their slots, the row map, and their state.
        dims: Numbers per row of the tables and of each state array; 0 where there is none.
        for_lookups: What `pool` takes of the memories.
        tensors: Views of all tables and state arrays, which share their versions.
        fetcher: Moves rows into slots; None if all rows are in their tables.
        before_update: Sees the ledger's entries before each update, which goes by those that it
            returns; None to update all of them.
        files: The files that tables and state are mapped from; None if they are in memory.
        kernel: Looks rows up.
        data_reads: How often callers have read each table's `data`, to which they may write.
        released: Tables that are torch's again, which stay in the group and are not updated, and
            whether their gradients are sparse.
        device: Where kernels run.
        is_on_device: Whether this is a `DeviceGroup`.

    Raises:
        ValueError: the tables are not as above, or have 2**31 rows or more.
    """

    is_on_device: ClassVar[bool] = False
    device = torch.device("cpu")

    def __init__(self, names: Sequence[str], tables: Sequence[nn.Parameter]) -> None:
        self.names, self.tables, self.ledger = list(names), list(tables), Ledger()
        sizes = list(map(len, tables))
        self.dim = tables[0].shape[1]
        if sum(sizes) > _MAX_ROWS:
            raise ValueError(
                f"tables {self.names} must have fewer than 2**31 rows of dim {self.dim} together, "
                f"got {sum(sizes)}; give some of them another embedding_dim"
            )
        self.sizes = np.array(sizes, np.uint64)
        self.first_rows = np.cumsum([0, *sizes]).astype(np.uint64)
        self.order = np.argsort([-size for size in sizes], kind="stable")
        self._slots = torch.empty(0, self.dim, dtype=tables[0].dtype)
        self.fetcher: Any = None  # a `Fetcher`; imports point down
        self.before_update: Callable[[Sequence[Entry]], Sequence[Entry]] | None = None
        self.files: Any = None  # `ColdFiles`
        self.data_reads = [0] * len(tables)
        self.released: dict[int, bool] = {}
        self._states: Sequence[tuple[Any, int]] = ()
        self._rows: Any
        self.memories: Any
        self.lay_out()

    def lay_out(self) -> None:
        """Read where tables and slots are.

        Raises:
            ValueError: the tables are not of one dtype and dim, not contiguous, or elsewhere.
        """
        self.dtype, kind = self.tables[0].dtype, self._kind_of_memory()
        kinds = {(table.dtype, table.device.type, table.shape[1:]) for table in self.tables}
        is_known = kinds == {(self.dtype, kind, (self.dim,))} and self.dtype in _DTYPES
        if not is_known or not all(table.is_contiguous() for table in self.tables):
            raise ValueError(
                f"tables {self.names} must be contiguous float32, float64 or bfloat16 on {kind}, "
                f"all of one dtype and embedding_dim, got {kinds}; convert the whole module; to "
                "move it, build it with device=, or call recsys.restore and accelerate it there"
            )
        self.compute_dtype = compute_dtype(self.dtype)
        self.nothing: NDArray[Any] = np.empty(0, _DTYPES[self.compute_dtype][0])
        self._addresses = list(map(_address, self.tables))
        if not all(map(_address, filter(len, self.tables))):
            raise ValueError(f"tables {self.names}: the memory of one was freed; keep it")
        if not len(self._slots):
            self._slots = self._slots.to(self.device, self.dtype)
        self._rows = self._memory(self.tables, self._slots)
        self._join()
        self._located: dict[Lookups, Located] = {}

    def locate(self, lookups: Lookups) -> Located:
        """Where the tables of lookups are; notices tables that have moved.

        Raises:
            RuntimeError: as for `notice_moved_tables`.
            ValueError: as for `notice_moved_tables`.
        """
        found = self._located.get(lookups)
        if found is not None and (
            self.fetcher is not None or list(map(_address, found.tables)) == found.addresses
        ):
            return found
        self.notice_moved_tables()
        looked_up = [self.tables[table] for table in lookups.tables]
        addresses = [self._addresses[table] for table in lookups.tables]
        found = Located(self._numbers_of(lookups), looked_up, addresses)
        if len(self._located) >= _MOST_LOCATED:  # inputs with ever other orders of features
            self._located.clear()
        self._located[lookups] = found
        return found

    def notice_moved_tables(self) -> None:
        """Notice tables that have moved; every update asks once.

        Raises:
            RuntimeError: a table has another number of rows now.
            ValueError: a table has another dtype, dim or device now.
        """
        if self.fetcher is None:  # with slots, `TieredParameter` asks
            self.find_tables()

    def find_tables(self) -> None:
        """As `notice_moved_tables`, also for tables with slots, whose rows must have left them."""
        if list(map(_address, self.tables)) == self._addresses:
            return
        sizes = list(map(len, self.tables))
        if sizes != self.sizes.tolist():
            raise RuntimeError(
                f"tables {self.names}: the memory of one was replaced by one with another number "
                f"of rows, {sizes}; build the module again"
            )
        self.lay_out()

    def trained(self, lookups: Lookups) -> Lookups:
        """The lookups in tables that require a gradient."""
        # A table that has moved is the same Parameter.
        known = self._located.get(lookups) or self.locate(lookups)
        if all(map(_requires_grad, known.tables)):
            return lookups
        return lookups.in_tables(
            [table for table in lookups.tables if self.tables[table].requires_grad]
        )

    @property
    def num_slots(self) -> int:
        """S; 0 if all rows are in their tables."""
        return len(self._slots)

    def give_slots(self, num_slots: int, fetcher: Any) -> None:
        """Keep some rows in slots from now on.

        Args:
            num_slots: S.
            fetcher: Moves rows into them.
        """
        self._slots = self.new_slots(num_slots, self.dim, self.dtype)
        self.fetcher = fetcher
        self.lay_out()

    def set_states(self, states: Sequence[tuple[Sequence[Tensor | None], int]]) -> None:
        """Use these state arrays; the optimizer's update owns them.

        Args:
            states: For each kind of state, the tables' arrays, and their numbers per row.
        """
        found = []
        for arrays, size in states:
            slots = self.new_slots(self.num_slots, size, self.compute_dtype)
            by_row = [
                slots[:0] if array is None else array.view(len(array), size) for array in arrays
            ]
            found.append((self._memory(by_row, slots), size))
        self._states = found
        self._join()

    def new_rows(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros for an array beside the tables."""
        return empty_rows(*shape, dtype=dtype).zero_()

    def reachable(self, tensor: Tensor) -> Tensor:
        """An array beside the tables, or a copy of it that kernels can reach."""
        return tensor

    def new_slots(self, num_slots: int, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many numbers of each slot."""
        return empty_rows(num_slots, size, dtype=dtype)

    def join(self, entries: Sequence[Entry]) -> Any:
        """Entries of the ledger, as `update` takes them."""
        return join(entries, len(self.tables))

    def update(
        self,
        joined: Any,
        formula: RowOptimizer,
        rates_T2: NDArray[np.float64],
        keys_T: NDArray[Any],
    ) -> BadRow | None:
        """Update each row once; arguments and result as of `update_rows`."""
        settings = formula, rates_T2, keys_T, self.order
        return update_rows(self.memories, self.dim, *settings, joined, self.nothing)

    def drop_ledger(self) -> None:
        """Drop all gradients; the slots of their rows may be taken."""
        if self.ledger.entries:
            self.ledger.clear()
            if self.fetcher is not None:
                self.fetcher.end_generation()

    def _kind_of_memory(self) -> str:
        return "cpu"

    def _numbers_of(self, lookups: Lookups) -> Any:
        """Lookups as kernels take them."""
        tables, positions, columns = lookups.arrays
        of_tables = self._rows.bases[tables], self.sizes[tables], self.first_rows[tables]
        found = [*of_tables[:2], positions, columns, of_tables[2]]
        return np.stack(found).astype(np.uint64)

    def _memory(self, tables: Sequence[Tensor], slots: Tensor) -> Any:
        return Memory(tables, slots)

    def _join(self) -> None:
        rows, marks = self._rows, None if self.fetcher is None else self.fetcher.marks
        of_states = [
            *((state.flat, state.bases) for state, _ in self._states),
            *[(self.nothing, rows.bases)] * 2,
        ]
        self.memories = Memories(
            rows.flat,
            rows.bases,
            *of_states[0],
            *of_states[1],
            INT32 if marks is None else marks.slot_of_row,
            self.first_rows,
            _NO_MARKS if marks is None else marks.is_dirty,
        )
        first, second = [*(dim for _, dim in self._states), 0, 0][:2]
        self.dims = self.dim, first, second
        of_tables = (memory.tensors for memory in (rows, *(state for state, _ in self._states)))
        self.tensors = [tensor for tensors in of_tables for tensor in tensors]
        # A number that fits int64: numba looks for a kernel of another signature otherwise, slowly.
        slots_base = int(rows.bases[-1]) if len(self._slots) else 0
        self.for_lookups = rows.flat, self.dim, self.memories.slot_of_row, slots_base
        self.kernel = lookup_kernel(
            self.dim, rows.flat.dtype, self.nothing.dtype, is_tiered=len(self._slots) > 0
        )
