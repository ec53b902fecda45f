"""Optimizers of torch's and TorchRec's, read as formulas of ours.

    torch.optim.SGD              SGD               without momentum
    torch.optim.Adagrad          Adagrad           its `sum` is the state, adopted as it is
    torch.optim.SparseAdam       Adam              `exp_avg`, `exp_avg_sq`
    torchrec RowWiseAdagrad      RowWiseAdagrad    its `sum`

Weight decay is refused everywhere: like momentum, it moves rows that were not looked up. What an
optimizer may be told in mid-course, by `load_state_dict` or a scheduler, is checked at every step.

`apply_optimizer_in_backward` leaves its mark on the parameters. TorchRec's placeholders, which run
in FBGEMM alone, stand for FBGEMM's formulas with FBGEMM's defaults.

References:
    `torch.optim`; `torchrec.optim`; `torch.distributed.optim._apply_optimizer_in_backward`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.row_updater import Translation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["InBackward", "in_backward", "translate"]

_WAY_OUT = "recsys.accelerate(model) without optimizer= leaves the gradients to your optimizer"
_MOVES_ALL = "moves rows that were not looked up"
# Settings that must be off, and what is wrong with them.
_MUST_BE_OFF = {
    "momentum": _MOVES_ALL,
    "weight_decay": _MOVES_ALL,
    "maximize": "is not translated (negate the loss)",
    "differentiable": "is not translated (rows are moved outside autograd)",
}


def translate(optimizer: torch.optim.Optimizer, tables: Sequence[tuple[str, int]]) -> Translation:
    """How an optimizer's settings and state are read.

    Args:
        optimizer: One of those above.
        tables: The name of each table to be moved, and the number of its param group.

    Raises:
        ValueError: the optimizer, or a setting of a table's group, has no formula here.
    """
    translation = _translations().get(type(optimizer))
    for table, number in tables:
        if translation is None:
            raise ValueError(f"table {table!r}: {_no_formula(type(optimizer))}; {_WAY_OUT}")
        try:
            translation.formula(optimizer.param_groups[number])
        except ValueError as error:
            raise ValueError(f"table {table!r}: {error}") from None
    assert translation is not None
    return translation


@dataclass(frozen=True)
class InBackward:
    """What `apply_optimizer_in_backward` has made of a table.

    Attributes:
        formula: Of the optimizer.
        host: The optimizer; None where it is a placeholder.
        state_names: Under which name the optimizer keeps each of the formula's state arrays.
    """

    formula: RowOptimizer
    host: torch.optim.Optimizer | None
    state_names: Mapping[str, str]


def in_backward(table: str, weight: nn.Parameter) -> InBackward | None:
    """Read the mark of `apply_optimizer_in_backward`; None where there is none.

    Args:
        table: The table's name, for errors.
        weight: The table.

    Raises:
        ValueError: the table has several optimizers, or one that has no formula here.
    """
    kinds = getattr(weight, "_optimizer_classes", [])
    if not kinds:
        return None
    if len(kinds) > 1:
        names = [kind.__name__ for kind in kinds]
        raise ValueError(
            f"table {table!r}: one optimizer may move its rows in backward, got {names}; apply one"
        )
    [kind], [settings] = kinds, weight._optimizer_kwargs  # type: ignore[attr-defined]
    if kind in _placeholders():
        try:
            return InBackward(_placeholders()[kind](settings), None, {})
        except ValueError as error:
            raise ValueError(f"table {table!r}: {error}") from None
    [host] = weight._in_backward_optimizers  # type: ignore[attr-defined]
    try:
        translation = translate(host, [(table, 0)])
    except ValueError as error:
        raise ValueError(str(error).replace(_WAY_OUT, _apply_another())) from None
    [group] = host.param_groups
    if group.get("lr_decay"):
        raise ValueError(
            f"table {table!r}: {_name(kind)} in backward must have lr_decay 0, got "
            f"{group['lr_decay']}; give the optimizer to recsys.accelerate instead"
        )
    return InBackward(translation.formula(group), host, translation.state_names)


def _translations() -> dict[type[torch.optim.Optimizer], Translation]:
    known = dict(_TORCH)
    # Who has one of TorchRec's has imported it; importing it here takes seconds.
    module = sys.modules.get("torchrec.optim.rowwise_adagrad")
    if module is not None:
        known[module.RowWiseAdagrad] = Translation(
            formula=_rowwise_adagrad,
            state_names={"momentum1": "sum"},
            learning_rate=_decaying_lr,
            counts_steps=True,
        )
    return known


def _placeholders() -> dict[type, Any]:
    module = sys.modules.get("torchrec.optim.optimizers")
    if module is None:
        return {}
    return {
        module.SGD: _fbgemm_sgd,
        module.Adagrad: _fbgemm_adagrad,
        module.PartialRowWiseAdam: _fbgemm_partial_rowwise_adam,
        module.Adam: _no_fbgemm_adam,
    }


def _sgd(settings: Mapping[str, Any]) -> SGD:
    _require_off("torch.optim.SGD", settings)
    return SGD(lr=float(settings["lr"]))


def _adagrad(settings: Mapping[str, Any]) -> Adagrad:
    _require_off("torch.optim.Adagrad", settings)
    return Adagrad(lr=float(settings["lr"]), eps=float(settings["eps"]))


def _sparse_adam(settings: Mapping[str, Any]) -> Adam:
    _require_off("torch.optim.SparseAdam", settings)
    beta1, beta2 = settings["betas"]
    return Adam(
        lr=float(settings["lr"]), betas=(float(beta1), float(beta2)), eps=float(settings["eps"])
    )


def _rowwise_adagrad(settings: Mapping[str, Any]) -> RowWiseAdagrad:
    _require_off("torchrec RowWiseAdagrad", settings)
    return RowWiseAdagrad(lr=float(settings["lr"]), eps=float(settings["eps"]))


def _lr(settings: Mapping[str, Any], step: int) -> float:
    return float(settings["lr"])


def _decaying_lr(settings: Mapping[str, Any], step: int) -> float:
    return float(settings["lr"]) / (1 + (step - 1) * float(settings["lr_decay"]))


_TORCH: dict[type[torch.optim.Optimizer], Translation] = {
    torch.optim.SGD: Translation(
        formula=_sgd, state_names={}, learning_rate=_lr, counts_steps=False
    ),
    torch.optim.Adagrad: Translation(
        formula=_adagrad,
        state_names={"momentum1": "sum"},
        learning_rate=_decaying_lr,
        counts_steps=True,
    ),
    torch.optim.SparseAdam: Translation(
        formula=_sparse_adam,
        state_names={"momentum1": "exp_avg"},
        learning_rate=_lr,
        counts_steps=True,
    ),
}


def _fbgemm_sgd(settings: Mapping[str, Any]) -> SGD:
    _require_known("SGD", settings, {"lr"})
    return SGD(lr=settings.get("lr", 0.01))


def _fbgemm_adagrad(settings: Mapping[str, Any]) -> Adagrad:
    _require_known("Adagrad", settings, {"lr", "eps"})
    return Adagrad(lr=settings.get("lr", 0.01), eps=settings.get("eps", 1e-8))


def _fbgemm_partial_rowwise_adam(settings: Mapping[str, Any]) -> PartialRowWiseAdam:
    _require_known("PartialRowWiseAdam", settings, {"lr", "eps", "beta1", "beta2"})
    return PartialRowWiseAdam(
        lr=settings.get("lr", 0.01),
        betas=(settings.get("beta1", 0.9), settings.get("beta2", 0.999)),
        eps=settings.get("eps", 1e-8),
    )


def _no_fbgemm_adam(settings: Mapping[str, Any]) -> RowOptimizer:
    raise ValueError(
        "torchrec.optim.Adam adds eps elsewhere than torch.optim.SparseAdam and "
        "recsys.embeddings.Adam do; apply torch.optim.SparseAdam to a bag with sparse=True, or "
        "torchrec.optim.PartialRowWiseAdam"
    )


def _require_off(name: str, settings: Mapping[str, Any]) -> None:
    for setting, wrong in _MUST_BE_OFF.items():
        if settings.get(setting):
            raise ValueError(f"{name} with {setting}={settings[setting]} {wrong}; {_WAY_OUT}")


def _require_known(name: str, settings: Mapping[str, Any], known: set[str]) -> None:
    unknown = {key: value for key, value in settings.items() if value and key not in known}
    if unknown:
        raise ValueError(
            f"torchrec.optim.{name}: arguments {sorted(known)} are translated, got {unknown} too; "
            "leave them out"
        )


def _no_formula(kind: type) -> str:
    dense = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "ASGD", "Adadelta")
    if kind.__module__.startswith("torch.optim") and kind.__name__ in dense:
        return f"{_name(kind)} {_MOVES_ALL}"
    return f"{_name(kind)} is none of SGD, Adagrad, SparseAdam and TorchRec's RowWiseAdagrad"


def _apply_another() -> str:
    return "apply one of SGD, Adagrad, SparseAdam and TorchRec's RowWiseAdagrad to it"


def _name(kind: type) -> str:
    package = kind.__module__.partition(".")[0]
    return f"{'torch.optim' if package == 'torch' else package}.{kind.__name__}"
