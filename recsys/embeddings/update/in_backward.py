"""Tables that have an optimizer from `apply_optimizer_in_backward`.

That function sets attributes on a parameter (`_optimizer_classes`, `_in_backward_optimizers` and
others) and registers a hook that steps the optimizer after each backward pass. When a recsys module
takes the table over, it updates the rows by the same formula and continues from the same state. It
removes the hook meanwhile: other uses of the table in the loss would update the rows a second time.
The optimizers keep their meaning: what a scheduler or `load_state_dict` changes in them counts from
the next update on, and their `state_dict` has the newest state.

TorchRec's placeholder optimizers run only in FBGEMM. They get FBGEMM's formulas and defaults.

References:
    `torch.distributed.optim._apply_optimizer_in_backward`; TorchRec's mapping of its optimizers to
    FBGEMM's in `torchrec.distributed.utils`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from recsys.embeddings.optimizer import SGD, Adagrad, PartialRowWiseAdam
from recsys.embeddings.update.translate import translate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.update.fused_optimizer import FusedOptimizer
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["InBackward", "read_marks"]

_HOOKS = "torch.distributed.optim.apply_optimizer_in_backward"


@dataclass(frozen=True, eq=False)
class InBackward:
    """Tables to which `apply_optimizer_in_backward` gave equal optimizers.

    Attributes:
        formula: The update rule of their rows.
        tables: The tables, by name.
        optimizers: Each table's optimizer; None for a placeholder.
        state_names: Maps the formula's state arrays to the optimizers' names.
    """

    formula: RowOptimizer
    tables: Mapping[str, nn.Parameter]
    optimizers: tuple[torch.optim.Optimizer | None, ...]
    state_names: Mapping[str, str]
    _settings: list[dict[str, Any]] = field(default_factory=list, init=False)  # as last read
    _handles: list[RemovableHandle] = field(default_factory=list, init=False)

    def hand_over(self, row_optimizer: FusedOptimizer) -> None:
        """Give the state to `row_optimizer`, and remove the hooks that step the optimizers."""
        handles = getattr(sys.modules.get(_HOOKS), "param_to_optim_hook_handle_map", {})
        for table in self.tables.values():
            for handle in handles.pop(table, []) if table in handles else []:
                handle.remove()
        self._give_state(row_optimizer)
        self._settings[:] = map(_copy, self._groups())
        row_optimizer.updater.marks = self
        hooks = _StateHooks(self, row_optimizer.updater)
        for optimizer in self.optimizers:
            if optimizer is not None:
                # A scheduler warns if its optimizer was never stepped; recsys updates in its place.
                optimizer._opt_called = True  # type: ignore[attr-defined]
                self._handles.extend(
                    (
                        optimizer.register_state_dict_pre_hook(hooks.before_save),
                        optimizer.register_load_state_dict_pre_hook(hooks.before_save),
                        optimizer.register_load_state_dict_post_hook(hooks.after_load),
                    )
                )

    def follow(self, row_optimizer: torch.optim.Optimizer) -> None:
        """Use settings that were changed in the tables' own optimizers, such as by a scheduler.

        Raises:
            ValueError: they have no formula, or differ between tables.
        """
        groups = self._groups()
        if groups == self._settings:
            return
        formulas = {
            name: _translate(name, optimizer)[0]
            for name, optimizer in zip(self.tables, self.optimizers, strict=True)
            if optimizer is not None
        }
        (first, formula), *others = formulas.items()
        for name, other in others:
            if other != formula:
                raise ValueError(
                    f"tables {first!r} and {name!r}: optimizers in backward of tables that are "
                    f"updated together must have the same settings, got {formula} and {other}; "
                    "change those of all tables before the next backward"
                )
        row_optimizer.param_groups[0].update(
            {each.name: getattr(formula, each.name) for each in fields(formula)}
        )
        self._settings[:] = map(_copy, groups)

    def hand_back(self, row_optimizer: FusedOptimizer) -> None:
        """Give the state back to the tables' own optimizers, and register the hooks again."""
        row_optimizer.updater.marks = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._take_state(row_optimizer)
        hooks: Any = sys.modules.get(_HOOKS)
        for table in self.tables.values():
            if hooks is not None and table in hooks.param_to_acc_grad_map:
                node = hooks.param_to_acc_grad_map[table]
                handle = node.register_hook(_Step(table))
                hooks.param_to_optim_hook_handle_map.setdefault(table, []).append(handle)

    def _groups(self) -> list[dict[str, Any]]:
        return [each.param_groups[0] for each in self.optimizers if each is not None]

    def _give_state(self, row_optimizer: torch.optim.Optimizer) -> None:
        for table, optimizer in zip(self.tables.values(), self.optimizers, strict=True):
            if optimizer is not None and table in optimizer.state:
                known = optimizer.state[table]
                row_optimizer.state[table].update(
                    {ours: known[theirs] for ours, theirs in self._names(table) if theirs in known}
                )

    def _take_state(self, row_optimizer: torch.optim.Optimizer) -> None:
        for table, optimizer in zip(self.tables.values(), self.optimizers, strict=True):
            known = row_optimizer.state.get(table, {})
            if optimizer is not None:
                optimizer.state[table].update(
                    {theirs: known[ours] for ours, theirs in self._names(table) if ours in known}
                )

    def _names(self, table: nn.Parameter) -> list[tuple[str, str]]:
        sizes = self.formula.state_sizes(table.shape[1])
        return [(name, self.state_names.get(name, name)) for name in (*sizes, "step")]


def _copy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of settings; also of a rate that is a tensor, which may change in place."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in settings.items()
    }


