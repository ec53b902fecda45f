"""The kernels of a device, with operations of torch alone: what Triton kernels are compared with.

The CPU stands in for a device where tests ask for `BY_TORCH`. Triton's interpreter takes a hundred
times as long, so few tests ask for `BY_TRITON`.

Letters: T tables, R rows, S slots, W slots looked at, N lookups, U places for distinct rows, D dim.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from recsys.embeddings.kernels import choice
from recsys.embeddings.kernels.choice import Kernels
from recsys.embeddings.kernels.cpu.rounding import (
    FACTOR1,
    FACTOR2,
    GOLDEN,
    INFINITY,
    LARGEST_BFLOAT16,
    TO_NEAREST,
)
from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED, DIRTY, EMPTY, NOWHERE, PINNED
from recsys.embeddings.kernels.cpu.slots import Moves, NoSuchRow, SlotClaim
from recsys.embeddings.kernels.torch import pooled_lookup as tiered
from recsys.embeddings.kernels.torch.bags import (
    TorchBags,
    layers_of,
    lengths_of,
    locate_one_hot,
    rows_of,
)
from recsys.embeddings.kernels.torch.errors import BAD_GRADIENT, errors_on
from recsys.embeddings.kernels.torch.pooled_lookup import TieredRows
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace, upload
from recsys.embeddings.kernels.torch.slots import (
    LOOKED_AT,
    DeviceSlotMap,
    QueuedClaim,
    Transfer,
    distinct_rows,
    mark_dirty,
    num_enough,
    rows_first,
    slots_of,
)
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad

NO_SLOT = -2  # in `QueuedClaim.slot_of_value`; the lookup refuses it, as it refuses no padding
_MOST_USES = 255
_NO_PLACE = torch.iinfo(torch.int64).max


def signed(number):
    """The int64 with the bits of an unsigned number of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


_GOLDEN, _FACTOR1, _FACTOR2 = map(signed, (GOLDEN, FACTOR1, FACTOR2))


# -- Lookups.


class _Readable:
    """A row space, with what `TieredRows` has besides."""

    def __init__(self, space):
        self._space = space

    def __getattr__(self, name):
        return getattr(self._space, name)

    def read(self, rows):
        if not len(self.rows):
            return self.rows.new_zeros(len(rows), self.dim, dtype=self.compute_dtype)
        return self.rows.index_select(0, rows.clamp(max=len(self.rows) - 1)).to(self.compute_dtype)


def pooled_lookup(space, lookups, bags, result):
    """As `triton.pooled_lookup.pooled_lookup`."""
    readable = space if isinstance(space, TieredRows) else _Readable(space)
    return tiered.pooled_lookup(readable, lookups, bags, result)


def pooled_lookup_reference(weights, lookups, values, offsets, bag_weights, batch_size, *, is_mean):
    """Pooled rows by `torch.nn.functional.embedding_bag`; results side by side, (B, W)."""
    pooled = []
    for table, position in zip(lookups.tables, lookups.positions, strict=True):
        first = int(position) * batch_size
        bounds = offsets[first : first + batch_size + 1]
        of_bags = slice(int(bounds[0]), int(bounds[-1]))
        pooled.append(
            functional.embedding_bag(
                values[of_bags],
                weights[int(table)],
                bounds - bounds[0],
                mode="mean" if is_mean else "sum",
                per_sample_weights=None if bag_weights is None else bag_weights[of_bags],
                include_last_offset=True,
            )
        )
    return torch.cat(pooled, dim=1)


def columns_of(layer, array_BW, dim):
    """The layer's columns of a (B, W) array as (B * L, D): one row per sample and lookup."""
    if layer.columns is not None:
        array_BW = array_BW.index_select(1, layer.columns)
    return array_BW.reshape(-1, dim)


class Located(NamedTuple):
    """The rows that are looked up, and where their gradients come from.

    Attributes:
        rows: (N,) int64; R for a value without a row.
        sources: For each value, its row of `columns_of`, (N,); 0 for a value without a row.
        scales: Factor of each value, (N,); None for 1.
    """

    rows: torch.Tensor
    sources: torch.Tensor
    scales: torch.Tensor | None


