"""Tables that others have taken the place of, and what may not: kernels would write past memory.

Whoever has a module may give it another Parameter, or a Parameter other rows, at any time: between
lookups, between a lookup and its backward, before an update. Most are welcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.embeddings.table_parameter import plain_grad, require_unmoved

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor, nn

    from recsys.embeddings.row_space import AbstractRowSpace
    from recsys.embeddings.table_group import TableGroup

__all__ = [
    "gone",
    "heirs",
    "require_dim",
    "require_grad_of",
    "require_own",
    "require_own_memory",
    "require_tiered",
    "require_twins",
]


def gone(before: Sequence[nn.Parameter], now: Sequence[nn.Parameter]) -> set[int]:
    """The numbers of tables that have another in their place; all, where there are none now."""
    return {table for table, each in enumerate(before) if not now or now[table] is not each}


def heirs(
    before: Sequence[nn.Parameter], now: Sequence[nn.Parameter]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Each table that went, and one that came; those that have changed places did neither."""
    left = set(before) & set(now)
    went = [table for table in before if table not in left]
    came = [table for table in now if table not in left]
    return list(zip(went, came, strict=True))


def require_own(weights: Sequence[nn.Parameter], group: TableGroup) -> None:
    """Refuse tables that would be moved twice.

    Args:
        weights: Of the group, all of them.
        group: Is to move them.

    Raises:
        ValueError: another group moves one already, or it has come in two places of this one.
    """
    known: set[int] = set()
    for weight in weights:
        place = f"a table of shape {tuple(weight.shape)}"
        require_unmoved(place, weight, but_by=group)
        if id(weight) in known:
            raise ValueError(
                f"{place} was put in the place of another one too, and would be moved twice; give "
                "each its own Parameter, or build the modules anew, of one table"
            )
        known.add(id(weight))


def require_own_memory(names: Sequence[str], weights: Sequence[Tensor]) -> None:
    """Refuse tables for two tiers that share memory: a write to one counts as a write to all.

    Raises:
        ValueError: a table is a part of a larger tensor.
    """
    for name, weight in zip(names, weights, strict=True):
        if weight.untyped_storage().nbytes() > weight.nbytes:
            raise ValueError(
                f"table {name!r}: with a budget its rows must have memory of their own, and they "
                "are a part of a larger tensor; give it a clone (weight.data = weight.data.clone())"
            )


def require_twins(twins: Iterable[tuple[nn.Module, int]], weights: Sequence[nn.Parameter]) -> None:
    """Refuse one Parameter less in modules that had the same.

    Args:
        twins: Further modules of the tables, and the number of each one's table.
        weights: The tables.

    Raises:
        ValueError: one has another Parameter than its twin.
    """
    for holder, table in twins:
        if holder.weight is not weights[table]:
            raise ValueError(
                f"a table of shape {tuple(weights[table].shape)} was one Parameter of several "
                "modules, which are looked up together, and is not any more; give the others "
                "its Parameter too, or build the modules anew"
            )


def require_dim(space: AbstractRowSpace, dim: int) -> None:
    """Refuse tables of another dim, which pooled vectors have other room for.

    Raises:
        ValueError: they are.
    """
    if space.dim != dim:
        raise ValueError(
            f"tables of embedding_dim {dim} were exchanged for some of {space.dim}, and pooled "
            "vectors are made for the former; build the module anew, for the latter"
        )


def require_tiered(table: Tensor, num_rows: int, dtype: torch.dtype) -> None:
    """Refuse a table that slots and row maps were not made for.

    Args:
        table: Has come in the place of one in two tiers.
        num_rows: E of that.
        dtype: Likewise.

    Raises:
        ValueError: it has another number of rows, or another dtype.
    """
    if (len(table), table.dtype) != (num_rows, dtype):
        raise ValueError(
            f"a table of {num_rows} rows of {dtype} in two tiers was exchanged for one of "
            f"{len(table)} rows of {table.dtype}; build the module anew, for that one"
        )


def require_grad_of(weight: Tensor) -> None:
    """Refuse a `grad` that was left at a table before it got other rows.

    Raises:
        ValueError: it was.
    """
    gradient = plain_grad(weight)
    if gradient is not None and gradient.shape != weight.shape:
        raise ValueError(
            f"the grad of a table of shape {tuple(weight.shape)} is of shape "
            f"{tuple(gradient.shape)}, of rows that it had before; set it to None"
        )
