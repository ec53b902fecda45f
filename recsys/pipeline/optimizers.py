"""The optimizers that a pipeline steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from recsys.embeddings.tables_module import TableModule
from recsys.embeddings.update.fused_optimizer import FusedOptimizer

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["optimizers_to_step"]


def optimizers_to_step(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None
) -> list[Optimizer]:
    """The given optimizers, and row optimizers of the model that do not step in backward.

    Warns if an optimizer that `recsys.accelerate` was given is not among those given here.

    Raises:
        ValueError: one is listed twice.
    """
    given = [] if optimizer is None else optimizer
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    for number, listed in enumerate(optimizers):
        if any(listed is other for other in optimizers[:number]):
            raise ValueError(
                f"optimizer= must list each optimizer once, got one {type(listed).__name__} twice, "
                "which would step twice in each mini-batch; leave one out"
            )
    for module in model.modules():
        own = getattr(module, "row_optimizer", None)
        if isinstance(own, FusedOptimizer) and own not in optimizers and not own.steps_in_backward:
            optimizers.append(own)
    # Row optimizers step first: if one of them raises, no other parameter has been updated.
    updates = [
        update
        for module in model.modules()
        if isinstance(module, TableModule)
        for own in (module.attachment, module.row_optimizer)
        if own is not None
        for update in own.updates
    ]
    of_rows = {id(update.optimizer): update.optimizer for update in updates}
    known = {id(parameter) for optimizer in optimizers for parameter in _parameters(optimizer)}
    are_known = all(hasattr(listed, "param_groups") for listed in optimizers)  # or it may be in one
    for row_optimizer in of_rows.values():
        if not (model.training and are_known) or isinstance(row_optimizer, FusedOptimizer):
            continue
        if not any(id(parameter) in known for parameter in _parameters(row_optimizer)):
            warnings.warn(
                f"optimizer= lacks the {type(row_optimizer).__name__} that recsys.accelerate was "
                "given, so its parameters are never trained; pass it, too",
                stacklevel=3,
            )
    return sorted(optimizers, key=lambda listed: id(listed) not in of_rows)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer has, also one that is wrapped."""
    groups = getattr(optimizer, "param_groups", ())
    return [parameter for group in groups for parameter in group["params"]]
