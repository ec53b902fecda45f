"""The tables that a tracker follows: found in a model, and named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.embeddings.lookup.abstract_tables import table_modules_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from recsys.embeddings.update.group_updater import GroupUpdater
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["names_of", "require_all_tables", "updaters_in"]


def updaters_in(models: Sequence[nn.Module]) -> list[RowUpdater]:
    """The updaters of all recsys modules, each once.

    Raises:
        ValueError: there is no recsys module, or one has no recsys optimizer; also if its tables
            are not trained.
    """
    whole = table_modules_in(*models)
    if not whole:
        raise ValueError(
            "the model has no module of recsys.embeddings, so no row can be followed; use "
            "recsys.accelerate(model, optimizer=...) first"
        )
    updaters: dict[RowUpdater, None] = {}
    for name, module in whole:
        if module.row_updater is None:
            tables = dict(module.named_parameters(prefix=name))
            if not any(weight.requires_grad for weight in tables.values()):
                table = next(iter(tables), name).removesuffix(".weight")
                raise ValueError(
                    f"table {table!r} is not trained (requires_grad is False), and only rows that "
                    "a recsys optimizer updates can be followed; train it with one (optimizer=), "
                    "use a policy that follows no rows, such as Importance, or give a "
                    "StalenessTracker the other modules only"
                )
            raise ValueError(
                f"module {name!r}: its rows are updated by a torch optimizer, which a "
                "StalenessTracker cannot follow; give it a recsys optimizer (optimizer=)"
            )
        updaters[module.row_updater] = None
    return list(updaters)


def require_all_tables(models: Sequence[nn.Module], groups: Sequence[GroupUpdater]) -> None:
    """Check that the modules have all tables of some groups, whose rows would freeze together.

    Raises:
        ValueError: a table belongs to another module.
    """
    given = {
        (id(group), number)
        for _, module in table_modules_in(*models)
        for group, number in module._places
    }
    missing = [
        name
        for each in groups
        for number, name in enumerate(each.group.names)
        if (id(each.group), number) not in given
    ]
    if missing:
        raise ValueError(
            f"freezes_rows=True would freeze rows of tables {missing}, too, which the optimizer of "
            "the given modules updates, but which belong to others; give the whole model, or "
            "accelerate it with an optimizer for each part (optimizer=[...])"
        )


def names_of(models: Sequence[nn.Module], groups: Sequence[GroupUpdater]) -> list[list[str]]:
    """Names of the tables of each group: their own if they differ, else those of the parameters."""
    names = [list(group.group.names) for group in groups]
    if len({name for each in names for name in each}) == sum(map(len, names)):
        return names
    of_parameters: dict[int, str] = {}
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            of_parameters.setdefault(id(parameter), prefix + name.removesuffix(".weight"))
    return [
        [
            of_parameters.get(id(table), f"{number}.{name}")
            for table, name in zip(group.group.tables, group.group.names, strict=True)
        ]
        for number, group in enumerate(groups)
    ]
