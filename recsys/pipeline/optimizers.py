"""The optimizers that a pipeline steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recsys.embeddings.update.fused_optimizer import FusedOptimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["optimizers_to_step"]


def optimizers_to_step(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None
) -> list[Optimizer]:
    """The given optimizers, and row optimizers of the model that do not step in backward."""
    given = [] if optimizer is None else optimizer
    optimizers = list(given) if isinstance(given, Sequence) else [given]
    for module in model.modules():
        own = getattr(module, "row_optimizer", None)
        if isinstance(own, FusedOptimizer) and own not in optimizers and not own.updater.auto_apply:
            optimizers.append(own)
    # Row optimizers step first: if one of them raises, no other parameter has been updated.
    of_rows = {
        id(updater.optimizer)
        for module in model.modules()
        if (updater := getattr(module, "row_updater", None)) is not None
    }
    return sorted(optimizers, key=lambda each: id(each) not in of_rows)
