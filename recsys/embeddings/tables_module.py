"""What modules with tables have in common: groups of tables, an optimizer, fast memory, nodes."""

from __future__ import annotations

import warnings
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from recsys._support.cuda.own_pages import empty_in_own_pages, pages_of
from recsys._support.memory import empty_rows
from recsys._support.sizes import parse_bytes
from recsys._support.torch_compat import outside_graphs
from recsys.embeddings.lookup.lookup import Nodes
from recsys.embeddings.optimizer import require_formula
from recsys.embeddings.popularity.plan import require_plan
from recsys.embeddings.rows.bags import Lookups
from recsys.embeddings.rows.grads import bind_table, require_no_optimizer
from recsys.embeddings.rows.tables import TableGroup
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tiers import COLD_TIERS
from recsys.embeddings.tiers.budget import give_slots
from recsys.embeddings.tiers.fetch import HitRates, claim_together
from recsys.embeddings.tiers.file_store import ColdFiles
from recsys.embeddings.tiers.write_back import write_back
from recsys.embeddings.update.apply_in_backward import read_marks
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.rows.bags import Bags
    from recsys.embeddings.tiers.fetch import Claims
    from recsys.embeddings.update.update_rows import TableUpdate

__all__ = [
    "Member",
    "OneTable",
    "Table",
    "TableModule",
    "TableSettings",
    "check_input",
    "device_of",
    "group_tables",
    "groups_of",
    "require_supported",
    "table_modules_in",
]

_WEIGHT = repeat("weight")


class Table(NamedTuple):
    """A table of a module.

    Attributes:
        name: For errors.
        key: Of its rows in the module's `state_dict`.
        state_prefix: Of the names of its optimizer state, as in TorchRec.
        holder: The module with the `weight`.
        is_sparse: Whether torch would make a sparse gradient.
        collection: In a model: the name of its collection; "" for a bag.
        planned_as: In a model: its name in profiles and plans.
        features: In a model: names of its features in a profile.
    """

    name: str
    key: str
    state_prefix: str
    holder: nn.Module
    is_sparse: bool
    collection: str = ""
    planned_as: str = ""
    features: tuple[str, ...] = ()

    @property
    def weight(self) -> nn.Parameter:
        """The rows, (E, D)."""
        return cast("nn.Parameter", self.holder.weight)


class Member(NamedTuple):
    """A table's group, and its number there."""

    group: TableGroup
    number: int


