"""`Auto`: measures several schedules during training, and continues with the fastest.

    turn      one candidate runs for some steps. The first steps are not counted: in them the window
              fills, or the run still uses rows that the previous candidate fetched
    round     each candidate has one turn, so changes of the machine's speed affect all of them
    choice    made after the last round, for the rest of the run

All candidates compute the same numbers to the last bit. So measuring does not change the run, and a
run that sets the chosen schedule from the start gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median
from typing import Any

from recsys._support.untrusted import AbstractSettings, require_state, setting
from recsys.pipeline.schedule import LookAhead, Sequential

__all__ = ["Auto", "Choice"]

_MIN_WARM_UP_STEPS = 8  # of a turn; at least two for each mini-batch of look-ahead depth
_MAX_TIME_RATIO = 0.98  # a later candidate is chosen if its steps take less than this share


@dataclass(frozen=True)
class Auto(AbstractSettings):
    """Tries schedules in turns, and continues with the one whose steps take the least time.

    Args:
        candidates: Simplest first: a later one is chosen if its steps take at least 2 % less.
        steps_per_turn: Steps of a turn that are counted.
        num_rounds: Turns of each candidate.

    Raises:
        ValueError: an argument is out of range, or candidates are not distinct.
    """

    candidates: tuple[Sequential | LookAhead, ...] = (Sequential(), LookAhead(2), LookAhead(4))
    steps_per_turn: int = setting(16, "steps of a turn that are counted", ge=1)
    num_rounds: int = setting(3, "turns of each candidate", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.candidates or not all(
            isinstance(candidate, Sequential | LookAhead) for candidate in self.candidates
        ):
            raise ValueError(
                "Auto: candidates must be Sequential() and LookAhead(depth), whose numbers are the "
                f"same, got {self.candidates}"
            )
        if len(set(self.candidates)) < len(self.candidates):
            raise ValueError(f"Auto: candidates must be distinct, got {self.candidates}")


class Choice:
    """The state of choosing a schedule.

    Args:
        auto: The candidates, and how to measure them.

    Attributes:
        chosen: The chosen schedule; None until the last round is over.
    """

    def __init__(self, auto: Auto) -> None:
        self._auto = auto
        self._num_warm_up_steps = max(
            _MIN_WARM_UP_STEPS,
            *(2 * getattr(candidate, "depth", 0) for candidate in auto.candidates),
        )
        self._num_steps = 0
        self._counted: list[float] = []  # seconds of the steps of this turn
        self._turns: list[list[float]] = [[] for _ in auto.candidates]  # mean seconds of each turn
        self.chosen: Sequential | LookAhead | None = None

    @property
    def current(self) -> Sequential | LookAhead:
        """The schedule of the next step."""
        if self.chosen is not None:
            return self.chosen
        turn = self._num_steps // self._steps_of_turn
        return self._auto.candidates[turn % len(self._auto.candidates)]

    def add(self, seconds: float) -> None:
        """Record how long a step under `current` took."""
        if self.chosen is not None:
            return
        index = self._auto.candidates.index(self.current)
        self._num_steps += 1
        step_of_turn = (self._num_steps - 1) % self._steps_of_turn
        if step_of_turn >= self._num_warm_up_steps:
            self._counted.append(seconds)
        if step_of_turn == self._steps_of_turn - 1:
            self._turns[index].append(fmean(self._counted))
            self._counted = []
            if len(self._turns[-1]) == self._auto.num_rounds:
                self.chosen = self._choose()

    def describe(self) -> dict[str, Any]:
        """The chosen schedule and the measured times, for a run record.

        Schedules are described by the settings that select them; times are medians over turns.
        """
        measured = [
            _settings(schedule) | {"step_ms": 1e3 * median(turns) if turns else None}
            for schedule, turns in zip(self._auto.candidates, self._turns, strict=True)
        ]
        chosen = None if self.chosen is None else _settings(self.chosen)
        return {"chosen": chosen, "measured": measured}

    def state_dict(self) -> dict[str, Any]:
        """The mean seconds of every turn so far, in JSON types; the current turn is left out."""
        by_round = zip_longest(*self._turns)
        seconds = [turn for of_round in by_round for turn in of_round if turn is not None]
        return {"auto": str(self._auto), "turn_seconds": seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last complete turn of `state`; ignored if its `Auto` is another one.

        Raises:
            ConfigError: `state` is no state of a choice.
        """
        found = require_state("schedule choice state", state, ("auto", "turn_seconds"))
        if found["auto"] != str(self._auto):
            return
        num_candidates = len(self._auto.candidates)
        num_turns = num_candidates * self._auto.num_rounds
        seconds = found["turn_seconds"]
        self._turns = [seconds[index::num_candidates] for index in range(num_candidates)]
        self._num_steps, self._counted = len(seconds) * self._steps_of_turn, []
        self.chosen = self._choose() if len(seconds) == num_turns else None

    @property
    def _steps_of_turn(self) -> int:
        return self._num_warm_up_steps + self._auto.steps_per_turn

    def _choose(self) -> Sequential | LookAhead:
        seconds = [median(turns) for turns in self._turns]
        best = 0
        for number in range(1, len(seconds)):
            if seconds[number] < _MAX_TIME_RATIO * seconds[best]:
                best = number
        return self._auto.candidates[best]


def _settings(schedule: Sequential | LookAhead) -> dict[str, Any]:
    """The schedule as keys of a configuration's `schedule`."""
    if isinstance(schedule, LookAhead):
        return {"name": "lookahead", "depth": schedule.depth}
    return {"name": "sequential"}
