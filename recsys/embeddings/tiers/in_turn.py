"""Lets several threads use one object: each of its methods waits until no other thread is in one.

So a second thread may evaluate during training with a budget: it reads rows where they are, while
training moves and updates them.
"""

from __future__ import annotations

import os
import threading
import weakref
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self

from recsys._support.torch_compat import outside_graphs

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AbstractInTurn"]


# Those of a forked process get new locks: another thread of its parent may hold them.
_OBJECTS: weakref.WeakSet[AbstractInTurn] = weakref.WeakSet()


class AbstractInTurn:
    """An object whose public methods hold its lock.

    Attributes:
        lock: A `threading.RLock`, for callers that need several methods without another thread
            between them.
    """

    lock: Any

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Make the lock."""
        made = super().__new__(cls)
        made.lock = threading.RLock()
        _OBJECTS.add(made)
        return made

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, _locked(method))


def _locked(method: FunctionType) -> Callable[..., Any]:
    @outside_graphs  # torch.compile has no lock
    @wraps(method)
    def locked(self: AbstractInTurn, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


def _renew_locks() -> None:
    for each in _OBJECTS:
        each.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
