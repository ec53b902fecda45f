"""The lookup in one table whose rows a recsys optimizer updates.

sum, mean                      one kernel pools the rows
max, or scale_grad_by_freq     the kernel looks up distinct rows, and torch pools them
of an nn.Embedding             bags of one id; `padding_idx` is looked up without a gradient
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.embeddings.lookup.device_tables import require_same_device
from recsys.embeddings.lookup.fused_lookup import Part, fused_lookup, prefetch_parts
from recsys.embeddings.rows.bag_input import BagInput
from recsys.embeddings.rows.row_space import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.table_module import TableModule
    from recsys.embeddings.tiers.ahead import Prefetched
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["BagPlace", "parts_of_bags", "pool_fused", "prefetch_bags"]


class BagPlace(NamedTuple):
    """The group and the updater of a bag's table.

    Attributes:
        group: Has the table.
        lookups: One lookup, in this table.
        updater: Updates the group; None if torch gets the gradients.
    """

    group: TableGroup
    lookups: Lookups
    updater: RowUpdater | None


def pool_fused(bag: TableModule, place: BagPlace, bags: BagInput) -> Tensor:
    """Look up and pool; the result has the compute dtype of the rows.

    In bags, `padding_idx` is left out. The ids of an `nn.Embedding` are bags of one id: there it is
    looked up like any other row, and gets no gradient.

    Args:
        bag: Has the settings and the table.
        place: Group and updater of the table.
        bags: The input.

    Raises:
        IdOutOfRange: an id is not a row.
        MalformedBags: on a device, offsets do not make bags.
        ValueError: settings exclude each other, or ids are on another device.
    """
    bags = _checked(bag, place, bags)
    is_max, divides = bag.mode == "max", bag.scale_grad_by_freq
    if bag.max_norm is not None:
        _renormalize(bag, place, bags, bag.max_norm)
    bags = _without_padding(bag, place, bags)
    if bags.weights is not None:
        bags = bags._replace(weights=bags.weights.to(compute_dtype(bag.weight.dtype)))
    if not is_max and not divides:
        return _look_up(bag, place, bags, bags)
    distinct, numbers, counts = torch.unique(bags.values, return_inverse=True, return_counts=True)
    rows = _look_up(bag, place, _one_by_one(distinct), bags)
    if divides and rows.requires_grad:
        rows.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient / counts.unsqueeze(1)
        )
    return functional.embedding_bag(
        numbers,
        rows,
        bags.offsets,
        mode=bag.mode,
        per_sample_weights=bags.weights,
        include_last_offset=True,
    )


def parts_of_bags(bag: TableModule, place: BagPlace, bags: BagInput) -> list[Part]:
    """What `pool_fused` of the same arguments looks up, without `padding_idx` and weights.

    Raises:
        MalformedBags: as `pool_fused`.
        ValueError: as `pool_fused`.
    """
    bags = _checked(bag, place, bags)._replace(weights=None)
    if bag.padding_idx is not None:
        bags = bags.without(bag.padding_idx)
    return [Part(place.group, place.lookups, _made(bag, place, bags))]


def prefetch_bags(bag: TableModule, place: BagPlace, bags: BagInput) -> Prefetched:
    """Start to fetch the rows for `pool_fused` of the same arguments.

    Raises:
        IdOutOfRange: an id is not a row.
        MalformedBags: as `pool_fused`.
        ValueError: as `pool_fused`.
    """
    # Weights are checked, then dropped: they do not change which rows are needed.
    bags = _checked(bag, place, bags)._replace(weights=None)
    bags = looked_up = _without_padding(bag, place, bags)
    needs_distinct = bag.mode == "max" or bag.scale_grad_by_freq
    if needs_distinct:
        looked_up = _one_by_one(torch.unique(bags.values))
    made = _made(bag, place, looked_up)
    if place.group.kernels.errors is not None and not needs_distinct and not bags.are_ids:
        made = made._replace(padding=bag.padding_idx)
    claimed = prefetch_parts(
        [Part(place.group, place.lookups, made)],
        partial(_id_error, bags, len(bag.weight), _table_name(place)),
    )
    claimed.can_split = not needs_distinct  # a distinct row may belong to several samples
    return claimed


def _checked(bag: TableModule, place: BagPlace, bags: BagInput) -> BagInput:
    """Check the input; prefetch and lookup raise the same errors.

    Raises:
        MalformedBags: on a device, offsets do not make bags.
        ValueError: settings exclude each other, or ids are on another device.
    """
    is_max, divides = bag.mode == "max", bag.scale_grad_by_freq
    if place.group.kernels.errors is not None:
        require_same_device(bags.values, place.group.device)
        if is_max or divides or bag.max_norm is not None:
            bags = bags.checked()  # torch operations follow, which do not check
    if is_max and (divides or bag.sparse):
        raise ValueError("mode 'max' goes with neither scale_grad_by_freq nor sparse")
    return bags


def _without_padding(bag: TableModule, place: BagPlace, bags: BagInput) -> BagInput:
    # On a device, kernels skip padding, so that the host need not wait to count ids.
    is_deferred = place.group.kernels.errors is not None
    is_skipped = is_deferred and bag.mode != "max" and not bag.scale_grad_by_freq
    if bag.padding_idx is None or bags.are_ids or is_skipped:
        return bags
    return bags.without(bag.padding_idx)


def _one_by_one(distinct: Tensor) -> BagInput:
    bounds = torch.arange(len(distinct) + 1, device=distinct.device)
    return BagInput(distinct, bounds, None, is_one_hot=True)


def _look_up(bag: TableModule, place: BagPlace, looked_up: BagInput, bags: BagInput) -> Tensor:
    """Look up and pool `looked_up`; errors describe `bags`."""
    weight, kernels = bag.weight, place.group.kernels
    values, offsets, weights = looked_up[:3]
    # A device may report an error later, so this must not keep the module alive.
    explain = partial(_id_error, bags, len(weight), _table_name(place))
    made = _made(bag, place, looked_up)
    if kernels.errors is not None and looked_up is bags and not bags.are_ids:
        made = made._replace(padding=bag.padding_idx)
    part = Part(place.group, place.lookups, made)
    return fused_lookup(
        [part],
        weights,
        ids=(values, offsets),
        updater=place.updater,
        explain=explain,
        padding_idx=bag.padding_idx if bags.are_ids else None,
    )


def _made(bag: TableModule, place: BagPlace, looked_up: BagInput) -> Any:
    values, offsets, weights, is_one_hot = looked_up[:4]
    made = place.group.kernels.make_bags(
        values,
        offsets,
        weights,
        len(offsets) - 1,
        is_mean=bag.mode == "mean",
        is_one_hot=is_one_hot,
    )
    return made._replace(given=looked_up.given) if looked_up.given else made


def _renormalize(bag: TableModule, place: BagPlace, bags: BagInput, max_norm: float) -> None:
    bad = bags.first_bad(len(bag.weight))
    if bad is not None:
        raise bags.id_error(bad, len(bag.weight), _table_name(place))
    if place.group.tiers is None:
        changed_rows = place.group.changed_rows
        if changed_rows is not None:
            [table] = place.lookups.distinct_tables
            changed_rows.mark_renormalized(table, bags.values)
        torch.embedding_renorm_(bag.weight.detach(), bags.values, max_norm, bag.norm_type)
        if changed_rows is not None:
            changed_rows.accept()
        return
    with DisableTorchFunctionSubclass():  # internal write to the rows
        [table] = place.lookups.distinct_tables
        space = place.group.space()
        place.group.tiers.renormalize(space, table, bags.values, max_norm, bag.norm_type)


def _table_name(place: BagPlace) -> str:
    [number] = place.lookups.distinct_tables
    return place.group.names[number]


def _id_error(bags: BagInput, num_rows: int, table: str, position: int) -> Exception:
    bad = bags.first_bad(num_rows)
    # The caller may have overwritten the ids before a device reports the error.
    return bags.id_error(position if bad is None else bad, num_rows, table)
