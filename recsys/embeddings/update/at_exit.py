"""Files of rows are complete when a process ends normally."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING
from weakref import WeakSet

from recsys.embeddings.tiers.cold.cold_files import FilesDeleted

if TYPE_CHECKING:
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["forget_at_exit", "sync_at_exit"]

_UPDATERS: WeakSet[RowUpdater] = WeakSet()
if hasattr(os, "register_at_fork"):  # files belong to the process that opened them
    os.register_at_fork(after_in_child=_UPDATERS.clear)


def sync_at_exit(updater: RowUpdater) -> None:
    """Call `sync` of an updater when this process ends, if the updater still exists."""
    _UPDATERS.add(updater)


def forget_at_exit(updater: RowUpdater) -> None:
    """Do not sync an updater at the end."""
    _UPDATERS.discard(updater)


@atexit.register
def _sync_all() -> None:
    errors = []
    for updater in list(_UPDATERS):
        try:
            updater.sync()
        except FilesDeleted:  # there is nothing to complete
            pass
        except Exception as error:  # the other updaters are still synced
            errors.append(error)
    if errors:
        raise ExceptionGroup(
            "files of rows were not synced; they count as damaged, as after a crash", errors
        )
