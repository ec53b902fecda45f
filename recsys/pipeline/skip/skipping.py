"""`Skipping`: a policy at work in a `TrainPipeline`.

    a mini-batch is made    samples are chosen, and mini-batches refilled (`Refill`)
    before a step           the tracker learns the number of its mini-batch
    after a step            the tracker counts it; the guard gets the predictions if it is open

What is found after the step of mini-batch s holds for mini-batches from s + 32 on. So it does not
matter how many mini-batches a schedule has made ahead.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recsys._support.states import SavedState
from recsys._support.user_warnings import warn_caller
from recsys.datasets.loader import BatchIterator
from recsys.embeddings.staleness.settings import LEAD
from recsys.embeddings.staleness.tracker import StalenessTracker
from recsys.pipeline.skip.guard import QualityGuard
from recsys.pipeline.skip.importance import ImportanceSampler
from recsys.pipeline.skip.paper import Paper
from recsys.pipeline.skip.paper_classifier import PaperClassifier
from recsys.pipeline.skip.policies import (
    FreezeRows,
    Importance,
    Observe,
    Policy,
    RandomDrop,
    stale_share,
)
from recsys.pipeline.skip.refill import Position, Refill, full_size_of
from recsys.pipeline.skip.sample_choice import SampleChoice, gives_weights, leaves_samples_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from recsys.pipeline.model_tables import ModelTables
    from recsys.pipeline.skip.chosen_samples import Chosen, RawBatch
    from recsys.pipeline.stalls import StageClock
    from recsys.pipeline.window import MiniBatch, Windows

__all__ = ["Skipping", "load_skipping"]

_STATE_KEYS = (
    "policy",
    "position",
    "tracker",
    "guard",
    "paper",
    "importance",
)
_MOST = 2**62
_MOST_FAILED = 10_000  # steps in a row that failed, in a state


class Skipping:
    """What a pipeline leaves out, and the counts of it.

    Args:
        policy: What is left out.
        model: The model that is trained.
        tables: The tables of the model.
        max_depth: The most mini-batches that the schedule makes ahead.
        clock: Measures what skipping takes, as its stage "skip".

    Attributes:
        policy: As given.
        tracker: Knows which rows are stale; None for `RandomDrop`, `Importance` and `Paper`.
        guard: Checks quality; None if the policy has no guard.
        paper: Chooses samples for `Paper`; None for other policies.
        importance: Chooses samples for `Importance`; None for other policies.

    Raises:
        TypeError: `policy` is none.
        ValueError: the model or the schedule does not fit the policy.
    """

    def __init__(
        self,
        policy: Policy | Paper,
        model: nn.Module,
        tables: ModelTables,
        max_depth: int,
        clock: StageClock,
    ) -> None:
        if not isinstance(policy, Policy | Paper):
            raise TypeError(
                f"skip must be a policy such as DropInput(), or None, got {type(policy).__name__}"
            )
        self.policy, self._clock = policy, clock
        self._setting = f"skip={_short(policy)}"
        if gives_weights(policy) and not getattr(model, "uses_sample_weights", False):
            raise ValueError(
                f"{self._setting} gives samples weights, but {type(model).__name__} does not say "
                "that it reads them: multiply each sample's loss by batch.weights, divide the sum "
                "by B, and set uses_sample_weights = True in the class"
            )
        self.tracker: StalenessTracker | None = None
        self.guard: QualityGuard | None = None
        self.paper: PaperClassifier | None = None
        self.importance: ImportanceSampler | None = None
        self._choose: Callable[[RawBatch], Chosen]
        if isinstance(policy, Paper):  # `attach` makes its choice, by iterator
            self.paper = PaperClassifier(policy, model, tables, self._setting, max_depth)
        elif isinstance(policy, RandomDrop):
            self._choose = SampleChoice(policy, tables, None, None, self._setting)
        else:
            if max_depth >= LEAD:
                raise ValueError(
                    f"{self._setting}: a schedule may make at most {LEAD - 1} mini-batches ahead, "
                    f"because it takes {LEAD} steps until a decision holds, got {max_depth}; use "
                    f"LookAhead({LEAD - 1})"
                )
            if not isinstance(policy, Observe) and policy.guard is not None:
                self.guard = QualityGuard(policy.guard)
            if isinstance(policy, Importance):
                self.importance = ImportanceSampler(policy, tables, self.guard, self._setting)
                self._choose = self.importance
            else:
                self.tracker = StalenessTracker(
                    model,
                    policy.staleness,
                    share=stale_share(policy),
                    freezes_rows=isinstance(policy, FreezeRows),
                )
                self._choose = SampleChoice(policy, tables, self.tracker, self.guard, self._setting)
        self._forget_samples()
        self._warned_of: set[str] = set()
        self._is_closed = False

    def _forget_samples(self) -> None:
        self._refill: Refill | None = None
        self._position = Position()  # without a refill
        self._is_loaded = False  # so the next iterator begins at the position, whatever it is
        self._num_seen = 0  # after the last step that began

    @property
    def position(self) -> Position:
        """The position in the raw stream after the last mini-batch that was trained on."""
        return self._position if self._refill is None else self._refill.position

    @property
    def num_seen(self) -> int:
        """Raw samples that are used up, also those left out."""
        return self.position.num_seen

    @property
    def num_skipped(self) -> int:
        """Raw samples that were left out."""
        position = self.position
        return position.num_seen - position.num_kept

    def attach(self, windows: Windows, iterator: Iterator[Any], *, is_training: bool) -> None:
        """Give the window of a training iterator its refill, unless it has the current one.

        Samples of an earlier iterator without support for weak references are dropped.

        Raises:
            ValueError: mini-batches of another training iterator wait; the iterator must not be
                read ahead, has parts of mini-batches, or is for evaluation, too; or it was closed.
        """
        if is_training and self._is_closed:
            raise ValueError(f"{self._setting} was closed; build a new TrainPipeline to train on")
        window = windows.of(iterator)
        if not is_training:
            if window.refill is not None and not window.refill.has_ended:
                raise ValueError(
                    f"{self._setting}: evaluation must have an iterator of its own, because "
                    "samples of this one wait for training"
                )
            return
        is_attached = window.refill is not None and window.refill is self._refill
        if is_attached or getattr(iterator, "is_over", False):
            return
        if self.paper is not None:
            self.paper.require_loader(iterator)
        reason = getattr(iterator, "in_turn_because", "")
        if reason and (isinstance(self.policy, Paper) or leaves_samples_out(self.policy)):
            raise ValueError(
                f"{self._setting} takes mini-batches ahead to replace the samples that it leaves "
                f"out, but {reason}"
            )
        position = self.position
        if windows.drop_lasting(except_of=window):
            self._warn(
                f"{self._setting}: the samples that wait are dropped when another iterator is "
                "used, if it is not known whether theirs was deleted (it has no support for weak "
                "references); use iterators to their end, or use a loader or a generator",
            )
        # An iterator that was used before another one gets a new refill: positions go on.
        known = [each for each in (self._refill, window.refill) if each is not None]
        if any(each.holds_samples and not each.has_ended for each in known):
            raise ValueError(
                f"{self._setting} trains on one iterator at a time, and samples of an earlier one "
                "wait; use that one to its end, or close or delete it"
            )
        is_continued = self._refill is not None and self._refill.is_continued_by(iterator)
        if position.offset and not (self._is_loaded or is_continued):
            # The samples that wait are dropped, as mini-batches are with their iterator.
            position = position._replace(offset=0, num_raw=position.num_raw + 1)
        refills = getattr(self.policy, "refill", not isinstance(self.policy, Importance))
        if isinstance(iterator, BatchIterator):
            setting = self._setting if refills and leaves_samples_out(self.policy) else ""
            position = position._replace(full_size=full_size_of(iterator.loader, setting))
        self._is_loaded = False
        choose = self._choose if self.paper is None else self.paper.chooser(iterator)
        mark = self._clock.mark
        self._refill = Refill(choose, position, self._setting, self._warn, mark, refills=refills)
        window.refill = self._refill

    def begin_step(self, current: MiniBatch) -> None:
        """Called before each training step."""
        tracker, guard = self.tracker, self.guard
        if tracker is not None:
            number = _number_of(current)
            for failed in range(tracker.num_steps, number):  # it began, and raised an error
                tracker.begin_step(failed, freezes=False)
                tracker.end_step(self._num_seen)
            freezes = guard is None or not (guard.is_open(number) or not guard.factor_of(number))
            tracker.begin_step(number, freezes=freezes)
            self._num_seen = self.position.num_seen
        self._clock.mark("skip")

    def end_step(self, current: MiniBatch, output: Any) -> None:
        """Called after each training step.

        Args:
            current: The mini-batch.
            output: What the model returned beside the loss.

        Raises:
            ValueError: there is a guard, and the output is not (loss, logits, labels).
        """
        self._clock.mark("update")
        number = _number_of(current)
        if self.guard is not None and self.guard.is_open(number):
            self._check_quality(self.guard, current, output)
        if self.tracker is not None:
            self.tracker.end_step(self._num_seen)
        if self.importance is not None:
            assert current.refilled is not None
            self.importance.end_step(current.refilled, current.batch)
        self._clock.mark("skip")

    def cancel_step(self) -> None:
        """Called after a step that raised an error: later updates are not those of its step."""
        if self.tracker is not None:
            self.tracker.cancel_step()

    def close(self) -> None:
        """Stop following rows; later training steps raise."""
        self._is_closed = True
        for follower in (self.tracker, self.paper):
            if follower is not None:
                follower.close()

    def report(self) -> dict[str, Any]:
        """What was left out, for a run record, in JSON types.

        Returns:
            The `policy` and its settings; counts of raw samples; `share_skipped` of them;
            `num_lookups_left_out` of updates, and their share of all, `share_lookups_left_out`;
            `staleness`, `guard`, `paper` and `importance`: the reports of tracker, guard,
            `PaperClassifier` and `ImportanceSampler`, or null.
        """
        staleness = None if self.tracker is None else self.tracker.report()
        lookups = staleness or {"num_lookups": 0, "num_lookups_left_out": 0}
        num_left_out = lookups["num_lookups_left_out"]
        return {
            "policy": {"name": _NAMES[type(self.policy)], **asdict(self.policy)},
            "num_seen": self.num_seen,
            "num_skipped": self.num_skipped,
            "share_skipped": self.num_skipped / max(1, self.num_seen),
            "num_lookups_left_out": num_left_out,
            "share_lookups_left_out": num_left_out / max(1, lookups["num_lookups"]),
            "num_checked": self.position.num_checked,
            "num_stale": self.position.num_stale,
            "staleness": staleness,
            "guard": None if self.guard is None else self.guard.report(),
            "paper": None if self.paper is None else self.paper.report(),
            "importance": None if self.importance is None else self.importance.report(),
        }

    def state_dict(self) -> dict[str, Any]:
        """The state after the last mini-batch that was trained on.

        JSON types, except for the tensors of the tracker's state.
        """
        return {
            "policy": repr(self.policy),
            "position": self.position._asdict(),
            "tracker": None if self.tracker is None else self.tracker.state_dict(),
            "guard": None if self.guard is None else self.guard.state_dict(),
            "paper": None if self.paper is None else self.paper.state_dict(),
            "importance": None if self.importance is None else self.importance.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with the next iterator that is trained on.

        That iterator begins with the first raw mini-batch that was not used up, as a loader does
        whose state was taken with it. The policy may differ from that of `state`, but not the
        settings of staleness. A part that `state` lacks starts anew.

        Raises:
            ConfigError: `state` is no state of skipping, or one with other tables or settings. If a
                part does not fit, everything starts anew.
        """
        found = SavedState("skipping state", state, _STATE_KEYS)
        position = _position_in(found)
        self.reset()
        try:
            self._load_parts(found, position)
        except BaseException:
            self.reset()
            raise
        self._position, self._is_loaded = position, True
        self._num_seen = position.num_seen

    def reset(self) -> None:
        """Start anew: no sample was seen, and nothing was found."""
        for each in (self.tracker, self.guard, self.paper, self.importance):
            if each is not None:
                each.reset()
        self._set_share()
        if self._refill is not None:
            self._refill.close()
        self._forget_samples()

    def _load_parts(self, found: SavedState, position: Position) -> None:
        """Load tracker, guard, paper and importance.

        Raises:
            ConfigError: as for `load_state_dict`.
        """
        num_batches = position.num_batches
        if self.tracker is not None:
            if found["tracker"] is None:
                self.tracker.num_steps = num_batches
            else:
                self.tracker.load_state_dict(found["tracker"])
            # The tracker catches up on steps that failed.
            if not 0 <= num_batches - self.tracker.num_steps <= _MOST_FAILED:
                raise found.error(
                    "position",
                    f"one whose num_batches is the tracker's {self.tracker.num_steps} steps, or "
                    f"at most {_MOST_FAILED} more",
                )
        if self.guard is not None and found["guard"] is not None:
            self.guard.load_state_dict(found["guard"])
        self._set_share()
        if self.paper is not None and found["paper"] is not None:
            self.paper.load_state_dict(found["paper"])
        if self.importance is not None and found["importance"] is not None:
            self.importance.load_state_dict(found["importance"], num_batches)

    def _check_quality(self, guard: QualityGuard, current: MiniBatch, output: Any) -> None:
        if not _is_scored(output):
            raise ValueError(
                f"{self._setting}: the guard needs the predictions, so the model must return "
                "(loss, (loss, logits, labels)) as TorchRec's train models do, got an output of "
                f"type {type(output).__name__}; return that, or set guard=None"
            )
        logits, labels = output[1], output[2]
        known = None if current.refilled is None else current.refilled.is_stale
        is_stale = torch.from_numpy(np.zeros(labels.numel(), bool) if known is None else known)
        if guard.add(_number_of(current), logits, labels, is_stale):
            self._set_share()

    def _set_share(self) -> None:
        """Lower the tracker's target by the guard's last decision; the next window uses it."""
        if self.tracker is not None:
            factor = 1.0 if self.guard is None else self.guard.tracked_factor
            self.tracker.share = stale_share(self.policy) * factor

    def _warn(self, message: str) -> None:
        if message not in self._warned_of:
            self._warned_of.add(message)
            warn_caller(message)


