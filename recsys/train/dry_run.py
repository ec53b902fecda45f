"""What the tables of a run will take: `recsys train --dry-run`, and the sizes of `recsys verify`.

The data is opened, the plan is read or made, and the model is built with its tables on the "meta"
device. No table is allocated, and nothing is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recsys.config import replace
from recsys.conversion.estimate import Estimate, estimate
from recsys.train.callbacks import callbacks_of, require_metric
from recsys.train.parts.build import (
    INIT_FROM_NEEDS,
    build_model,
    choose_plan,
    cold_folder,
    open_first_model,
    open_source,
    tables_budget,
)
from recsys.train.run_files.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["dry_run", "size_tables"]


def dry_run(config: TrainConfig, run_dir: str | Path) -> Estimate:
    """Check a run and size its tables, up to their allocation.

    Args:
        config: The configuration.
        run_dir: The folder that the run would make.

    Returns:
        What the tables take. What a policy of skipping keeps of rows beside them is not in it.

    Raises:
        AlreadyExists: `run_dir` is not empty.
        BudgetTooSmall: the budget is below the least one.
        ColdTierError: the disk has no room for rows in files.
        ConfigError, ProfileError, StoreError: the configuration does not fit the data or the
            machine.
        MissingDependency: a package that a callback logs to is not installed.
    """
    run_dir = Path(run_dir)
    callbacks_of(config)
    source = open_source(config)
    if config.early_stopping.patience:
        require_metric(config, source)
    first_model = open_first_model(config, source)
    RunFolder.require_place(run_dir)
    tables, model = size_tables(config, source, cold_folder(config, run_dir))
    if first_model is not None:
        first_model.require_fitting_model(model, INIT_FROM_NEEDS)
    return tables


def size_tables(
    config: TrainConfig, source: SampleSource, cold_path: str = ""
) -> tuple[Estimate, nn.Module]:
    """What the tables take, and the model with tables on the "meta" device.

    Args:
        config: The configuration.
        source: Its data.
        cold_path: A folder whose disk must have room for the files of the cold tier.

    Raises:
        Exception: as for `dry_run`.
    """
    plan = choose_plan(config, source)
    resident = replace(config, budget="", plan="", cold_tier="host", cold_path="")
    train_model, optimizers = build_model(resident, source, table_device="meta")
    model: nn.Module = train_model.model
    if config.embeddings != "recsys":
        of_rows: Optimizer = optimizers[-1]
        return estimate(model, optimizer=of_rows), model
    tables = estimate(
        model,
        tables_budget(config, source) or None,
        plan=plan,
        cold_tier=config.cold_tier,
        cold_path=cold_path or None,
        device=config.device,
    )
    return tables, model