def locate(space, layer, bags):
    """The row of every value, and its factor."""
    places = torch.arange(len(bags.values), device=bags.values.device)
    bag_N = torch.searchsorted(bags.bounds(), places, right=True) - 1
    lookup_N = layer.lookup_of_feature[bag_N // max(bags.batch_size, 1)]
    num_lookups, sample_N = len(layer.positions), bag_N % max(bags.batch_size, 1)
    scales = None if bags.weights is None else bags.weights.to(space.compute_dtype)
    if bags.is_mean:
        lengths = lengths_of(bags).to(space.compute_dtype)
        shares = 1 if scales is None else scales
        scales = shares / torch.cat([lengths, lengths.new_ones(1)])[bag_N]
    return Located(
        rows_of(space, layer, bags)[0],
        torch.where(lookup_N < num_lookups, sample_N * num_lookups + lookup_N, 0),
        scales,
    )


def row_gradient_dots(space, lookups, bags, gradient, result):
    """The gradient of per-sample weights: the dot product of each row and its bag's gradient.

    For mean pooling, it is divided by the length of the bag.

    Args:
        space: The tables.
        lookups: Which features were looked up in which tables.
        bags: The input.
        gradient: Gradient of the pooled rows, (B, W).
        result: (N,); the gradient is added, since a feature may be looked up in several tables.
    """
    if not bags.batch_size or not len(bags.values):
        return
    unweighted = bags._replace(weights=None)
    for layer in layers_of(space, lookups, bags.num_features)[1]:
        rows_N, sources_N, scales_N = locate(space, layer, unweighted)
        gradients_ND = columns_of(layer, gradient, space.dim).index_select(0, sources_N)
        dots_N = (_Readable(space).read(rows_N) * gradients_ND).sum(1)
        if scales_N is not None:
            dots_N = dots_N * scales_N
        result += torch.where(rows_N < space.num_rows, dots_N, 0)


# -- Updates.


def update_reference(optimizer, weight, states, rows, gradients, step=1, key=None):
    """Update rows in place. A table of bfloat16 is computed in float32 and rounded.

    Args:
        optimizer: The formula.
        weight: The table.
        states: Its state, initially zeros, in the order of `state_sizes`.
        rows: The row of each gradient; a row may occur several times.
        gradients: In lookup order.
        step: Number of the step, from 1.
        key: `table_key` of a table of bfloat16, to round it stochastically; None to round to
            nearest.

    Shape:
        weight (E, D); states (E, size) each; rows (N,) int64; gradients (N, D). States and
        gradients have the dtype of the computation.
    """
    distinct, inverse = torch.unique(rows, return_inverse=True)
    summed = gradients.new_zeros(len(distinct), weight.shape[1]).index_add_(0, inverse, gradients)
    rate, eps = optimizer.rate_and_eps(optimizer.lr, step)
    change, updated = row_steps(optimizer, [state[distinct] for state in states], summed, rate, eps)
    for state, values in zip(states, updated, strict=True):
        state[distinct] = values
    new = weight[distinct].to(summed.dtype) - change
    if weight.dtype == torch.bfloat16:
        new = round_rows(new, None if key is None else fold(signed(key), distinct))
    weight[distinct] = new


def row_steps(optimizer, states, summed, rate, eps):
    """One step: the numbers to subtract from rows, and their new state.

    Args:
        optimizer: The formula.
        states: State of the rows, in the order of `state_sizes`.
        summed: The sum of each row's gradients.
        rate: Of `rate_and_eps`.
        eps: Of `rate_and_eps`.

    Shape:
        states (U, size) each; summed (U, D); rate and eps numbers, or (U, 1); results: (U, D), and
        states of the same shapes.
    """
    if isinstance(optimizer, SGD):
        return rate * summed, []
    squares = summed * summed
    if isinstance(optimizer, RowWiseAdagrad | PartialRowWiseAdam):
        squares = squares.mean(1, keepdim=True)
    if isinstance(optimizer, Adagrad | RowWiseAdagrad):
        direction = summed
        updated = [states[0] + squares]
    else:
        beta1, beta2 = optimizer.betas
        direction = states[0] + (1 - beta1) * (summed - states[0])
        updated = [direction, states[1] + (1 - beta2) * (squares - states[1])]
    divisor = updated[-1].sqrt() + eps
    # In the kernel's order, so that both give the same bits.
    if isinstance(optimizer, Adagrad):
        return rate * direction / divisor, updated
    if isinstance(optimizer, Adam):
        return rate * (direction / divisor), updated
    rates = rate if isinstance(rate, torch.Tensor) else torch.full_like(divisor, rate)
    return rates / divisor * direction, updated


def fold(key, number):
    """The hash of a key and one more number; 64 bits, as int64."""
    mixed = key + (number + 1) * _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _FACTOR1
    mixed = (mixed ^ _shifted(mixed, 27)) * _FACTOR2
    return mixed ^ _shifted(mixed, 31)


def round_rows(values, keys):
    """Round rows to bfloat16, like `narrow` of the CPU kernels.

    Args:
        values: The rows.
        keys: The hash of (seed, step, table, row) for each row; None to round to nearest.

    Shape:
        values (U, D) float32; keys (U,) int64; result (U, D).
    """
    chance = None
    if keys is not None:
        columns = torch.arange(values.shape[1], device=values.device)
        chance = _shifted(fold(keys.unsqueeze(1), columns), 32)
    bits = values.contiguous().view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    fixed = magnitude << 16
    if chance is None:
        chance = 0x7FFFFFFF + ((fixed >> 32) & 1)
    chance = torch.where(magnitude > LARGEST_BFLOAT16, 1 << 31, chance)
    stored = (fixed + chance) >> 32
    stored = torch.where(magnitude > INFINITY, 0x7FC0, stored) | ((bits >> 16) & 0x8000)
    # Through int16, because some devices do not support uint16.
    return (
        torch.where(stored > 0x7FFF, stored - 0x10000, stored).to(torch.int16).view(torch.bfloat16)
    )


def _shifted(number, places):
    """Logical shift to the right."""
    return (number >> places) & ((1 << (64 - places)) - 1)


def table_of(space, rows):
    """The table of each row, (U,) int64; of the row in each slot, if rows are slots."""
    _, tables_T, _ = space.starts
    return tables_T[_place_of(space, rows)]


def _place_of(space, rows):
    starts_T, _, row_of_slot = space.starts
    rows = rows if row_of_slot is None else row_of_slot[rows].long()
    return torch.searchsorted(starts_T, rows, right=True) - 1


def ids_of(space, rows):
    """The id of each row in its table, (U,) int64; of the row in each slot, if rows are slots."""
    starts_T, _, row_of_slot = space.starts
    places = _place_of(space, rows)
    return (rows if row_of_slot is None else row_of_slot[rows].long()) - starts_T[places]


def translate(state, rows, space, tables):
    """Translate row numbers of a space of rows to one of their state."""
    shifts_T = state.shifts(space, tables)
    return rows if shifts_T is None else rows + shifts_T[table_of(space, rows)]


class Merged(NamedTuple):
    """The gradients of a ledger, summed by row.

    Attributes:
        rows: Distinct rows, then the first one repeated, (U,) int64.
        sums: The sum of each row's gradients, (U, D).
        is_row: False if no lookup has a valid row, (U,); then `rows` are arbitrary.
    """

    rows: torch.Tensor
    sums: torch.Tensor
    is_row: torch.Tensor


def row_update(space, states, optimizer, rates_T2, ledger, keys_T=TO_NEAREST):
    """Sum each row's gradients in lookup order, and update each row once.

    While a recorded error has not been raised, no row is updated. The slots of updated rows are
    marked.

    Args:
        space: The tables.
        states: The tables' state arrays, in the order of the optimizer's `state_sizes`.
        optimizer: The formula.
        rates_T2: `rate_and_eps` of the optimizer, for each table's learning rate and step.
        ledger: One entry per backward pass since the last update, in order; bags are `TorchBags`.
        keys_T: `table_key` of each table, uint64, for stochastic rounding to 16 bits.

    Raises:
        IdOutOfRange: an id of an earlier lookup is not a row of its table.
        MalformedBags: the offsets of an earlier lookup are invalid.
        NonFiniteGradient: a gradient of an earlier update has nan or inf in it.
        ValueError: a per-sample weight of an earlier lookup is nan.
    """
    space.errors.poll()
    merged = merge_by_row(space, ledger)
    if merged is None:
        return
    rows_U, sums_UD, is_row = merged
    space.errors.note(BAD_GRADIENT, (is_row & ~sums_UD.isfinite().all(1)).any().view(1))
    is_updated = (is_row & (space.errors.first >= 1 << 62)).unsqueeze(1)
    tables = sorted({table for entry in ledger for table in entry.lookups.distinct_tables})
    # If all ids are padding, no row is updated, but one is read: of a table that has state.
    rows_U = torch.where(is_row, rows_U, space.first_rows[tables[0]])
    rate, eps = _rates(space, rates_T2, tables, rows_U)
    places = [translate(state, rows_U, space, tables) for state in states]
    before = [state.rows.index_select(0, at) for state, at in zip(states, places, strict=True)]
    change, updated = row_steps(optimizer, before, sums_UD, rate, eps)
    for state, at, old, new in zip(states, places, before, updated, strict=True):
        state.rows.index_copy_(0, at, torch.where(is_updated, new, old))
    old = space.rows.index_select(0, rows_U)
    new = old.to(sums_UD.dtype) - change
    if space.is_narrow:
        keys = None
        if keys_T.dtype != TO_NEAREST.dtype:
            of_tables = upload(keys_T.view(np.int64), rows_U.device)[table_of(space, rows_U)]
            keys = fold(of_tables, ids_of(space, rows_U))
        new = round_rows(new, keys)
    space.rows.index_copy_(0, rows_U, torch.where(is_updated, new, old))
    if space.slots is not None:
        mark_dirty(space.slots, torch.where(is_updated.squeeze(1), rows_U, NOWHERE))


def merge_by_row(space, ledger):
    """Sum the gradients of each row; None if the ledger has no lookups.

    Args:
        space: The tables.
        ledger: One entry per backward pass, in order; bags are `TorchBags`.
    """
    rows, sources, scales, gradients = _joined(space, list(_parts(space, ledger)))
    num_rows, num_places = space.num_rows, len(rows)
    if not num_places or not num_rows:
        return None
    rows_N, order_N = rows.sort(stable=True)
    is_first = torch.ones_like(rows_N, dtype=torch.bool)
    torch.ne(rows_N[1:], rows_N[:-1], out=is_first[1:])
    run_N = is_first.cumsum(0) - 1
    # Where each run begins; numbers without a run get the end.
    numbers = torch.arange(num_places + 1, device=rows.device)
    starts = torch.searchsorted(run_N, numbers)
    in_order = gradients.index_select(0, sources[order_N])
    if scales is not None:
        in_order *= scales[order_N].unsqueeze(1)
    sums_UD = torch.segment_reduce(in_order, "sum", offsets=starts, axis=0, unsafe=True, initial=0)
    rows_U = rows_N[starts[:-1].clamp(max=num_places - 1)]
    is_run = (starts[:-1] < num_places) & (rows_U < num_rows)
    chosen = torch.where(is_run, numbers[:-1], 0)
    rows_U = rows_U[chosen]
    return Merged(
        rows_U.clamp(max=num_rows - 1), sums_UD.index_select(0, chosen), rows_U < num_rows
    )


def _parts(space, ledger):
    """The located lookups of every entry, and the gradients that their sources index."""
    for lookups, bags, gradient, *_ in ledger:
        if not bags.batch_size or not len(lookups.tables):
            continue
        whole, layers = layers_of(space, lookups, bags.num_features)
        if bags.is_plain:
            rows_LB = locate_one_hot(space, whole, bags)
            num_lookups, batch_size = rows_LB.shape
            numbers = torch.arange(rows_LB.numel(), device=rows_LB.device)
            sources = numbers % batch_size * num_lookups + numbers // batch_size
            found = Located(rows_LB.reshape(-1), sources, None)
            yield found, columns_of(whole, gradient.flatten(1), space.dim)
            continue
        for layer in layers:
            yield locate(space, layer, bags), columns_of(layer, gradient.flatten(1), space.dim)


def _joined(space, parts):
    """Join all parts: their rows, sources, scales and gradients."""
    if not parts:
        none = torch.empty(0, dtype=torch.int64, device=space.rows.device)
        return none, none, None, space.rows.new_empty(0, space.dim)
    if len(parts) == 1:
        [(found, gradients)] = parts
        return *found, gradients
    sources, num_before = [], 0
    for found, gradients in parts:
        sources.append(found.sources + num_before)
        num_before += len(gradients)
    scales = None
    if any(found.scales is not None for found, _ in parts):
        scales = torch.cat(
            [
                gradients.new_ones(len(found.rows)) if found.scales is None else found.scales
                for found, gradients in parts
            ]
        )
    return (
        torch.cat([found.rows for found, _ in parts]),
        torch.cat(sources),
        scales,
        torch.cat([gradients for _, gradients in parts]),
    )


def _rates(space, rates_T2, tables, rows):
    """Rate and eps; plain numbers if all tables have the same, which is the usual case."""
    of_updated = rates_T2[list(tables)]
    if (of_updated == of_updated[0]).all():
        return float(of_updated[0, 0]), float(of_updated[0, 1])
    rates = upload(rates_T2.copy(), rows.device).to(space.compute_dtype)[table_of(space, rows)]
    return rates[:, :1], rates[:, 1:]


# -- Slots.


class TorchSlotMap(DeviceSlotMap):
    """Claims slots on a device."""

    def claim(self, lookups, bags):
        """As `SlotMap.claim`; the host waits once, to learn which rows to copy."""
        slots = self.tensors
        rows_N, is_bad_N = self.rows_of_values(lookups, bags)
        is_row_N = rows_N < slots.num_rows
        num_hits = (slots_of(slots, rows_N) != NOWHERE).sum()
        first_bad = _first(is_bad_N)
        # Where a value is no row, nothing is claimed.
        is_claimed_N = is_row_N & (first_bad == _NO_PLACE)
        rows_U = distinct_rows(torch.where(is_claimed_N, rows_N, NOWHERE))
        numbers = torch.stack([first_bad, is_row_N.sum(), num_hits, (rows_U != NOWHERE).sum()])
        slot_U, listed = self._try(rows_U, numbers, LOOKED_AT * len(rows_U))
        if not listed.is_enough:
            slot_U, listed = self._try(rows_U, numbers, slots.num_slots)
        if listed.first_bad != _NO_PLACE:
            raise NoSuchRow(listed.first_bad)
        if not listed.is_enough:
            raise self._shortage(rows_U)
        return SlotClaim(
            slots_of(slots, rows_N),
            slot_U,
            listed.moves,
            listed.num_lookups,
            listed.num_hits,
            listed.num_rows,
            num_rows_hit=listed.num_rows - len(listed.moves.fetched_rows),
        )

    def release(self, held):
        """As `SlotMap.release`."""
        release(self.tensors, held)

    def _try(self, rows_U, numbers, num_looked_at):
        """Claim, and copy the result to the host in one piece."""
        num_looked_at = max(1, num_looked_at)
        slot_U, transfer = claim(self.tensors, rows_U, num_looked_at, first_slot=self.first_slot)
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


class _Listed(NamedTuple):
    """The result of a claim, on the host."""

    is_enough: bool
    first_bad: int
    num_lookups: int
    num_hits: int
    num_rows: int
    moves: Moves


def _first(is_meant):
    """The first place that is true, () int64; `_NO_PLACE` if none is."""
    places = torch.arange(len(is_meant) + 1, device=is_meant.device)
    places = torch.where(torch.nn.functional.pad(is_meant, (0, 1)), places, _NO_PLACE)
    return places.amin()


def claim(slots, rows_U, num_looked_at=None, *, first_slot=0):
    """Give every row a slot, and count a ticket into all of them; all or nothing.

    Args:
        slots: Changed in place; at least one.
        rows_U: The result of `distinct_rows`.
        num_looked_at: W: the claim considers this many slots from the hand on; None for all.
        first_slot: All slots before it are pinned and not considered.

    Returns:
        The slot of each row, (U,), `NOWHERE` where there is no row, or not enough slots; and the
        rows to copy.
    """
    num_rows, num_slots = slots.num_rows, slots.num_slots
    is_row = rows_U >= 0
    known_U = slots.slot_of_row[torch.where(is_row, rows_U, num_rows)].long()
    is_missing = is_row & (known_U == NOWHERE)
    is_held = is_row & ~is_missing
    is_awaited = is_held & (known_U >= AWAITED)
    known_U = torch.where(is_awaited, known_U - AWAITED, known_U)
    # Counted at once, so that the hand passes over them; taken back if the others are not enough.
    known_U = torch.where(is_held, known_U, num_slots)
    _add(slots.num_claims, known_U, 1)
    num_others = num_slots - first_slot
    looked_at_W = torch.arange(min(num_looked_at or num_others, num_others), device=rows_U.device)
    hand = slots.hand.clamp(min=first_slot) - first_slot
    looked_at_W = first_slot + (looked_at_W + hand) % num_others
    order_W, rounds_W, is_free_W = _by_the_hand(slots, looked_at_W)
    num_missing = is_missing.sum()
    is_enough = num_missing <= is_free_W.sum()
    _add(slots.num_claims, known_U, torch.where(is_enough, 0, -1))
    # The k-th row that lacks a slot takes the k-th slot.
    number_U = (is_missing.cumsum(0) - 1).clamp(0, len(looked_at_W) - 1)
    taken_U = looked_at_W[order_W[number_U]]
    is_placed = is_missing & is_enough
    place_U = torch.where(is_placed, taken_U, num_slots)
    old_U = slots.row_of_slot[place_U].long()  # EMPTY at the place of none
    is_written = (old_U != EMPTY) & ((slots.flags[place_U] & DIRTY) > 0)
    _move_the_hand(slots, looked_at_W, order_W, rounds_W, is_free_W, num_missing, is_enough)
    slots.slot_of_row.index_fill_(0, torch.where(old_U == EMPTY, num_rows, old_U), NOWHERE)
    slots.row_of_slot.index_copy_(0, place_U, rows_U.int())
    slots.num_uses.index_fill_(0, place_U, 0)
    slots.flags.index_fill_(0, place_U, 0)
    slots.num_claims.index_fill_(0, place_U, 1)
    slot_U = torch.where(is_missing, taken_U, known_U)
    slot_U = torch.where(is_row & is_enough, slot_U, NOWHERE)
    held_U = torch.where(slot_U == NOWHERE, num_slots, slot_U)
    slots.slot_of_row.index_copy_(0, torch.where(slot_U == NOWHERE, num_rows, rows_U), held_U.int())
    uses_U = (slots.num_uses[held_U].long() + 1).clamp(max=_MOST_USES)
    slots.num_uses.index_copy_(0, held_U, uses_U.to(torch.uint8))
    _clear_last_places(slots)
    is_fetched = is_placed | (is_awaited & is_enough)
    return slot_U, Transfer(
        torch.where(is_written, old_U, NOWHERE),
        torch.where(is_written, place_U, NOWHERE),
        torch.where(is_fetched, rows_U, NOWHERE),
        torch.where(is_fetched, slot_U, NOWHERE),
        is_enough,
    )


def release(slots, slot_U):
    """Take a ticket out of the counts of its slots, as from `claim`."""
    _add(slots.num_claims, torch.where(slot_U == NOWHERE, slots.num_slots, slot_U), -1)
    _clear_last_places(slots)


def _add(counts, places_U, number):
    """Add to distinct places; the last place, which is none, may get any value."""
    counts.index_copy_(0, places_U, (counts[places_U] + number).to(counts.dtype))


def _by_the_hand(slots, looked_at_W):
    """The order in which the hand takes slots; the round in which it takes each; which it may take.

    Slots that it may not take come last.
    """
    num_looked_at = len(looked_at_W)
    flags_W, uses_W = slots.flags[looked_at_W], slots.num_uses[looked_at_W]
    is_free_W = (slots.num_claims[looked_at_W] == 0) & ((flags_W & PINNED) == 0)
    rounds_W = torch.frexp(uses_W.float()).exponent.long()  # bits of a number
    rounds_W = torch.where(slots.row_of_slot[looked_at_W] == EMPTY, 0, rounds_W)
    turn_W = rounds_W * num_looked_at + torch.arange(num_looked_at, device=looked_at_W.device)
    last = torch.iinfo(torch.int64).max
    return torch.where(is_free_W, turn_W, last).argsort(stable=True), rounds_W, is_free_W


def _move_the_hand(slots, looked_at_W, order_W, rounds_W, is_free_W, num_taken, is_enough):
    """To the slot after the last one taken; halve the uses of the slots that it passes."""
    has_moved = is_enough & (num_taken > 0)
    # Not by brackets, which would wait to read a single number.
    last = order_W.take((num_taken - 1).clamp(0, len(looked_at_W) - 1))
    numbers_W = torch.arange(len(looked_at_W), device=looked_at_W.device)
    passes_W = rounds_W.take(last) + (numbers_W <= last).long()
    uses_W = slots.num_uses[looked_at_W].long()
    left_W = torch.where(is_free_W & has_moved, uses_W >> passes_W, uses_W)
    slots.num_uses.index_copy_(0, looked_at_W, left_W.to(torch.uint8))
    following = (looked_at_W.take(last) + 1) % slots.num_slots
    slots.hand.copy_(torch.where(has_moved, following, slots.hand))


def _clear_last_places(slots):
    """Undo writes for no row, or no slot."""
    slots.slot_of_row[-1:].fill_(NOWHERE)
    slots.row_of_slot[-1:].fill_(EMPTY)
    for counts in (slots.num_claims, slots.num_uses, slots.flags):
        counts[-1:].zero_()


def queue_claim(slot_map, lookups, bags, num_rows, num_others, released=None, copies=None):
    """As `TorchSlotMap.claim`, for a claim that finds enough slots; the host does not wait.

    A value that is not a row gets the slot `NO_SLOT`; the rows of all other values are claimed.

    Args:
        slot_map: The slots.
        lookups: Which features are looked up in which tables; each feature in at most one.
        bags: The input; its values are rows.
        num_rows: The result of `most_rows`.
        num_others: The most slots that other tickets need; together with `num_rows`, not more than
            there are slots that are not pinned.
        released: Slots of a ticket to release before; None for none.
        copies: Makes the claim's transfer; None for none.
    """
    if released is not None:
        slot_map.release(released)
    slots = slot_map.tensors
    rows_N, is_bad_N = slot_map.rows_of_values(lookups, bags)
    is_row_N = rows_N < slots.num_rows
    num_hits = (slots_of(slots, rows_N) != NOWHERE).sum()
    rows_U = distinct_rows(torch.where(is_row_N, rows_N, NOWHERE))
    num_looked_at = max(num_enough(slot_map, num_rows + num_others), LOOKED_AT * len(rows_U))
    slot_U, transfer = claim(slots, rows_U, num_looked_at, first_slot=slot_map.first_slot)
    slot_N = slots_of(slots, rows_N)
    num_distinct = (rows_U != NOWHERE).sum()
    num_fetched = (transfer.fetched_rows != NOWHERE).sum()
    num_written = (transfer.written_rows != NOWHERE).sum()
    counts = [is_row_N.sum(), num_hits, num_distinct]
    counts += [num_distinct - num_fetched, num_fetched, num_written]
    moves = Transfer(
        *rows_first(transfer.written_rows, transfer.written_slots),
        *rows_first(transfer.fetched_rows, transfer.fetched_slots),
        transfer.is_enough,
    )
    if copies is not None:
        copies.launch(moves)
    return QueuedClaim(
        torch.where((slot_N == NOWHERE) & (is_row_N | is_bad_N), NO_SLOT, slot_N),
        slot_U,
        moves,
        torch.stack(counts),
    )


def kernels_by_torch(device):
    """As `choice.kernels_on`."""
    return Kernels(
        TorchRowSpace,
        TorchBags.from_tensors,
        pooled_lookup,
        row_gradient_dots,
        row_update,
        TorchSlotMap,
        queue_claim,
        errors_on(device),
        None,
    )


# For `choice.DEVICE_KERNELS`: the kernels that "cpu" has in place of numba's.
BY_NUMBA = choice.DEVICE_KERNELS
BY_TORCH = BY_NUMBA | {"cpu": kernels_by_torch}
BY_TRITON = BY_NUMBA | {"cpu": choice.kernels_by_triton}
