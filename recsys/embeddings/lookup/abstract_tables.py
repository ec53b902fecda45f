"""Base class of the modules with tables, and what finds such modules in a model."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from recsys._support.sizes import format_bytes
from recsys._support.torch_compat import plain_grad
from recsys.embeddings.rows.table_parameter import make_plain
from recsys.embeddings.tiers.counts import HitRates
from recsys.embeddings.update.fused_optimizer import FusedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.embeddings.lookup.fused_lookup import Part
    from recsys.embeddings.lookup.prefetch_requests import PrefetchRequest
    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.tiers.ahead import Prefetched
    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.embeddings.update.row_updater import Places, RowUpdater

__all__ = ["AbstractTables", "check_input", "device_of", "table_modules_in", "tiers_of"]


class AbstractTables(nn.Module, ABC):
    """A module with tables that recsys kernels work on.

    Attributes:
        _updater: Updates the rows; None if a torch optimizer gets the gradients.
        _places: For each table: its group, and its number in the group.
        _known_tables: The Parameters that the updater has; they must not be replaced.
    """

    _updater: RowUpdater | None = None
    _places: Places = ()
    _known_tables: Sequence[nn.Parameter] = ()

    @property
    def row_updater(self) -> RowUpdater | None:
        """Updates the rows; None if a torch optimizer gets the gradients."""
        return self._updater

    def tiers(self) -> list[Tiers]:
        """The tiers of its tables; empty if all rows are resident."""
        updater = self.row_updater
        return [] if updater is None else updater.tiers()

    @property
    def hit_rates(self) -> HitRates | None:
        """How often rows were in fast memory; None if all rows are resident.

        In an accelerated model, that of all tables of the same optimizer.
        """
        tiers = self.tiers()
        return HitRates.of(each.residency.counts for each in tiers) if tiers else None

    def extra_repr(self) -> str:
        """For `repr`: with a budget, also the budget and the optimizer of the rows.

        Modules of an accelerated model share a budget.
        """
        own, updater = super().extra_repr(), self._updater
        if updater is None or not updater.budget_bytes:
            return own
        rule: object = type(updater.optimizer).__name__
        if isinstance(updater.optimizer, FusedOptimizer):
            rule = updater.optimizer.formula
        num_tables = sum(len(each.group.tables) for each in updater.groups)
        shared = " for all tables" if num_tables > len(self._known_tables) else ""
        return f"{own}, budget={format_bytes(updater.budget_bytes)!r}{shared}, optimizer={rule}"

    @abstractmethod
    def holders(self) -> list[nn.Module]:
        """The modules whose `weight`s are the tables."""

    def attach(self, updater: RowUpdater, places: Places) -> None:
        """Pass gradients to an updater instead of torch.

        Args:
            updater: Updates the rows.
            places: For each table: its group, and its number in the group.
        """
        self._updater, self._places = updater, places
        self._known_tables = [group.tables[number] for group, number in places]

    @abstractmethod
    def prefetch(self, *arguments: Any) -> Prefetched:
        """Start to fetch the rows for `forward` of the same arguments.

        Args:
            arguments: Those of `forward`.

        Returns:
            The claim on slots; it need not be kept.
        """

    def prefetch_request(self, *arguments: Any) -> PrefetchRequest | None:
        """What `prefetch` claims, for `prefetch_together`; None to call `prefetch`.

        Args:
            arguments: Those of `forward`.
        """
        return None

    @abstractmethod
    def parts(self, *arguments: Any) -> list[Part]:
        """What `forward` of the same arguments looks up, with one bag for each sample.

        Only for modules whose rows a recsys optimizer updates.

        Args:
            arguments: Those of `forward`.
        """

    def detach(self) -> None:
        """Leave gradients to torch, as the replaced module does."""
        self._updater, self._places, self._known_tables = None, (), ()

    def _table_groups(self) -> list[TableGroup]:
        """The groups of its tables, each once."""
        return list(dict.fromkeys(group for group, _ in self._places))

    def _require_tables(self) -> None:
        """Check that no Parameter was replaced while an updater has the tables.

        A table on the "meta" device may be replaced by one with memory.

        Raises:
            TypeError: `torch.export` is tracing the module; it replaces Parameters by its own.
            ValueError: a Parameter was replaced.
        """
        updater = self._updater
        assert updater is not None
        for holder, (group, number) in zip(self.holders(), self._places, strict=True):
            table, known = holder._parameters.get("weight"), group.tables[number]
            if table is known:
                continue
            if known.is_meta and isinstance(table, nn.Parameter):
                updater.give_memory(group, number, table)
                continue
            if torch.compiler.is_exporting():
                raise TypeError(
                    f"torch.export cannot trace {type(self).__name__} while a recsys optimizer "
                    "updates its tables; call recsys.restore on an accelerated model first, or "
                    "load its state_dict into the module of torch or TorchRec"
                )
            raise ValueError(
                f"table {group.names[number]!r}: its Parameter was replaced, and the tables of a "
                "module are fixed while a recsys optimizer updates them; call "
                "recsys.restore(model) first, then replace the Parameter and accelerate again "
                "(copy values in place to keep the Parameter: weight.data.copy_, load_state_dict "
                "without assign=True; leave tables out of what torch.func.functional_call replaces)"
            )
        self._known_tables = [group.tables[number] for group, number in self._places]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: plain tables with all rows, without an optimizer of recsys."""
        updater = self._updater
        if updater is not None and updater.rule:
            warnings.warn(
                f"a copy of {type(self).__name__} has plain tables, which a copy of the optimizer "
                "updates by its own rule, every row in each step; for the rule of the original "
                "call recsys.restore(copy) and recsys.accelerate(copy, ...)",
                stacklevel=2,
            )
        state = self.__dict__ | {"_updater": None, "_places": (), "_known_tables": ()}
        if "row_optimizer" in state:
            state["row_optimizer"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the tables of a copy plain Parameters."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for holder in self.holders():
            make_plain(cast("nn.Parameter", holder.weight))
        self.detach()

    def check_input(self) -> None:
        """Wait for the device, and raise the first error in the input of earlier lookups.

        On CUDA a lookup does not wait for the check of its ids: invalid ids raise on a later lookup
        or update, and no row is updated meanwhile. On the CPU the lookup itself raises.

        Raises:
            IdOutOfRange: an id was not a row of its table.
            MalformedBags: offsets did not make bags.
            ValueError: a weight was nan.
        """
        for group in self._table_groups():
            if group.kernels.errors is not None:
                group.kernels.errors.check()

    def sync(self) -> None:
        """Write updated rows and state back to the tables.

        In an accelerated model this writes all tables of the same optimizer, not only this
        module's.

        Raises:
            ConflictingWrite: tables or their state were written to while slots held updated rows.
            TiersFailed: a transfer has failed.
        """
        if self.row_updater is not None:
            self.row_updater.flush()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`. Updated rows are written back first; they stay in fast memory.

        Args:
            args: As in `nn.Module`.
            kwargs: As in `nn.Module`.
        """
        with ExitStack() as stack:
            for tiers in self.tiers():
                stack.enter_context(tiers.only_read())
            return super().state_dict(*args, **kwargs)

    def settle(self) -> None:
        """End all pending work of the tiers, for example after an interrupted step.

        Cancels prefetches, waits for transfers, releases slots, and drops gradients that no update
        has used. Without tiers it does nothing.
        """
        for group in self._table_groups():
            if group.tiers is not None:
                group.forget()
                group.tiers.settle()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert the module for `.to()`, `.cuda()`, `.half()` and others.

        Ledgers become the tables' `grad`. The next step converts the optimizer's state. With tiers
        only the slots move to the device; the cold store stays where it is.

        Raises:
            ValueError: with tiers, slots are in use, or `fn` changes the dtype.
        """
        groups = self._table_groups()
        for group in groups:
            group.ledger_to_grads()
        if any(group.tiers is not None for group in groups):
            fn = self._move_tiers(fn)
        module: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for group in groups:
            group.forget_space()
        if self.row_updater is None:
            self.detach()  # also finds the new Parameters that `to_empty` makes
        elif any(table.is_meta for table in self._known_tables):
            self._require_tables()
        return module

    def _move_tiers(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Apply `fn` to the slots; the result applies it to everything but the cold store."""
        weights = [table for group in self._table_groups() for table in group.tables]
        for dtype in {weight.dtype for weight in weights}:
            found = fn(torch.empty(0, dtype=dtype))
            if found.device.type not in ("cpu", "cuda") or found.dtype != dtype:
                raise ValueError(
                    f"rows in two tiers must stay {dtype}, on the CPU or on CUDA, and cannot "
                    f"become {found.dtype} on '{found.device}'; call recsys.restore on an "
                    "accelerated model first, or build the module so, or without budget="
                )
        if found.is_cpu and found.is_shared():  # type: ignore[no-untyped-call]
            warnings.warn(
                "share_memory: rows in use are in fast memory of this process alone, and tables "
                "have them only after state_dict() or another read; a process that is forked may "
                "read the tables, but what it trains is lost: leave budget= out to train in "
                "several processes, or use recsys.distributed",
                stacklevel=6,
            )
        updater = self.row_updater
        assert updater is not None
        updater.move_slots(found.device)
        # Gradients stay with their tables; the list keeps ids of these tensors valid.
        staying = [each for weight in weights for each in (weight, plain_grad(weight))]
        numbers = {id(each) for each in staying}

        def move(tensor: Tensor) -> Tensor:
            is_left = found.device.type != "cpu" and id(tensor) in numbers
            return tensor if is_left else fn(tensor)

        return move


def table_modules_in(*models: nn.Module) -> list[tuple[str, AbstractTables]]:
    """The recsys modules of models, with their names, but those that are parts of another one."""
    found = [
        (name, each)
        for model in models
        for name, each in model.named_modules()
        if isinstance(each, AbstractTables)
    ]
    parts = {part for _, each in found for part in each.modules() if part is not each}
    return [(name, each) for name, each in found if each not in parts]


def tiers_of(model: nn.Module) -> list[Tiers]:
    """The tiers of a model's recsys modules, each once; none where every row is resident."""
    modules = [each for each in model.modules() if isinstance(each, AbstractTables)]
    return list(dict.fromkeys(tiers for each in modules for tiers in each.tiers()))


def check_input(model: nn.Module) -> None:
    """Call `AbstractTables.check_input` of every recsys module in a model.

    Raises:
        IdOutOfRange: as that method.
        MalformedBags: as that method.
        ValueError: as that method.
    """
    for module in model.modules():
        if isinstance(module, AbstractTables):
            module.check_input()


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes. Its first parameter may be a table in two tiers, in host memory."""
    for module in model.modules():
        for tiers in module.tiers() if isinstance(module, AbstractTables) else ():
            return tiers.device
    return next(model.parameters()).device
