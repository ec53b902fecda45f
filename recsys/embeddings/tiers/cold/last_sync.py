"""Files of rows are complete when a process ends normally, also those of deleted modules.

    a module exists at the end      its updater is synced then
    a module was deleted before     its updater is kept, and synced when another module gets tiers,
                                    or at the end

The files of a model that was accelerated with its own optimizer are not opened again, so nothing is
kept of it. A finalizer itself calls no `sync`: the garbage collector runs in any thread and at any
line, also while a lock is held that moving rows needs.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections import deque
from typing import Protocol
from weakref import WeakSet

from recsys.embeddings.tiers.cold.cold_files import FilesDeleted
from recsys.embeddings.tiers.in_turn import AbstractInTurn

__all__ = ["forget_at_exit", "keep_deleted", "sync_at_exit", "sync_deleted"]


class _Updater(Protocol):
    def sync(self) -> None: ...


_UPDATERS: WeakSet[_Updater] = WeakSet()
_OF_PARENT: list[_Updater] = []  # in a forked process, which ends if it frees memory of a GPU


def _begin_in_fork() -> None:
    """Sync nothing of the parent: files belong to the process that opened them."""
    _OF_PARENT.extend(_DELETED.updaters)
    _DELETED.updaters.clear()
    _UPDATERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_fork)


def sync_at_exit(updater: _Updater) -> None:
    """Call `sync` of an updater when this process ends, if the updater still exists."""
    _UPDATERS.add(updater)


def forget_at_exit(updater: _Updater) -> None:
    """Do not sync an updater at the end."""
    _UPDATERS.discard(updater)


def keep_deleted(updater: _Updater) -> None:
    """Keep an updater whose module was deleted until `sync_deleted`; called in its finalizer."""
    _DELETED.updaters.append(updater)


def sync_deleted() -> None:
    """Complete the files of deleted modules, and free their fast memory.

    A warning tells of files that cannot be written; their folder counts as damaged.
    """
    _DELETED.sync()


class _Deleted(AbstractInTurn):
    """Updaters of deleted modules, with rows that are not in files yet."""

    def __init__(self) -> None:
        self.updaters: deque[_Updater] = deque()

    def sync(self) -> None:
        """As `sync_deleted`; another thread, which may open one of the folders, waits."""
        while self.updaters:
            self._sync_first()

    def _sync_first(self) -> None:
        updater = self.updaters.popleft()
        try:
            updater.sync()
        except FilesDeleted:  # there is nothing to complete
            pass
        except Exception as error:
            warnings.warn(
                f"rows of a module that was deleted cannot be written to its files: {error}",
                stacklevel=5,
            )
        except BaseException:  # Ctrl-C: the next call does it
            self.updaters.append(updater)
            raise


_DELETED = _Deleted()


@atexit.register
def _sync_all() -> None:
    errors = []
    for updater in {*_UPDATERS, *_DELETED.updaters}:  # one may be in both
        try:
            updater.sync()
        except FilesDeleted:  # there is nothing to complete
            pass
        except Exception as error:  # the other updaters are still synced
            errors.append(error)
    if errors:
        causes = "; ".join(map(str, errors))  # at the end of a process, Python prints no others
        raise ExceptionGroup(
            f"files of rows were not synced ({causes}); they count as damaged, as after a crash",
            errors,
        )
