"""The lookup in one table whose rows a recsys optimizer updates.

One kernel pools the rows of a sum or mean. Ids given to an `nn.Embedding` are bags of one id; there
`padding_idx` is looked up without a gradient.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys.embeddings.lookup.fused_lookup import Part, fused_lookup
from recsys.embeddings.lookup.prefetch_requests import PrefetchRequest
from recsys.embeddings.rows.bag_input import BagInput, require_same_device
from recsys.embeddings.rows.row_space import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.table_module import TableModule

__all__ = ["BagLookup", "require_supported"]


def require_supported(module: nn.Module) -> None:
    """Check that a module of torch, or one like it, only sums or averages rows.

    Raises:
        ValueError: `mode`, `max_norm` or `scale_grad_by_freq` says otherwise.
    """
    settings: Any = module
    if getattr(module, "mode", None) == "max":
        found = "mode='max'"
    elif settings.max_norm is not None:
        found = f"max_norm={settings.max_norm}"
    elif settings.scale_grad_by_freq:
        found = "scale_grad_by_freq=True"
    else:
        return
    raise ValueError(
        f"{found} is not supported where a recsys optimizer updates rows; leave it out, or use "
        f"torch.nn.{'EmbeddingBag' if hasattr(module, 'mode') else 'Embedding'} with an optimizer "
        "of torch"
    )


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
            ValueError: ids are on another device, or a setting is not supported.
        """
        bag, bags = self.bag, self._without_padding(self._checked(bags))
        if bags.weights is not None:
            bags = bags._replace(weights=bags.weights.to(compute_dtype(bag.weight.dtype)))
        values, offsets, weights = bags[:3]
        return fused_lookup(
            [Part(self.group, self.lookups, self._made_with_padding(bags))],
            weights,
            ids=(values, offsets),
            updater=bag.row_updater,
            explain=self._explain(bags),
            padding_idx=bag.padding_idx if bags.are_ids else None,
            num_samples=bags.shape[0] if bags.shape else None,
        )

    def parts(self, bags: BagInput) -> list[Part]:
        """What `pool` of the same bags looks up, without `padding_idx` and weights.

        Raises:
            ValueError: as `pool`.
        """
        bags = self._checked(bags)._replace(weights=None)
        if self.bag.padding_idx is not None:
            bags = bags.without(self.bag.padding_idx)
        return [Part(self.group, self.lookups, self._made(bags))]

    def request(self, bags: BagInput) -> PrefetchRequest:
        """The request to fetch the rows for `pool` of the same bags.

        Raises:
            ValueError: as `pool`.
        """
        # Weights are checked, then dropped: they do not change which rows are needed.
        bags = self._without_padding(self._checked(bags)._replace(weights=None))
        part = Part(self.group, self.lookups, self._made_with_padding(bags))
        return PrefetchRequest(part, self._explain(bags))

    def _checked(self, bags: BagInput) -> BagInput:
        """Check input and settings; request and lookup raise the same errors.

        Raises:
            ValueError: ids are on another device, or a setting is not supported.
        """
        require_supported(self.bag)  # which the caller may have changed
        if self.group.kernels.errors is not None:
            require_same_device(bags.values, self.group.device)
        return bags

    def _without_padding(self, bags: BagInput) -> BagInput:
        # On a device, kernels skip padding, so that the host need not wait to count ids.
        is_skipped = self.group.kernels.errors is not None
        if self.bag.padding_idx is None or bags.are_ids or is_skipped:
            return bags
        return bags.without(self.bag.padding_idx)

    def _made_with_padding(self, bags: BagInput) -> Any:
        """The kernels' bags; on a device, kernels skip their padding."""
        made = self._made(bags)
        if self.group.kernels.errors is None or bags.are_ids:
            return made
        return made._replace(padding=self.bag.padding_idx)

    def _made(self, bags: BagInput) -> Any:
        values, offsets, weights, is_one_hot = bags[:4]
        made = self.group.kernels.make_bags(
            values,
            offsets,
            weights,
            len(offsets) - 1,
            is_mean=self.bag.mode == "mean",
            is_one_hot=is_one_hot,
        )
        return made._replace(given=bags.given) if bags.given else made

    def _explain(self, bags: BagInput) -> Callable[[int], Exception]:
        [number] = self.lookups.distinct_tables
        # A device may report an error later, so this must not keep the module alive.
        return partial(_id_error, bags, len(self.bag.weight), self.group.names[number])


def _id_error(bags: BagInput, num_rows: int, table: str, position: int) -> Exception:
    bad = bags.first_bad(num_rows)
    # The caller may have overwritten the ids before a device reports the error.
    return bags.id_error(position if bad is None else bad, num_rows, table)
