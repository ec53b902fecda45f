"""What `recsys bench gpu` measures, the most important cases first.

    model      bottom MLP       top MLP                  D         B
    kaggle     512-256-D        512-256-1                128, 64   16384, 2048, 65536
    nvidia     512-256-128      1024-1024-512-256-1      128       65536; TF32 and bf16

Both have Criteo Kaggle's 26 tables: 16.1 GiB at D=128. NVIDIA publishes figures for a model of
15 GB with other Criteo tables, under the name DLRM small.

A case is a model, a batch size, a precision and a budget. The first budget of `shares` is measured
beside all other providers, if `has_baselines`, the others beside the resident tables alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsys.bench.parts.shares import FLOOR
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "PRESETS",
    "QUICK",
    "SCHEDULES_MEASURED",
    "SHARES",
    "Case",
    "Model",
    "Plan",
    "cases_of",
]

SHARES = ("0.1", FLOOR, "0.05", "0.2", "0.5", "1")
SCHEDULES_MEASURED = ("sequential", "lookahead-1", "lookahead-2", "hotline")
PRESETS = ("kaggle", "nvidia")


@dataclass(frozen=True)
class Model:
    """A DLRM's dense part at one batch size and precision.

    Attributes:
        name: A name from `PRESETS`.
        dim: D.
        batch_size: B.
        precision: "fp32", "tf32" or "bf16".
    """

    name: str
    dim: int
    batch_size: int
    precision: str

    @property
    def dense_arch(self) -> list[int]:
        """Layer sizes of the bottom MLP."""
        return [size for size in (512, 256) if size > self.dim] + [self.dim]

    @property
    def over_arch(self) -> list[int]:
        """Layer sizes of the top MLP."""
        return [1024, 1024, 512, 256, 1] if self.name == "nvidia" else [512, 256, 1]


@dataclass(frozen=True)
class Case:
    """A model at one budget.

    Attributes:
        model: The model.
        share: A share of the bytes of all rows, or "floor". At 1 everything is resident.
        has_baselines: Whether all providers take turns, or only recsys and the resident tables.
    """

    model: Model
    share: str
    has_baselines: bool

    @property
    def name(self) -> str:
        """The case of rows, without the schedule."""
        model = self.model
        return (
            f"B={model.batch_size},D={model.dim},model={model.name},precision={model.precision},"
            f"share={self.share}"
        )


@dataclass(frozen=True)
class Plan:
    """What is measured, and how long it may take.

    Attributes:
        device: "cuda", or "cpu" to try the program.
        table_sizes: Rows per table.
        presets: Names from `PRESETS`.
        dims: D of preset kaggle.
        batch_sizes: B of preset kaggle.
        precision: Precision of preset kaggle.
        nvidia: D and B of preset nvidia.
        shares: Budgets, the one beside the baselines first.
        schedules: Names of schedules.
        num_fill_samples: Samples whose lookups fill the slots before the first turn.
        seconds: No case begins later than this after the start.
        case_seconds: Rounds of a case stop after about so long, but not before three.
        has_kernels: Whether the kernels of one step are listed.
        has_baselines: Whether the first budget is measured beside all other providers.
        capture: Whether every provider replays its dense part as CUDA graphs.
        is_quick: Whether turns are as short as possible.
    """

    device: str = "cuda"
    table_sizes: Sequence[int] = KAGGLE_TABLE_SIZES
    presets: Sequence[str] = PRESETS
    dims: Sequence[int] = (128, 64)
    batch_sizes: Sequence[int] = (16384, 2048, 65536)
    precision: str = "tf32"
    nvidia: tuple[int, int] = (128, 65536)
    shares: Sequence[str] = SHARES
    schedules: Sequence[str] = SCHEDULES_MEASURED
    num_fill_samples: int = 3_000_000
    seconds: float = 480.0
    case_seconds: float = 10.0
    has_kernels: bool = False
    has_baselines: bool = True
    capture: bool = False
    is_quick: bool = False


QUICK = Plan(
    table_sizes=(900, 800, 70, 3),
    dims=(8,),
    batch_sizes=(64,),
    nvidia=(8, 64),
    shares=("0.5", FLOOR, "1"),
    num_fill_samples=512,
    is_quick=True,
)


def cases_of(plan: Plan) -> list[tuple[int, list[Case]]]:
    """All cases by D, in order of importance; the tables are built once for each D."""
    models: dict[int, list[Model]] = {}
    if "kaggle" in plan.presets:
        for dim in plan.dims:
            models[dim] = [Model("kaggle", dim, size, plan.precision) for size in plan.batch_sizes]
    if "nvidia" in plan.presets:
        dim, batch_size = plan.nvidia
        published = [Model("nvidia", dim, batch_size, each) for each in ("tf32", "bf16")]
        known = models.get(dim, [])
        models[dim] = known[:1] + published + known[1:]
    first, *others = plan.shares
    return [
        (
            dim,
            [Case(model, first, plan.has_baselines) for model in of_dim]
            + [Case(model, share, has_baselines=False) for model in of_dim for share in others],
        )
        for dim, of_dim in models.items()
    ]
