"""The plan of a model's tables: what profiles and plans call them, and which rows are pinned.

    a bag                      its name in the model: "users", "tables.0"
    a table of a collection    its name in the collection: "t_cat_0"; found in a profile by those of
                               its features, too

A table that several modules share has the first of its names. A collection's table whose name
another table has, too, goes by its place in the model: "left.embedding_bags.t_cat_0".
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from recsys.embeddings.plan import HotPlan, plan_hot_rows
from recsys.embeddings.popularity import PopularityProfile
from recsys.errors import BudgetTooSmall, ProfileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from recsys.embeddings.attach import Mover, NamedTable
    from recsys.embeddings.table import TableConfig

__all__ = ["plan_of_model", "require_arguments"]

_DATA_TYPES = {torch.float32: "fp32", torch.float64: "fp64"}


def require_arguments(
    budget: int | str | None, plan: HotPlan | None, profile: PopularityProfile | None
) -> None:
    """Check what goes with what.

    Raises:
        TypeError: `plan` or `profile` is something else.
        ValueError: both are given, or a profile without a budget.
    """
    if plan is not None and not isinstance(plan, HotPlan):
        raise TypeError(
            f"plan must be a HotPlan, got {type(plan).__name__}; HotPlan.load reads a file"
        )
    if profile is not None and not isinstance(profile, PopularityProfile):
        raise TypeError(
            f"profile must be a PopularityProfile, got {type(profile).__name__}; "
            "PopularityProfile.load reads a file"
        )
    if plan is not None and profile is not None:
        raise ValueError(
            "plan= and profile= exclude each other: a plan is made of a profile; leave one out"
        )
    if profile is not None and budget is None:
        raise ValueError("profile= needs budget=, the memory that rows are chosen for; give both")


def plan_of_model(
    tables: Sequence[NamedTable],
    mover: Mover,
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
) -> tuple[int, dict[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]]] | None:
    """Bytes of fast memory, and which rows are to have slots of their own.

    Args:
        tables: Of every module; one that modules share comes several times.
        mover: Moves their rows; tables that it does not move stay resident, and are no part of it.
        budget: As for `accelerate`, and so are the next two.
        plan: Of the tables that are moved, in any order.
        profile: Of these tables, and others.

    Returns:
        By table as `RowUpdater.tier` takes it; None where there is neither plan nor profile.

    Raises:
        BudgetTooSmall: a plan of the profile needs more.
        ProfileError: plan or profile are of other tables.
    """
    if plan is None and profile is None:
        return None
    weights, configs = _configs(
        [table for table in tables if id(table.weight) in mover.param_groups]
    )
    if plan is None:
        assert profile is not None
        assert budget is not None
        plan = _plan_by(profile, configs, budget, mover)
    else:
        order = {name: number for number, name in enumerate(plan.tables)}
        configs.sort(key=lambda config: order.get(config.name, len(order)))
        plan = plan.of_tables(_as_configs(configs), budget)
    pinned = {
        weights[name]: rows for name, rows in zip(plan.tables, plan.pinned_by_table(), strict=True)
    }
    return plan.budget_bytes, pinned


class _Config(NamedTuple):
    """What `TableConfig` says, of float64 too."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: tuple[str, ...]
    data_type: str


def _configs(tables: Sequence[NamedTable]) -> tuple[dict[str, nn.Parameter], list[_Config]]:
    """Every table once, and its config, by the name that it has in a plan."""
    firsts: dict[int, NamedTable] = {}
    features: dict[int, list[str]] = {}
    for table in tables:
        firsts.setdefault(id(table.weight), table)
        features.setdefault(id(table.weight), []).extend(table.features)
    uses = Counter(table.planned_as for table in firsts.values())
    weights, configs = {}, []
    for key, table in firsts.items():
        is_unique = uses[table.planned_as] == 1 or table.collection is None
        name = table.planned_as if is_unique else table.name
        weights[name] = table.weight
        num_embeddings, embedding_dim = table.weight.shape
        its_features = tuple(dict.fromkeys(features[key]))
        data_type = _DATA_TYPES[table.weight.dtype]
        configs.append(_Config(name, num_embeddings, embedding_dim, its_features, data_type))
    return weights, configs


def _as_configs(configs: Sequence[_Config]) -> Sequence[TableConfig]:
    return cast("Sequence[TableConfig]", configs)


def _plan_by(
    profile: PopularityProfile, configs: Sequence[_Config], budget: int | str, mover: Mover
) -> HotPlan:
    try:
        return plan_hot_rows(profile, _as_configs(configs), budget, mover.formula)
    except ProfileError as error:
        if all(config.name in profile.table_sizes for config in configs):
            raise
        raise ProfileError(
            f"{error}. A bag's table is called by the bag's name in the model, here are "
            f"{[config.name for config in configs]}; profile.for_tables gives counts other names"
        ) from None
    except BudgetTooSmall as error:
        raise BudgetTooSmall(
            f"{error}. These are as large as plan_hot_rows takes them by default; of smaller ones, "
            "give plan=plan_hot_rows(..., window_lookups=...) in place of profile="
        ) from None
