"""Row update with torch operations; see `cpu.row_update` for the contract.

    1. Sort lookups by row; those of one row stay in lookup order.
    2. Sum the gradients of each row in that order, by `segment_reduce`.
    3. Read rows and state, update them by `row_steps`, and write them.

Only the device knows how many distinct rows there are. So there is a place for every lookup; the
places left over repeat the first row, and write the same numbers to the same memory.

Letters: T tables, R rows, N lookups, U places for distinct rows (N of them), D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST
from recsys.embeddings.kernels.cpu.slot_arrays import NOWHERE
from recsys.embeddings.kernels.torch.bags import Located, layers_of, locate, locate_one_hot
from recsys.embeddings.kernels.torch.errors import BAD_GRADIENT
from recsys.embeddings.kernels.torch.rounding import fold, round_rows
from recsys.embeddings.kernels.torch.row_space import upload
from recsys.embeddings.kernels.torch.slots import mark_dirty
from recsys.embeddings.optimizer import row_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.torch.row_space import TorchRows
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.ledger import LedgerEntry

__all__ = ["Merged", "merge_by_row", "row_update"]


class Merged(NamedTuple):
    """The gradients of a ledger, summed by row.

    Attributes:
        rows: Distinct rows, then the first one repeated, (U,) int64.
        sums: The sum of each row's gradients, (U, D).
        is_row: False if no lookup has a valid row, (U,); then `rows` are arbitrary.
    """

    rows: Tensor
    sums: Tensor
    is_row: Tensor


def row_update(
    space: TorchRows,
    states: Sequence[TorchRows],
    optimizer: RowOptimizer,
    rates_T2: NDArray[np.float64],
    ledger: Sequence[LedgerEntry],
    keys_T: NDArray[Any] = TO_NEAREST,
) -> None:
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
    is_updated = (is_row & space.errors.is_clear()).unsqueeze(1)
    tables = sorted({table for entry in ledger for table in entry.lookups.distinct_tables})
    # If all ids are padding, no row is updated, but one is read: of a table that has state.
    rows_U = torch.where(is_row, rows_U, space.first_rows[tables[0]])
    rate, eps = _rates(space, rates_T2, tables, rows_U)
    places = [state.translate(rows_U, space, tables) for state in states]
    before = [state.rows.index_select(0, at) for state, at in zip(states, places, strict=True)]
    change, updated = row_steps(optimizer, before, sums_UD, rate, eps)
    for state, at, old, new in zip(states, places, before, updated, strict=True):
        state.rows.index_copy_(0, at, torch.where(is_updated, new, old))
    old = space.rows.index_select(0, rows_U)
    new = old.to(sums_UD.dtype) - change
    if space.is_narrow:
        keys = None
        if keys_T.dtype != TO_NEAREST.dtype:
            of_tables = upload(keys_T.view(np.int64), rows_U.device)[space.table_of(rows_U)]
            keys = fold(of_tables, space.ids_of(rows_U))
        new = round_rows(new, keys)
    space.rows.index_copy_(0, rows_U, torch.where(is_updated, new, old))
    if space.slots is not None:
        mark_dirty(space.slots, torch.where(is_updated.squeeze(1), rows_U, NOWHERE))


def merge_by_row(space: TorchRows, ledger: Sequence[LedgerEntry]) -> Merged | None:
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


def _parts(space: TorchRows, ledger: Sequence[LedgerEntry]) -> Iterator[tuple[Located, Tensor]]:
    """The located lookups of every entry, and the gradients that their sources index."""
    for lookups, any_bags, gradient, *_ in ledger:
        bags: Any = any_bags  # `TorchBags`
        if not bags.batch_size or not len(lookups.tables):
            continue
        whole, layers = layers_of(space, lookups, bags.num_features)
        if bags.is_plain:
            rows_LB = locate_one_hot(space, whole, bags)
            num_lookups, batch_size = rows_LB.shape
            numbers = torch.arange(rows_LB.numel(), device=rows_LB.device)
            sources = numbers % batch_size * num_lookups + numbers // batch_size
            found = Located(rows_LB.reshape(-1), sources, None)
            yield found, whole.of_columns(gradient.flatten(1), space.dim)
            continue
        for layer in layers:
            yield locate(space, layer, bags), layer.of_columns(gradient.flatten(1), space.dim)


def _joined(
    space: TorchRows, parts: Sequence[tuple[Located, Tensor]]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
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


def _rates(
    space: TorchRows, rates_T2: NDArray[np.float64], tables: Sequence[int], rows: Tensor
) -> tuple[float | Tensor, float | Tensor]:
    """Rate and eps; plain numbers if all tables have the same, which is the usual case."""
    of_updated = rates_T2[list(tables)]
    if (of_updated == of_updated[0]).all():
        return float(of_updated[0, 0]), float(of_updated[0, 1])
    rates = upload(rates_T2.copy(), rows.device).to(space.compute_dtype)[space.table_of(rows)]
    return rates[:, :1], rates[:, 1:]
