"""The error about a write to a table whose newest rows are in slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.errors import ConflictingWrite

if TYPE_CHECKING:
    from recsys.embeddings.rows.table_versions import Written

__all__ = ["conflict_error"]


def conflict_error(name: str, conflict: Written) -> ConflictingWrite:
    """Make the error.

    Args:
        name: Name of the table.
        conflict: What was written to.
    """
    if conflict.state is not None:
        return ConflictingWrite(
            f"table {name!r}: its optimizer state {conflict.state!r} was written to while "
            "newer state of some rows is in fast memory; one of the two would be lost. Before "
            "such a write, call the optimizer's state_dict(), which writes the newer state "
            "back; to continue now, build the model again and load a checkpoint"
        )
    return ConflictingWrite(
        f"table {name!r}: its rows were written to by a tensor kept from before (of detach(), "
        "data or state_dict()) while newer values of some rows are in fast memory; one of the "
        "two would be lost. Write through the module's weight, which writes the newer values "
        "back first (with torch.no_grad(): module.weight.clamp_(...)); to continue now, load "
        "a checkpoint by load_state_dict, first into the module, then into the optimizer"
    )
