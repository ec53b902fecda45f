"""Finds modules that plain PyTorch trains faster; `accelerate` leaves them to it.

The limits are measured on one CPU core, with one linear layer after tables of 16 columns and 128
samples a step, which gain least. Ratios are those of a plain step to one of recsys.

    SGD, sparse gradients         1 table 0.6, 8 tables 0.8, 20 tables 0.9 to 1.0, 26 tables 1.0
    SGD, dense gradients          0.6 to 0.9 up to 640,000 numbers in all tables, 4 for 1,600,000
    Adagrad, sparse gradients     1 table 0.9, 2 tables 1.0, 4 tables 1.2
    Adagrad, dense gradients      0.6 to 0.7 up to 16,000 numbers in all tables, 1.6 for 160,000
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from recsys.conversion.accelerated import LeftAlone
from recsys.conversion.exchange import tables_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.embeddings.updaters import NamedTable, UpdaterSpec

__all__ = ["find_slower"]

# From so many tables with sparse gradients, or numbers in those with dense ones, steps are shorter.
_WITHOUT_STATE = 24, 1 << 20
_WITH_STATE = 2, 1 << 17
_BY_LAUNCHES = (
    "on CUDA a launch for each module takes longer than in PyTorch; one collection looks up all "
    "tables at once"
)


def find_slower(
    found: Mapping[nn.Module, list[str]], specs: Sequence[UpdaterSpec]
) -> dict[nn.Module, LeftAlone]:
    """Find the modules that plain PyTorch trains faster.

    Args:
        found: Modules that can be replaced, with their names.
        specs: What would update their rows in place of torch optimizers; empty if the gradients
            are left to the caller.
    """
    tables = {module: list(tables_of(module, names[0])) for module, names in found.items()}
    of_table: dict[int, str] = {}
    for spec in specs:
        updated = [each for of_module in tables.values() for each in of_module]
        of_table |= dict.fromkeys(spec.param_groups, _reason_of(spec, updated))
    reasons = {}
    for module in found:
        is_apart = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.is_cuda
        of_tables = [of_table.get(id(table.weight), "") for table in tables[module]]
        reasons[module] = _BY_LAUNCHES if is_apart else next(filter(None, of_tables), "")
    # A table that modules share is left in all of them, or in none.
    taken = {
        id(table.weight) for module in found if not reasons[module] for table in tables[module]
    }
    return {
        module: LeftAlone(
            tuple(names), type(module).__name__, f"{reasons[module]}; always=True takes them"
        )
        for module, names in found.items()
        if reasons[module] and not any(id(table.weight) in taken for table in tables[module])
    }


def _reason_of(spec: UpdaterSpec, tables: Sequence[NamedTable]) -> str:
    """Why PyTorch trains the tables of an optimizer faster; "" if it does not."""
    if spec.rule:  # the caller asks for another rule than PyTorch's
        return ""
    is_sparse: dict[int, bool] = {}
    num_dense = 0
    for table in tables:
        key = id(table.weight)
        if key in spec.param_groups and key not in is_sparse:
            is_sparse[key] = table.is_sparse
            num_dense += 0 if table.is_sparse else table.weight.numel()
    has_state = bool(spec.formula.state_sizes(1))
    least_tables, least_numbers = _WITH_STATE if has_state else _WITHOUT_STATE
    if sum(is_sparse.values()) >= least_tables or num_dense >= least_numbers:
        return ""
    return (
        f"with {type(spec.formula).__name__}, steps are not shorter for fewer than {least_tables} "
        f"tables with sparse=True, or {least_numbers:,} numbers in tables with sparse=False"
    )
