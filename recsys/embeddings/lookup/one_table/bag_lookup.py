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
from recsys.embeddings.lookup.fused_lookup import Part, fused_lookup
from recsys.embeddings.lookup.prefetch_requests import PrefetchRequest
from recsys.embeddings.rows.bag_input import BagInput, require_same_device
from recsys.embeddings.rows.row_space import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.table_module import TableModule

__all__ = ["BagLookup"]


class BagLookup(NamedTuple):
    """A lookup in the table of a module, by the module's settings.

    Attributes:
        bag: The module.
        group: Has the table.
        lookups: One lookup, in this table.
    """

    bag: TableModule
    group: TableGroup
    lookups: Lookups

    def pool(self, bags: BagInput) -> Tensor:
        """Look up and pool; the result has the compute dtype of the rows.

        In bags, `padding_idx` is left out. The ids of an `nn.Embedding` are bags of one id: there
        it is looked up like any other row, and gets no gradient.

        Raises:
            IdOutOfRange: an id is not a row.
            MalformedBags: on a device, offsets do not make bags.
            ValueError: settings exclude each other, or ids are on another device.
        """
        bag, bags = self.bag, self._checked(bags)
        if bag.max_norm is not None:
            self._renormalize(bags, bag.max_norm)
        bags = self._without_padding(bags)
        if bags.weights is not None:
            bags = bags._replace(weights=bags.weights.to(compute_dtype(bag.weight.dtype)))
        if not self._needs_distinct:
            return self._look_up(bags, bags)
        distinct, numbers, counts = torch.unique(
            bags.values, return_inverse=True, return_counts=True
        )
        rows = self._look_up(_one_by_one(distinct), bags)
        if bag.scale_grad_by_freq and rows.requires_grad:
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

    def parts(self, bags: BagInput) -> list[Part]:
        """What `pool` of the same bags looks up, without `padding_idx` and weights.

        Raises:
            MalformedBags: as `pool`.
            ValueError: as `pool`.
        """
        bags = self._checked(bags)._replace(weights=None)
        if self.bag.padding_idx is not None:
            bags = bags.without(self.bag.padding_idx)
        return [Part(self.group, self.lookups, self._made(bags))]

    def request(self, bags: BagInput) -> PrefetchRequest:
        """The request to fetch the rows for `pool` of the same bags.

        Raises:
            MalformedBags: as `pool`.
            ValueError: as `pool`.
        """
        # Weights are checked, then dropped: they do not change which rows are needed.
        bags = self._without_padding(self._checked(bags)._replace(weights=None))
        looked_up = _one_by_one(torch.unique(bags.values)) if self._needs_distinct else bags
        part = Part(self.group, self.lookups, self._made_for(looked_up, bags))
        # Of distinct rows, one may belong to several samples.
        return PrefetchRequest(part, self._explain(bags), can_split=not self._needs_distinct)

    @property
    def _needs_distinct(self) -> bool:
        """Whether the kernel looks up distinct rows, which torch pools."""
        return self.bag.mode == "max" or self.bag.scale_grad_by_freq

    def _checked(self, bags: BagInput) -> BagInput:
        """Check the input; request and lookup raise the same errors.

        Raises:
            MalformedBags: on a device, offsets do not make bags.
            ValueError: settings exclude each other, or ids are on another device.
        """
        bag = self.bag
        if self.group.kernels.errors is not None:
            require_same_device(bags.values, self.group.device)
            if self._needs_distinct or bag.max_norm is not None:
                bags = bags.checked()  # torch operations follow, which do not check
        if bag.mode == "max" and (bag.scale_grad_by_freq or bag.sparse):
            raise ValueError("mode 'max' goes with neither scale_grad_by_freq nor sparse")
        return bags

    def _without_padding(self, bags: BagInput) -> BagInput:
        # On a device, kernels skip padding, so that the host need not wait to count ids.
        is_skipped = self.group.kernels.errors is not None and not self._needs_distinct
        if self.bag.padding_idx is None or bags.are_ids or is_skipped:
            return bags
        return bags.without(self.bag.padding_idx)

    def _look_up(self, looked_up: BagInput, bags: BagInput) -> Tensor:
        """Look up and pool `looked_up`; errors describe `bags`."""
        values, offsets, weights = looked_up[:3]
        part = Part(self.group, self.lookups, self._made_for(looked_up, bags))
        return fused_lookup(
            [part],
            weights,
            ids=(values, offsets),
            updater=self.bag.row_updater,
            explain=self._explain(bags),
            padding_idx=self.bag.padding_idx if bags.are_ids else None,
            num_samples=bags.shape[0] if bags.shape else None,
        )

    def _made_for(self, looked_up: BagInput, bags: BagInput) -> Any:
        """The kernels' bags of `looked_up`; on a device, kernels skip the padding of `bags`."""
        made = self._made(looked_up)
        if self.group.kernels.errors is None or looked_up is not bags or bags.are_ids:
            return made
        return made._replace(padding=self.bag.padding_idx)

    def _made(self, looked_up: BagInput) -> Any:
        values, offsets, weights, is_one_hot = looked_up[:4]
        made = self.group.kernels.make_bags(
            values,
            offsets,
            weights,
            len(offsets) - 1,
            is_mean=self.bag.mode == "mean",
            is_one_hot=is_one_hot,
        )
        return made._replace(given=looked_up.given) if looked_up.given else made

    def _renormalize(self, bags: BagInput, max_norm: float) -> None:
        bag, group = self.bag, self.group
        bad = bags.first_bad(len(bag.weight))
        if bad is not None:
            raise bags.id_error(bad, len(bag.weight), self._table_name)
        [table] = self.lookups.distinct_tables
        if group.tiers is not None:
            with DisableTorchFunctionSubclass():  # internal write to the rows
                space = group.space()
                group.tiers.renormalize(space, table, bags.values, max_norm, bag.norm_type)
            return
        if group.changed_rows is not None:
            group.changed_rows.mark_renormalized(table, bags.values)
        torch.embedding_renorm_(bag.weight.detach(), bags.values, max_norm, bag.norm_type)
        if group.changed_rows is not None:
            group.changed_rows.accept()

    @property
    def _table_name(self) -> str:
        [number] = self.lookups.distinct_tables
        return self.group.names[number]

    def _explain(self, bags: BagInput) -> Callable[[int], Exception]:
        # A device may report an error later, so this must not keep the module alive.
        return partial(_id_error, bags, len(self.bag.weight), self._table_name)


def _one_by_one(distinct: Tensor) -> BagInput:
    bounds = torch.arange(len(distinct) + 1, device=distinct.device)
    return BagInput(distinct, bounds, None, is_one_hot=True)


def _id_error(bags: BagInput, num_rows: int, table: str, position: int) -> Exception:
    bad = bags.first_bad(num_rows)
    # The caller may have overwritten the ids before a device reports the error.
    return bags.id_error(position if bad is None else bad, num_rows, table)
