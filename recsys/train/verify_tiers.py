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
from recsys.train.parts.budget import MemoryNeeds
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

_REORDERING = {
    "fae": "the order of samples",
    "hotline": "the order in which floats are summed",
}
BUDGETS = ("floor", "twice-floor", "half", "everything")


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
            which most rows are used in cold memory; "half" and "everything" are shares of the bytes
            of rows and state, "half" not below the floor.
        max_steps: The most steps of a run, at least 1; None for one epoch.

    Raises:
        BudgetTooSmall: a size is below the floor.
        ConfigError: the configuration does not fit the data, or a budget or `max_steps` is not
            valid.
    """
    if max_steps is not None and max_steps < 1:
        raise ConfigError(f"verify: max_steps must be at least 1, got {max_steps}")
    if config.embeddings != "recsys":
        raise ConfigError(
            f"verify: embeddings must be 'recsys', got {config.embeddings!r}; leave it out"
        )
    if config.schedule.kind in _REORDERING:
        raise ConfigError(
            f"verify compares runs to the last bit, and schedule {config.schedule.kind!r} changes "
            f"{_REORDERING[config.schedule.kind]}; leave it out"
        )
    if config.skip.kind != "none":
        raise ConfigError(
            "verify compares runs that train on the same samples, and skip "
            f"{config.skip.kind!r} leaves some out; leave it out"
        )
    set_num_threads(config.num_threads)
    source = open_source(config)
    sizes = _budget_sizes(config, source, budgets)
    resident = replace(
        config, budget="", plan="", cold_tier="host", cold_path="", schedule=ScheduleConfig()
    )
    expected = _Run(resident, source, max_steps)
    cold_path = config.cold_path or gettempdir() if config.cold_tier == "file" else ""
    found = []
    for name, num_bytes in sizes.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "budget=")  # "everything" fits
            warnings.filterwarnings("ignore", "tables .* cold memory")
            settings = replace(config, budget=str(num_bytes), cold_path=cold_path)
            run = _Run(settings, source, max_steps)
            differing = run.differs_from(expected)
        found.append(BudgetVerification(name, num_bytes, len(run.losses), run.tiers, differing))
    return found


def format_verification(found: Sequence[BudgetVerification]) -> str:
    """Format one line per budget."""
    lines = []
    for each in found:
        tiers = "all resident"
        if each.tiers is not None:
            tiers = (
                f"{each.tiers['num_slots']:,} of {each.tiers['num_rows']:,} rows hot, "
                f"{each.tiers['lookup_hit_rate']:.1%} of lookups hit"
            )
        verdict = "equal to the last bit"
        if not each.ok:
            more = f" and {len(each.differing) - 3} more" if len(each.differing) > 3 else ""
            verdict = f"DIFFERS: {', '.join(each.differing[:3])}{more}"
        size = format_bytes(each.budget_bytes)
        steps = counted(each.num_steps, "step")
        lines.append(f"{each.name:<12}{size:>10}  {steps}, {tiers}: {verdict}")
    return "\n".join(lines)


class _Run:
    """Trains a model; keeps the model, its optimizers, the losses and the tiers."""

    def __init__(self, config: TrainConfig, source: SampleSource, max_steps: int | None) -> None:
        self.model, self.optimizers = build_model(config, source)
        self.losses: list[float] = []
        self.model.train()
        loader = build_loader(config, source, None)
        num_steps = len(loader) if max_steps is None else min(len(loader), max_steps)
        pipeline = build_pipeline(self.model, self.optimizers, config, StageClock(), num_steps)
        for loss, _ in pipeline.steps(islice(loader, max_steps)):
            self.losses.append(loss.item())
        pipeline.detach()
        self.tiers = describe_tiers(self.model)

    def differs_from(self, other: _Run) -> list[str]:
        """Names of everything that differs."""
        pairs = enumerate(zip(other.losses, self.losses, strict=True))
        differing = [
            f"loss of step {step}" for step, (a, b) in pairs if a != b and not (a != a and b != b)
        ]
        expected, found = other.numbers(), self.numbers()
        # A table that was never looked up may have no state in one run, and zeros in the other.
        for name in {**expected, **found}:
            a, b = expected.get(name), found.get(name)
            if a is None or b is None:
                is_same = not torch.count_nonzero(b if a is None else a)  # type: ignore[arg-type]
            else:
                is_same = torch.equal(a, b)
            if not is_same:
                differing.append(name)
        return differing

    def numbers(self) -> dict[str, Tensor]:
        """Parameters and the state of the rows, by name, on the CPU.

        With a budget, tables of a model on a GPU are in the host's memory.
        """
        found = {name: value.cpu() for name, value in self.model.state_dict().items()}
        for state in self.optimizers[-1].state_dict()["state"].values():
            found |= {name: torch.as_tensor(value).cpu() for name, value in state.items()}
        return found


def _budget_sizes(
    config: TrainConfig, source: SampleSource, names: Sequence[str]
) -> dict[str, int]:
    """The bytes of each budget."""
    needs = MemoryNeeds(config, source)
    # A plan reserves room for mini-batches.
    floor = HotPlan.load(config.plan).floor_bytes if config.plan else needs.least
    sizes = {
        "floor": floor,
        "twice-floor": 2 * floor,
        "half": max(floor, needs.everything // 2),
        "everything": needs.everything,
    }
    return {name: sizes.get(name) or parse_bytes(name, "budget") for name in names}