class TableSettings(NamedTuple):
    """The settings of a module that torch's does not have; see `HotColdEmbeddingBag`."""

    optimizer: RowOptimizer | None
    auto_apply: bool = True
    stochastic_rounding: bool = True
    rounding_seed: int = 0
    budget: int | str | None = None
    cold_tier: str = "host"
    cold_path: Path | str | None = None
    plan: HotPlan | None = None

    @property
    def _has_budget(self) -> bool:
        return self.budget is not None or self.plan is not None

    def _keeps_on_host(self, device: torch.device | None) -> bool:
        """Whether a device reaches the tables in host memory."""
        return self._has_budget and device is not None and device.type == "cuda"

    def require(self, device: torch.device | str | None = None) -> None:
        """Check that the settings fit together.

        Args:
            device: Where kernels run.

        Raises:
            ConfigError: they contradict each other, or files are to be on a device.
            TypeError: the optimizer is not a formula, or the plan no `HotPlan`.
            ValueError: there is a budget and no optimizer.
        """
        require_formula(self.optimizer)
        require_plan(self.plan)
        if self.cold_tier not in COLD_TIERS:
            raise ConfigError(f"cold_tier must be one of {COLD_TIERS}, got {self.cold_tier!r}")
        if (self.cold_tier == "file") != (self.cold_path is not None):
            raise ConfigError(
                f"cold_path is the folder of cold_tier='file', got {self.cold_path!r} and "
                f"cold_tier={self.cold_tier!r}; give both or none"
            )
        has_budget = self._has_budget
        if self.cold_tier == "file" and not has_budget:
            raise ConfigError("cold_tier='file' needs budget=, the fast memory for rows in use")
        if has_budget and self.optimizer is None:
            raise ValueError(
                "budget= (or plan=) needs optimizer=, which updates rows wherever they are"
            )
        if self.cold_tier == "file" and device is not None and torch.device(device).type != "cpu":
            raise ConfigError(
                f"cold_tier='file' is for tables whose fast memory is that of the CPU, got "
                f"device={str(device)!r}; use cold_tier='host', or leave device= out"
            )

    def give_slots(
        self, tables: Sequence[Table], groups: Sequence[TableGroup], formula: RowOptimizer
    ) -> None:
        """Divide the budget, if there is one, among groups of tables.

        Raises:
            BudgetTooSmall: it has no room for the row maps and a slot of each group.
            ConfigError: it cannot be read.
            ProfileError: the plan is for other tables.
        """
        budget: Any = self.budget
        pinned = None
        if self.plan is not None:
            # A plan for a module with one table may have any name for it.
            names = [*self.plan.tables] if tables[0].key == "weight" else [t.name for t in tables]
            known = [
                TableConfig(name=name, num_embeddings=shape[0], embedding_dim=shape[1])
                for name, table in zip(names, tables, strict=False)
                for shape in [table.weight.shape]
            ]
            plan = self.plan.of_tables(known, budget)
            of_tables = zip(tables, plan.pinned_by_table(), strict=True)
            budget, pinned = plan.budget_bytes, {table.name: rows for table, rows in of_tables}
        if budget is not None:
            give_slots(groups, formula, parse_bytes(budget, "budget"), pinned)

    def allocate(
        self,
        tables: Mapping[str, tuple[tuple[int, int], torch.dtype]],
        device: torch.device | str | None,
    ) -> tuple[list[Tensor], ColdFiles | None]:
        """Memory for tables, undefined.

        Args:
            tables: Shape and dtype by name.
            device: Of the rows.

        Returns:
            The rows of each table, and the files that they are in; None in memory.

        Raises:
            ColdTierError: the folder cannot be used, or the disk is full.
            ConfigError: the settings contradict each other, or files are to be on a device.
        """
        self.require(device)
        target_device = None if device is None else torch.device(device)
        if self.cold_path is not None:
            files = ColdFiles(self.cold_path)
            return [files.make(name, *kind) for name, kind in tables.items()], files
        if self._keeps_on_host(target_device):
            return [empty_in_own_pages(*kind, target_device) for kind in tables.values()], None
        return [
            empty_rows(*shape, dtype=dtype, device=target_device)
            for shape, dtype in tables.values()
        ], None

    def allocate_one(
        self,
        shape: tuple[int, int],
        weight: Tensor | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> tuple[Tensor | None, ColdFiles | None]:
        """Memory for one table, undefined unless `weight` is given; None for torch to make it."""
        self.require()
        device = device if weight is None else weight.device
        target_device = None if device is None else torch.device(device)
        is_moved = self.cold_path is not None or self._keeps_on_host(target_device)
        if self.optimizer is None or (weight is not None and not is_moved):
            return weight, None
        dtype = dtype or torch.get_default_dtype() if weight is None else weight.dtype
        [made], files = self.allocate({"weight": (shape, dtype)}, target_device)
        return made if weight is None else made.copy_(weight), files


def group_tables(
    tables: Sequence[Table],
    numbers: Mapping[nn.Parameter, int] | None = None,
    *,
    are_bound: bool = True,
) -> list[Member]:
    """Group tables by dim, dtype and param group.

    Args:
        tables: A Parameter that is several tables is in its group once, under its first name.
        numbers: Of their param groups; None for one.
        are_bound: Whether a recsys optimizer updates them, so that their `grad` is the ledger's.

    Returns:
        The group of each table, and its number there.

    Raises:
        ValueError: a table is not float32, float64 or bfloat16 on the CPU or CUDA, or not
            contiguous; or
            another recsys optimizer updates it.
    """
    kinds: dict[tuple[Any, ...], dict[nn.Parameter, str]] = {}
    for table in tables:
        if are_bound:
            require_no_optimizer(table.name, table.weight)
        kind = *_kind_of(table.weight), (numbers or {}).get(table.weight, 0)
        kinds.setdefault(kind, {}).setdefault(table.weight, table.name)
    members: dict[nn.Parameter, Member] = {}
    for names in kinds.values():
        group = _make_group(list(names.values()), list(names))
        members |= {table: Member(group, number) for number, table in enumerate(names)}
    sparse: dict[nn.Parameter, bool] = {}  # the sum of a sparse and a dense gradient is dense
    for table in tables:
        sparse[table.weight] = sparse.get(table.weight, True) and table.is_sparse
    for weight, member in members.items() if are_bound else ():
        bind_table(*member, is_sparse=sparse[weight])
    return [members[table.weight] for table in tables]


def _kind_of(table: nn.Parameter) -> tuple[int, torch.dtype, torch.device]:
    """What tables of one group have in common: dim, dtype, and where kernels run."""
    device = table.device
    pages = pages_of(table) if device.type == "cpu" else None
    # In pages of its own, it is as `TableSettings.allocate` makes it.
    device = device if pages is None else pages.memory.device or torch.device("cuda")
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    return table.shape[1], table.dtype, device


def _make_group(names: Sequence[str], tables: Sequence[nn.Parameter]) -> TableGroup:
    *_, device = _kind_of(tables[0])
    if device.type != "cuda":
        return TableGroup(names, tables)
    try:
        from recsys.embeddings.rows.device_tables import DeviceGroup
    except ImportError as error:
        raise MissingDependency(
            "tables on a CUDA device need triton, which comes with PyTorch for CUDA; install it "
            "with: pip install triton"
        ) from error
    return DeviceGroup(names, tables, device)


class TableModule(nn.Module):
    """A module with tables whose rows a recsys optimizer may update.

    Attributes:
        row_optimizer: The formula as a torch optimizer, with `param_groups`; None without one.
    """

    row_optimizer: FusedOptimizer | None = None
    attachment: Any = None  # an `Attachment`; imports point down
    # Of tables on "meta", until they have memory.
    _pending: tuple[TableSettings, ColdFiles | None] | None = None
    _members: Sequence[Member] = ()
    _parts: Sequence[Part] = ()  # what is looked up
    _nodes: Nodes | None = None
    _known: Sequence[nn.Parameter] = ()
    _parameters_of_tables: Sequence[dict[str, Any]] = ()

    def tables(self) -> list[Table]:
        """Its tables, in order."""
        raise NotImplementedError

    def table_weights(self) -> list[nn.Parameter]:
        """The rows of every table, (E, D), in order."""
        return [table.weight for table in self.tables()]

    def lookups(self, *arguments: Any) -> list[tuple[Part, Bags]]:
        """What `forward` of the same arguments looks up.

        Args:
            arguments: Those of `forward`.
        """
        raise NotImplementedError

    @outside_graphs
    def prefetch(self, *arguments: Any) -> Claims:
        """Fetch the rows of a later lookup in the background, as many as slots suffice for.

        Any later `forward` stays correct. Arguments are those of `forward`, which refuses an id
        that is no row.

        Args:
            arguments: Those of `forward`.

        Returns:
            For `TrainPipeline`; it need not be kept. Empty without slots.
        """
        return claim_together(self.lookups(*arguments)) if self._try_begin() else []

    def attach(self, members: Sequence[Member], nodes: Nodes) -> None:
        """Pass gradients to an optimizer of recsys instead of torch.

        Args:
            members: Of its tables.
            nodes: Shared by all modules with tables of the same optimizer.
        """
        self._members, self._nodes = members, nodes
        self._lay_out()

    def detach(self) -> None:
        """Leave gradients to torch, as the replaced module does."""
        self._members, self._parts, self._known, self._nodes = (), (), (), None

    def groups(self) -> list[TableGroup]:
        """The groups of its tables, each once."""
        self._try_begin()
        return list(dict.fromkeys(member.group for member in self._members))

    @property
    def device(self) -> torch.device:
        """Device of ids and results."""
        return (
            self._members[0].group.device if self._try_begin() else self.tables()[0].weight.device
        )

    def updates(self) -> Sequence[TableUpdate]:
        """What updates its rows, and those of other modules with the same optimizer."""
        self._try_begin()
        updater = self.row_optimizer or self.attachment
        return () if updater is None else updater.updates

    @property
    def nodes(self) -> Nodes | None:
        """Makes the autograd nodes of its lookups; None if gradients are left to torch."""
        return self._nodes

    @property
    def hit_rates(self) -> HitRates | None:
        """How often rows of the optimizer's tables were in fast memory; None without slots."""
        groups = [update.group for update in self.updates()]
        fetchers = [group.fetcher for group in groups if group.fetcher is not None]
        return HitRates.of(fetchers) if fetchers else None

    def members(self) -> list[Member]:
        """The group and number of each table; none if gradients are left to torch."""
        return list(self._members) if self._try_begin() else []

    def sync(self) -> None:
        """Write the newest rows and state to the tables; `state_dict` does, too.

        Raises:
            ConflictingWrite: a table was written to while slots had newer rows.
        """
        for group in self.groups():
            write_back(group)

    def check_input(self) -> None:
        """On a device, wait for all lookups, and raise the error of one of them, if there is one.

        Raises:
            IdOutOfRange: an id was not a row of its table.
            MalformedBags: offsets or weights did not form bags.
        """
        for group in self.groups():
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)
            group.notice_moved_tables()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: plain tables with all rows, without an optimizer of recsys."""
        if self.attachment is not None:
            self.attachment.warn_of_copy()
        state = {"_members": (), "_parts": (), "_nodes": None, "row_optimizer": None}
        state |= {"attachment": None, "_pending": None}
        return self.__dict__ | state | {"_known": (), "_parameters_of_tables": ()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert Parameters; tables that a device reaches in host memory stay there."""
        left = {
            id(table)
            for group in {member.group for member in self._members}
            if group.fetcher is not None and group.is_on_device
            for shown in [fn(torch.empty(0, dtype=group.dtype))]  # what it does to a table
            if (shown.device.type, shown.dtype) == (group.device.type, group.dtype)
            for table in group.tables
        }
        return super()._apply(lambda tensor: tensor if id(tensor) in left else fn(tensor), recurse)  # type: ignore[no-any-return,no-untyped-call]

    def _optimize(self, settings: TableSettings, files: ColdFiles | None) -> None:
        """Let the formula of the settings update the rows, once they have memory."""
        if settings.optimizer is None:
            return
        self.row_optimizer = FusedOptimizer(
            {table.key: (table.weight, table.state_prefix) for table in self._tables_once()},
            [],
            settings.optimizer,
            stochastic_rounding=settings.stochastic_rounding,
            rounding_seed=settings.rounding_seed,
        )
        self.row_optimizer.steps_in_backward = settings.auto_apply
        self._pending = settings, files
        self._try_begin()

    def _begin(self, settings: TableSettings, files: ColdFiles | None) -> None:
        formula, tables, optimizer = settings.optimizer, self.tables(), self.row_optimizer
        assert formula is not None
        assert optimizer is not None
        members = group_tables(tables)
        groups = list(dict.fromkeys(member.group for member in members))
        for group in groups:
            group.files = files
        settings.give_slots(tables, groups, formula)
        optimizer.begin([table.weight for table in self._tables_once()], groups)
        self.attach(members, Nodes(optimizer if settings.auto_apply else None))

    def _tables_once(self) -> list[Table]:
        """Each Parameter once, under the first of its names."""
        named = {table.weight: table for table in reversed(self.tables())}
        return [*named.values()][::-1]

    def _try_begin(self, *, is_needed: bool = False) -> bool:
        """Whether rows are updated by recsys; from now on, if tables had no memory before.

        Args:
            is_needed: Whether tables that still have none are an error.
        """
        pending = self._pending
        if pending and (is_needed or not any(table.weight.is_meta for table in self.tables())):
            self._begin(*pending)
            self._pending = None
        return self._nodes is not None

    def _take_over(
        self, module: nn.Module, optimizer: RowOptimizer | None, *, auto_apply: bool
    ) -> Self:
        """Update rows by `optimizer`, or by that of `apply_optimizer_in_backward`, if any.

        Args:
            module: The module that this one was made of.
            optimizer: The formula.
            auto_apply: As for the class.
        """
        marks = read_marks([(table.name, table.weight) for table in self.tables()], optimizer)
        formula = optimizer if marks is None else marks.formula
        self._optimize(TableSettings(formula, auto_apply), None)
        if marks is not None:
            assert self.row_optimizer is not None
            marks.give_state(self.row_optimizer)
            marks.remove_hooks()
        return self.train(module.training)

    def _lay_out(self) -> None:
        """Note which Parameters the tables are now."""
        self._known = [member.group.tables[member.number] for member in self._members]
        # Every lookup compares all tables; reading modules' attributes takes ten times as long.
        self._parameters_of_tables = [table.holder._parameters for table in self.tables()]

    def _require_tables(self) -> None:
        """Notice that a Parameter was replaced.

        Raises:
            ValueError: a recsys optimizer updates its rows.
        """
        if self._pending is not None:
            self._try_begin(is_needed=True)
        are_known = map(is_, map(dict.get, self._parameters_of_tables, _WEIGHT), self._known)
        if (
            self._known
            and all(are_known)
            and (
                self._nodes is not None
                or _kind_of(self._known[0])[2] == self._members[0].group.device
            )
        ):
            return
        if self._nodes is None:
            self._members = group_tables(self.tables(), are_bound=False)
            self._lay_out()
            return
        for table, known, member in zip(self.tables(), self._known, self._members, strict=True):
            if table.holder._parameters["weight"] is not known:
                raise ValueError(
                    f"table {member.group.names[member.number]!r}: its Parameter was replaced, and "
                    "the tables of a module are fixed while a recsys optimizer updates them; copy "
                    "values into it instead (weight.data.copy_, load_state_dict without "
                    "assign=True), or call recsys.restore first"
                )


