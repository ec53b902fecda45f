"""`Auto`: a schedule that is measured, not guessed.

    turn      a candidate runs for some steps, of which the first, in which the window fills, or
              what another has fetched is used up, are not counted
    round     each candidate has a turn, so that what changes from minute to minute meets all
    choice    behind the last round, for the rest of the run

All candidates compute the same to the last bit, so measuring changes no number, and who sets what
was chosen gets the same run.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from recsys.pipeline.schedule import LookAhead, Sequential

__all__ = ["Auto", "Choice"]

_NOT_COUNTED = 8  # of a turn, or two for each mini-batch that a candidate looks ahead to
_WORTH = 0.98  # of the time, for which a deeper window is taken


@dataclass(frozen=True)
class Auto:
    """Tries schedules in turns, and goes on with the one whose steps take least.

    Args:
        candidates: Simplest first: a later one is taken if its steps take at least 2 % less.
        steps_per_turn: That are counted.
        num_rounds: Turns of each.

    Raises:
        ValueError: there is nothing to choose between, or to count.
    """

    candidates: tuple[Sequential | LookAhead, ...] = (Sequential(), LookAhead(2), LookAhead(4))
    steps_per_turn: int = 16
    num_rounds: int = 3

    def __post_init__(self) -> None:
        if not self.candidates or not all(
            isinstance(each, Sequential | LookAhead) for each in self.candidates
        ):
            raise ValueError(
                "Auto: candidates must be Sequential() and LookAhead(depth), whose numbers are the "
                f"same, got {self.candidates}"
            )
        if len(set(self.candidates)) < len(self.candidates):
            raise ValueError(f"Auto: candidates must be distinct, got {self.candidates}")
        for name in ("steps_per_turn", "num_rounds"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"Auto: {name} must be a whole number of at least 1, got {value!r}"
                )


class Choice:
    """How far the choosing has come.

    Args:
        auto: Between what, and how.

    Attributes:
        chosen: None until the last round is over.
    """

    def __init__(self, auto: Auto) -> None:
        self._auto = auto
        self._num_not_counted = max(
            _NOT_COUNTED, *(2 * getattr(each, "depth", 0) for each in auto.candidates)
        )
        self._num_steps = 0
        self._counted: list[float] = []
        self._turns: list[list[float]] = [[] for _ in auto.candidates]
        self.chosen: Sequential | LookAhead | None = None

    @property
    def current(self) -> Sequential | LookAhead:
        """What the next step runs by."""
        if self.chosen is not None:
            return self.chosen
        turn = self._num_steps // self._steps_of_turn
        return self._auto.candidates[turn % len(self._auto.candidates)]

    def add(self, seconds: float) -> None:
        """A step by `current` has taken so long."""
        if self.chosen is not None:
            return
        place = self._auto.candidates.index(self.current)
        self._num_steps += 1
        step_of_turn = (self._num_steps - 1) % self._steps_of_turn
        if step_of_turn >= self._num_not_counted:
            self._counted.append(seconds)
        if step_of_turn == self._steps_of_turn - 1:
            self._turns[place].append(fmean(self._counted))
            self._counted = []
            if len(self._turns[-1]) == self._auto.num_rounds:
                self.chosen = self._choose()

    def describe(self) -> dict[str, Any]:
        """What was chosen, the settings that do the same, and why; times are medians over turns."""
        measured = [
            _settings(schedule) | {"step_ms": 1e3 * median(turns) if turns else None}
            for schedule, turns in zip(self._auto.candidates, self._turns, strict=True)
        ]
        chosen = None if self.chosen is None else _settings(self.chosen)
        return {"chosen": chosen, "measured": measured}

    @property
    def _steps_of_turn(self) -> int:
        return self._num_not_counted + self._auto.steps_per_turn

    def _choose(self) -> Sequential | LookAhead:
        seconds = [median(turns) for turns in self._turns]
        best = 0
        for number in range(1, len(seconds)):
            if seconds[number] < _WORTH * seconds[best]:
                best = number
        return self._auto.candidates[best]


def _settings(schedule: Sequential | LookAhead) -> dict[str, Any]:
    """As the keys of a configuration's `schedule`."""
    if isinstance(schedule, LookAhead):
        return {"name": "lookahead", "depth": schedule.depth}
    return {"name": "sequential"}
