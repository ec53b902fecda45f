"""Raises errors of an input on a device, without waiting for the device.

A kernel records its first error in one number on the device. After the kernel, this number is
copied to the host. The next lookup or update reads it if the copy has arrived; `check` waits for
it. From the error until it is raised, no row is updated, so rows keep the values that they had
before the invalid mini-batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys._support.memory import lasting_tensors
from recsys.errors import IdOutOfRange, MalformedBags, NonFiniteGradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "BAD_BOUND",
    "BAD_GRADIENT",
    "BAD_WEIGHT",
    "KIND_BITS",
    "NO_ROW",
    "DeferredErrors",
    "errors_on",
]

# Kinds of errors. If there are several, the first of these is raised.
BAD_BOUND, NO_ROW, BAD_WEIGHT, BAD_GRADIENT = range(4)

KIND_BITS = 40  # the bits below the kind hold the position
_NONE = 1 << 62


_Find = Callable[[], Exception | None]


class _Report(NamedTuple):
    """The recorded error after one lookup, while it is copied to the host."""

    first: Tensor
    event: torch.cuda.Event | None
    explain: Callable[[int], Exception]


class DeferredErrors:
    """The errors on one device that are still to be raised.

    Args:
        device: Where kernels run. On the CPU, which tests use in place of a GPU, a report arrives
            at once; still, only the next call raises it.

    Attributes:
        first: The first error, () int64: its kind, shifted left by `KIND_BITS`, plus its position.
            Kernels lower it; without an error it is larger than any.
    """

    @lasting_tensors()
    def __init__(self, device: torch.device) -> None:
        self.first = torch.full((), _NONE, dtype=torch.int64, device=device)
        self._reports: deque[_Report] = deque()
        self._expected: list[_Find] = []
        # Memory and event of reports that were read; making them takes longer than the report.
        self._spare: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._lock = threading.RLock()  # evaluation may run in a second thread

    def note(self, kind: int, is_bad: Tensor, places: Tensor | None = None) -> None:
        """In a kernel: record the invalid positions of an input.

        Args:
            kind: `BAD_BOUND`, `NO_ROW`, `BAD_WEIGHT` or `BAD_GRADIENT`.
            is_bad: Which entries are invalid, any shape, bool.
            places: Their positions in the input, of the same shape; None for 0, 1, 2, ...
        """
        if not is_bad.numel():
            return
        if places is None:
            places = torch.arange(is_bad.numel(), device=is_bad.device).view(is_bad.shape)
        first = torch.where(is_bad, places + (kind << KIND_BITS), _NONE).amin()
        torch.minimum(self.first, first, out=self.first)

    def report(self, explain: Callable[[int], Exception]) -> None:
        """After a lookup's kernels: start to copy the recorded error to the host.

        Args:
            explain: Makes the exception for an id out of range from its position in the input.
        """
        with self._lock:
            first, event = self._spare.pop() if self._spare else self._place()
            first.copy_(self.first, non_blocking=True)
            if event is not None:
                # Of the copy's device, which need not be the current one.
                event.record(torch.cuda.current_stream(self.first.device))
            self._reports.append(_Report(first, event, explain))

    def expect(self, find: _Find) -> None:
        """After the kernels of a lookup: have `report_expected` be for it, in place of its own.

        Args:
            find: Makes the exception for the lookup's first id out of range; None if all are rows.
        """
        with self._lock:
            self._expected.append(find)

    @property
    def num_expected(self) -> int:
        """The number of lookups that `report_expected` is for."""
        return len(self._expected)

    def report_expected(self) -> None:
        """Report for the lookups that expect it, if there are any; before kernels of others.

        So the recorded error is one of these lookups.
        """
        with self._lock:
            if self._expected:
                finds, self._expected = self._expected, []
                self.report(partial(_explain_first, finds))

    def poll(self) -> None:
        """Raise the first error that has arrived on the host; never waits.

        Raises:
            IdOutOfRange: an id is not a row of its table.
            MalformedBags: offsets do not begin at 0, decrease, or exceed the number of values.
            NonFiniteGradient: a gradient of rows has nan or inf in it.
            ValueError: a per-sample weight is nan.
        """
        with self._lock:
            while self._reports and _has_arrived(self._reports[0]):
                first, event, explain = self._reports.popleft()
                number = int(first.numpy())  # in host memory, so reading it does not wait
                self._spare.append((first, event))
                if number != _NONE:
                    self.forget()
                    raise _error(number, explain)

    def check(self) -> None:
        """Wait for the device, then raise the first error of all lookups and updates so far.

        Raises:
            IdOutOfRange: an id is not a row of its table.
            MalformedBags: offsets do not begin at 0, decrease, or exceed the number of values.
            NonFiniteGradient: a gradient of rows has nan or inf in it.
            ValueError: a per-sample weight is nan.
        """
        if self.first.is_cuda:  # other streams may have lookups, and a report is of one stream
            torch.cuda.synchronize(self.first.device)
        self.report_expected()
        with self._lock:
            self.report(_unexplained)  # an update may have recorded an error after the last lookup
            last = self._reports[-1].event
        if last is not None:
            last.synchronize()
        self.poll()

    def forget(self) -> None:
        """Discard recorded errors."""
        with self._lock:
            self._reports.clear()  # their memory may still be written to, so it is no spare
            self._expected.clear()
            self.first.fill_(_NONE)

    @lasting_tensors()
    def _place(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """Host memory for a number, and the event after its copy."""
        is_cuda = self.first.is_cuda
        first = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        return first, torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]


def errors_on(device: torch.device) -> DeferredErrors:
    """The errors of a device. All modules share them: an error in one stops updates in all."""
    if str(device) == "cuda":  # without a number
        device = torch.device("cuda", torch.cuda.current_device())
    return _errors_on(device)


@cache
def _errors_on(device: torch.device) -> DeferredErrors:
    return DeferredErrors(device)


def _unexplained(position: int) -> Exception:
    return AssertionError(f"id at position {position} is out of range, but no lookup reported it")


def _explain_first(finds: Sequence[_Find], position: int) -> Exception:
    """The exception of the first lookup that has an id out of range.

    Args:
        finds: For each lookup, as for `DeferredErrors.expect`.
        position: The recorded position.
    """
    found = (find() for find in finds)
    return next((error for error in found if error is not None), _overwritten(position))


def _overwritten(position: int) -> Exception:
    return IdOutOfRange(
        f"the id at position {position} of the input of a lookup was not a row of its table, and "
        "was overwritten since; call check_input() after the lookup, which names table and id"
    )


def _has_arrived(report: _Report) -> bool:
    return report.event is None or bool(report.event.query())  # type: ignore[no-untyped-call]


def _error(first: int, explain: Callable[[int], Exception]) -> Exception:
    kind, position = first >> KIND_BITS, first & ((1 << KIND_BITS) - 1)
    if kind == BAD_BOUND:
        return MalformedBags(
            f"offsets must begin at 0, not decrease and not exceed the number of values; number "
            f"{position} does not; for a more precise error, look up the mini-batch on "
            "the CPU"
        )
    if kind == BAD_WEIGHT:
        return ValueError(
            f"weights of lookups must be numbers, got nan at position {position}; check the code "
            "that computes it"
        )
    if kind == BAD_GRADIENT:
        return NonFiniteGradient(
            "the gradient of an earlier lookup has nan or inf in it, and no row was updated since; "
            "check for a learning rate that is too high, log(0), or float16 without GradScaler"
        )
    return explain(position)
