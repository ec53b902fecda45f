"""`Skipping`: a policy at work in a `TrainPipeline`.

    a mini-batch is made    samples are chosen, and mini-batches refilled (`Refill`)
    before a step           the tracker learns the number of its mini-batch
    after a step            the tracker counts it; the guard gets the predictions if it is open

What is found after the step of mini-batch s holds for mini-batches from s + 32 on. So it does not
matter how many mini-batches a schedule has made ahead. A choice depends on the stream indices of
the samples, and on the rows that are stale for the mini-batch that they are taken for. So it is the
same at any depth, and again after a resume.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from recsys._support.hashing import mix64
from recsys._support.untrusted import require_state
from recsys.datasets.loader import BatchIterator
from recsys.embeddings.staleness.settings import LEAD
from recsys.embeddings.staleness.tracker import MOST_INPUTS, StalenessTracker
from recsys.pipeline.skip.guard import QualityGuard
from recsys.pipeline.skip.importance import ImportanceChoice
from recsys.pipeline.skip.paper import PaperClassifier
from recsys.pipeline.skip.policies import (
    DropInput,
    FreezeRows,
    Guard,
    Importance,
    Observe,
    Paper,
    Policy,
    RandomDrop,
    Subsample,
    stale_share,
)
from recsys.pipeline.skip.refill import EVERYTHING, Chosen, Position, Refill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from recsys.pipeline.model_tables import ModelTables
    from recsys.pipeline.skip.refill import RawBatch
    from recsys.pipeline.stalls import StageClock
    from recsys.pipeline.window import MiniBatch, Windows

__all__ = ["Skipping", "choose_random", "choose_stale"]

# Raw mini-batches from one whose samples the threshold is found from to the next one. Policies that
# keep all samples look at no other ones, to cost less.
_MOST_PERIOD = 32


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
        policy: Policy,
        model: nn.Module,
        tables: ModelTables,
        max_depth: int,
        clock: StageClock,
    ) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(
                f"skip must be a policy such as DropInput(), or None, got {type(policy).__name__}"
            )
        self.policy, self._clock = policy, clock
        named = "..." if isinstance(policy, Paper) else f"share={policy.share:g}"
        self._setting = f"skip={type(policy).__name__}({named})"
        gives_weights = getattr(policy, "weighted", isinstance(policy, Subsample | Importance))
        if gives_weights and not getattr(model, "uses_sample_weights", False):
            raise ValueError(
                f"{self._setting} gives samples weights, but {type(model).__name__} does not say "
                "that it reads them: multiply each sample's loss by batch.weights, divide the sum "
                "by B, and set uses_sample_weights = True in the class"
            )
        guard = getattr(policy, "guard", None)
        self.guard = QualityGuard(guard) if guard is not None and guard.every else None
        factor_of = (lambda _: 1.0) if self.guard is None else self.guard.factor_of
        self.tracker: StalenessTracker | None = None
        self.paper: PaperClassifier | None = None
        self.importance: ImportanceChoice | None = None
        self._choose: Callable[[RawBatch], Chosen]
        if max_depth >= LEAD:
            raise ValueError(
                f"{self._setting}: a schedule may make at most {LEAD - 1} mini-batches ahead, "
                f"because it takes {LEAD} steps until a decision holds, got {max_depth}; use "
                f"LookAhead({LEAD - 1})"
            )
        if isinstance(policy, Paper):  # `attach` makes its choice, by iterator
            self.paper = PaperClassifier(policy, model, tables, self._setting, max_depth)
        elif isinstance(policy, RandomDrop):
            self._choose = partial(choose_random, policy)
        elif isinstance(policy, Importance):
            self.importance = ImportanceChoice(policy, tables, factor_of, self._setting)
            self._choose = self.importance
        else:
            freezes = isinstance(policy, FreezeRows)
            share = stale_share(policy)
            tracker = StalenessTracker(model, policy.staleness, share=share, freezes_rows=freezes)
            self.tracker, setting = tracker, self._setting
            self._choose = partial(choose_stale, policy, tables, tracker, factor_of, setting)
        parts = {
            "staleness": self.tracker,
            "guard": self.guard,
            "paper": self.paper,
            "importance": self.importance,
        }
        self._parts: dict[str, Any] = {name: part for name, part in parts.items() if part}
        self._is_closed = False
        self._refill: Refill | None = None
        self._position = Position()  # without a refill
        self._num_seen = 0  # after the last step that began
        # What continues at the position: the loader of the last iterator, or any after a load.
        self._loader: Any = None
        self._is_loaded = False

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

        Raises:
            ValueError: samples of another training iterator wait; the iterator must not be read
                ahead, has parts of mini-batches, or is for evaluation, too; or it was closed.
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
        policy, reason = self.policy, getattr(iterator, "in_turn_because", "")
        if self.paper is not None:
            self.paper.require_loader(iterator)
            self._choose = partial(self.paper.choose, ref(iterator))
        leaves_out = isinstance(policy, DropInput | Subsample | Importance | RandomDrop | Paper)
        if self._refill is not None and self._refill.holds_samples:
            raise ValueError(
                f"{self._setting} trains on one iterator at a time, and samples of an earlier one "
                "wait; use that one to its end, or close or delete it (that of a list cannot be: "
                "use a loader or a generator)"
            )
        loader = iterator.loader if isinstance(iterator, BatchIterator) else None
        refills = leaves_out and getattr(policy, "refill", not isinstance(policy, Importance))
        if refills and getattr(loader, "num_ranks", 1) > 1:
            reason = (
                "the loader hands out the parts of several processes (num_ranks), which would make "
                "different numbers of steps; use Importance or RandomDrop(refill=False)"
            )
        if reason and leaves_out:
            raise ValueError(
                f"{self._setting} takes mini-batches ahead to replace the samples that it leaves "
                f"out, but {reason}"
            )
        windows.drop_refilled()
        window, position = windows.of(iterator), self.position
        is_continued = self._is_loaded or (loader is not None and loader is self._loader)
        if position.offset and not is_continued:
            # The samples that wait are dropped, as mini-batches are with their iterator.
            position = position._replace(offset=0, num_raw=position.num_raw + 1)
        position = position._replace(full_size=getattr(loader, "batch_size", position.full_size))
        self._is_loaded, self._loader = False, loader
        mark = self._clock.mark
        self._refill = Refill(self._choose, position, self._setting, mark, refills=refills)
        window.refill = self._refill

    def begin_step(self, current: MiniBatch) -> None:
        """Called before each training step."""
        tracker, number = self.tracker, current.refilled.number
        if tracker is not None:
            for failed in range(tracker.num_steps, number):  # it began, and raised an error
                tracker.begin_step(failed, freezes=False)
                tracker.end_step(self._num_seen)
            freezes = self.guard is None or bool(self.guard.factor_of(number))
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
        number, guard = current.refilled.number, self.guard
        if guard is not None and guard.is_open(number):
            if not _is_scored(output):
                raise ValueError(
                    f"{self._setting}: the guard needs the predictions, so the model must return "
                    "(loss, (loss, logits, labels)) as TorchRec's train models do, got an output "
                    f"of type {type(output).__name__}; return that, or set guard.every to 0"
                )
            guard.add(number, output[1], output[2])
        if self.tracker is not None:
            if guard is not None:  # the next window uses the lower share
                self.tracker.share = stale_share(self.policy) * guard.factor
            self.tracker.end_step(self._num_seen)
        if self.importance is not None:
            self.importance.end_step(current.refilled, current.batch)
        self._clock.mark("skip")

    def cancel_step(self) -> None:
        """Called after a step that raised an error: later updates are not those of its step."""
        if self.tracker is not None:
            self.tracker.cancel_step()

    def close(self) -> None:
        """Stop following rows; later training steps raise."""
        self._is_closed = True
        if self.tracker is not None:
            self.tracker.close()

    def report(self) -> dict[str, Any]:
        """What was left out, for a run record, in JSON types.

        Returns:
            The `policy` and its settings; counts of raw samples; `share_skipped` of them;
            `num_lookups_left_out` of updates, and their share of all, `share_lookups_left_out`;
            `staleness`, `guard` and `paper`: the reports of these parts, or null.
        """
        parts = {name: self._parts.get(name) for name in ("staleness", "guard", "paper")}
        found = {name: part and part.report() for name, part in parts.items()}
        lookups = found["staleness"] or {"num_lookups": 0, "num_lookups_left_out": 0}
        name = re.sub("(?<!^)(?=[A-Z])", "_", type(self.policy).__name__).lower()
        return {
            "policy": {"name": name, **asdict(self.policy)},
            "num_seen": self.num_seen,
            "num_skipped": self.num_skipped,
            "share_skipped": self.num_skipped / max(1, self.num_seen),
            "num_lookups_left_out": lookups["num_lookups_left_out"],
            "share_lookups_left_out": (
                lookups["num_lookups_left_out"] / max(1, lookups["num_lookups"])
            ),
            **found,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state after the last mini-batch that was trained on: JSON types, and tensors."""
        return {
            "policy": repr(self.policy),
            "position": self.position._asdict(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, before the first step, with the next iterator.

        That iterator begins with the first raw mini-batch that was not used up, as a loader does
        whose state was taken with it. If `state` is of another policy, only its position is used,
        and what this policy finds starts anew.

        Raises:
            ConfigError: `state` is no state of skipping, or one of other tables.
        """
        found = require_state("skipping state", state, ("policy", "position", "parts"))
        self._position = Position(**found["position"])
        self._is_loaded, self._num_seen = True, self._position.num_seen
        # recsys 0.1 wrote None for no guard.
        if found["policy"].replace("guard=None", f"guard={Guard(every=0)}") == repr(self.policy):
            for name, part in self._parts.items():
                part.load_state_dict(found["parts"][name])
        elif self.tracker is not None:
            self.tracker.num_steps = self._position.num_batches


def choose_stale(
    policy: Observe | DropInput | FreezeRows | Subsample,
    tables: ModelTables,
    tracker: StalenessTracker,
    factor_of: Callable[[int], float],
    setting: str,
    raw: RawBatch,
) -> Chosen:
    """Leave out samples all of whose rows are stale; equal arguments give equal choices.

    Args:
        policy: The policy; `Observe` and `FreezeRows` keep every sample.
        tables: The tables of the model.
        tracker: Knows which rows are stale; it gets samples to find the threshold from.
        factor_of: The part of the policy's share that holds for a mini-batch; 0: keep everything.
        setting: The policy, for errors.
        raw: The raw mini-batch.
    """
    leaves_out = isinstance(policy, DropInput | Subsample) and bool(factor_of(raw.taken_for))
    # As many raw mini-batches as are needed, and at least every 32nd.
    period = min(_MOST_PERIOD, max(1, policy.staleness.window * raw.size // MOST_INPUTS))
    is_sampled = raw.number % period == 0
    if leaves_out:
        tracker.use_flags_of(raw.taken_for)
        leaves_out = tracker.has_stale_rows
    if not (is_sampled or leaves_out):
        return EVERYTHING
    parts = tables.parts(raw.batch, raw.size, setting)
    if is_sampled:  # evenly spaced samples, from which the tracker finds the threshold
        num_samples = -(-MOST_INPUTS * period // policy.staleness.window)
        samples = np.arange(0, raw.size, max(1, raw.size // num_samples))
        samples = samples[samples >= raw.offset]  # the others were added at the first time
        tracker.add_inputs(raw.first_index, parts, raw.size, torch.from_numpy(samples))
    if not leaves_out:
        return EVERYTHING
    is_stale = tracker.all_stale(parts, raw.size).numpy()
    if not isinstance(policy, Subsample):
        return Chosen(np.flatnonzero(~is_stale))
    is_drawn = is_stale & (raw.random_bits(policy.seed) < _threshold(policy.keep))
    samples, weights = np.flatnonzero(~is_stale | is_drawn), None
    if is_drawn.any():
        weights = np.where(is_drawn, 1 / policy.keep, 1).astype(np.float32)[samples]
    return Chosen(samples, weights)


def choose_random(policy: RandomDrop, raw: RawBatch) -> Chosen:
    """Leave out random samples; equal arguments give equal choices.

    Without refilling, the number of samples is the same for all mini-batches of a size, give or
    take one: torch prepares its matrix products anew for each new size.
    """
    bits = raw.random_bits(policy.seed)
    if policy.refill:
        samples = np.flatnonzero(bits >= _threshold(policy.share))
    else:
        most = (1 - policy.share) * raw.size + int(mix64(bits[:1])[0]) / 2**64
        samples = np.sort(np.argsort(bits, kind="stable")[: int(most)])
    weights = None
    if policy.weighted:
        weights = np.full(len(samples), 1 / (1 - policy.share), np.float32)
    return Chosen(samples, weights)


def _threshold(share: float) -> Any:
    """The bits of a share of the samples lie below it."""
    return np.uint64(int(share * 2**64))


def _is_scored(output: Any) -> bool:
    """Whether an output is (loss, logits, labels)."""
    return (
        isinstance(output, tuple | list)
        and len(output) == 3
        and isinstance(output[1], Tensor)
        and isinstance(output[2], Tensor)
        and output[1].numel() == output[2].numel()
    )
