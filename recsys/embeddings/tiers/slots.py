"""The hot tier of one row space: slots and the rows they hold; see `slot_costs`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.memory import empty_rows
from recsys.embeddings.kernels.choice import kernels_on
from recsys.embeddings.kernels.cpu.slot_arrays import (
    AWAITED,
    DIRTY,
    EMPTY,
    MARKED,
    NOWHERE,
    PINNED,
    POPULAR,
)
from recsys.embeddings.kernels.cpu.slots import Shortage
from recsys.embeddings.kernels.cpu.tiered_lookup import tiered_lookup
from recsys.embeddings.kernels.torch.bags import layers_of
from recsys.embeddings.kernels.torch.pooled_lookup import TieredRows, pooled_lookup
from recsys.embeddings.kernels.torch.row_space import SlotRows, number_rows
from recsys.embeddings.rows.row_space import RowSpace, compute_dtype
from recsys.embeddings.tiers.cold.staging import RowsAlone, Staging, TransferStream
from recsys.embeddings.tiers.slot_costs import map_bytes, require_numbers, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.cpu.slots import SlotClaim
    from recsys.embeddings.kernels.torch.slots import Copies, QueuedClaim
    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.tiers.cold.device_copies import DeviceCopies
    from recsys.embeddings.tiers.cold.host_store import ColdStore

__all__ = ["Slots", "fewest_uses"]

_MIN_POPULAR_USES = 2  # a row used by one mini-batch only has one use


class Slots:
    """Slots for some rows of a row space, in host memory or on a device.

    Numba kernels claim slots on the CPU, and Triton kernels on a device (`kernels_on`). All rare
    operations are written once, in torch, for both.

    A device copies rows by itself (`DeviceCopies`), or they pass through `Staging`. On CUDA,
    transfers run on a stream of their own and overlap with computing:

    claim      on this tier's stream, if it is only queued; else on the caller's, and the host waits
    transfer   on this tier's stream, after everything that streams which use slots, and that of the
               caller, have queued by then
    compute    on the caller's stream, after the transfers that the ticket has waited for
    update     on the caller's stream, after what other streams that use slots have queued by then

    A flush, a reload and a lookup without a ticket copy on the caller's stream, after the last
    transfer; see `TransferStream`.

    Args:
        sizes: E of every table.
        dim: D.
        dtype: Dtype of the rows.
        state_sizes: Numbers per row of every state array, by name.
        num_slots: S.
        device: Device of the slots.

    Attributes:
        num_slots: S.
        rows: The rows in the slots, (S, D); undefined for an empty slot.
        states: The state arrays, (S, size) each.
        map: Which row is in which slot; rows are counted over all tables.
        first_rows: Where each table's rows begin among the rows of all tables, (T + 1,).
        space: The rows as a row space in which slot s is row s of every table.
        state_spaces: The state arrays as such row spaces.
        arrays: The rows and each state array as numpy arrays; empty on a device.
        num_unpinned: Rows of a plan that were unpinned for mini-batches so far.

    Raises:
        ValueError: there are more rows, or slots, than 32 bits can number.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        dtype: torch.dtype,
        state_sizes: Mapping[str, int],
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.first_rows: NDArray[np.uint64] = np.cumsum([0, *sizes]).astype(np.uint64)
        require_numbers(int(self.first_rows[-1]), num_slots)
        self.num_slots, self.num_unpinned = num_slots, 0
        self._slot_bytes = slot_bytes(dim, dtype, state_sizes)
        self.rows = empty_rows(num_slots, dim, dtype=dtype, device=device)
        self.states = [
            empty_rows(num_slots, size, dtype=compute_dtype(dtype), device=device)
            for size in state_sizes.values()
        ]
        memories = [self.rows, *self.states]
        self.map: Any
        self._staging: Staging | None = None
        self._stream: TransferStream | None = None
        self._both: tuple[RowSpace, RowSpace] | None = None  # (tables, tables and slots)
        spaces: list[Any]
        kernels = kernels_on(device)
        self._queue_claim: Any = kernels.queue_claim
        if kernels.errors is None:
            self.map = kernels.make_slot_map(self.first_rows, num_slots)
            spaces = [_SlotSpace(memory, sizes) for memory in memories]
            spaces[0].row_names = self.map.arrays.row_of_slot
            spaces[0].first_names = self.first_rows
            self.arrays = [space.flat.reshape(num_slots, space.dim) for space in spaces]
        else:
            self._numbers = number_rows(sizes, dim, self.rows)
            self.map = kernels.make_slot_map(self._numbers, num_slots)
            spaces = [SlotRows(each, self.map.tensors, self._numbers) for each in memories]
            self.arrays = []
            self._staging = Staging(memories, self.first_rows)
            if self.rows.is_cuda:
                self._stream = TransferStream([*memories, *self.map.tensors])
        self.space, *self.state_spaces = spaces

    @property
    def num_bytes(self) -> int:
        """Bytes of the row map and all slots."""
        return map_bytes(int(self.first_rows[-1])) + self.num_slots * self._slot_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes that move with a row: the row and its state."""
        return sum(each.itemsize * each.shape[1] for each in (self.rows, *self.states))

    def fetch(self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy rows and their state from the cold store into slots; see `ColdStore.fetch`."""
        if self._staging is None:
            cold.fetch(self, rows, slots)
        else:
            self._staging.fetch(cold, rows, slots)

    def write_back(
        self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> None:
        """Copy rows and their state from slots to the cold store; see `ColdStore.write_back`."""
        if self._staging is None:
            cold.write_back(self, rows, slots)
        else:
            self._staging.write_back(cold, rows, slots)

    @property
    def are_marked_by_updates(self) -> bool:
        """Whether kernels that update rows mark their slots as updated; those of a device do."""
        return self._staging is not None

    def in_order(self) -> AbstractContextManager[None]:
        """A context for one transfer: it runs after what is queued now; see `TransferStream`."""
        return nullcontext() if self._stream is None else self._stream.transfer()

    def prepare(self, lookups: Lookups, bags: Any) -> None:
        """Prepare for `queue_claim` in the order of transfers."""
        if bags.batch_size:  # what claims and lookups read is uploaded on the latter's stream
            layers_of(self._numbers, lookups, bags.num_features)
        if self._stream is not None:
            self._stream.keep_for_transfer([bags.values, bags.offsets])

    @property
    def last_transfer(self) -> Any:
        """The event after the transfers so far; None before the first, and without a stream."""
        return None if self._stream is None else self._stream.last

    def record_transfers(self) -> Any:
        """In `in_order`: the event after what was queued in it so far; None without a stream."""
        return None if self._stream is None else self._stream.record()

    def read_counts(self, counts: Tensor, event: Any) -> list[int]:
        """The counts of a queued claim; the host waits for it, but for nothing queued later.

        Args:
            counts: See `QueuedClaim`.
            event: The event after the claim; None without a stream.
        """
        if self._stream is not None:
            return self._stream.read(counts, event)
        found: list[int] = counts.tolist()
        return found

    def after_transfers(self, last: Any = None, *made: Any) -> None:
        """Have the caller's stream wait for transfers.

        Args:
            last: The event to wait for; None for all transfers so far.
            made: What a claim in their order has made or copied, and the caller reads.
        """
        if self._stream is not None:
            self._stream.wait(last)
        for each in made:
            self._keep(each)

    def use(self) -> None:
        """Before rows are updated: see `TransferStream.use`."""
        if self._stream is not None:
            self._stream.use()

    def pin(self, rows: NDArray[np.int32]) -> None:
        """Reserve a slot for each of these rows, counted over all tables; slots must be new."""
        pinned, numbers = self.tensor(rows), torch.arange(len(rows), device=self.rows.device)
        self.map.row_of_slot[: len(rows)] = pinned.int()
        self.map.flags[: len(rows)] = PINNED
        self.map.slot_of_row[pinned] = (numbers + AWAITED).int()
        self.map.recount()

    def claim(self, lookups: Lookups, bags: Any, *, may_unpin: bool = True) -> SlotClaim:
        """Give every row of a mini-batch a slot, and count the claim there; all or nothing.

        Args:
            lookups: Which features are looked up in which tables.
            bags: The input, in the type of the slots' device.
            may_unpin: Whether pinned rows that no ticket needs may be unpinned if slots are scarce:
                first rows pinned for their uses, then the plan's, the least popular first.

        Raises:
            NoSuchRow: a value is not a row of its table.
            Shortage: too few slots are neither claimed nor pinned.
        """
        try:
            claim: SlotClaim = self.map.claim(lookups, bags)
        except Shortage as shortage:
            if not may_unpin:
                raise
            self._unpin(shortage)
            claim = self.map.claim(lookups, bags)
        return claim

    def queue_claim(
        self,
        lookups: Lookups,
        bags: Any,
        num_rows: int,
        num_others: int,
        released: Any = None,
        copies: Copies | None = None,
    ) -> QueuedClaim:
        """As `claim`, on a device and without waiting; see `triton.slots.queue_claim`."""
        if released is not None:
            self._keep(released)
        claim: QueuedClaim = self._queue_claim(
            self.map, lookups, bags, num_rows, num_others, released, copies
        )
        return claim

    def release(self, held: Any) -> None:
        """Take a claim out of the counts of the slots that it holds."""
        self._keep(held)
        self.map.release(held)

    def _keep(self, tensor: Any) -> None:
        """Keep memory, of whichever stream, until the current stream is done with it."""
        if self._stream is not None and isinstance(tensor, torch.Tensor):
            self._stream.keep(tensor)

    def pin_popular(self, num_slots: int) -> tuple[int, int]:
        """Pin the rows that are used most; see `Residency.pin_popular`.

        Args:
            num_slots: The maximum number of pinned slots, including those of a plan's rows.
        """
        flags, uses = self.map.flags, self.map.num_uses
        was_popular, is_full = (flags & POPULAR) > 0, torch.ne(self.map.row_of_slot, EMPTY)
        may_be = is_full & (was_popular | ((flags & PINNED) == 0))
        num_planned = int(((flags & PINNED) > 0).sum() - was_popular.sum())
        counts = torch.bincount(uses[may_be], minlength=256).cpu().numpy()
        enough = fewest_uses(counts, num_slots - num_planned)
        is_popular = may_be & (uses.long() >= enough)  # `enough` may be 256, which is no uint8
        given_up = (was_popular & ~is_popular).nonzero().flatten()
        flags[is_popular] |= PINNED | POPULAR
        uses[is_popular] >>= 1
        self._unpin_slots(given_up)
        return int((is_popular & ~was_popular).sum()), len(given_up)

    def popular_rows(self) -> NDArray[np.int32]:
        """Rows pinned because they are popular, counted over all tables, most uses first."""
        self.after_transfers()
        slots = ((self.map.flags & POPULAR) > 0).nonzero().flatten()
        order = self.map.num_uses[slots].argsort(descending=True, stable=True)
        found: NDArray[np.int32] = self.map.row_of_slot[slots[order]].cpu().numpy()
        return found

    def pin_as_popular(self, rows: NDArray[np.int64], num_slots: int) -> None:
        """Reserve an empty slot for each of these rows that has no slot yet, as far as they fit.

        The next `pin_popular` may unpin them.

        Args:
            rows: Distinct rows, counted over all tables; the first ones have precedence.
            num_slots: The maximum number of pinned slots, including those of a plan's rows.
        """
        slot_of_row, row_of_slot = self.map.slot_of_row, self.map.row_of_slot
        flags = self.map.flags[: self.num_slots]
        num_left = max(0, num_slots - int(((flags & PINNED) > 0).sum()))
        numbers = self.tensor(rows)
        numbers = numbers[slot_of_row[numbers] == NOWHERE][:num_left]
        empty = (row_of_slot[: self.num_slots] == EMPTY).nonzero().flatten()[: len(numbers)]
        numbers = numbers[: len(empty)]
        if not len(numbers):
            return
        row_of_slot[empty] = numbers.int()
        flags[empty] = PINNED | POPULAR
        slot_of_row[numbers] = (empty + AWAITED).int()
        self.map.recount()

    @property
    def num_claimed(self) -> int:
        """Slots that tickets need."""
        return int((self.map.num_claims > 0).sum())

    def are_among(self, slot_of_value: Any, slots: Any) -> Tensor:
        """Whether each value's slot is one of `slots`, (N,) bool, on the device of the slots.

        There, negative numbers stand for no slot.
        """
        flags, marked, slots_N = self.map.flags, self.tensor(slots), self.tensor(slot_of_value)
        flags[marked] |= MARKED
        found = torch.gt(flags[slots_N] & MARKED, 0) & (slots_N >= 0)
        flags[marked] &= 255 - MARKED
        return found

    def of_rows(self, held: Any, only: Sequence[range]) -> Tensor:
        """The slots among `held` whose row is in one of these ranges, counted over all tables."""
        slots = self.tensor(held)
        rows = self.map.row_of_slot[slots]
        is_chosen = torch.zeros_like(rows, dtype=torch.bool)
        for each in only:
            is_chosen |= (rows >= each.start) & (rows < each.stop)
        return slots[is_chosen]

    def dirty(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Rows that are newer than in the cold store, and their slots."""
        return self._rows_and_slots((self.map.flags & DIRTY) > 0)

    def mark_clean(self, slots: NDArray[np.int32]) -> None:
        """Note that these slots' rows were written back."""
        self.map.flags[self.tensor(slots)] &= 255 - DIRTY

    def claimed(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Rows in slots that tickets need, and their slots."""
        return self._rows_and_slots((self.map.num_claims > 0) & (self.map.row_of_slot != EMPTY))

    def drop_unclaimed(self) -> None:
        """Drop rows that no ticket needs, without writing back; pinned rows keep empty slots."""
        self._both = None
        slot_of_row, row_of_slot, flags = self.map.slot_of_row, self.map.row_of_slot, self.map.flags
        flags.bitwise_and_(255 - DIRTY)
        is_dropped = (self.map.num_claims == 0) & (row_of_slot != EMPTY)
        is_pinned = is_dropped & ((flags & PINNED) > 0)
        pinned = is_pinned.nonzero().flatten()
        slot_of_row[row_of_slot[is_dropped].long()] = NOWHERE
        slot_of_row[row_of_slot[pinned].long()] = (pinned + AWAITED).int()
        row_of_slot[is_dropped & ~is_pinned] = EMPTY

    def where(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slot of each row, (M,); -1 for a row that is only in the cold store."""
        slots = self.map.slot_of_row[self.tensor(rows)].long()
        found: NDArray[np.int64] = torch.where(slots < AWAITED, slots, NOWHERE).cpu().numpy()
        return found

    def look_up(
        self,
        tables: RowSpace,
        cold: ColdStore,
        copies: DeviceCopies | None,
        lookups: Lookups,
        bags: Any,
        result: Tensor,
    ) -> int:
        """Pool rows from their slots or from the cold store; see `Residency.look_up`.

        On the CPU, rows without a slot are read from the tables, which are in memory or mapped
        into it. A device that reaches the tables reads them, too. Otherwise the host waits for the
        list of these rows, and copies them from the cold store.
        """
        if self._staging is None:
            if self._both is None or self._both[0] is not tables:
                self._both = tables, RowSpace([*tables.tables, self.rows])
            slot_of_row = self.map.arrays.slot_of_row
            return tiered_lookup(self._both[1], slot_of_row, self.first_rows, lookups, bags, result)
        if copies is not None:
            return copies.look_up(self._numbers, self.map.tensors, lookups, bags, result)
        rows_U = self.map.rows_of(lookups, bags)
        known_U = self.map.slot_of_row[rows_U.clamp(min=0)]
        is_elsewhere = (known_U == NOWHERE) | (known_U >= AWAITED)
        others = rows_U[(rows_U != NOWHERE) & is_elsewhere]
        found = self._staging.read(cold, others.cpu().numpy().astype(np.int32))
        rows = TieredRows(self._numbers, self.map.tensors, self.rows, others, found)
        return pooled_lookup(rows, lookups, bags, result)

    def read_rows(self, cold: ColdStore, rows: NDArray[np.int64]) -> Tensor:
        """Copy rows from their slots or from the cold store, (M, D), to the device of the slots."""
        slots = self.tensor(self.where(rows))
        is_here, found = slots >= 0, self.rows.new_empty(len(rows), self.rows.shape[1])
        found[is_here] = self.rows[slots[is_here]]
        others = rows[(slots < 0).cpu().numpy()].astype(np.int32)
        if len(others) and self._staging is not None:
            found[~is_here] = self._staging.read(cold, others)
        elif len(others):
            copies = self.rows.new_empty(len(others), self.rows.shape[1])
            memory = RowsAlone([RowSpace([copies]).flat.reshape(copies.shape)], self.first_rows)
            cold.fetch(memory, others, np.arange(len(others), dtype=np.int32))
            found[~is_here] = copies
        return found

    def _unpin(self, shortage: Shortage) -> None:
        """Unpin as many rows as a claim lacks slots, except rows that it or a ticket needs."""
        is_free = torch.ones_like(self.map.flags, dtype=torch.bool)
        is_free[self.tensor(shortage.needed)] = False
        pinned = (((self.map.flags & PINNED) > 0) & is_free).nonzero().flatten()
        is_popular = (self.map.flags[pinned] & POPULAR) > 0
        # A plan's rows are in slots from the most popular to the least popular.
        in_order = torch.cat([pinned[is_popular], pinned[~is_popular].flip(0)])
        given_up = in_order[: shortage.num_lacking]
        self._unpin_slots(given_up)
        self.num_unpinned += max(0, len(given_up) - int(is_popular.sum()))

    def _unpin_slots(self, given_up: Tensor) -> None:
        """Unpin these slots, (M,)."""
        slot_of_row, row_of_slot = self.map.slot_of_row, self.map.row_of_slot
        self.map.flags[given_up] &= 255 - PINNED - POPULAR
        rows = row_of_slot[given_up].long()
        is_empty = slot_of_row[rows] >= AWAITED
        slot_of_row[rows[is_empty]] = NOWHERE
        row_of_slot[given_up[is_empty]] = EMPTY
        self.map.recount()

    def _rows_and_slots(self, is_chosen: Tensor) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        slots = is_chosen.nonzero().flatten()
        return self.map.row_of_slot[slots].cpu().numpy(), slots.int().cpu().numpy()

    def tensor(self, numbers: Any) -> Tensor:
        """Row or slot numbers as an int64 tensor on the device of the slots."""
        found = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(numbers)
        return found.to(self.rows.device, torch.int64)


class _SlotSpace(RowSpace):
    """The slots as a row space: slot s is row s of every table, at `flat[s * dim]`."""

    def __init__(self, rows: Tensor, sizes: Sequence[int]) -> None:
        super().__init__([rows])
        self.bases = np.zeros(len(sizes), np.uint64)
        # Kernels begin with the largest table.
        self.sizes_key = np.array(sizes, np.uint64).tobytes()
        self.sizes = np.full(len(sizes), len(rows), np.uint64)


def fewest_uses(counts: NDArray[np.int64], num_slots: int) -> int:
    """The least number of uses for which a row is popular.

    Args:
        counts: Number of rows, by number of uses.
        num_slots: The maximum number of popular rows. Of rows with equal uses, all are popular or
            none.
    """
    num_with = counts[::-1].cumsum()[::-1]  # rows with this many uses or more
    fitting = np.flatnonzero(num_with <= num_slots)
    return max(_MIN_POPULAR_USES, int(fitting[0]) if len(fitting) else len(counts))