class OneTable(TableModule):
    """A module of torch with one table, `weight`."""

    weight: Tensor
    mode: str
    sparse: bool

    def tables(self) -> list[Table]:
        """Its table."""
        return [Table("weight", "weight", "", self, self.sparse)]

    def _lay_out(self) -> None:
        super()._lay_out()
        [member] = self._members
        lookups = Lookups([(member.number, 0, 0)], is_mean=self.mode == "mean")
        self._parts = [(member.group, lookups)]

    def _dtype(self) -> torch.dtype:
        """Of the rows, which `module.double()` may have converted; those with slots are fixed.

        Raises:
            ValueError: the Parameter was replaced.
        """
        [table] = self._known
        if self._parameters["weight"] is not table:
            self._require_tables()
        group = self._parts[0][0]
        return table.dtype if group.fetcher is None else group.dtype

    def _optimize(self, settings: TableSettings, files: ColdFiles | None) -> None:
        if settings.optimizer is not None:
            require_supported(self)
        super()._optimize(settings, files)

    def _optimize_pretrained(self, settings: TableSettings, *, freeze: bool) -> None:
        """The rest of `from_pretrained`."""
        if settings.optimizer is not None and freeze:
            warnings.warn(
                "from_pretrained freezes the rows by default: the optimizer updates none of them "
                "until weight.requires_grad is set; pass freeze=False",
                stacklevel=3,
            )
        self._optimize(settings, None)


