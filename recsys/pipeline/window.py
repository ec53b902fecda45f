"""Windows: mini-batches that were taken from an iterator before their steps.

Each iterator has its own window. So evaluation on another iterator does not use the window of the
training data, and training continues with it afterwards.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from recsys._support.user_code import fits_override
from recsys.pipeline.take import OverwrittenBatch, take

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from recsys.embeddings.tiers.fetch import Claims
    from recsys.pipeline.model_tables import ModelTables

__all__ = ["MiniBatch", "Window", "Windows"]


class MiniBatch:
    """A mini-batch that waits for its step.

    Attributes:
        batch: What the iterator returned, on the device once it was moved.
        claims: Its claims; None if nothing is claimed.
        has_failed: Whether claiming has failed; its own step will raise the error.
        is_sent: Whether its ids were sent to the processes that have their rows.
        refilled: What `Refill` made, if the window has one.
    """

    def __init__(self, batch: Any, refilled: Any = None) -> None:
        self.batch, self.refilled = batch, refilled
        self._is_moved = refilled is not None
        self.claims: Claims | None = None
        self.has_failed = self.is_sent = False

    def move(self, device: torch.device | None) -> None:
        """Move it to a device, once; None leaves it where it is."""
        if not self._is_moved:
            self.batch, self._is_moved = _to(self.batch, device), True

    def prefetch(self, tables: ModelTables) -> None:
        """Claim slots for it, unless it has them."""
        if self.claims is None and not self.has_failed:
            try:
                self.claims = tables.prefetch(self.batch)
            except Exception:  # its own step will fail in the same way, and raise the error
                self.has_failed = True


class Window:
    """The mini-batches that were taken from one iterator and not yet used.

    Attributes:
        batches: The mini-batches, oldest first.
        refill: Makes mini-batches of those that the iterator returns; None to use them as they are.
    """

    def __init__(self) -> None:
        self.batches: deque[MiniBatch] = deque()
        self.refill: Any = None  # a `Refill`; imports point down
        self._has_ended = False
        self._error: Exception | None = None  # of the iterator, raised after the last mini-batch

    def __bool__(self) -> bool:
        """Whether there is a mini-batch to use or an error to raise."""
        if self.refill is not None and not self.refill.has_ended:
            return True
        return bool(self.batches) or self._error is not None

    def fill(self, iterator: Iterator[Any], depth: int, device: torch.device | None) -> None:
        """Take mini-batches from the iterator: the next one, and `depth` more.

        Args:
            iterator: The window's iterator.
            depth: Mini-batches after the next one.
            device: Where they are moved; None leaves them where they are.

        Raises:
            OverwrittenBatch: the iterator has written to mini-batches that wait. They are dropped.
        """
        while len(self.batches) <= depth and not self._has_ended and self._error is None:
            try:
                self.batches.append(self._next(iterator, device))
            except StopIteration:
                self._has_ended = True
            except OverwrittenBatch:  # those that wait are not what they were
                self.batches.clear()
                raise
            except Exception as error:
                self._error = error
            else:
                self._set_num_waiting(iterator)
                with suppress(Exception):  # `pop` will try again, and raise
                    self.batches[-1].move(device)

    def pop(self, iterator: Iterator[Any], device: torch.device | None) -> MiniBatch:
        """Remove and return the next mini-batch; it counts as used from now on.

        Args:
            iterator: The window's iterator.
            device: As for `fill`.

        Raises:
            StopIteration: the iterator has ended.
            Exception: any error of the iterator, or of moving the mini-batch.
        """
        if self.batches:
            current = self.batches.popleft()
            self._set_num_waiting(iterator)
            current.move(device)
            return current
        if self._error is not None:
            self._raise_error()
        if self.refill is not None:
            self.refill.end(iterator)
        raise StopIteration

    def send(self, current: MiniBatch, tables: ModelTables) -> None:
        """Start to send the ids of mini-batches, if rows are divided among processes. A collective.

        Args:
            current: The mini-batch that was taken out of the window last.
            tables: The tables of the model.

        Raises:
            Exception: any error of the iterator: then other processes have one mini-batch more, so
                this one must not train on; or invalid ids, on every process.
        """
        if not tables.divided:
            return
        if self._error is not None:
            self._raise_error()
        for waiting in (current, *self.batches):
            if not waiting.is_sent:
                tables.send(waiting.batch)
                waiting.is_sent = True

    def num_untold(self, iterator: Any) -> int:
        """What `num_waiting` of the window's iterator would be; 0 if it has this attribute."""
        if hasattr(iterator, "num_waiting"):
            return 0
        return len(self.batches) if self.refill is None else self.refill.num_raw_waiting

    def close(self) -> None:
        """Drop the samples that wait for a refill."""
        if self.refill is not None:
            self.refill.close()

    def _raise_error(self) -> NoReturn:
        """Raise the error of the iterator, once."""
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: a reference cycle

    def _next(self, iterator: Iterator[Any], device: torch.device | None) -> MiniBatch:
        waiting = [mini_batch.batch for mini_batch in self.batches]
        if self.refill is None:
            return MiniBatch(take(iterator, waiting))
        refilled = self.refill.take(iterator, partial(_to, device=device), waiting)
        return MiniBatch(refilled.batch, refilled)

    def _set_num_waiting(self, iterator: Any) -> None:
        """Set an iterator's `num_waiting`, if it has this attribute."""
        if self.refill is not None:
            self.refill.set_num_waiting(iterator, len(self.batches))
        elif hasattr(iterator, "num_waiting"):
            iterator.num_waiting = len(self.batches)


