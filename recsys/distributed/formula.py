"""Reads TorchRec's settings of an optimizer (`fused_params`) as a recsys formula.

    EmbOptimType.SGD, EXACT_SGD                           SGD
    EmbOptimType.EXACT_ADAGRAD                            Adagrad
    EmbOptimType.EXACT_ROWWISE_ADAGRAD, ROWWISE_ADAGRAD   RowWiseAdagrad

TorchRec stores there what `apply_optimizer_in_backward` was called with. Settings that are left out
have FBGEMM's defaults, as they do with TorchRec's own sharders: lr=0.01 and eps=1e-8. The defaults
of `torch.optim` differ (eps=1e-10 for Adagrad).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys.embeddings.optimizer import SGD, Adagrad, RowWiseAdagrad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["common_formula"]

_FORMULAS: dict[str, type[SGD | Adagrad | RowWiseAdagrad]] = {
    "sgd": SGD,
    "exact_sgd": SGD,
    "exact_adagrad": Adagrad,
    "exact_row_wise_adagrad": RowWiseAdagrad,
    "row_wise_adagrad": RowWiseAdagrad,
}
# FBGEMM's cache has the first. Rows of 32 bits are never rounded. The others are read below.
_ALLOWED = {"prefetch_pipeline", "stochastic_rounding", "optimizer", "learning_rate", "eps"}
_PRECISIONS = {"cache_precision", "output_dtype", "weights_precision"}


def common_formula(fused_params: Mapping[str, Mapping[str, Any]]) -> RowOptimizer:
    """The update rule of all tables.

    Args:
        fused_params: TorchRec's settings of each table, by name; at least one table.

    Raises:
        ValueError: there is no optimizer, it or one of its settings is not supported, or tables
            have different ones.
    """
    formulas = {table: _formula_of(table, settings) for table, settings in fused_params.items()}
    first, formula = next(iter(formulas.items()))
    for table, other in formulas.items():
        if other != formula:
            raise ValueError(
                f"tables {first!r} and {table!r}: all tables of a collection must have the same "
                f"optimizer, got {formula} and {other}; apply one to both, or put the tables into "
                "two collections"
            )
    return formula


def _formula_of(table: str, settings: Mapping[str, Any]) -> RowOptimizer:
    optimizer = settings.get("optimizer")
    if optimizer is None:
        raise ValueError(
            f"table {table!r}: rows need an optimizer, got none; call "
            "torchrec.optim.apply_optimizer_in_backward before DistributedModelParallel, or set "
            "fused_params={'optimizer': EmbOptimType...., 'learning_rate': ...} of the sharder"
        )
    kind = str(getattr(optimizer, "value", optimizer))
    formula = _FORMULAS.get(kind)
    if formula is None:
        raise ValueError(
            f"table {table!r}: the optimizer must be one of {sorted(_FORMULAS)}, got {kind!r}; use "
            "SGD, Adagrad or RowWiseAdagrad, or TorchRec's own sharder"
        )
    for name, value in settings.items():
        is_fp32 = str(getattr(value, "value", value)).lower() == "fp32"
        if name not in _ALLOWED and value and not (name in _PRECISIONS and is_fp32):
            raise ValueError(
                f"table {table!r}: fused_params has {name}={value!r}, which recsys does not "
                "support; leave it out, or use TorchRec's own sharder"
            )
    read = {"lr": float(settings.get("learning_rate", 0.01))}
    if formula is not SGD:
        read["eps"] = float(settings.get("eps", 1e-8))
    return formula(**read)
