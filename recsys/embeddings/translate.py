"""Optimizers of torch's and TorchRec's, read as formulas of ours.

    torch.optim.SGD              SGD               without momentum
    torch.optim.Adagrad          Adagrad           its `sum` is the state, adopted as it is
    torch.optim.SparseAdam       Adam              `exp_avg`, `exp_avg_sq`
    torchrec RowWiseAdagrad      RowWiseAdagrad    its `sum`
    dlrm's RWSAdagrad            RowWiseAdagrad    its `momentum`
    torch.optim.Adam, AdamW      Adam              where asked for; rows not looked up stay

Weight decay is refused everywhere: like momentum, it moves rows that were not looked up. What an
optimizer may be told in mid-course, by `load_state_dict` or a scheduler, is checked at every step.

References:
    `torch.optim`; `torchrec.optim`; `optim/rwsadagrad.py` of facebookresearch/dlrm.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from recsys.embeddings.optimizer import SGD, Adagrad, Adam, RowWiseAdagrad
from recsys.embeddings.translation import Translation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["translate"]

_WAY_OUT = "recsys.accelerate(model) without optimizer= leaves the gradients to your optimizer"
_MOVES_ALL = "moves rows that were not looked up"
_LAZILY = "lazy_adam=True has recsys move those looked up alone, by the rule of SparseAdam"
# Settings that must be off, and what is wrong with them.
_MUST_BE_OFF = {
    "momentum": _MOVES_ALL,
    "weight_decay": _MOVES_ALL,
    "amsgrad": "is not translated",
    "maximize": "is not translated (negate the loss)",
    "differentiable": "is not translated (rows are moved outside autograd)",
}


def translate(
    optimizer: torch.optim.Optimizer,
    tables: Sequence[tuple[str, int]],
    way_out: str = _WAY_OUT,
    *,
    lazy_adam: bool = False,
) -> Translation:
    """How an optimizer's settings and state are read.

    Args:
        optimizer: One of those above.
        tables: The name of each table to be moved, and the number of its param group; at least one.
        way_out: What errors recommend.
        lazy_adam: Whether Adam and AdamW may be read as SparseAdam.

    Raises:
        ValueError: the optimizer, or a setting of a table's group, has no formula here.
    """
    translation = _translations(optimizer, lazy_adam=lazy_adam).get(type(optimizer))
    for table, number in tables:
        if translation is None:
            reason = _no_formula(type(optimizer))
            if way_out == _WAY_OUT and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
                reason += f"; {_LAZILY}"
            raise ValueError(f"table {table!r}: {reason}; {way_out}")
        try:
            translation.formula(optimizer.param_groups[number])
        except ValueError as error:
            raise ValueError(f"table {table!r}: {error}; or: {way_out}") from None
    assert translation is not None
    return translation


def _translations(
    optimizer: torch.optim.Optimizer, *, lazy_adam: bool
) -> dict[type[torch.optim.Optimizer], Translation]:
    known = dict(_TORCH)
    if lazy_adam:
        known |= {torch.optim.Adam: _LAZY_ADAM, torch.optim.AdamW: _LAZY_ADAM}
    # No package has it: who uses it has the file in the own tree.
    if type(optimizer).__name__ == "RWSAdagrad" and set(optimizer.defaults) >= _RWS_SETTINGS:
        known[type(optimizer)] = _RWS_ADAGRAD
    # Who has one of TorchRec's has imported it; importing it here takes seconds.
    module = sys.modules.get("torchrec.optim.rowwise_adagrad")
    if module is not None:
        known[module.RowWiseAdagrad] = Translation(
            formula=_rowwise_adagrad,
            state_names={"momentum1": "sum"},
            learning_rate=_decaying_lr,
            counts_steps=True,
            no_step=torch.tensor(0.0),
            has_columns=True,
        )
    return known


def _sgd(settings: Mapping[str, Any]) -> SGD:
    _require_off("torch.optim.SGD", settings)
    return SGD(lr=_at_least_0(settings["lr"]))


def _adagrad(settings: Mapping[str, Any]) -> Adagrad:
    _require_off("torch.optim.Adagrad", settings)
    return Adagrad(lr=_at_least_0(settings["lr"]), eps=float(settings["eps"]))


def _sparse_adam(settings: Mapping[str, Any]) -> Adam:
    _require_off("torch.optim.SparseAdam", settings)
    return _adam_of(settings)


def _adam(settings: Mapping[str, Any]) -> Adam:
    name = "torch.optim.AdamW" if settings.get("decoupled_weight_decay") else "torch.optim.Adam"
    _require_off(name, settings)
    return _adam_of(settings)


def _adam_of(settings: Mapping[str, Any]) -> Adam:
    beta1, beta2 = settings["betas"]
    return Adam(
        lr=_at_least_0(settings["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(settings["eps"]),
    )


def _rws_adagrad(settings: Mapping[str, Any]) -> RowWiseAdagrad:
    _require_off("RWSAdagrad", settings)
    if settings["initial_accumulator_value"]:
        raise ValueError(
            "RWSAdagrad with initial_accumulator_value="
            f"{settings['initial_accumulator_value']} is not translated; leave it out"
        )
    return RowWiseAdagrad(lr=_at_least_0(settings["lr"]), eps=float(settings["eps"]))


def _rowwise_adagrad(settings: Mapping[str, Any]) -> RowWiseAdagrad:
    _require_off("torchrec RowWiseAdagrad", settings)
    return RowWiseAdagrad(lr=_at_least_0(settings["lr"]), eps=float(settings["eps"]))


def _at_least_0(lr: Any) -> float:
    """A rate for a formula's eyes, which a scheduler may have rounded to a little less than 0.

    Rows move by `learning_rate`, whatever it is.
    """
    return 0.0 if float(lr) < 0 else float(lr)


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
        no_step=torch.tensor(0.0),
    ),
    torch.optim.SparseAdam: Translation(
        formula=_sparse_adam,
        state_names={"momentum1": "exp_avg"},
        learning_rate=_lr,
        counts_steps=True,
    ),
}


_LAZY_ADAM = Translation(
    formula=_adam,
    state_names={"momentum1": "exp_avg"},
    learning_rate=_lr,
    counts_steps=True,
    no_step=torch.tensor(0.0),
    rule=(
        "lazy_adam=True: rows are moved by the rule of torch.optim.SparseAdam: a row that a step "
        "does not look up stays, and so do its moments, where Adam would let the moments decay "
        "and move the row by them"
    ),
)

_RWS_SETTINGS = {"lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"}
_RWS_ADAGRAD = Translation(
    formula=_rws_adagrad,
    state_names={"momentum1": "momentum"},
    learning_rate=_decaying_lr,
    counts_steps=True,
    is_for_sparse=True,
)


def _require_off(name: str, settings: Mapping[str, Any]) -> None:
    for setting, wrong in _MUST_BE_OFF.items():
        if settings.get(setting):
            raise ValueError(f"{name} with {setting}={settings[setting]} {wrong}; leave it out")


def _no_formula(kind: type) -> str:
    dense = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "ASGD", "Adadelta")
    if kind.__module__.startswith("torch.optim") and kind.__name__ in dense:
        return f"{_name(kind)} {_MOVES_ALL}"
    return f"{_name(kind)} is none of SGD, Adagrad, SparseAdam, RowWiseAdagrad and RWSAdagrad"


def _name(kind: type) -> str:
    package = kind.__module__.partition(".")[0]
    return f"{'torch.optim' if package == 'torch' else package}.{kind.__name__}"
