"""Where one kernel call looks rows up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups
    from recsys.embeddings.residency import Ticket
    from recsys.embeddings.row_space import RowSpace
    from recsys.embeddings.table_group import TableGroup

__all__ = ["Found"]


class Found(NamedTuple):
    """What one kernel call looks up, and where.

    Attributes:
        group: Has the tables.
        kernels: What looks up.
        lookups: What is looked up where.
        rows: The input.
        space: The rows: those of the tables, or slots that hold them.
        bags: The input as numbers of `space`.
        tables: All of the group, as they are now.
        parameters: The same as Parameters, of a group that is watched.
        ticket: Has the slots, if they are some.
    """

    group: TableGroup
    kernels: Any
    lookups: Lookups
    rows: Bags
    space: RowSpace
    bags: Bags
    tables: Sequence[Tensor]
    parameters: Sequence[nn.Parameter]
    ticket: Ticket | None