class _StateHooks:
    """Hooks of the tables' own optimizers: their state is that of the updater's optimizer.

    They do not keep the updater: the optimizers live as long as the tables.
    """

    def __init__(self, marks: InBackward, updater: RowUpdater) -> None:
        self._marks, self._updater = marks, ref(updater)

    def before_save(self, *_: object) -> None:
        updater = self._updater()
        if updater is not None:
            updater.flush()
            self._marks._take_state(updater.optimizer)

    def after_load(self, *_: object) -> None:
        updater = self._updater()
        if updater is not None:
            self._marks._give_state(updater.optimizer)
            updater.reload_state()


class _Step:
    """The same hook that torch registers: it steps the table's optimizers after backward."""

    def __init__(self, table: nn.Parameter) -> None:
        self._table = table

    def __call__(self, *_gradients: object) -> None:
        for optimizer in self._table._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
        self._table.grad = None


def read_marks(
    tables: Sequence[tuple[str, nn.Parameter]], optimizer: object = None
) -> InBackward | None:
    """Read what `apply_optimizer_in_backward` set on tables; None if it was called on none.

    Args:
        tables: All tables that one row optimizer will update, by name; at least one.
        optimizer: The optimizer that the user gave in addition.

    Raises:
        ValueError: a table has several optimizers, or one that cannot be translated, or one that
            differs from the others', or one in addition to the user's.
    """
    marks = {name: _read_mark(name, table) for name, table in tables}
    (first, mark), *others = marks.items()
    marked = [name for name, each in marks.items() if each is not None]
    if marked and optimizer is not None:
        raise ValueError(
            f"table {marked[0]!r}: apply_optimizer_in_backward has given it an optimizer, so "
            f"optimizer= must be None, got {type(optimizer).__name__}; leave out one of the two"
        )
    for name, other in others:
        formulas = [None if each is None else each.formula for each in (mark, other)]
        if formulas[0] != formulas[1]:
            raise ValueError(
                f"tables {first!r} and {name!r}: apply_optimizer_in_backward must give tables that "
                f"are updated together the same optimizer, got {formulas[0]} and {formulas[1]}; "
                "apply one to both"
            )
    if mark is None:
        return None
    return InBackward(
        mark.formula,
        dict(tables),
        tuple(each.optimizer for each in marks.values() if each is not None),
        mark.state_names,
    )


@dataclass(frozen=True)
class _Mark:
    formula: RowOptimizer
    optimizer: torch.optim.Optimizer | None
    state_names: Mapping[str, str]


def _read_mark(name: str, table: nn.Parameter) -> _Mark | None:
    kinds = getattr(table, "_optimizer_classes", [])
    if not kinds:
        return None
    if len(kinds) > 1:
        names = [kind.__name__ for kind in kinds]
        raise ValueError(
            f"table {name!r}: one optimizer may update its rows in backward, got {names}; apply one"
        )
    if kinds[0] in _placeholders():
        [settings] = table._optimizer_kwargs  # type: ignore[attr-defined]
        try:
            return _Mark(_placeholders()[kinds[0]](settings), None, {})
        except ValueError as error:
            raise ValueError(f"table {name!r}: {error}") from None
    [optimizer] = table._in_backward_optimizers  # type: ignore[attr-defined]
    formula, state_names = _translate(name, optimizer)
    return _Mark(formula, optimizer, state_names)


def _translate(
    name: str, optimizer: torch.optim.Optimizer
) -> tuple[RowOptimizer, Mapping[str, str]]:
    """The formula of a table's own optimizer, and its names of the formula's state arrays."""
    translation = translate(
        optimizer,
        [(name, 0)],
        advice="apply SGD, Adagrad, SparseAdam or TorchRec's RowWiseAdagrad",
    )
    [group] = optimizer.param_groups
    if group.get("lr_decay"):
        raise ValueError(
            f"table {name!r}: an optimizer in backward must have lr_decay 0, got "
            f"{group['lr_decay']}; give the optimizer to recsys.accelerate instead"
        )
    return translation.formula(group), translation.state_names


def _placeholders() -> dict[type, Any]:
    module = sys.modules.get("torchrec.optim.optimizers")
    if module is None:
        return {}
    return {
        module.SGD: _sgd,
        module.Adagrad: _adagrad,
        module.PartialRowWiseAdam: _partial_rowwise_adam,
        module.Adam: _refuse_adam,
    }


def _sgd(settings: Mapping[str, Any]) -> SGD:
    _require_known("SGD", settings, {"lr"})
    return SGD(lr=settings.get("lr", 0.01))


def _adagrad(settings: Mapping[str, Any]) -> Adagrad:
    _require_known("Adagrad", settings, {"lr", "eps"})
    return Adagrad(lr=settings.get("lr", 0.01), eps=settings.get("eps", 1e-8))


def _partial_rowwise_adam(settings: Mapping[str, Any]) -> PartialRowWiseAdam:
    _require_known("PartialRowWiseAdam", settings, {"lr", "eps", "beta1", "beta2"})
    return PartialRowWiseAdam(
        lr=settings.get("lr", 0.01),
        betas=(settings.get("beta1", 0.9), settings.get("beta2", 0.999)),
        eps=settings.get("eps", 1e-8),
    )


def _refuse_adam(settings: Mapping[str, Any]) -> RowOptimizer:
    raise ValueError(
        "torchrec.optim.Adam adds eps in another place than recsys.embeddings.Adam and "
        "torch.optim.SparseAdam; apply torchrec.optim.PartialRowWiseAdam, or give an optimizer="
    )


def _require_known(name: str, settings: Mapping[str, Any], known: set[str]) -> None:
    unknown = {key: value for key, value in settings.items() if value and key not in known}
    if unknown:
        raise ValueError(
            f"torchrec.optim.{name}: arguments {sorted(known)} are translated, got {unknown} too; "
            "leave them out"
        )
