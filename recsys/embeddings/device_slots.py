"""The hot tier on a device: slots in its memory, and the map of them there, too.

What is looked up is on the device, and so is what says where it is: a claim is made without asking
the host. Only what has to be copied is listed for the host, which has the cold store.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.embeddings.hot_tier import AbstractHotTier
from recsys.embeddings.kernels.slots import (
    AWAITED,
    DIRTY,
    EMPTY,
    MARKED,
    NOWHERE,
    PINNED,
    POPULAR,
)
from recsys.embeddings.row_space import compute_dtype
from recsys.embeddings.slot_map import Moves, NoSuchRow, Shortage, SlotClaim, fewest_uses
from recsys.embeddings.staging import Staging, TransferStream
from recsys.embeddings.torch_kernels.bags import layers_of, rows_of
from recsys.embeddings.torch_kernels.pooled_lookup import pooled_lookup
from recsys.embeddings.torch_kernels.slot_rows import SlotRows, TieredRows, number_rows
from recsys.embeddings.torch_kernels.slots import (
    TorchSlots,
    claim,
    distinct_rows,
    first_unpinned,
    let_go,
    mark_dirty,
    num_needed,
    release,
    slots_of,
    unpin,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.cold_store import ColdStore
    from recsys.embeddings.kernels.pooled_lookup import Lookups
    from recsys.embeddings.row_space import RowSpace
    from recsys.embeddings.torch_kernels.bags import TorchBags

__all__ = ["DeviceHotTier", "DeviceSlotMap"]

# Slots that a claim looks at first, for every value that is looked up.
_LOOKED_AT = 4


class DeviceHotTier(AbstractHotTier):
    """Slots in a device's memory; see `AbstractHotTier`.

    On CUDA, transfers have a stream of their own, so that they overlap with what is computed:

    claim      on the caller's stream; the host waits for what is to be copied
    transfer   on the tier's stream, after all that the caller's stream had when it was put in
    compute    on the caller's stream, after the transfers that a ticket has waited for

    A flush, a reload and a lookup without a ticket wait until no transfer is under way; they copy
    on the caller's stream, after the last transfer. See `TransferStream`.
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
        super().__init__(sizes, num_slots)
        self.rows = torch.empty(num_slots, dim, dtype=dtype, device=device)
        self.states = [
            torch.empty(num_slots, size, dtype=compute_dtype(dtype), device=device)
            for size in state_sizes.values()
        ]
        self.slots = TorchSlots.empty(int(self.first_rows[-1]), num_slots, self.rows.device)
        self.numbers = number_rows(sizes, dim, self.rows)
        self.space = SlotRows(self.rows, self.slots, self.numbers)
        self.state_spaces = [SlotRows(state, self.slots, self.numbers) for state in self.states]
        memories = [self.rows, *self.states]
        self._staging = Staging(memories, self.first_rows)
        self._stream = TransferStream(memories) if self.rows.is_cuda else None

    def make_map(self) -> DeviceSlotMap:
        """See `AbstractHotTier`."""
        return DeviceSlotMap(self)

    def pin(self, rows: NDArray[np.int32]) -> None:
        """See `AbstractHotTier`."""
        pinned = torch.from_numpy(rows.astype(np.int64)).to(self.rows.device)
        self.slots.row_of_slot[: len(rows)] = pinned.int()
        self.slots.flags[: len(rows)] = PINNED
        numbers = torch.arange(len(rows), device=pinned.device)
        self.slots.slot_of_row[pinned] = (numbers + AWAITED).int()

    def fetch(self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """See `AbstractHotTier`."""
        self._staging.fetch(cold, rows, slots)

    def write_back(
        self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> None:
        """See `AbstractHotTier`."""
        self._staging.write_back(cold, rows, slots)

    def read(self, cold: ColdStore, rows: NDArray[np.int32]) -> Tensor:
        """Copies of rows of the cold store beside the slots, (M, D)."""
        return self._staging.read(cold, rows)

    def in_order(self) -> AbstractContextManager[Any]:
        """See `AbstractHotTier`; what the caller has queued is what its stream has now."""
        return nullcontext() if self._stream is None else self._stream.transfer()

    def after_transfers(self) -> None:
        """See `AbstractHotTier`; it is the caller's stream that waits, not the host."""
        if self._stream is not None:
            self._stream.wait()


class DeviceSlotMap:
    """The map of slots on a device; see `SlotMap`.

    Args:
        hot: Has the slots.
    """

    def __init__(self, hot: DeviceHotTier) -> None:
        self._hot, self._slots = hot, hot.slots
        self.num_unpinned = 0
        self.forecast = None  # hits are known to the device alone
        self._first_slot = first_unpinned(hot.slots)

    @property
    def num_claimed(self) -> int:
        """As in `SlotMap`, and so are all that follow."""
        return int((self._slots.num_claims > 0).sum())

    def claim(self, lookups: Lookups, bags: TorchBags, *, may_unpin: bool = True) -> SlotClaim:
        """See `SlotMap`; the host waits once, to know what to copy."""
        slots = self._slots
        rows_N, is_bad_N = self._rows_of(lookups, bags)
        is_row_N = rows_N < slots.num_rows
        num_hits = (slots_of(slots, rows_N) != NOWHERE).sum()
        first_bad = _first(is_bad_N)
        # With a value that is no row, nothing is claimed.
        is_claimed_N = is_row_N & (first_bad == _NO_PLACE)
        rows_U = distinct_rows(torch.where(is_claimed_N, rows_N, NOWHERE))
        numbers = torch.stack([first_bad, is_row_N.sum(), num_hits, (rows_U != NOWHERE).sum()])
        slot_U, listed = self._try(rows_U, numbers, _LOOKED_AT * len(rows_U))
        if not listed.is_enough:
            slot_U, listed = self._try(rows_U, numbers, slots.num_slots)
        if may_unpin and not listed.is_enough:
            self.num_unpinned += unpin(slots, rows_U)
            self._first_slot = first_unpinned(slots)
            slot_U, listed = self._try(rows_U, numbers, slots.num_slots)
        if listed.first_bad != _NO_PLACE:
            raise NoSuchRow(listed.first_bad)
        if not listed.is_enough:
            raise Shortage(num_needed(slots, rows_U))
        return SlotClaim(
            slots_of(slots, rows_N),
            slot_U,
            listed.moves,
            listed.num_lookups,
            listed.num_hits,
            listed.num_rows,
            num_rows_hit=listed.num_rows - len(listed.moves.fetched_rows),
        )

    def undo(self, moves: Moves, *, has_written: bool) -> None:
        """See `SlotMap`."""
        slots, device = self._slots, self._hot.rows.device
        rows, at, written_rows, written_at = (_long(each, device) for each in moves)
        is_own = slots.row_of_slot[at] == rows
        is_pinned = is_own & ((slots.flags[at] & PINNED) > 0)
        slots.slot_of_row[rows] = torch.where(is_pinned, at + AWAITED, NOWHERE).int()
        slots.row_of_slot[at[is_own & ~is_pinned]] = EMPTY
        if not has_written:
            slots.row_of_slot[written_at] = written_rows.int()
            slots.slot_of_row[written_rows] = written_at.int()
            slots.flags[written_at] |= DIRTY

    def are_among(self, slot_of_value: Tensor, slots: NDArray[np.int32]) -> Tensor:
        """See `SlotMap`."""
        flags, marked = self._slots.flags, _long(slots, self._hot.rows.device)
        flags[marked] |= MARKED
        found = torch.gt(flags[slot_of_value] & MARKED, 0)
        flags[marked] &= 255 - MARKED
        return found

    def pin_popular(self, num_slots: int) -> tuple[int, int]:
        """See `SlotMap`; the host waits, to know how many uses are enough."""
        slots = self._slots
        uses = slots.num_uses
        was_popular = (slots.flags & POPULAR) > 0
        may_be = self._is_full() & (was_popular | ((slots.flags & PINNED) == 0))
        num_planned = int(((slots.flags & PINNED) > 0).sum() - was_popular.sum())
        counts = torch.bincount(uses[may_be], minlength=256).cpu().numpy()
        enough = fewest_uses(counts, num_slots - num_planned)
        is_popular = may_be & (uses.long() >= enough)  # 256 is no uint8
        given_up = (was_popular & ~is_popular).nonzero().flatten()
        slots.flags[is_popular] |= PINNED | POPULAR
        uses[is_popular] >>= 1
        let_go(slots, given_up)
        self._first_slot = first_unpinned(slots)
        return int((is_popular & ~was_popular).sum()), len(given_up)

    def release(self, held: Tensor) -> None:
        """See `SlotMap`."""
        release(self._slots, held)

    def of_rows(self, held: Tensor | NDArray[np.int64], only: Sequence[range]) -> Tensor:
        """See `SlotMap`."""
        slots = torch.as_tensor(held).to(self._hot.rows.device)
        slots = slots[slots != NOWHERE]
        rows = self._slots.row_of_slot[slots]
        is_meant = torch.zeros_like(rows, dtype=torch.bool)
        for each in only:
            is_meant |= (rows >= each.start) & (rows < each.stop)
        return slots[is_meant]

    def mark_dirty(self, held: Tensor | NDArray[np.int64]) -> None:
        """See `SlotMap`."""
        mark_dirty(self._slots, torch.as_tensor(held).to(self._hot.rows.device))

    def dirty(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """See `SlotMap`."""
        return self._rows_and_slots((self._slots.flags & DIRTY) > 0)

    def mark_clean(self, slots: NDArray[np.int32]) -> None:
        """See `SlotMap`."""
        self._slots.flags[_long(slots, self._hot.rows.device)] &= 255 - DIRTY

    def needed(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """See `SlotMap`."""
        return self._rows_and_slots((self._slots.num_claims > 0) & self._is_full())

    def forget_others(self) -> None:
        """See `SlotMap`."""
        slots = self._slots
        slots.flags.bitwise_and_(255 - DIRTY)
        is_gone = (slots.num_claims == 0) & self._is_full()
        is_pinned = is_gone & ((slots.flags & PINNED) > 0)
        pinned = is_pinned.nonzero().flatten()
        slots.slot_of_row[slots.row_of_slot[is_gone].long()] = NOWHERE
        slots.slot_of_row[slots.row_of_slot[pinned].long()] = (pinned + AWAITED).int()
        slots.row_of_slot[is_gone & ~is_pinned] = EMPTY

    def look_up(
        self, tables: RowSpace, cold: ColdStore, lookups: Lookups, bags: TorchBags, result: Tensor
    ) -> int:
        """See `SlotMap`; the host waits, to know which rows are in no slot."""
        hot, slots = self._hot, self._slots
        rows_N, _ = self._rows_of(lookups, bags)
        rows_U = distinct_rows(torch.where(rows_N < slots.num_rows, rows_N, NOWHERE))
        is_other = (rows_U != NOWHERE) & (slots_of(slots, rows_U) == NOWHERE)
        others = rows_U[is_other]
        copies = hot.read(cold, others.cpu().numpy().astype(np.int32))
        rows = TieredRows(hot.numbers, slots, hot.rows, others, copies)
        return pooled_lookup(rows, lookups, bags, result)

    def where(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `SlotMap`."""
        found = slots_of(self._slots, _long(rows, self._hot.rows.device))
        return _on_the_host(found)

    def _rows_of(self, lookups: Lookups, bags: TorchBags) -> tuple[Tensor, Tensor]:
        """Rows looked up, R for none, and which should be some and are not.

        Shape:
            results (L * N,), value by value, as often as features are looked up in several tables.
        """
        if not bags.batch_size or not len(lookups.tables):
            none = torch.zeros_like(bags.values, dtype=torch.bool)
            return torch.full_like(none, self._slots.num_rows, dtype=torch.int64), none
        numbers = self._hot.numbers
        _, layers = layers_of(numbers, lookups, bags.num_features)
        found = [rows_of(numbers, layer, bags) for layer in layers]
        return torch.cat([rows for rows, _ in found]), torch.cat([is_bad for _, is_bad in found])

    def _try(self, rows_U: Tensor, numbers: Tensor, num_looked_at: int) -> tuple[Tensor, _Listed]:
        """Claim, and tell the host of it in one piece."""
        num_looked_at = max(1, num_looked_at)
        slot_U, transfer = claim(self._slots, rows_U, num_looked_at, first_slot=self._first_slot)
        *moves, has_found = transfer
        listed = torch.cat([has_found.long().view(1), numbers, *moves]).cpu().numpy()
        known, moved = listed[: 1 + len(numbers)], listed[1 + len(numbers) :].astype(np.int32)
        written_rows, written_at, rows, at = moved.reshape(4, -1)
        is_written, is_fetched = written_rows != NOWHERE, rows != NOWHERE
        moves_M = Moves(
            rows[is_fetched], at[is_fetched], written_rows[is_written], written_at[is_written]
        )
        is_enough, first_bad, num_lookups, num_hits, num_rows = known.tolist()
        return slot_U, _Listed(bool(is_enough), first_bad, num_lookups, num_hits, num_rows, moves_M)

    def _is_full(self) -> Tensor:
        return torch.ne(self._slots.row_of_slot, EMPTY)

    def _rows_and_slots(self, is_meant: Tensor) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        slots = is_meant.nonzero().flatten()
        rows = self._slots.row_of_slot[slots]
        return rows.cpu().numpy(), slots.int().cpu().numpy()


class _Listed(NamedTuple):
    """What the host is told of a claim."""

    is_enough: bool
    first_bad: int
    num_lookups: int
    num_hits: int
    num_rows: int
    moves: Moves


_NO_PLACE = torch.iinfo(torch.int64).max


def _first(is_meant: Tensor) -> Tensor:
    """The first place that is, () int64; `_NO_PLACE` if none is."""
    places = torch.arange(len(is_meant) + 1, device=is_meant.device)
    places = torch.where(torch.nn.functional.pad(is_meant, (0, 1)), places, _NO_PLACE)
    return places.amin()


def _on_the_host(numbers: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = numbers.cpu().numpy()
    return found


def _long(numbers: NDArray[Any], device: torch.device) -> Tensor:
    found: Tensor = torch.from_numpy(numbers.astype(np.int64)).to(device)
    return found