def load_skipping(skipping: Skipping | None, state: Any) -> None:
    """Load the state of skipping; without one skipping starts anew.

    If there is a state and no skipping, warn of samples that are used twice.

    Raises:
        ConfigError: as for `Skipping.load_state_dict`.
    """
    if skipping is not None:
        if state is None:
            skipping.reset()
        else:
            skipping.load_state_dict(state)
        return
    if state is None:
        return
    offset = _position_in(SavedState("skipping state", state, _STATE_KEYS)).offset
    if offset:
        warn_caller(
            f"the state was saved with skip={reprlib.repr(state['policy'])}, after the first "
            f"{offset} samples of the next mini-batch; without skip, these are trained on again",
        )


_NAMES = {
    policy: re.sub("(?<!^)(?=[A-Z])", "_", policy.__name__).lower()
    for policy in (*Policy.__args__, Paper)
}


def _short(policy: Policy | Paper) -> str:
    """A policy in the words of errors."""
    if isinstance(policy, Paper):
        return "Paper(...)"
    return f"{type(policy).__name__}(share={policy.share:g})"


def _number_of(current: MiniBatch) -> int:
    number: int = current.refilled.number
    return number


def _is_scored(output: Any) -> bool:
    """Whether an output is (loss, logits, labels)."""
    return (
        isinstance(output, tuple | list)
        and len(output) == 3
        and isinstance(output[1], Tensor)
        and isinstance(output[2], Tensor)
        and output[1].numel() == output[2].numel()
    )


def _position_in(found: SavedState) -> Position:
    """The position that a state holds.

    Raises:
        ConfigError: it is none.
    """
    entries = found.inner("position", Position._fields)
    position = Position(**{name: entries.whole(name, most=_MOST) for name in Position._fields})
    if position.num_kept > position.num_seen or position.offset > position.num_seen:
        raise found.error("position", "counts that fit each other")
    return position
