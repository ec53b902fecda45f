"""The plan of a model's tables: the names of tables in profiles and plans, and the pinned rows.

    a bag                      its name in the model: "users", "tables.0"
    a table of a collection    its name in the collection: "t_cat_0"; a profile may have the names
                               of its features instead

A table that several modules share has the first of its names. If another table has the same name, a
collection's table is called by its path in the model: "left.embedding_bags.t_cat_0".
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from recsys._support.sizes import parse_bytes
from recsys.embeddings.popularity.counts import PopularityProfile
from recsys.embeddings.popularity.plan import plan_hot_rows, require_plan
from recsys.embeddings.table import DATA_TYPES
from recsys.errors import BudgetTooSmall, ProfileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.table import TableConfig
    from recsys.embeddings.tables_module import Table

__all__ = ["configs_of", "plan_of_model", "require_arguments"]

_DATA_TYPES = {dtype: name for name, dtype in (DATA_TYPES | {"fp64": torch.float64}).items()}


def require_arguments(
    budget: int | str | None, plan: HotPlan | None, profile: PopularityProfile | None
) -> None:
    """Check which arguments are given together.

    Raises:
        TypeError: `plan` is not a `HotPlan`, or `profile` not a `PopularityProfile`.
        ValueError: both are given, or a profile without a budget.
    """
    require_plan(plan)
    if profile is not None and not isinstance(profile, PopularityProfile):
        raise TypeError(
            f"profile must be a PopularityProfile, got {type(profile).__name__}; "
            "PopularityProfile.load reads a file"
        )
    if plan is not None and profile is not None:
        raise ValueError(
            "plan= and profile= exclude each other: a plan is made from a profile; leave one out"
        )
    if profile is not None and budget is None:
        raise ValueError("profile= needs budget=, the fast memory of its plan; give both")


def plan_of_model(
    tables: Sequence[Table],
    formulas: Sequence[RowOptimizer | None],
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
) -> tuple[int, dict[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]]] | None:
    """The bytes of fast memory, and the rows to be pinned; None if all rows are resident.

    Args:
        tables: The tables that share the budget; a shared table occurs once for each of its
            modules.
        formulas: The update rules of their rows; None for rows that have none.
        budget: See `accelerate`.
        plan: A plan of the updated tables, in any order; see `accelerate`.
        profile: Has the updated tables, and may have others; see `accelerate`.

    Returns:
        The budget, and for each table its pinned rows and their counts.

    Raises:
        BudgetTooSmall: the floor of the profile's plan is above the budget.
        ConfigError: `budget` cannot be read.
        ProfileError: plan or profile has other tables.
        ValueError: there is no optimizer, or more than one; or the tables are on several devices.
    """
    if budget is None and plan is None:
        return None
    formula = formulas[0] if formulas else None
    if formula is None or None in formulas:
        raise ValueError(
            "budget= (or plan=) keeps some rows in slow memory, and recsys must update them; give "
            "optimizer=, too: a formula (recsys.embeddings.SGD, Adagrad, RowWiseAdagrad, ...) or "
            "the model's torch optimizer"
        )
    if len(formulas) > 1:
        raise ValueError(
            f"budget: tables that share it must have one optimizer, got {len(formulas)}; give "
            "only one of them, which leaves the other tables alone, or leave out budget="
        )
    devices = {table.weight.device: table.name for table in tables}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(
            f"budget: tables that share it must be on one device, got {places}; move the model by "
            ".to(), or leave out budget="
        )
    weights, configs = configs_of(tables)
    if plan is not None:
        order = {name: number for number, name in enumerate(plan.tables)}
        configs.sort(key=lambda config: order.get(config.name, len(order)))
        plan = plan.of_tables(configs, budget)
    else:
        assert budget is not None
        if profile is None:
            return parse_bytes(budget, "budget"), {}
        try:
            plan = plan_hot_rows(profile, configs, budget, formula)
        except ProfileError as error:
            if all(config.name in profile.table_sizes for config in configs):
                raise
            raise ProfileError(
                f"{error}. A bag's table has the bag's name in the model; the names here are "
                f"{[config.name for config in configs]}; profile.for_tables renames tables"
            ) from None
        except BudgetTooSmall as error:
            raise BudgetTooSmall(
                f"{error}. plan_hot_rows assumes large mini-batches by default; for smaller ones, "
                "pass plan=plan_hot_rows(..., window_lookups=...) instead of profile="
            ) from None
    pinned = {
        weights[name]: rows for name, rows in zip(plan.tables, plan.pinned_by_table(), strict=True)
    }
    return plan.budget_bytes, pinned


class _Config(NamedTuple):
    """The fields of `TableConfig` that planning needs; allows float64, which that one refuses."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: tuple[str, ...]
    data_type: str


def configs_of(tables: Sequence[Table]) -> tuple[dict[str, nn.Parameter], list[TableConfig]]:
    """Every table once: its Parameter by its name in a plan, and its config."""
    firsts: dict[nn.Parameter, Table] = {}
    features: dict[nn.Parameter, list[str]] = {}
    for table in tables:
        firsts.setdefault(table.weight, table)
        features.setdefault(table.weight, []).extend(table.features)
    uses = Counter(table.planned_as for table in firsts.values())
    weights, configs = {}, []
    for weight, table in firsts.items():
        is_unique = uses[table.planned_as] == 1 or not table.collection
        name = table.planned_as if is_unique else table.name
        weights[name] = weight
        data_type = _DATA_TYPES.get(weight.dtype, str(weight.dtype))
        num_embeddings, embedding_dim = weight.shape
        feature_names = tuple(dict.fromkeys(features[weight]))
        configs.append(_Config(name, num_embeddings, embedding_dim, feature_names, data_type))
    return weights, cast("list[TableConfig]", configs)