class Windows:
    """The windows that are not empty, by iterator.

    A window is dropped when its iterator is deleted. An iterator without support for weak
    references, such as that of a list, stays alive as long as its window.

    Attributes:
        num_untold: That of the window of the last training step, also after it was dropped.
    """

    def __init__(self) -> None:
        self.num_untold = 0
        self._windows: dict[int, Window] = {}
        self._owners: dict[int, Any] = {}  # the iterators, as weak references where possible

    def of(self, iterator: Iterator[Any]) -> Window:
        """The window of an iterator; a new one if it has none."""
        key = id(iterator)
        if key not in self._windows:
            owner: Any = iterator
            with suppress(TypeError):  # no support for weak references
                owner = weakref.ref(iterator, partial(_drop, self._windows, self._owners, key))
            self._windows[key], self._owners[key] = Window(), owner
        return self._windows[key]

    def drop(self, iterator: Iterator[Any]) -> None:
        """Drop the window of an iterator."""
        _drop(self._windows, self._owners, id(iterator))

    def drop_refilled(self) -> None:
        """Drop every window with a refill."""
        for key, window in list(self._windows.items()):
            if window.refill is not None:
                _drop(self._windows, self._owners, key)

    def drop_all(self) -> None:
        """Drop every window."""
        for key in list(self._windows):
            _drop(self._windows, self._owners, key)


def _drop(windows: dict[int, Window], owners: dict[int, Any], key: int, _: object = None) -> None:
    """Drop a window; also the callback of a weak reference, which is its last argument."""
    window = windows.pop(key, None)
    owners.pop(key, None)
    if window is not None:
        window.close()


def _to(batch: Any, device: torch.device | None) -> Any:
    """Move everything that has `to` to a device, also inside dictionaries, tuples and lists."""
    if device is None:
        return batch
    if hasattr(batch, "to"):
        if device.type == "cuda" and fits_override(type(batch), "pin_memory", "to"):
            # From other memory the host copies in step with the device. What is on the device
            # already cannot be pinned. A `pin_memory` that does not fit `to` may lose attributes.
            with suppress(RuntimeError):
                batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to(value, device) for value in batch)
    return batch
