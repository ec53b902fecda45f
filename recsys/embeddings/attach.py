"""Lets one optimizer update the rows of several modules; changes tables, and gives them back.

A torch optimizer keeps its settings and state, and its `step` updates the rows:

    step -> hook -> closure, update of all groups -> the optimizer's own parameters

All tables of one param group, dim and dtype are a `TableGroup`, across modules. A table that
modules share is in it once.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch

from recsys._support.torch_compat import not_compiled
from recsys._support.user_code import warn_caller
from recsys.embeddings.lookup.lookup import Nodes
from recsys.embeddings.rows.grads import drop_grads, unbind_table, with_dense_grads
from recsys.embeddings.tables_module import group_tables
from recsys.embeddings.tiers.write_back import write_back
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.embeddings.update.update_rows import TableUpdate, update_all
from recsys.errors import ConflictingWrite, TiersFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.tables import TableGroup
    from recsys.embeddings.tables_module import Table, TableModule
    from recsys.embeddings.update.translation import Translation

__all__ = ["Attachment", "numbers_of"]


class Attachment:
    """What updates the rows of several modules, which keep it.

    Args:
        modules: Modules without an optimizer of recsys.
        tables: The tables that are updated, each once, by their names in the model; of a module all
            or none.
        optimizer: Its step updates the rows; or their formula, which updates them at the end of
            each backward.
        rule: How to read a torch optimizer.

    Attributes:
        modules: The modules whose rows it updates.
        groups: The groups of the tables.
        updates: Those of the groups.
        row_optimizer: The formula as a torch optimizer; None with a torch optimizer.

    Raises:
        ValueError: recsys does not support the device or dtype of a table, or already updates it.
    """

    def __init__(
        self,
        modules: Sequence[TableModule],
        tables: Sequence[Table],
        optimizer: torch.optim.Optimizer | RowOptimizer,
        rule: Translation | None = None,
    ) -> None:
        self.groups: list[TableGroup] = []
        self.row_optimizer: FusedOptimizer | None = None
        self.updates: list[TableUpdate] = []
        self._handles: Sequence[RemovableHandle] = ()
        self.modules: WeakSet[TableModule] = WeakSet()
        self._rule, self._is_begun = rule, False
        # Gradients of lookups before this do not say that a loss uses tables in other ways.
        self._had_grads = any(table.weight.grad is not None for table in tables)
        self._known: list[tuple[int, int]] = []  # param groups that have all tables
        is_torch = isinstance(optimizer, torch.optim.Optimizer)
        numbers = numbers_of(optimizer) if is_torch else {}
        self._numbers = {
            table.weight: numbers[table.weight] for table in tables if table.weight in numbers
        }
        found = group_tables(tables, numbers)
        members = {table.weight: member for table, member in zip(tables, found, strict=True)}
        self.groups = list(dict.fromkeys(member.group for member in found))
        if isinstance(optimizer, torch.optim.Optimizer):
            assert rule is not None
            self.updates = [
                TableUpdate(group, optimizer, numbers.get(group.tables[0], 0), rule)
                for group in self.groups
            ]
            self._handles = _add_hooks(optimizer, self)
        else:
            keyed = {table.key: (table.weight, table.state_prefix) for table in tables}
            self.row_optimizer = FusedOptimizer(keyed, self.groups, optimizer)
            self.updates = self.row_optimizer.updates
        nodes = Nodes(self.row_optimizer)
        for module in modules:
            own = [members[table.weight] for table in module.tables() if table.weight in members]
            if own:
                module.attach(own, nodes)
                module.attachment = self
                self.modules.add(module)

    def __del__(self) -> None:
        """The modules were deleted: the optimizer updates their tables by itself from now on."""
        if not sys.is_finalizing():
            with suppress(TiersFailed, ConflictingWrite):  # said where it happened
                self.write_back()

    def warn_of_copy(self) -> None:
        """Say that a copy trains by another rule, if it does."""
        if self._rule is not None and self._rule.rule:
            warn_caller(
                "a copy of an accelerated model has plain tables, which a copied Adam updates row "
                "by row in each step, looked up or not; call recsys.restore on the copy, and "
                "accelerate it with its optimizer and lazy_adam=True"
            )

    def write_back(self) -> None:
        """Write the newest rows and state to the tables and the optimizer's state."""
        for group in self.groups:
            write_back(group)

    def empty_slots(self) -> None:
        """Let the optimizer's state be replaced."""
        for group in self.groups:
            if group.fetcher is not None:
                group.fetcher.empty_slots(is_written_back=True)

    def require_releasable(self) -> None:
        """Write the newest rows to the tables, and check that no gradient or table was changed.

        Raises:
            ConflictingWrite: a table was written to while slots had newer rows.
            RuntimeError: a gradient was overwritten before its rows were updated, or the memory of
                a table replaced.
        """
        self.write_back()
        for group in self.groups:
            group.notice_moved_tables()
            group.ledger.in_order()

    def release(self) -> None:
        """Give the tables back: plain Parameters with all rows, whose `grad` torch fills.

        Raises:
            ConflictingWrite: as for `require_releasable`.
            RuntimeError: as for `require_releasable`.
        """
        self.require_releasable()
        self._give_back(list(self.modules))
        for handle in self._handles:
            handle.remove()

    @not_compiled
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update rows in a step of the torch optimizer.

        Raises:
            NonFiniteGradient: a row has a gradient with nan or inf; all others were updated.
            RuntimeError: GradScaler has left unscaling to the optimizer, which sees no gradients of
                rows; or a gradient was overwritten since its backward.
            ValueError: a table is in no param group any more; or settings or state do not fit.
        """
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "GradScaler leaves unscaling to an optimizer with fused=True, which does not see "
                "the gradients of rows; call scaler.unscale_(optimizer) before the step"
            )
        self._require_param_groups(optimizer)
        if bool(getattr(optimizer, "found_inf", False)):
            for group in self.groups:
                drop_grads(group)
            return
        if not self._is_begun and not self._had_grads:
            self._give_back_dense()
        update_all(self.updates)
        self._is_begun, self._had_grads = not self._had_grads, False

    def _require_param_groups(self, optimizer: torch.optim.Optimizer) -> None:
        now = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        if now == self._known:
            return
        numbers = numbers_of(optimizer)
        for group in self.groups:
            pending = {
                table for entry in group.ledger.entries for table in entry.call.lookups.tables
            }
            for table, name in ((group.tables[index], group.names[index]) for index in pending):
                number, before = numbers.get(table), self._numbers.get(table)
                if number != before:
                    location = "none" if number is None else f"group {number}"
                    raise ValueError(
                        f"table {name!r} of shape {tuple(table.shape)} was in param group "
                        f"{before} of the optimizer, which updates its rows, and is "
                        f"in {location} now; put it back, or call recsys.restore first"
                    )
        if all(numbers.get(table) == number for table, number in self._numbers.items()):
            self._known = now

    def _give_back_dense(self) -> None:
        """Before the first update: give back tables that a loss also uses as a matrix."""
        dense = {
            group.tables[number]: group.names[number]
            for group in self.groups
            if group.fetcher is None
            for number in with_dense_grads(group)
        }
        if not dense or self._rule is None or self._rule.rule:
            return
        known, going = set(dense), []
        left = list(self.modules)
        while found := [
            module for module in left if any(table.weight in known for table in module.tables())
        ]:
            going += found
            left = [module for module in left if module not in going]
            known |= {table.weight for module in found for table in module.tables()}
        self._give_back(going)
        warn_caller(
            f"tables {', '.join(dense.values())} are left to torch, because a loss uses them in "
            "other ways than by lookups (an L2 penalty over all rows?), and torch's step is faster "
            "then; penalize the rows that were looked up instead",
        )

    def _give_back(self, modules: Sequence[TableModule]) -> None:
        given = {table.weight for module in modules for table in module.tables()}
        for group in self.groups:
            for number, table in enumerate(group.tables):
                if table in given:
                    unbind_table(group, number)
        for module in modules:
            module.detach()
            module.attachment = None
            self.modules.discard(module)


def numbers_of(optimizer: Any) -> dict[nn.Parameter, int]:
    """The number of each parameter's param group."""
    return {
        weight: number
        for number, group in enumerate(optimizer.param_groups)
        for weight in group["params"]
    }


def _add_hooks(
    optimizer: torch.optim.Optimizer, attachment: Attachment
) -> Sequence[RemovableHandle]:
    """Update rows in the optimizer's steps, and let it load and save their state.

    Hooks do not keep the attachment, which modules keep. Without them, the optimizer updates their
    tables by itself.
    """
    found = ref(attachment)

    def call(run: Callable[[Attachment], None]) -> None:
        known = found()
        if known is not None:
            run(known)

    def before_step(
        stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Update in the closure, which runs after hooks that may change gradients or settings."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def compute_and_update() -> Any:
            loss = None if closure is None else closure()
            call(lambda known: known.update(stepping))
            return loss

        return args[:1], kwargs | {"closure": compute_and_update}

    return (
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_state_dict_pre_hook(lambda _: call(Attachment.write_back)),
        optimizer.register_load_state_dict_pre_hook(lambda *_: call(Attachment.empty_slots)),
    )
