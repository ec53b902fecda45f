"""Errors of an input on a device, without waiting for the device.

A kernel notes in one number on the device the first thing that is wrong; the number is copied to
the host behind the kernel, and read when the copy has come: by the next lookup or update, or by
`check`, which waits. From the kernel that noted something on until it has been raised, no row is
moved, so rows are then what they were before the mini-batch that is to blame.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys.errors import MalformedBags, NonFiniteGradient

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["BAD_BOUND", "BAD_GRADIENT", "BAD_WEIGHT", "NO_ROW", "DeferredErrors", "errors_on"]

# What can be wrong, by what is said first where several things are.
BAD_BOUND, NO_ROW, BAD_WEIGHT, BAD_GRADIENT = range(4)

_KIND_BITS = 40  # below: the position
_NONE = 1 << 62


class _Report(NamedTuple):
    """The number as it was behind a lookup, on its way to the host."""

    first: Tensor
    event: torch.cuda.Event | None
    explain: Callable[[int], Exception]


class DeferredErrors:
    """What has gone wrong on one device, and is still to be raised.

    Args:
        device: Where kernels run. On the CPU, whose tests stand in for a device's, reports come at
            once, and are raised by the next call all the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), _NONE, dtype=torch.int64, device=device)
        self._reports: deque[_Report] = deque()

    def note(self, kind: int, is_bad: Tensor, places: Tensor | None = None) -> None:
        """In a kernel: positions of the input at which something is wrong.

        Args:
            kind: What.
            is_bad: Any shape, bool.
            places: Positions, of the same shape; None for 0, 1, 2, ...
        """
        if not is_bad.numel():
            return
        if places is None:
            places = torch.arange(is_bad.numel(), device=is_bad.device).view(is_bad.shape)
        first = torch.where(is_bad, places + (kind << _KIND_BITS), _NONE).amin()
        torch.minimum(self._first, first, out=self._first)

    def is_clear(self) -> Tensor:
        """In a kernel: whether nothing has been noted, () bool."""
        return self._first == _NONE

    def report(self, explain: Callable[[int], Exception]) -> None:
        """Behind a lookup's kernels: have it read whether they noted something.

        Args:
            explain: From the position of a value that is no row to the error that says so.
        """
        if self._first.is_cuda:
            first = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
            first.copy_(self._first, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._reports.append(_Report(first, event, explain))
        else:
            self._reports.append(_Report(self._first.clone(), None, explain))

    def poll(self) -> None:
        """Raise the first thing of which the host has heard; without waiting.

        Raises:
            IdOutOfRange: a value was no row of its table.
            MalformedBags: offsets did not make bags.
            NonFiniteGradient: a gradient of rows had nan or inf in it.
            ValueError: a weight was not a number.
        """
        while self._reports and _has_come(self._reports[0]):
            first, _, explain = self._reports.popleft()
            number = int(first.numpy())  # the host's memory, so nobody waits
            if number != _NONE:
                self.forget()
                raise _error(number, explain)

    def check(self) -> None:
        """Wait for the device, then raise what is wrong with anything looked up or updated so far.

        Raises:
            IdOutOfRange: as for `poll`, and so are the others.
            MalformedBags: likewise.
            ValueError: likewise.
        """
        self.report(_unexplained)  # an update may have noted something since the last lookup
        last = self._reports[-1].event
        if last is not None:
            last.synchronize()
        self.poll()

    def forget(self) -> None:
        """As if nothing had been noted."""
        self._reports.clear()
        self._first.fill_(_NONE)


@cache
def errors_on(device: torch.device) -> DeferredErrors:
    """Those of a device: a mini-batch's kernels stop each other, whatever module they are of."""
    return DeferredErrors(device)


def _unexplained(position: int) -> Exception:
    return AssertionError(f"an id at position {position} is no row, and its lookup did not say so")


def _has_come(report: _Report) -> bool:
    return report.event is None or bool(report.event.query())  # type: ignore[no-untyped-call]


def _error(first: int, explain: Callable[[int], Exception]) -> Exception:
    kind, position = first >> _KIND_BITS, first & ((1 << _KIND_BITS) - 1)
    if kind == BAD_BOUND:
        return MalformedBags(
            f"offsets must begin at 0, not decrease and not exceed the number of values; number "
            f"{position} does not; bags of the CPU say more, try the mini-batch there"
        )
    if kind == BAD_WEIGHT:
        return ValueError(
            f"weights of lookups must be numbers, got nan at position {position}; find what "
            "computes it"
        )
    if kind == BAD_GRADIENT:
        return NonFiniteGradient(
            "the gradient of rows looked up before has nan or inf in it, and no row was updated "
            "since; find what computes it (a learning rate too high, log(0), float16 without "
            "GradScaler)"
        )
    return explain(position)
