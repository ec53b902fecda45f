"""The hooks by which the `step` of the user's optimizer also updates rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from recsys.embeddings.rows.table_parameter import make_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.utils.hooks import RemovableHandle

    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["add_hooks"]


def add_hooks(updater: RowUpdater, optimizer: torch.optim.Optimizer) -> Sequence[RemovableHandle]:
    """Update rows in the steps of an optimizer, and load and save their state with its state."""
    hooks = _Hooks(updater)
    return (
        optimizer.register_step_pre_hook(hooks.before_step),
        # Rows in slots have newer state than the optimizer until it is read.
        optimizer.register_state_dict_pre_hook(hooks.flush),
        optimizer.register_load_state_dict_pre_hook(hooks.flush),
        optimizer.register_load_state_dict_post_hook(hooks.reload_state),
    )


class _Hooks:
    """The hooks of an updater in the user's optimizer.

    The updater refers to the optimizer, and the hooks do not keep the updater: so a model and its
    optimizer free their memory when they are deleted, without waiting for the garbage collector.
    If all modules are deleted before the optimizer, it updates their tables by itself.
    """

    def __init__(self, updater: RowUpdater) -> None:
        self._updater = ref(updater)

    def _updater_of(self, optimizer: torch.optim.Optimizer) -> RowUpdater | None:
        """The updater; if it was deleted, its tables become plain Parameters with all rows."""
        updater = self._updater()
        if updater is None:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    make_plain(weight)
        return updater

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Update rows in a step, before the optimizer updates other parameters.

        The update is in the step's closure, which torch's optimizers call first. So it runs after
        hooks that were registered later and may change gradients or settings.
        """
        updater = self._updater_of(optimizer)
        if updater is None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def compute_and_update_rows() -> Any:
            loss = None if closure is None else closure()
            _update_rows(updater, optimizer)
            return loss

        return args[:1], kwargs | {"closure": compute_and_update_rows}

    def flush(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Write back the state of rows in slots."""
        updater = self._updater_of(optimizer)
        if updater is not None:
            updater.flush()

    def reload_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the state that was loaded."""
        updater = self._updater_of(optimizer)
        if updater is not None:
            updater.reload_state()


def _update_rows(updater: RowUpdater, optimizer: torch.optim.Optimizer) -> None:
    # With a "fused" optimizer, GradScaler leaves unscaling and the check for inf to the step.
    if getattr(optimizer, "grad_scale", None) is not None:
        raise RuntimeError(
            "GradScaler leaves unscaling to an optimizer with fused=True, which does not see "
            "the gradients of rows; call scaler.unscale_(optimizer) before scaler.step(optimizer)"
        )
    updater.require_param_groups()
    if bool(getattr(optimizer, "found_inf", False)):
        updater.forget()
    else:
        updater.update_rows()
