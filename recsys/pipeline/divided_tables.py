"""Tables whose rows are divided among processes, as a pipeline that looks ahead sees them.

    send        ids travel to the processes that have their rows: a collective
    prefetch    each process claims slots for its rows and fetches them: no collective
    forward     finds the ids that were sent; a collective

Whether a process has slots for the rows of a mini-batch is known to that process alone. So nothing
that depends on it may decide about a collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from recsys.batch import JaggedIds
    from recsys.embeddings.tiers.fetch import Claims, Fetcher

__all__ = ["AbstractDividedTables"]


class AbstractDividedTables(nn.Module, ABC):
    """A module that looks up rows of several processes.

    Attributes:
        has_tiers: Whether rows are in two tiers on any process; the same on all.
    """

    has_tiers = False

    @abstractmethod
    def send(self, features: JaggedIds) -> None:
        """Start to send the ids of a later mini-batch, and do not wait for them. A collective.

        Args:
            features: The input of a later `forward`, the very object.

        Raises:
            Exception: the ids of a process are invalid; every process raises.
        """

    @abstractmethod
    def prefetch(self, features: JaggedIds) -> Claims:
        """Wait for ids that were sent, and start to fetch this process's rows. No collective."""

    @abstractmethod
    def fetchers(self) -> list[Fetcher]:
        """What moves this process's rows; empty if all are in fast memory."""
