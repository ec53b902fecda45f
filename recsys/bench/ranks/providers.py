"""What `recsys bench distributed` compares, and on what. No TorchRec here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TORCHREC", "Case", "Provider", "providers_with"]

TORCHREC = "torchrec_fbgemm"


@dataclass(frozen=True)
class Provider:
    """A sharder, with its settings and the plan of all tables.

    Attributes:
        name: The provider's name in results.
        plan: "table_wise" or "row_wise".
        fused_params: Settings of the recsys sharder.
        budget_share: Fast memory of a rank, as a share of the bytes of its rows; None for all.
    """

    name: str
    plan: str
    fused_params: Mapping[str, Any] = field(default_factory=dict)
    budget_share: float | None = None

    @property
    def is_torchrec(self) -> bool:
        """Whether TorchRec's own sharder divides the tables."""
        return self.name == TORCHREC


class Case(NamedTuple):
    """What the ranks train.

    Attributes:
        world_size: W.
        batch_size: B, of all ranks together.
        dim: D.
        table_sizes: Rows per table.
        num_batches: Different mini-batches; after the last comes the first.
        providers: All of them have their tables side by side.
    """

    world_size: int
    batch_size: int
    dim: int
    table_sizes: Sequence[int]
    num_batches: int
    providers: Sequence[Provider]


def providers_with(budget_share: float) -> tuple[Provider, ...]:
    """All providers.

    Args:
        budget_share: The budget of "recsys_budget" on each rank.
    """
    rows = {"row_wise_exchange": "rows"}
    return (
        Provider("recsys", "table_wise"),
        Provider("recsys_budget", "table_wise", budget_share=budget_share),
        Provider(TORCHREC, "table_wise"),
        Provider("recsys", "row_wise", rows),
        Provider("recsys_budget", "row_wise", rows, budget_share),
        Provider("recsys_pooled", "row_wise", {"row_wise_exchange": "pooled"}),
        Provider(TORCHREC, "row_wise"),
    )
