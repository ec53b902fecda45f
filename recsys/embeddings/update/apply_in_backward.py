"""Tables that have an optimizer from `apply_optimizer_in_backward`.

That function sets attributes on a parameter (`_optimizer_classes`, `_in_backward_optimizers` and
others) and registers a hook that steps the optimizer after each backward pass. When a recsys module
gets the table, it reads the settings and the state once and removes the hook: other uses of the
table in the loss would update the rows a second time. From then on the rows have the recsys
optimizer alone, `row_optimizer`.

TorchRec's placeholder optimizers run only in FBGEMM. They get FBGEMM's formulas and defaults.

References:
    `torch.distributed.optim._apply_optimizer_in_backward`; TorchRec's mapping of its optimizers to
    FBGEMM's in `torchrec.distributed.utils`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recsys.embeddings.optimizer import SGD, Adagrad, PartialRowWiseAdam
from recsys.embeddings.update.translate import translate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["InBackward", "read_marks"]

_HOOKS = "torch.distributed.optim.apply_optimizer_in_backward"


@dataclass(frozen=True, eq=False)
class InBackward:
    """Tables to which `apply_optimizer_in_backward` gave equal optimizers.

    Attributes:
        formula: The update rule of their rows.
        tables: The tables.
        optimizers: Each table's optimizer; None for a placeholder.
        state_names: Maps the formula's state arrays to the optimizers' names.
    """

    formula: RowOptimizer
    tables: Sequence[nn.Parameter]
    optimizers: Sequence[torch.optim.Optimizer | None]
    state_names: Mapping[str, str]

    def give_state(self, row_optimizer: torch.optim.Optimizer) -> None:
        """Give the state that the optimizers have to `row_optimizer`."""
        for table, optimizer in zip(self.tables, self.optimizers, strict=True):
            known = {} if optimizer is None else optimizer.state.get(table, {})
            names = (*self.formula.state_sizes(table.shape[1]), "step")
            theirs = {name: self.state_names.get(name, name) for name in names}
            found = {name: known[other] for name, other in theirs.items() if other in known}
            if found:
                row_optimizer.state[table] = found

    def remove_hooks(self) -> None:
        """Remove the hooks that step the optimizers, and the optimizers from the tables."""
        handles = getattr(sys.modules.get(_HOOKS), "param_to_optim_hook_handle_map", {})
        for table in self.tables:
            for handle in handles.pop(table, []) if table in handles else []:
                handle.remove()
            for name in ("_optimizer_classes", "_optimizer_kwargs", "_in_backward_optimizers"):
                table.__dict__.pop(name, None)


def read_marks(tables: Sequence[tuple[str, nn.Parameter]], optimizer: object) -> InBackward | None:
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
    marked = [name for name, table_mark in marks.items() if table_mark is not None]
    if marked and optimizer is not None:
        raise ValueError(
            f"table {marked[0]!r}: apply_optimizer_in_backward has given it an optimizer, so "
            f"optimizer= must be None, got {type(optimizer).__name__}; leave out one of the two"
        )
    for name, other in others:
        formulas = [
            None if table_mark is None else table_mark.formula for table_mark in (mark, other)
        ]
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
        [table for _, table in tables],
        [table_mark.optimizer for table_mark in marks.values() if table_mark is not None],
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
