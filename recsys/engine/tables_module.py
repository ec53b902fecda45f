"""What modules with tables have in common: groups of tables, an optimizer, fast memory, nodes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakMethod

import torch
from torch import nn

from recsys._support.memory import empty_rows
from recsys._support.sizes import parse_bytes
from recsys.embeddings.optimizer import require_formula
from recsys.engine.lookup.lookup import Nodes
from recsys.engine.rows.bags import Lookups
from recsys.engine.rows.grads import bind_table
from recsys.engine.rows.tables import TableGroup
from recsys.engine.tiers.budget import give_slots
from recsys.engine.tiers.file_store import ColdFiles
from recsys.engine.update.fused_optimizer import FusedOptimizer
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.engine.tiers.fetch import Claim

__all__ = ["Place", "TableModule", "TableSettings", "group_tables"]


class Place(NamedTuple):
    """A table's group, and its number there."""

    group: TableGroup
    number: int


class TableSettings(NamedTuple):
    """The settings of a module that torch's does not have; see `HotColdEmbeddingBag`."""

    optimizer: RowOptimizer | None
    auto_apply: bool
    stochastic_rounding: bool
    rounding_seed: int
    budget: int | str | None
    cold_tier: str
    cold_path: Path | str | None

    def require(self) -> None:
        """Check that the settings fit together.

        Raises:
            ConfigError: they contradict each other.
            TypeError: the optimizer is not a formula.
            ValueError: there is a budget and no optimizer.
        """
        require_formula(self.optimizer)
        if self.cold_tier not in ("host", "file"):
            raise ConfigError(f"cold_tier must be 'host' or 'file', got {self.cold_tier!r}")
        if (self.cold_tier == "file") != (self.cold_path is not None):
            raise ConfigError(
                f"cold_path is the folder of cold_tier='file', got {self.cold_path!r} and "
                f"cold_tier={self.cold_tier!r}; give both or none"
            )
        if self.cold_tier == "file" and self.budget is None:
            raise ConfigError("cold_tier='file' needs budget=, the fast memory for rows in use")
        if self.budget is not None and self.optimizer is None:
            raise ValueError("budget= needs optimizer=, which updates rows wherever they are")

    def allocate(
        self, shape: tuple[int, int], weight: Tensor | None, dtype: torch.dtype | None
    ) -> tuple[Tensor | None, ColdFiles | None]:
        """Memory for a table, undefined unless `weight` is given; None for torch to allocate it.

        Raises:
            ColdTierError: the folder cannot be used, or the disk is full.
        """
        self.require()
        if self.optimizer is None:
            return weight, None
        dtype = dtype or torch.get_default_dtype() if weight is None else weight.dtype
        if self.cold_path is None:
            return empty_rows(*shape, dtype=dtype) if weight is None else weight, None
        files = ColdFiles(self.cold_path)
        made = files.make("weight", shape, dtype)
        return made if weight is None else made.copy_(weight), files


def group_tables(tables: Mapping[str, tuple[nn.Parameter, bool]]) -> list[Place]:
    """Group tables by dim and dtype, and let their `grad` be that of the ledger.

    Args:
        tables: By name: the table, and whether torch would make a sparse gradient. A Parameter that
            is several tables is in its group once, under its first name.

    Returns:
        The place of each table.

    Raises:
        ValueError: a table is not float32, float64 or bfloat16 on the CPU, or not contiguous.
    """
    kinds: dict[tuple[int, torch.dtype], dict[nn.Parameter, str]] = {}
    for name, (table, _) in tables.items():
        kinds.setdefault((table.shape[1], table.dtype), {}).setdefault(table, name)
    places: dict[nn.Parameter, Place] = {}
    for members in kinds.values():
        group = TableGroup(list(members.values()), list(members))
        places |= {table: Place(group, number) for number, table in enumerate(members)}
    for table, is_sparse in reversed(list(tables.values())):
        bind_table(*places[table], is_sparse=is_sparse)
    return [places[table] for table, _ in tables.values()]


