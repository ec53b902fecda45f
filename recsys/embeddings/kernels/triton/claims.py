"""Claims slots on a CUDA device in four launches, and sorts what is to be copied.

`claim_kernels` has the kernels. Rows that lie near each other are copied faster.

Letters: N values, W slots looked at, U places for distinct rows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from recsys._support.cuda.triton_support import cdiv
from recsys.embeddings.kernels.torch.slots import Transfer, rows_first
from recsys.embeddings.kernels.triton.claim_kernels import (
    NUM_BINS,
    count_kernel,
    mark_kernel,
    release_kernel,
    resolve_kernel,
    take_kernel,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys._support.cuda.replays import Replays
    from recsys.embeddings.kernels.torch.bags import Layer, TorchBags
    from recsys.embeddings.kernels.torch.slots import Copies, TorchSlots

__all__ = ["ClaimNumbers", "StartedClaim", "claim", "release"]

_BLOCK_VALUES = 256
_BLOCK_SLOTS = 512
_MOST_PROGRAMS = 256  # that look at slots: each reads the counts of all of them
_NUM_NUMBERS = 16  # so that the lists after them begin at a multiple of 64 bytes
_SIZES_OF_NUMBERS = (1, 1, 6, 8)  # `bad`, `is_enough`, those of `StartedClaim.counts`, unused
_NUM_LISTS = 6  # of U places each


class ClaimNumbers(NamedTuple):
    """The numbers of a claim.

    Attributes:
        bad: N minus the position of the first value that is no row; 0 for none.
        is_enough: Whether slots were claimed; see `Transfer`. The other numbers count only then.
        num_lookups: Values looked up that are rows.
        num_hits: Values whose row was in its slot.
        num_rows, num_rows_hit: Distinct rows, and those that were in their slot.
        num_fetched, num_written: Rows to fetch, and rows to write back.
    """

    bad: int
    is_enough: bool
    num_lookups: int
    num_hits: int
    num_rows: int
    num_rows_hit: int
    num_fetched: int
    num_written: int


class StartedClaim(NamedTuple):
    """A claim that the device may still be making.

    Attributes:
        slot_of_value: (N,) int32; `NOWHERE` for a value that is not looked up, and
            `claim_kernels.NO_ROW` for one that is looked up and is not a row of its table, or if
            nothing was claimed.
        held: The slots that count the claim, (U,) int32, with `NOWHERE` between them.
        transfer: The rows to copy, int32, and so is `is_enough`. If it is 0, nothing was claimed,
            because there are too few slots or a value is refused, and all lists hold only
            `NOWHERE`.
        rows: The distinct rows looked up, (U,) int32, with `NOWHERE` between them.
        counts: The last six of `ClaimNumbers`, on the device, (6,) int32.
        result: In one array, so that one copy brings a part to the host: numbers, the lists of
            `transfer`, `rows`, `held`, `slot_of_value`.
    """

    slot_of_value: Tensor
    held: Tensor
    transfer: Transfer
    rows: Tensor
    counts: Tensor
    result: Tensor

    def wait(self) -> tuple[ClaimNumbers, NDArray[np.int32]]:
        """Wait for the device; the numbers, and the lists of `transfer`, (4, U)."""
        listed = self.result[: _NUM_NUMBERS + 4 * len(self.held)].cpu().numpy()
        return ClaimNumbers(*listed[:8].tolist()), listed[_NUM_NUMBERS:].reshape(4, -1)


class _Window(NamedTuple):
    """The slots that a claim looks at, from the hand on, and the blocks of them per program."""

    first_slot: int
    num_slots: int
    num_looked_at: int
    num_chunks: int


def claim(
    slots: TorchSlots,
    layer: Layer,
    bags: TorchBags,
    num_places: int,
    num_looked_at: int | None = None,
    *,
    first_slot: int = 0,
    refuses: bool = True,
    replays: Replays | None = None,
    released: Tensor | None = None,
    copies: Copies | None = None,
) -> StartedClaim:
    """Give every row a slot, and count a ticket into all of them; all or nothing.

    The host waits for nothing.

    Args:
        slots: Changed in place; at least one.
        layer: Which features are looked up in which tables.
        bags: The input.
        num_places: U: at least the number of distinct rows; a multiple of 16, so that no list's
            alignment depends on the mini-batch.
        num_looked_at: W: the claim considers this many slots from the hand on; None for all.
        first_slot: All slots before it are pinned and not considered.
        refuses: Whether nothing is claimed if a value is not a row of its table. If False, the rows
            of all other values are claimed.
        replays: Of these slots: replays the launches if bags are one-hot. None launches.
        released: Slots of a ticket to release before; None for none.
        copies: Makes the claim's transfer; None for none.
    """
    num_others = slots.num_slots - first_slot
    num_looked_at = min(num_looked_at or num_others, num_others)
    num_chunks = cdiv(num_looked_at, _BLOCK_SLOTS * _MOST_PROGRAMS)
    window = _Window(first_slot, slots.num_slots, num_looked_at, num_chunks)
    launch = partial(_launch, slots, layer, bags, num_places, window, refuses, copies)
    inputs = [bags.values] if released is None else [bags.values, released]
    if replays is None or bags.offsets is not None:  # of a size that changes from step to step
        result = launch(*inputs)
    else:
        key = (
            None if copies is None else copies.key,
            layer.first_rows.data_ptr(),
            bags.batch_size,
            bags.padding,
            num_places,
            window,
            refuses,
        )
        reads = layer, None if copies is None else copies.reads
        result = cast("Tensor", replays.run(key, launch, inputs, reads))
    sizes = [*_SIZES_OF_NUMBERS, *[num_places] * _NUM_LISTS, bags.values.numel()]
    _, is_enough, counts, _, *moved, rows, held, slot_of_value = result.split_with_sizes(sizes)
    return StartedClaim(
        slot_of_value, held, Transfer._make([*moved, is_enough]), rows, counts, result
    )


def _launch(
    slots: TorchSlots,
    layer: Layer,
    bags: TorchBags,
    num_places: int,
    window: _Window,
    refuses: bool,
    copies: Copies | None,
    values: Tensor,
    released: Tensor | None = None,
) -> Tensor:
    """Launch the kernels of `claim`; the result is `StartedClaim.result`."""
    if released is not None:
        release(slots, released)
    num_values, device = len(values), values.device
    num_programs = cdiv(window.num_looked_at, _BLOCK_SLOTS * window.num_chunks)
    sizes = [_NUM_NUMBERS + _NUM_LISTS * num_places, num_values]
    result = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    counts = torch.empty(num_programs * NUM_BINS, dtype=torch.int32, device=device)
    listed, slot_of_value = result.split_with_sizes(sizes)
    listed[:_NUM_NUMBERS].zero_()
    mark_kernel[(cdiv(num_values, _BLOCK_VALUES),)](
        values,
        bags.offsets,
        layer.lookup_of_feature,
        layer.first_rows,
        layer.sizes,
        slots.slot_of_row,
        slots.num_claims,
        slot_of_value,
        listed,
        num_values,
        max(bags.batch_size, 1),
        0 if bags.padding is None else bags.padding,
        num_places,
        bags.num_features,
        layer.positions.numel(),
        HAS_PADDING=bags.padding is not None,
        NUM_BITS=0 if bags.offsets is None else bags.num_features.bit_length(),
        BLOCK=_BLOCK_VALUES,
    )
    count_kernel[(num_programs,)](*slots[1:], counts, *window, BLOCK=_BLOCK_SLOTS)
    take_kernel[(num_programs,)](
        *slots,
        counts,
        listed,
        num_places,
        *window,
        REFUSES=refuses,
        MOST_PROGRAMS=_MOST_PROGRAMS,
        BLOCK=_BLOCK_SLOTS,
    )
    resolve_kernel[(cdiv(max(num_values, num_places), _BLOCK_VALUES),)](
        slots.slot_of_row,
        slots.num_claims,
        slots.num_uses,
        slots.hand,
        listed,
        slot_of_value,
        num_values,
        num_places,
        BLOCK=_BLOCK_VALUES,
    )
    moves = listed[_NUM_NUMBERS : _NUM_NUMBERS + 4 * num_places].view(2, 2, num_places)
    for rows_U, slots_U in moves:  # written back, and fetched
        in_order = rows_first(rows_U, slots_U)
        rows_U.copy_(in_order[0])
        slots_U.copy_(in_order[1])
    if copies is not None:
        copies.launch(Transfer._make([*moves.view(4, num_places), listed[1]]))
    return result


def release(slots: TorchSlots, held: Tensor) -> None:
    """Take a ticket out of the counts of its slots; see `SlotMap.release`."""
    grid = (cdiv(len(held), _BLOCK_VALUES),)
    release_kernel[grid](slots.num_claims, held, len(held), BLOCK=_BLOCK_VALUES)
