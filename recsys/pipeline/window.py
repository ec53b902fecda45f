"""Windows: mini-batches that were taken from an iterator ahead of their steps.

Each iterator has a window of its own. So evaluation on another iterator takes nothing from the
window of the training data, and training goes on with it afterwards.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from recsys.pipeline.inputs import cancel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from recsys.embeddings.ahead import Prefetched
    from recsys.pipeline.inputs import Inputs

__all__ = ["MiniBatch", "Window", "Windows"]


class MiniBatch:
    """A mini-batch on its way to its step.

    Attributes:
        batch: As the iterator gave it, or as it was moved.
        claims: What is claimed for it; None where nothing is.
        has_failed: Whether claiming has raised something, which its own step is to raise.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._is_moved = False
        self.claims: list[Prefetched] | None = None
        self.has_failed = False

    def move(self, device: torch.device | None) -> None:
        """Bring it to a device, unless it was; None leaves it where it is."""
        if not self._is_moved:
            self.batch, self._is_moved = _to(self.batch, device), True

    def prefetch(self, inputs: Inputs, *, may_claim: bool) -> None:
        """Claim slots for it, unless it has them.

        Args:
            inputs: What it will look up.
            may_claim: Whether there may be room; if not, it only gives back what is left where
                slots were needed for another lookup.
        """
        if any(claim.is_given_up for claim in self.claims or ()):
            self.give_back()
        elif self.claims is None and may_claim and not self.has_failed:
            try:
                self.claims = inputs.prefetch(self.batch)
            except Exception:  # its own step will find it, too, and raise it
                self.has_failed = True

    def give_back(self) -> None:
        """Give the slots back."""
        cancel(self.claims)
        self.claims = None


class Window:
    """The mini-batches that were taken from one iterator and not yet used.

    Attributes:
        batches: These, oldest first.
    """

    def __init__(self) -> None:
        self.batches: deque[MiniBatch] = deque()
        self._has_ended = False
        self._error: Exception | None = None  # of the iterator, to be raised in its turn

    def __bool__(self) -> bool:
        """Whether something is left to be used or raised."""
        return bool(self.batches) or self._error is not None

    def fill(self, iterator: Iterator[Any], depth: int, device: torch.device | None) -> None:
        """Take mini-batches from the iterator: the next one, and `depth` more.

        Args:
            iterator: The window's own.
            depth: Mini-batches ahead of the next one.
            device: Where they are brought; None leaves them where they are.
        """
        while len(self.batches) <= depth and not self._has_ended and self._error is None:
            try:
                self.batches.append(MiniBatch(next(iterator)))
            except StopIteration:
                self._has_ended = True
            except Exception as error:
                self._error = error
            else:
                self._tell(iterator)
                with suppress(Exception):  # one that cannot be moved is an error in its turn
                    self.batches[-1].move(device)

    def pop(self, iterator: Iterator[Any], device: torch.device | None) -> MiniBatch:
        """The next mini-batch, which counts as used from now on.

        Args:
            iterator: The window's own.
            device: As for `fill`.

        Raises:
            StopIteration: the iterator has ended.
            Exception: of the iterator, or of moving the mini-batch.
        """
        if self.batches:
            current = self.batches.popleft()
            self._tell(iterator)
            current.move(device)
            return current
        if self._error is None:
            raise StopIteration
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # it has this frame

    def give_back(self) -> None:
        """Give up every claim; mini-batches stay."""
        for each in self.batches:
            each.give_back()

    def _tell(self, iterator: Any) -> None:
        """Tell an iterator that keeps count of it how many mini-batches wait here."""
        if hasattr(iterator, "num_waiting"):
            iterator.num_waiting = len(self.batches)


class Windows:
    """The windows that are not empty, by iterator.

    A window goes when its iterator does. An iterator that takes no weak reference (one of a list,
    say) is kept as long as its window.
    """

    def __init__(self) -> None:
        self._windows: dict[int, Window] = {}
        self._owners: dict[int, Any] = {}  # weak references where they are possible

    def of(self, iterator: Iterator[Any]) -> Window:
        """The window of an iterator; a new one if it has none."""
        key = id(iterator)
        if key not in self._windows:
            owner: Any = iterator
            with suppress(TypeError):  # it takes no weak reference
                owner = weakref.ref(iterator, partial(_drop, self._windows, self._owners, key))
            self._windows[key], self._owners[key] = Window(), owner
        return self._windows[key]

    def drop(self, iterator: Iterator[Any]) -> None:
        """Drop the window of an iterator, with its claims."""
        _drop(self._windows, self._owners, id(iterator))

    def drop_all(self) -> None:
        """Drop every window, with its claims."""
        for key in list(self._windows):
            _drop(self._windows, self._owners, key)

    def give_back(self, but: Window | None = None) -> None:
        """Give up every claim, or all but those of one window; mini-batches stay."""
        for window in list(self._windows.values()):
            if window is not but:
                window.give_back()


def _drop(windows: dict[int, Window], owners: dict[int, Any], key: int, _: object = None) -> None:
    """Drop a window; also the callback of its iterator's weak reference, which is given last."""
    window = windows.pop(key, None)
    owners.pop(key, None)
    if window is not None:
        window.give_back()


def _to(batch: Any, device: torch.device | None) -> Any:
    """A mini-batch on a device: whatever has `to`, alone or in what Python has for several."""
    if device is None:
        return batch
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to(value, device) for value in batch)
    return batch