class TableModule(nn.Module):
    """A module of torch with one table, `weight`, whose rows a recsys optimizer may update.

    Attributes:
        row_optimizer: The formula as a torch optimizer, with `param_groups`; None without one.
    """

    weight: Tensor
    mode: str
    sparse: bool
    row_optimizer: FusedOptimizer | None = None
    _parts: Sequence[tuple[TableGroup, Lookups]] = ()
    _nodes: Nodes | None = None

    def attach(self, place: Place, nodes: Nodes) -> None:
        """Pass gradients to an optimizer of recsys instead of torch.

        Args:
            place: Of the table.
            nodes: Shared by all modules with tables in the group.
        """
        lookups = Lookups([(place.number, 0, 0)], is_mean=self.mode == "mean")
        self._parts, self._nodes = [(place.group, lookups)], nodes

    def detach(self) -> None:
        """Leave gradients at `weight`, as torch's module does."""
        self._parts, self._nodes = (), None

    def _optimize(self, settings: TableSettings, files: ColdFiles | None) -> None:
        """Let the formula of the settings update the rows."""
        formula = settings.optimizer
        if formula is None:
            return
        _require_supported(self)
        table = cast("nn.Parameter", self.weight)
        [place] = group_tables({"weight": (table, self.sparse)})
        place.group.files = files
        self.row_optimizer = FusedOptimizer(
            {"weight": (table, "")},
            [place.group],
            formula,
            stochastic_rounding=settings.stochastic_rounding,
            rounding_seed=settings.rounding_seed,
        )
        if settings.budget is not None:
            give_slots([place.group], formula, parse_bytes(settings.budget, "budget"))
        # Weak, because the node's hook must not keep the optimizer of a deleted module.
        step = WeakMethod(self.row_optimizer.step) if settings.auto_apply else None
        self.attach(place, Nodes(None if step is None else partial(_call, step)))

    def _optimize_pretrained(self, settings: TableSettings, *, freeze: bool) -> None:
        """The rest of `from_pretrained`."""
        if settings.optimizer is not None and freeze:
            warnings.warn(
                "from_pretrained freezes the rows by default: the optimizer updates none of them "
                "until weight.requires_grad is set; pass freeze=False",
                stacklevel=3,
            )
        self._optimize(settings, None)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: plain tables with all rows, without an optimizer of recsys."""
        return self.__dict__ | {"_parts": (), "_nodes": None, "row_optimizer": None}

    def _dtype(self) -> torch.dtype:
        """Of the rows, which `module.double()` may have converted; those with slots are fixed.

        Raises:
            ValueError: the Parameter was replaced.
        """
        [(group, lookups)] = self._parts
        table = group.tables[lookups.tables[0]]
        if self._parameters["weight"] is not table:
            raise ValueError(
                f"table {group.names[lookups.tables[0]]!r}: its Parameter was replaced, and the "
                "tables of a module are fixed while a recsys optimizer updates them; copy values "
                "into it instead (weight.data.copy_, load_state_dict without assign=True)"
            )
        return table.dtype if group.fetcher is None else group.dtype

    def _claim_ahead(self, bags: Any) -> Claim | None:
        """Fetch the rows of a later lookup; None without slots, or if slots are short."""
        [(group, lookups)] = self._parts
        if group.fetcher is None:
            return None
        return cast("Claim | None", group.fetcher.claim_ahead(lookups, bags))


def _call(method: WeakMethod[Any]) -> None:
    found = method()
    if found is not None:
        found()


def _require_supported(module: Any) -> None:
    """Check that a formula can update the rows of a module.

    Raises:
        ValueError: it has a setting that only torch supports.
    """
    if module.mode not in ("sum", "mean"):
        raise ValueError(f"optimizer= supports mode 'sum' and 'mean', got {module.mode!r}")
    for name in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, name):
            raise ValueError(
                f"optimizer= does not support {name}={getattr(module, name)}; leave one of them out"
            )