def require_supported(module: Any) -> None:
    """Check that a formula can update the rows of a module.

    Raises:
        ValueError: it has a setting that only torch supports.
    """
    mode = getattr(module, "mode", "sum")
    if mode not in ("sum", "mean"):
        raise ValueError(f"optimizer= supports mode 'sum' and 'mean', got {mode!r}")
    for name in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, name):
            raise ValueError(
                f"optimizer= does not support {name}={getattr(module, name)}; leave one of them out"
            )


def table_modules_in(model: nn.Module) -> dict[str, TableModule]:
    """The modules of recsys in a model, by name, but those that are parts of another one."""
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, TableModule)
    }
    parts = {part for module in found.values() for part in module.modules() if part is not module}
    return {name: module for name, module in found.items() if module not in parts}


def groups_of(model: nn.Module) -> list[TableGroup]:
    """The groups of tables that recsys updates in a model, each once."""
    modules = table_modules_in(model).values()
    return list(dict.fromkeys(group for module in modules for group in module.groups()))


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes. Its first parameter may be a table in the host's memory."""
    for group in groups_of(model):
        if group.fetcher is not None:
            return group.device
    return next(model.parameters()).device


def check_input(model: nn.Module) -> None:
    """Wait for all lookups on a device, and raise the error of one of them, if there is one."""
    for module in table_modules_in(model).values():
        module.check_input()
