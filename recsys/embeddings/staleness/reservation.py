"""The memory of a tracker, which is taken out of the budget of rows in two tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.embeddings.staleness.followed_rows import tracked_bytes
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.staleness.settings import Staleness
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["give_back", "give_back_later", "reserve"]


def reserve(updaters: Sequence[RowUpdater], staleness: Staleness) -> None:
    """Take the memory of a tracker out of the budgets; all or nothing.

    Args:
        updaters: Have the budgets.
        staleness: The settings of the tracker.

    Raises:
        BudgetTooSmall: there is no room, or slots are in use.
    """
    done: list[RowUpdater] = []
    try:
        for updater in updaters:
            num_bytes = sum(
                tracked_bytes(group.group.tables, staleness) for group in updater.groups
            )
            _reserve(updater, num_bytes, staleness)
            done.append(updater)
    except BaseException:
        for updater in done:
            updater.reserve(0)
        raise


def give_back(updaters: list[RowUpdater]) -> None:
    """Give the memory back to the slots.

    Args:
        updaters: As for `reserve`. Those that are done are removed from the list.

    Raises:
        BudgetTooSmall: slots are in use.
    """
    while updaters:
        if not _is_taken(updaters[-1]):
            updaters[-1].reserve(0)
        updaters.pop()


def give_back_later(updaters: Sequence[RowUpdater]) -> None:
    """Give the memory back to the slots when the budget is next divided; arguments as above."""
    for updater in updaters:
        if not _is_taken(updater):
            updater.drop_reserve()


def _is_taken(updater: RowUpdater) -> bool:
    """Whether another tracker has the rows, and thus the reserved memory."""
    return any(group.group.staleness is not None for group in updater.groups)


def _reserve(updater: RowUpdater, num_bytes: int, staleness: Staleness) -> None:
    try:
        updater.reserve(num_bytes)
    except BudgetTooSmall as error:
        raise BudgetTooSmall(
            f"the staleness tracker takes {num_bytes} bytes of the budget (staleness: max_rows is "
            f"{staleness.max_rows}; lower it to follow fewer rows). {error}"
        ) from None
