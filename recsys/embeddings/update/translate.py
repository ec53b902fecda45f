"""Translates optimizers of torch and TorchRec into the row optimizers of recsys.

    torch.optim.SGD              SGD               without momentum
    torch.optim.Adagrad          Adagrad           its `sum` becomes the state without a copy
    torch.optim.SparseAdam       Adam              `exp_avg`, `exp_avg_sq`
    torchrec RowWiseAdagrad      RowWiseAdagrad    its `sum`
    dlrm's RWSAdagrad            RowWiseAdagrad    its `momentum`
    torch.optim.Adam, AdamW      Adam              only with lazy_adam=True

Weight decay is always refused. Like momentum, it updates rows that were not looked up. Settings
may change during training, by `load_state_dict` or a scheduler, so every step checks them again.

References:
    `torch.optim`; `torchrec.optim`; `optim/rwsadagrad.py` of facebookresearch/dlrm.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from recsys.embeddings.optimizer import SGD, Adagrad, Adam, RowWiseAdagrad
from recsys.embeddings.update.translation import Translation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["translate"]

_ADVICE = (
    "recsys.accelerate(model) without optimizer= and budget= leaves the gradients to your optimizer"
)
# A wrapper's state_dict() reads the tensors without the optimizer's own, which would first write
# back the newer state of rows in fast memory.
_UNWRAP = (
    "wraps other optimizers: give accelerate the torch optimizers inside, which optim_factory "
    "returns, and call their step(), state_dict() and load_state_dict() instead of the wrapper's"
)
_UPDATES_ALL = "updates rows that were not looked up"
# Settings that must be off, and the reason.
_MUST_BE_OFF = {
    "momentum": _UPDATES_ALL,
    "weight_decay": _UPDATES_ALL,
    "amsgrad": "is not translated",
    "maximize": "is not translated (negate the loss)",
    "differentiable": "is not translated (rows are updated outside autograd)",
}


def translate(
    optimizer: torch.optim.Optimizer,
    tables: Sequence[tuple[str, int]],
    advice: str = _ADVICE,
    *,
    lazy_adam: bool = False,
) -> Translation:
    """Choose how to read an optimizer's settings and state.

    Args:
        optimizer: One of those listed above.
        tables: Name and param group number of each table to be updated; at least one.
        advice: What errors recommend.
        lazy_adam: Whether Adam and AdamW are read as SparseAdam.

    Raises:
        ValueError: the optimizer, or a setting in a table's param group, cannot be translated.
    """
    translation = _translations(optimizer, lazy_adam=lazy_adam).get(type(optimizer))
    for table, number in tables:
        if translation is None:
            keyed = sys.modules.get("torchrec.optim.keyed")
            wrappers = "KeyedOptimizerWrapper", "OptimizerWrapper", "CombinedOptimizer"
            if isinstance(optimizer, tuple(getattr(keyed, name, ()) for name in wrappers)):
                raise ValueError(f"table {table!r}: {_name(type(optimizer))} {_UNWRAP}")
            reason = _reason_to_refuse(type(optimizer))
            if advice == _ADVICE and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
                reason += f"; {_lazy_hint(optimizer.param_groups[number])}"
            raise ValueError(f"table {table!r}: {reason}; {advice}")
        try:
            translation.formula(optimizer.param_groups[number])
        except ValueError as error:
            raise ValueError(f"table {table!r}: {error}; or: {advice}") from None
    assert translation is not None
    return translation


def _translations(
    optimizer: torch.optim.Optimizer, *, lazy_adam: bool
) -> dict[type[torch.optim.Optimizer], Translation]:
    known = dict(_TORCH)
    if lazy_adam:
        known |= {torch.optim.Adam: _LAZY_ADAM, torch.optim.AdamW: _LAZY_ADAM}
    # RWSAdagrad is in no package: DLRM's users copy its file, so it is known by name and settings.
    if type(optimizer).__name__ == "RWSAdagrad" and set(optimizer.defaults) >= _RWS_SETTINGS:
        known[type(optimizer)] = _RWS_ADAGRAD
    # Importing TorchRec takes seconds. An optimizer of its class exists only if it is imported.
    module = sys.modules.get("torchrec.optim.rowwise_adagrad")
    if module is not None:
        known[module.RowWiseAdagrad] = Translation(
            formula=_formula("torchrec RowWiseAdagrad", RowWiseAdagrad, eps=float),
            state_names={"momentum1": "sum"},
            learning_rate=_decaying_lr,
            counts_steps=True,
            no_step=torch.tensor(0.0),
            has_columns=True,
        )
    return known


def _formula(
    name: str, kind: type[Any], must_be_off: Mapping[str, str] = _MUST_BE_OFF, **more: Any
) -> Callable[[Mapping[str, Any]], RowOptimizer]:
    """What reads a param group as a formula.

    Args:
        name: Name of the optimizer, for errors.
        kind: The formula.
        must_be_off: Settings that must be off, and the reason.
        more: The formula's settings but `lr`, with what converts them.
    """

    def read(settings: Mapping[str, Any]) -> RowOptimizer:
        _require_off(name, settings, must_be_off)
        # A scheduler may have rounded a rate to below 0; `Translation.learning_rate` keeps that.
        lr = float(settings["lr"])
        own = {name: read_as(settings[name]) for name, read_as in more.items()}
        found: RowOptimizer = kind(lr=0.0 if lr < 0 else lr, **own)
        return found

    return read


def _floats(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, numbers))


def _lr(settings: Mapping[str, Any], step: int) -> float:
    return float(settings["lr"])


def _decaying_lr(settings: Mapping[str, Any], step: int) -> float:
    return float(settings["lr"]) / (1 + (step - 1) * float(settings["lr_decay"]))


_TORCH: dict[type[torch.optim.Optimizer], Translation] = {
    torch.optim.SGD: Translation(
        formula=_formula("torch.optim.SGD", SGD),
        state_names={},
        learning_rate=_lr,
        counts_steps=False,
    ),
    torch.optim.Adagrad: Translation(
        formula=_formula("torch.optim.Adagrad", Adagrad, eps=float),
        state_names={"momentum1": "sum"},
        learning_rate=_decaying_lr,
        counts_steps=True,
        no_step=torch.tensor(0.0),
    ),
    torch.optim.SparseAdam: Translation(
        formula=_formula("torch.optim.SparseAdam", Adam, eps=float, betas=_floats),
        state_names={"momentum1": "exp_avg"},
        learning_rate=_lr,
        counts_steps=True,
    ),
}


_LAZY_ADAM = Translation(
    formula=_formula("torch.optim.Adam or AdamW", Adam, eps=float, betas=_floats),
    state_names={"momentum1": "exp_avg"},
    learning_rate=_lr,
    counts_steps=True,
    no_step=torch.tensor(0.0),
    rule=(
        "lazy_adam=True: rows are updated by the rule of torch.optim.SparseAdam: a row that a step "
        "does not look up keeps its value and its moments, where Adam would decay the moments and "
        "update the row by them"
    ),
)

_RWS_SETTINGS = {"lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"}
_RWS_ADAGRAD = Translation(
    formula=_formula(
        "RWSAdagrad",
        RowWiseAdagrad,
        _MUST_BE_OFF | {"initial_accumulator_value": "is not translated (make it without that)"},
        eps=float,
    ),
    state_names={"momentum1": "momentum"},
    learning_rate=_decaying_lr,
    counts_steps=True,
    is_for_sparse=True,
)


def _require_off(name: str, settings: Mapping[str, Any], must_be_off: Mapping[str, str]) -> None:
    for setting, wrong in must_be_off.items():
        if settings.get(setting):
            off = type(settings[setting])()
            cause = " (OneCycleLR and CyclicLR need cycle_momentum=False)"
            raise ValueError(
                f"{name} with {setting}={settings[setting]} {wrong}; set {setting}={off} in a "
                "param group of the tables alone, and leave the other parameters as they are"
                f"{cause if setting == 'momentum' else ''}"
            )


def _lazy_hint(settings: Mapping[str, Any]) -> str:
    """What `lazy_adam` does, and the settings that it needs."""
    off = [f"{name}={type(settings[name])()}" for name in _MUST_BE_OFF if settings.get(name)]
    needed = f" with {' and '.join(off)} in a param group of the tables alone" if off else ""
    return (
        f"lazy_adam=True{needed} updates only the rows that were looked up, by the rule of "
        "SparseAdam"
    )


def _reason_to_refuse(kind: type) -> str:
    dense = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "ASGD", "Adadelta")
    if kind.__module__.startswith("torch.optim") and kind.__name__ in dense:
        return f"{_name(kind)} {_UPDATES_ALL}"
    return f"{_name(kind)} is not SGD, Adagrad, SparseAdam, RowWiseAdagrad or RWSAdagrad"


def _name(kind: type) -> str:
    package = kind.__module__.partition(".")[0]
    return f"{'torch.optim' if package == 'torch' else package}.{kind.__name__}"
