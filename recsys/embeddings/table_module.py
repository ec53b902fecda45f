"""Base class of `HotColdEmbeddingBag` and `HotColdEmbedding`: one table and its updater."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.fx import Proxy

from recsys._support.user_classes import fits_override
from recsys.embeddings.lookup.abstract_tables import AbstractTables
from recsys.embeddings.lookup.one_table.bag_lookup import BagLookup, require_supported
from recsys.embeddings.lookup.table_group import TableGroup
from recsys.embeddings.rows.lookups import Lookups
from recsys.embeddings.rows.row_space import require_device
from recsys.embeddings.tier_arguments import TierArguments, empty_table
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.embeddings.update.in_backward import read_marks

if TYPE_CHECKING:
    from torch import Tensor, nn

    from recsys.embeddings.lookup.one_table.bag_calls import BagCalls
    from recsys.embeddings.lookup.one_table.device_calls import DeviceCalls
    from recsys.embeddings.lookup.prefetch_requests import PrefetchRequest
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.update.row_updater import Places, RowUpdater

__all__ = ["Rows", "TableModule", "allocate_rows"]


class Rows(NamedTuple):
    """The memory of a module's table.

    Attributes:
        weight: The rows, (E, D); None if torch allocates and draws them.
        are_to_draw: Whether the rows are not initialized yet.
        tiers: The checked arguments of the tiers.
    """

    weight: Tensor | None
    are_to_draw: bool
    tiers: TierArguments


def allocate_rows(
    shape: tuple[int, int],
    weight: Tensor | None,
    dtype: torch.dtype | None,
    optimizer: RowOptimizer | None,
    tiers: TierArguments,
) -> Rows:
    """Allocate a table; arguments as for `HotColdEmbeddingBag`.

    Raises:
        ProfileError: the plan is for other tables.
        ColdTierError: the folder cannot be used, or the disk is full.
        TypeError: the optimizer is not a formula, or the plan no `HotPlan`.
        ValueError: a recsys optimizer does not support the device or dtype of the rows; or `weight`
            has another shape.
    """
    if weight is not None and weight.shape != shape:
        raise ValueError(
            f"_weight must have the shape (num_embeddings, embedding_dim) = {shape}, got "
            f"{tuple(weight.shape)}"
        )
    dtype = dtype or torch.get_default_dtype() if weight is None else weight.dtype
    tiers = tiers.of_table(shape, dtype, optimizer)
    if tiers.files is not None:
        rows = tiers.files.begin_with("weight", weight)
        return Rows(rows, weight is None, tiers)
    if weight is not None or optimizer is None:
        return Rows(weight, False, tiers)
    require_device(
        tiers.device, "leave out optimizer= and use a torch optimizer, which supports any device"
    )
    rows = empty_table(shape, dtype, tiers.device, has_budget=tiers.has_budget)
    return Rows(rows, True, tiers)


class TableModule(AbstractTables):
    """A torch module with one table, `weight`, whose rows a recsys optimizer may update.

    Attributes:
        row_optimizer: `optimizer` as a torch optimizer, with `param_groups`; None without one.
    """

    # torch's classes define these
    weight: Tensor
    mode: str
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    row_optimizer: FusedOptimizer | None
    _group: TableGroup | None = None
    _lookups: Lookups | None = None

    def holders(self) -> list[nn.Module]:
        """The module itself."""
        return [self]

    def attach(self, updater: RowUpdater, places: Places) -> None:
        """Pass gradients to an updater; see `AbstractTables.attach`."""
        super().attach(updater, places)
        [(self._group, number)] = places
        self._lookups = Lookups.one(number, self.weight.shape[1])

    def detach(self) -> None:
        """Leave gradients at `weight`, as torch's module does."""
        super().detach()
        self._group = self._lookups = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; see `AbstractTables`."""
        return super().__getstate__() | {"_group": None, "_lookups": None}

    def _leaf_call(self, *arguments: Any) -> Any:
        """Record this call in what `torch.fx` traces, as of a module of torch; None outside of it.

        Raises:
            TypeError: the module has forward hooks.
        """
        for each in arguments:
            if isinstance(each, Proxy):
                tracer: Any = each.tracer
                if self._forward_hooks or self._forward_pre_hooks:
                    raise TypeError(
                        f"torch.fx: {type(self).__name__} has forward hooks, which would run "
                        "twice, in the traced graph and in the module; remove them, trace, and "
                        "register them again"
                    )
                path = tracer.path_of_module(self)
                return tracer.create_proxy("call_module", path, arguments, {})
        return None

    def prefetch_request(self, *arguments: Any) -> PrefetchRequest | None:
        """What `prefetch` claims; see `AbstractTables.prefetch_request`."""
        group = self._group
        if group is None or group.tiers is None:
            return None
        if not fits_override(type(self), "_request", "prefetch"):
            return None
        return self._request(*arguments)

    @abstractmethod
    def _request(self, *arguments: Any) -> PrefetchRequest:
        """What `prefetch` claims; arguments are those of `forward`."""

    def _bag_lookup(self) -> BagLookup:
        if self._parameters.get("weight") is not self._known_tables[0]:
            self._require_tables()
        assert self._group is not None
        assert self._lookups is not None
        return BagLookup(self, self._group, self._lookups)

    def _calls_and_lookups(self) -> tuple[BagCalls | DeviceCalls, Lookups]:
        """The lookups in single tables, and the one in this table."""
        if self._parameters.get("weight") is not self._known_tables[0]:
            self._require_tables()
        group, updater, lookups = self._group, self._updater, self._lookups
        assert group is not None
        assert updater is not None
        assert lookups is not None
        return group.calls(updater), lookups

    def _optimize(
        self,
        optimizer: RowOptimizer,
        *,
        auto_apply: bool,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
    ) -> RowUpdater:
        """Make an updater with this formula, and attach it."""
        require_supported(self)
        table = cast("nn.Parameter", self.weight)
        group = TableGroup([table], [self.sparse])
        if not table.is_meta:
            group.space()  # raises if kernels do not support the rows
        self.row_optimizer, updater = FusedOptimizer.with_updater(
            {"weight": (table, "")},
            [group],
            optimizer,
            auto_apply=auto_apply,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
        )
        self.attach(updater, [(group, 0)])
        return updater

    def _optimize_pretrained(
        self,
        optimizer: RowOptimizer | None,
        *,
        freeze: bool,
        auto_apply: bool,
        stochastic_rounding: bool,
        rounding_seed: int,
    ) -> None:
        """The rest of `from_pretrained`."""
        if optimizer is None:
            return
        if freeze:
            warnings.warn(
                "from_pretrained freezes the rows by default: the optimizer updates none of them "
                "until weight.requires_grad is set; pass freeze=False",
                stacklevel=3,
            )
        self._optimize(
            optimizer,
            auto_apply=auto_apply,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
        )

    def _take_over(
        self, module: nn.Module, optimizer: RowOptimizer | None, *, auto_apply: bool
    ) -> None:
        """The rest of `from_torch`: attach `optimizer`, or that of the table's marks."""
        weight = cast("nn.Parameter", self.weight)
        marks = read_marks([("weight", weight)], optimizer)
        formula = optimizer if marks is None else marks.formula
        if formula is not None:
            self._optimize(formula, auto_apply=auto_apply)
        if marks is not None:
            assert self.row_optimizer is not None
            marks.give_state(self.row_optimizer)
            marks.remove_hooks()
        self.train(module.training)
