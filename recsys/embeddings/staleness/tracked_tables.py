"""The tables that a tracker follows: found in a model, named, and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.embeddings.tables_module import table_modules_in
from recsys.embeddings.tiers.write_back import write_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.embeddings.rows.tables import TableGroup

__all__ = ["groups_in", "names_of", "read_rows", "require_all_tables"]


def groups_in(models: Sequence[nn.Module]) -> list[TableGroup]:
    """The groups that the optimizers of all recsys modules update, each once.

    Raises:
        ValueError: there is no recsys module, or the rows of one are not updated by recsys.
    """
    found: dict[TableGroup, None] = {}
    for model in models:
        for name, module in table_modules_in(model).items():
            updates = module.updates()
            if not updates:
                table = next((table.name for table in module.tables()), name)
                raise ValueError(
                    f"table {table!r} of {name!r}: only rows that recsys updates can be followed; "
                    "train it (requires_grad), give the module a recsys optimizer (optimizer=) or "
                    "use recsys.accelerate; or use a policy that follows no rows, such as "
                    "Importance, or give a StalenessTracker the other modules only"
                )
            found |= dict.fromkeys(update.group for update in updates)
    if not found:
        raise ValueError(
            "the model has no module of recsys.embeddings, so no row can be followed; use "
            "recsys.accelerate(model, optimizer=...) first"
        )
    return list(found)


def require_all_tables(models: Sequence[nn.Module], groups: Sequence[TableGroup]) -> None:
    """Check that the modules have all tables of some groups, whose rows would freeze together.

    Raises:
        ValueError: a table belongs to another module.
    """
    given = {
        place
        for model in models
        for module in table_modules_in(model).values()
        for place in module.places()
    }
    missing = [
        name
        for group in groups
        for number, name in enumerate(group.names)
        if (group, number) not in given
    ]
    if missing:
        raise ValueError(
            f"freezes_rows=True would freeze rows of tables {missing}, too, which the optimizer of "
            "the given modules updates, but which belong to others; give the whole model, or "
            "accelerate it with an optimizer for each part (optimizer=[...])"
        )


def names_of(models: Sequence[nn.Module], groups: Sequence[TableGroup]) -> list[list[str]]:
    """Names of the tables of each group: their own if they differ, else those of the parameters."""
    names = [list(group.names) for group in groups]
    if len({name for of_group in names for name in of_group}) == sum(map(len, names)):
        return names
    of_parameters: dict[int, str] = {}
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            of_parameters.setdefault(id(parameter), prefix + name.removesuffix(".weight"))
    return [
        [
            of_parameters.get(id(table), f"{number}.{name}")
            for table, name in zip(group.tables, group.names, strict=True)
        ]
        for number, group in enumerate(groups)
    ]


def read_rows(group: TableGroup, rows: NDArray[np.int64]) -> Tensor:
    """The newest values of rows, (M, D), where kernels run.

    Args:
        group: Their tables.
        rows: Numbers over all tables, (M,) ascending.

    Raises:
        ConflictingWrite: a table was written to while slots had newer rows.
        TiersFailed: a transfer of rows has failed.
    """
    write_back(group)
    firsts = group.first_rows.astype(np.int64)
    by_table = np.split(rows, np.searchsorted(rows, firsts[1:-1]))
    found = [
        table.index_select(0, torch.from_numpy(of_table - first).to(table.device))
        for table, of_table, first in zip(group.tensors, by_table, firsts.tolist(), strict=False)
    ]
    return torch.cat(found).to(group.device)
