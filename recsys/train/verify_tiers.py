"""`recsys verify`: compares training at several budgets with training where every row is resident.

The loss of every step must be equal to the last bit, and so must the rows, the optimizer's state
and the dense part at the end (contract C2).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import islice
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.machine import set_num_threads
from recsys._support.sizes import counted, format_bytes, parse_bytes
from recsys.config import ScheduleConfig, replace
from recsys.embeddings.popularity.plan import HotPlan
from recsys.errors import ConfigError
from recsys.pipeline.stalls import StageClock
from recsys.train.dry_run import size_tables
from recsys.train.parts.build import (
    build_loader,
    build_model,
    build_pipeline,
    describe_tiers,
    open_source,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["BUDGETS", "BudgetVerification", "format_verification", "verify_budgets"]

BUDGETS = ("floor", "half")


@dataclass(frozen=True)
class BudgetVerification:
    """A run at a budget, compared with the resident run.

    Attributes:
        name: Name of the budget.
        budget_bytes: Bytes of fast memory.
        num_steps: Steps compared.
        tiers: The tiers as a run record describes them; None if everything fitted.
        differing: Everything that differs: "loss of step 3", "t_cat_0.weight", ...
    """

    name: str
    budget_bytes: int
    num_steps: int
    tiers: dict[str, Any] | None
    differing: list[str]

    @property
    def ok(self) -> bool:
        """Whether both runs are equal to the last bit."""
        return not self.differing


def verify_budgets(
    config: TrainConfig, budgets: Sequence[str] = BUDGETS, max_steps: int | None = None
) -> list[BudgetVerification]:
    """Train with every row resident, then at each budget, and compare everything.

    Args:
        config: Configures the runs; its `plan` is used, its `budget` is not. With `cold_tier`
            "file", rows are in files in `cold_path`, or in the folder for temporary files.
        budgets: Names from `BUDGETS`, or sizes like "256MiB". "floor" is the least budget, with
            which most rows are used in cold memory; "half" is half of the bytes of rows and state,
            not below the floor.
        max_steps: The most steps of a run, at least 1; None for one epoch.

    Raises:
        BudgetTooSmall: a size is below the floor.
        ConfigError: the configuration does not fit the data, trains on other samples or in another
            order, or a budget or `max_steps` is not valid.
    """
    if max_steps is not None and max_steps < 1:
        raise ConfigError(f"verify: max_steps must be at least 1, got {max_steps}")
    for key, value, must_change in (
        ("embeddings", config.embeddings, config.embeddings != "recsys"),
        ("schedule", config.schedule.kind, config.schedule.kind in ("fae", "hotline")),
        ("skip", config.skip.kind, config.skip.kind != "none"),
    ):
        if must_change:
            raise ConfigError(
                "verify compares runs of recsys that train on the same samples in the same order; "
                f"{key} must not be {value!r}; leave it out"
            )
    set_num_threads(config.num_threads)
    source = open_source(config)
    resident = replace(
        config, budget="", plan="", cold_tier="host", cold_path="", schedule=ScheduleConfig()
    )
    tables, _ = size_tables(resident, source)
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
            warnings.filterwarnings("ignore", "tables .* cold memory")
            found, _, tiers = _train(settings, source, max_steps)
        differing = [
            key for key in {**expected, **found} if not _is_equal(expected.get(key), found.get(key))
        ]
        results.append(BudgetVerification(name, num_bytes, num_steps, tiers, differing))
    return results


def format_verification(found: Sequence[BudgetVerification]) -> str:
    """Format one line per budget."""
    lines = []
    for result in found:
        tiers = "all resident"
        if result.tiers is not None:
            tiers = (
                f"{result.tiers['num_slots']:,} of {result.tiers['num_rows']:,} rows hot, "
                f"{result.tiers['lookup_hit_rate']:.1%} of lookups hit"
            )
        verdict = "equal to the last bit"
        if not result.ok:
            verdict = f"DIFFERS in {len(result.differing)}: {', '.join(result.differing[:3])}"
        size = format_bytes(result.budget_bytes)
        steps = counted(result.num_steps, "step")
        lines.append(f"{result.name:<12}{size:>10}  {steps}, {tiers}: {verdict}")
    return "\n".join(lines)


def _train(
    config: TrainConfig, source: SampleSource, max_steps: int | None
) -> tuple[dict[str, Tensor], int, dict[str, Any] | None]:
    """Losses, parameters and state of rows, by name, on the CPU; number of steps; the tiers."""
    model, optimizers = build_model(config, source)
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
