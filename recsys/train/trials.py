"""Trials before a run: `recsys train --dry-run` sizes its tables, `recsys verify` compares budgets.

dry_run          the data is opened, the plan is read or made, and the model is built with its
tables on the "meta" device; no table is allocated, and nothing is written
verify_budgets   training where every row is resident, and at several budgets: the loss of every
step must be equal to the last bit, and so must the rows, the optimizer's state
and the dense part at the end (contract C2)
"""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from recsys._support.machine import set_num_threads
from recsys._support.sizes import counted, format_bytes, parse_bytes
from recsys.config import ScheduleConfig, TrainConfig, replace
from recsys.conversion.estimate import Estimate, estimate
from recsys.embeddings.popularity.plan import HotPlan
from recsys.errors import refuse
from recsys.pipeline.stalls import StageClock
from recsys.train.build import (
    build_loader,
    build_model,
    build_pipeline,
    choose_plan,
    cold_folder,
    describe_tiers,
    open_source,
    tables_budget,
)
from recsys.train.callbacks import callbacks_of, require_metric
from recsys.train.evaluate import INIT_FROM_NEEDS, open_first_model
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from recsys.batch import SampleSource

__all__ = ["BUDGETS", "BudgetVerification", "dry_run", "verify_budgets"]

BUDGETS = ("floor", "half")


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
    require_metric(config, source)
    first_model = open_first_model(config, source)
    RunFolder.require_place(run_dir)
    tables, model = _size_tables(config, source, cold_folder(config, run_dir))
    if first_model is not None:
        first_model.load_model(model, INIT_FROM_NEEDS)
    return tables


def _size_tables(
    config: TrainConfig, source: SampleSource, cold_path: str = ""
) -> tuple[Estimate, nn.Module]:
    """What the tables take, and the model with tables on the "meta" device.

    Args:
        config: The configuration.
        source: Its data.
        cold_path: A folder whose disk must have room for the files of the cold tier.
    """
    plan = choose_plan(config, source)
    resident = replace(config, budget="", plan="", cold_tier="host", cold_path="")
    train_model, optimizers = build_model(resident, source, table_device="meta")
    model: nn.Module = train_model.model
    tables = estimate(
        model,
        tables_budget(config, source) or None,
        optimizer=None if config.embeddings == "recsys" else optimizers[-1],
        plan=plan,
        cold_tier=config.cold_tier,
        cold_path=cold_path or None,
        device=config.device,
    )
    return tables, model


class BudgetVerification(NamedTuple):
    """A run at a budget, compared with the resident run.

    Attributes:
        name: Name of the budget.
        budget_bytes: Bytes of fast memory.
        num_steps: Steps compared.
        tiers: The tiers as a run record describes them; None if everything fitted.
        differing: Everything that differs: "loss of step 3", "t_cat_0.weight", ...; empty if both
            runs are equal to the last bit.
    """

    name: str
    budget_bytes: int
    num_steps: int
    tiers: dict[str, Any] | None
    differing: list[str]

    def __str__(self) -> str:
        tiers = "all resident"
        if self.tiers is not None:
            tiers = (
                f"{self.tiers['num_slots']:,} of {self.tiers['num_rows']:,} rows hot, "
                f"{self.tiers['lookup_hit_rate']:.1%} of lookups hit"
            )
        verdict = "equal to the last bit"
        if self.differing:
            verdict = f"DIFFERS in {len(self.differing)}: {', '.join(self.differing[:3])}"
        return (
            f"{self.name:<12}{format_bytes(self.budget_bytes):>10}  "
            f"{counted(self.num_steps, 'step')}, {tiers}: {verdict}"
        )


def verify_budgets(
    config: TrainConfig, budgets: Sequence[str] = BUDGETS, max_steps: int | None = None
) -> list[BudgetVerification]:
    """Train with every row resident, then at each budget, and compare everything.

    Args:
        config: Configures the runs; its `plan` is used, its `budget` is not. With `cold_tier`
            "file", rows are in files in `cold_path`, or in the folder for temporary files.
        budgets: Names from `BUDGETS`, or sizes like "256MiB". "floor" is the least budget, with
            which most rows are used in the cold tier; "half" is half of all rows and state,
            not below the floor.
        max_steps: The most steps of a run, at least 1; None for one epoch.

    Raises:
        BudgetTooSmall: a size is below the floor.
        ConfigError: the configuration does not fit the data, trains on other samples or in another
            order, or a budget or `max_steps` is not valid.
    """
    rules = [
        ("embeddings", config.embeddings, config.embeddings != "recsys"),
        ("schedule", config.schedule.kind, config.schedule.kind in ("fae", "hotline")),
        ("skip", config.skip.kind, config.skip.kind != "none"),
    ]
    refuse(
        (
            max_steps is not None and max_steps < 1,
            f"verify: max_steps must be at least 1, got {max_steps}",
        ),
        *(
            (
                must_change,
                "verify compares runs of recsys that train on the same samples in the same order; "
                f"{key} must not be {value!r}; leave it out",
            )
            for key, value, must_change in rules
        ),
    )
    set_num_threads(config.num_threads)
    source = open_source(config)
    resident = replace(
        config, budget="", plan="", cold_tier="host", cold_path="", schedule=ScheduleConfig()
    )
    tables, _ = _size_tables(resident, source)
    # A plan reserves room for mini-batches.
    floor = HotPlan.load(config.plan).floor_bytes if config.plan else tables.floor_bytes
    sizes = {"floor": floor, "half": max(floor, tables.everything_bytes // 2)}
    expected, num_steps, _ = _train(resident, source, max_steps)
    cold_path = config.cold_path or gettempdir() if config.cold_tier == "file" else ""
    results = []
    for name in budgets:
        num_bytes = sizes.get(name) or parse_bytes(name, "budget")
        settings = replace(config, budget=str(num_bytes), cold_path=cold_path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "tables .* cold tier")
            found, _, tiers = _train(settings, source, max_steps)
        differing = [
            key for key in {**expected, **found} if not _is_equal(expected.get(key), found.get(key))
        ]
        results.append(BudgetVerification(name, num_bytes, num_steps, tiers, differing))
    return results


def _train(
    config: TrainConfig, source: SampleSource, max_steps: int | None
) -> tuple[dict[str, Tensor], int, dict[str, Any] | None]:
    """Losses, parameters and state of rows, by name, on the CPU; number of steps; the tiers."""
    model, optimizers = build_model(config, source, choose_plan(config, source))
    model.train()
    loader = build_loader(config, source, None)
    num_steps = len(loader) if max_steps is None else min(len(loader), max_steps)
    pipeline = build_pipeline(model, optimizers, config, StageClock(), num_steps)
    numbers: dict[str, Tensor] = {}
    for step, (loss, _) in enumerate(pipeline.steps(islice(loader, num_steps))):
        numbers[f"loss of step {step}"] = loss.detach().cpu()
    pipeline.detach()
    # With a budget, tables of a model on a GPU are in the host's memory.
    numbers |= {name: value.cpu() for name, value in model.state_dict().items()}
    for state in optimizers[-1].state_dict()["state"].values():
        numbers |= {name: torch.as_tensor(value).cpu() for name, value in state.items()}
    return numbers, num_steps, describe_tiers(model)


def _is_equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether all numbers are equal; nan equals nan."""
    # A table that was never looked up may have no state in one run, and zeros in the other.
    if a is None or b is None:
        return not torch.count_nonzero(b if a is None else a)  # type: ignore[arg-type]
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
