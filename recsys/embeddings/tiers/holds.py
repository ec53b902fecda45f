"""Holds: the slots that tickets hold, and how many these may be.

The host does not know how many slots a queued claim takes before the device has made it. It knows
a bound: the most distinct rows that the mini-batch can have. Most mini-batches look rows up again
and again, so they have far fewer. If a new claim may not fit by these bounds, the host reads the
true numbers of claims that it has queued earlier.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
import torch

from recsys._support.interrupts import interrupts_held_back
from recsys.embeddings.kernels.cpu.slot_arrays import NOWHERE
from recsys.embeddings.tiers.counts import TierCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.embeddings.tiers.residency import Residency
    from recsys.embeddings.tiers.slots import Slots

__all__ = ["MOST_HELD", "Hold", "Holds", "LookupHold", "Need"]


# The maximum number of tickets at a time: a slot counts them in an int16.
MOST_HELD = 2**15 - 1


class Hold:
    """What one or more tickets share; when the last one drops it, its slots are released.

    Args:
        residency: Gets the slots back.
        slots: The slots.

    Attributes:
        event: The event after a queued claim; None for one that was waited for, and without a
            stream.
        lookups: What the tickets of each lookup share, if the claim was for several.
    """

    def __init__(self, residency: Residency, slots: Any) -> None:
        self.residency, self.slots = residency, slots
        self.event: Any = None
        self.lookups: list[ref[LookupHold]] = []


class LookupHold:
    """What the tickets of one lookup share, if its claim was for several.

    Args:
        whole: What all of these lookups share.
        slot_of_value: The slots of this one; negative numbers stand for none.
    """

    def __init__(self, whole: Hold, slot_of_value: Any) -> None:
        self.whole, self.slot_of_value = whole, slot_of_value
        self.residency = whole.residency
        whole.lookups.append(ref(self))

    @property
    def slots(self) -> Any:
        """Those of all of these lookups."""
        return self.whole.slots


class Need(NamedTuple):
    """How many slots a claim takes, as far as the host knows.

    Attributes:
        bound: The most distinct rows that such a mini-batch can have.
        num_rows: The most that this one has; `bound` for a queued claim until its counts are read.
        counts: The numbers of `TierCounts` on the device; None if `num_rows` is exact.
        batch: The number of the mini-batch in `AheadQueue`; None for one of its own.
    """

    bound: int
    num_rows: int
    counts: Tensor | None = None
    batch: int | None = None


class _HeldSlots(ref[Hold]):
    """A weak reference to a hold. When the hold dies, Python appends this object to `released`.

    Any thread may drop the last reference to a hold, at any time. Appending to a deque is atomic,
    and no signal handler can come before it, as it can before the first statement of a `__del__`.

    Attributes:
        slots: The slots.
        need: How many these can be.
    """

    __slots__ = ("need", "slots")

    slots: Any
    need: Need

    @classmethod
    def of(cls, hold: Hold, need: Need, released: deque[_HeldSlots]) -> _HeldSlots:
        """Note the slots of a hold. Keep the result until it is in `released`."""
        found = cls(hold, released.append)
        found.slots, found.need = hold.slots, need
        return found


class Holds:
    """The holds of one residency.

    Attributes:
        num_needed: The most slots that they need together, as far as the host knows.
        bound: The most that they could need by their sizes alone. It does not depend on ids, so
            steps of equal sizes have equal bounds.
        dropped: Slots of holds that were taken out of these numbers. The caller releases them.
    """

    def __init__(self) -> None:
        self.num_needed = self.bound = 0
        self.dropped: list[Any] = []
        self._held: dict[_HeldSlots, None] = {}  # in the order of their claims
        self._released: deque[_HeldSlots] = deque()  # their holds have died; still in `_held`

    def __len__(self) -> int:
        """Number of holds that tickets have."""
        return len(self._held) - len(self._released)

    def add(self, hold: Hold, need: Need) -> None:
        """Count a hold."""
        self._held[_HeldSlots.of(hold, need, self._released)] = None
        self.num_needed += need.num_rows
        self.bound += need.bound

    def take_released(self) -> None:
        """Take holds that died out of the numbers, and add their slots to `dropped`."""
        if not self._released:
            return
        with interrupts_held_back():  # slots that are taken off the list must be released
            while self._released:
                held = self._released.popleft()
                del self._held[held]
                self.num_needed -= held.need.num_rows
                self.bound -= held.need.bound
                self.dropped.append(held.slots)

    def drop_unneeded(self) -> bool:
        """Add slots that only released lookups of a shared claim needed to `dropped`.

        The host waits for a device.

        Returns:
            Whether there were any.
        """
        found = False
        for held in self._held:
            hold = held()
            if hold is None or not hold.lookups:
                continue
            left = [each for each in (lookup() for lookup in hold.lookups) if each is not None]
            if not left or len(left) == len(hold.lookups):
                continue  # without any, it is released as a whole
            is_needed = _are_among(hold.slots, [each.slot_of_value for each in left])
            num_rows = int(is_needed.sum())
            self.dropped.append(_selected(hold.slots, ~is_needed))
            held.slots = hold.slots = _selected(hold.slots, is_needed)
            hold.lookups = [ref(each) for each in left]
            self.num_needed += num_rows - held.need.num_rows
            held.need = held.need._replace(num_rows=num_rows, counts=None)
            found = True
        return found

    def leave(self, num_rows: int, hot: Slots, but_of: int | None = None) -> bool:
        """Whether they surely leave enough slots for a claim; pinned slots stay pinned.

        If they may not by what the host knows, it waits for queued claims and reads how many rows
        they have, beginning with the claim that was made first.

        Args:
            num_rows: The most rows that the claim can need.
            hot: The slots.
            but_of: The number of a mini-batch whose claims are not waited for; None for none.
        """
        num_left = hot.num_slots - hot.map.num_pinned - num_rows
        if self.num_needed <= num_left:
            return True
        unread = [
            held
            for held in self._held
            if held.need.counts is not None and (but_of is None or held.need.batch != but_of)
        ]
        if self.num_needed - sum(held.need.num_rows for held in unread) > num_left:
            return False  # whatever they are
        for held in unread:
            self._read(held, hot)
            if self.num_needed <= num_left:
                return True
        return False

    def _read(self, held: _HeldSlots, hot: Slots) -> None:
        """Wait for a queued claim, and correct the most slots that it needs."""
        need, hold = held.need, held()
        if hold is None:  # it has died just now, and is taken out before the next claim
            return
        assert need.counts is not None
        num_rows = TierCounts(*hot.read_counts(need.counts, hold.event)).num_rows
        self.num_needed += num_rows - need.num_rows
        held.need = need._replace(num_rows=num_rows, counts=None)


def _are_among(slots: Any, of_lookups: Sequence[Any]) -> Any:
    """Whether each number is a slot of one of the lookups."""
    if isinstance(slots, torch.Tensor):
        return (slots >= 0) & torch.isin(slots, torch.cat([*of_lookups]))
    return np.isin(slots, np.concatenate(of_lookups))


def _selected(slots: Any, is_selected: Any) -> Any:
    """Some of the slots. On a device, their number stays, because kernels are for one number."""
    if isinstance(slots, torch.Tensor):
        return torch.where(is_selected, slots, NOWHERE)
    return slots[is_selected]
