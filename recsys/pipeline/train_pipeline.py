"""`TrainPipeline`: steps of training, with the rows of what comes next on their way meanwhile.

iterator -> window      the current mini-batch, and as many as are looked ahead to
window   -> claims      slots for their rows, which come in the background
current  -> model       its forward takes its claim; backward; every row moved once
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from recsys.embeddings.fused_optimizer import FusedOptimizer
from recsys.embeddings.interrupts import interrupts_held_back
from recsys.errors import TrainingDiverged
from recsys.pipeline.auto import Auto, Choice
from recsys.pipeline.inputs import Inputs, cancel
from recsys.pipeline.micro_batches import join_outputs
from recsys.pipeline.popular_split import PopularSplit
from recsys.pipeline.schedule import Hotline, LookAhead, Sequential
from recsys.pipeline.stalls import StageClock
from recsys.pipeline.suggestions import forecast_budget, of_budget, of_schedule
from recsys.pipeline.window import Windows
from recsys.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.embeddings.ahead import Prefetched
    from recsys.pipeline.popular_split import MicroBatch
    from recsys.pipeline.schedule import Schedule
    from recsys.pipeline.suggestions import Suggestion
    from recsys.pipeline.timeline import Timeline
    from recsys.pipeline.window import MiniBatch, Window

__all__ = ["TrainPipeline"]

# After so many steps with fewer mini-batches ahead than asked for, one more is tried.
_STEPS_UNTIL_DEEPER = 16


class TrainPipeline:
    """Takes mini-batches from an iterator, and trains a model on one at each `progress`.

    Losses and rows are those of a plain loop, to the last bit, whatever the schedule; but for the
    order in which floats are summed, where `Hotline` splits a mini-batch. Between two
    steps the model is a model like any other: evaluation, checkpoints and `weight` have every row's
    newest value. An error, or Ctrl-C, gives back what was claimed for mini-batches to come; the
    next `progress` goes on with the mini-batch after the failed one.

    Mini-batches taken ahead are kept by iterator. `progress` with another iterator, for an
    evaluation say, neither uses nor loses them. The state of a `BatchLoader` or `HotColdLoader`
    does not count them: it says the next sample to be trained on.

    All of it runs in the thread that calls; rows are moved by one thread more for each table group,
    in the order in which they were asked for. Whoever waits for it is `progress` itself, in the
    forward of the mini-batch whose rows they are, and what has failed there is raised there.

    Args:
        model: Maps a mini-batch to (loss, output), as TorchRec's train models do.
        optimizer: Of the dense part, or several; None where nothing else is to be stepped. Rows
            that an optimizer of ours moves are moved with it, once per step.
        device: Where mini-batches are brought; None leaves them where they are.
        schedule: What runs when, `Auto()` to have it measured; where it is left out,
            `LookAhead(depth=2)` if rows are in two tiers, else `Sequential()`.
        ids: From a mini-batch to what modules of ours will look up: sparse features, or by a
            module's name in the model what its forward will be given (features, a tensor, a tuple
            of arguments; a list of these where it is called several times). Left out, collections
            look up the sparse features that the mini-batch has.
        custom_model_fwd: Called in place of `model`, as for `torch.autocast`.
        clock: Told of every stage.

    Attributes:
        schedule: As above, with nothing left out.
        clock: As above.
        popular_split: What splits mini-batches, and has counted them; None unless `Hotline` does.
        choice: How `Auto` chooses, and what it has measured; None unless it does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        device: torch.device | str | None = None,
        *,
        schedule: Schedule | Auto | None = None,
        ids: Callable[[Any], Any] | None = None,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self._model, self._forward = model, custom_model_fwd or model
        self._device = None if device is None else torch.device(device)
        self._inputs = Inputs(model, ids)
        self._optimizers = _with_those_of_rows(model, optimizer)
        self.clock = clock or StageClock()
        self.clock.watch(self._inputs.moved)
        if schedule is None:
            schedule = LookAhead() if self._inputs.modules else Sequential()
        self.schedule = schedule
        self.popular_split: PopularSplit | None = None
        self.choice: Choice | None = None
        self._most_depth = 0
        self._follow(Sequential())
        if schedule != Sequential() and not self._inputs.modules:
            warnings.warn(
                f"schedule={schedule} has no effect: every row is in fast memory, and none has to "
                "be fetched; leave it out, or give the tables a budget",
                stacklevel=2,
            )
        elif isinstance(schedule, Auto):
            self.choice = Choice(schedule)
            self._most_depth = max(getattr(each, "depth", 0) for each in schedule.candidates)
            self._follow(self.choice.current)
        else:
            self._follow(schedule)
            self._most_depth = self._depth
            if isinstance(schedule, Hotline):
                self.popular_split = PopularSplit(schedule, model, self._inputs.tiers)
        self._has_warned_of_room = self._has_warned_of_others = False
        self._windows = Windows()
        self._current: MiniBatch | None = None
        self._num_steps = self._num_ahead = 0

    @property
    def mean_depth(self) -> float:
        """Mini-batches ahead whose rows had slots, on average over the steps so far."""
        return self._num_ahead / max(1, self._num_steps)

    def forecast_budget(self) -> None:
        """Count from now on the rows that twice the budget would fetch, for `suggestions`."""
        forecast_budget(self._inputs.tiers())

    def suggestions(self) -> list[Suggestion | None]:
        """Settings that would shorten the waiting for rows; None for one that is unknown.

        A larger budget is suggested after `forecast_budget`, or if all rows would fit.
        """
        tiers = self._inputs.tiers()
        return [
            of_budget(self.clock, tiers),
            of_schedule(self.clock, tiers, self._followed, self.mean_depth),
        ]

    def progress(self, iterator: Iterator[Any]) -> tuple[Tensor, Any]:
        """Train on the next mini-batch, or where `model.training` is off, only compute its loss.

        In training, mini-batches ahead are taken from `iterator`, too. They wait for later calls
        with this same iterator, in training or not. An exception of the iterator is raised after
        the mini-batches that came before it.

        Args:
            iterator: Gives mini-batches, to this pipeline alone. If you drop it, those that wait
                are dropped.

        Returns:
            What the model returned: the loss, without a graph where the step is made, and the
            output.

        Raises:
            StopIteration: there is no mini-batch left.
            TrainingDiverged: the loss, on the CPU, has nan or inf in it, and no parameter was
                updated; or the gradient of a row has (`NonFiniteGradient`), and nothing but the
                other rows was.
            ValueError: the schedule looks ahead, and the iterator must not be read ahead (that of a
                `HotColdLoader` with `FAE(is_adaptive=True)`).
            Exception: of the iterator, the model, an optimizer, or a transfer of rows.
        """
        self.clock.mark("other")
        begin = perf_counter()
        try:
            if getattr(iterator, "is_over", False):  # closed, so its loader gives these again
                self._windows.drop(iterator)
            window = self._windows.of(iterator)
            self._current = self._take(iterator, window)
            self.clock.mark("load")
            found = self._step(self._current, window)
        except StopIteration:
            raise
        except BaseException:
            self._give_back()
            raise
        else:
            if self.choice is not None and self._model.training:
                self._try_next(self.choice, perf_counter() - begin)
            return found
        finally:
            self._current = None

    def steps(self, batches: Iterable[Any]) -> Generator[tuple[Tensor, Any]]:
        """`progress` until there is no mini-batch left.

        Left early, it closes the iterator that it has made. A `BatchLoader` or `HotColdLoader` that
        is then iterated again goes on with the next mini-batch to be trained on.

        Args:
            batches: One pass of a loader, say. An iterator is not closed, and goes on.
        """
        iterator = iter(batches)
        try:
            while True:
                try:
                    found = self.progress(iterator)
                except StopIteration:
                    return
                yield found
        finally:
            if iterator is not batches:
                self._windows.drop(iterator)
                if hasattr(iterator, "close"):
                    iterator.close()

    def record(self, timeline: Timeline | None) -> None:
        """Tell a timeline of every stage and every transfer from now on; None of none any more."""
        self.clock.timeline = timeline
        for number, tiers in enumerate(self._inputs.tiers()):
            tiers.residency.queue.on_span = (
                None if timeline is None else partial(_add_span, timeline, f"rows, group {number}")
            )

    def detach(self) -> nn.Module:
        """Leave nothing under way: no slot is claimed, no row is moving, no gradient is kept.

        A later `progress` goes on with the mini-batches that were taken from its iterator.

        Returns:
            The model.
        """
        self._give_back()
        for module in self._inputs.modules.values():
            module.settle()
        return self._model

    def __del__(self) -> None:
        """Give back the claims of a pipeline that is dropped."""
        if hasattr(self, "_current"):
            self._give_back()
            self._windows.drop_all()

    def _take(self, iterator: Iterator[Any], window: Window) -> MiniBatch:
        """The next mini-batch; as many as are looked ahead to wait in the window."""
        is_training = self._model.training
        reason = getattr(iterator, "in_turn_because", "")
        try:
            if reason and is_training and self._most_depth:
                raise ValueError(f"schedule={self.schedule} takes mini-batches ahead, but {reason}")
            window.fill(iterator, self._depth if is_training else 0, self._device)
            return window.pop(iterator, self._device)
        finally:
            if not window:
                self._windows.drop(iterator)

    def _step(self, current: MiniBatch, window: Window) -> tuple[Tensor, Any]:
        if not self._model.training:
            found = self._compute(current.batch)
            cancel(current.claims)
            return found
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._windows.give_back(but=window)
        if self._depth or self.popular_split:
            self._look_ahead(current, window)
        parts = self._split(current)
        if parts:
            loss, output = self._learn_from_parts(parts)
        else:
            loss, output = self._learn_from(current.batch, current.claims)
        for optimizer in self._optimizers:
            optimizer.step()
        if self.popular_split:
            self.popular_split.learn()
        self.clock.mark("update")
        return loss, output

    def _try_next(self, choice: Choice, seconds: float) -> None:
        """Go on by what is to be tried next, or was chosen."""
        choice.add(seconds)
        if choice.current != self._followed:
            self._follow(choice.current)

    def _follow(self, schedule: Schedule) -> None:
        """Look as many mini-batches ahead from now on."""
        self._followed = schedule
        self._depth = 0 if isinstance(schedule, Sequential) else schedule.depth
        self._room = self._depth  # mini-batches ahead that there is room for
        self._steps_in_room = 0

    def _split(self, current: MiniBatch) -> list[MicroBatch]:
        if self.popular_split is None:
            return []
        # Rows that are not claimed would need slots while those of the first part are held.
        claims = None if self._inputs.has_untold else current.claims
        sides = self.popular_split.choose(current.batch, claims, self._model, self._compute)
        if not sides or claims is None:
            return []
        with interrupts_held_back():  # or claims could be lost between the whole and its parts
            parts = self.popular_split.split(sides, claims)
            current.claims = [claim for part in parts for claim in part.claims]
        return parts

    def _compute(self, batch: Any) -> tuple[Tensor, Any]:
        try:
            found = self._forward(batch)
        except StopIteration as error:  # or the loop would take it for the end of the data
            raise RuntimeError("the model raised StopIteration") from error
        self.clock.mark("forward")
        return found

    def _learn_from(
        self, batch: Any, claims: Sequence[Prefetched] | None, weight: float = 1.0
    ) -> tuple[Tensor, Any]:
        """Forward and backward.

        Args:
            batch: A mini-batch, or a part of one.
            claims: What is claimed for it.
            weight: Of a loss without dimensions; one with a loss for each sample is summed.
        """
        loss, output = self._compute(batch)
        if any(claim.is_held for claim in claims or ()):
            cancel(claims)
            self._warn_of_other_ids()
        total = loss.sum() if loss.dim() else loss
        # On another device, asking would wait for it.
        if total.is_cpu and not isfinite(total.item()):
            raise TrainingDiverged(
                f"the loss is {total.item()} in a mini-batch, and no parameter was updated by it; "
                "lower the learning rate, or find the sample that it comes from"
            )
        if weight != 1.0 and not loss.dim():
            total = total * weight
        total.backward()  # type: ignore[no-untyped-call]
        self.clock.mark("backward")
        return loss.detach(), output

    def _learn_from_parts(self, parts: Sequence[MicroBatch]) -> tuple[Tensor, Any]:
        """As from the whole: gradients add up, and rows are moved once."""
        with ExitStack() as stack:
            for updater in self._inputs.updaters():
                stack.enter_context(updater.moving_once())
            found = [self._learn_from(part.batch, part.claims, part.weight) for part in parts]
            is_sum = self.popular_split is not None and self.popular_split.is_loss_a_sum
            sums = [loss for loss, _ in found] if is_sum else None
            loss, output = join_outputs(found, [part.samples for part in parts], sums)
        return loss, output

    def _look_ahead(self, current: MiniBatch, window: Window) -> None:
        """Claim slots for the current mini-batch, then for those ahead, as far as there is room."""
        self._num_steps += 1
        self._steps_in_room += 1
        if self._room < self._depth and self._steps_in_room > _STEPS_UNTIL_DEEPER:
            self._room, self._steps_in_room = self._room + 1, 0
        if any(claim.is_given_up for claim in current.claims or ()):
            current.give_back()
        if current.claims is None:
            current.claims = self._inputs.prefetch(current.batch)
        has_room = current.claims is not None
        for number, each in enumerate(window.batches):
            if has_room:
                each.prefetch(self._inputs, may_claim=number < self._room)
                has_room = each.claims is not None or each.has_failed
                if not has_room and number < self._room:
                    self._shrink(number)
            if not has_room:  # and rows of those behind must not take the slots of those before
                each.give_back()
            self._num_ahead += bool(each.claims)

    def _shrink(self, room: int) -> None:
        self._room, self._steps_in_room = room, 0
        if self._has_warned_of_room:
            return
        self._has_warned_of_room = True
        slots = ", ".join(
            f"{tiers.hot.num_slots} rows of embedding_dim {tiers.hot.rows.shape[1]}"
            for tiers in self._inputs.tiers()
        )
        way_out = f"or LookAhead(depth={room})" if room else "or Sequential()"
        warnings.warn(
            f"schedule={self.schedule}: a budget with slots for {slots} "
            f"({format_bytes(sum(tiers.hot.num_bytes for tiers in self._inputs.tiers()))}) has "
            f"room for {room} of {self._depth} mini-batches ahead; rows of the others are fetched "
            f"when there is room. Give a larger budget, {way_out}",
            stacklevel=5,
        )

    def _warn_of_other_ids(self) -> None:
        if self._has_warned_of_others:
            return
        self._has_warned_of_others = True
        warnings.warn(
            f"schedule={self.schedule}: the model has looked up other ids than were fetched ahead "
            "for its mini-batch, so their rows were fetched when they were needed; give "
            "TrainPipeline(..., ids=fn) what each module is given",
            stacklevel=5,
        )

    def _give_back(self) -> None:
        """Give up every claim; mini-batches stay."""
        if self._current is not None:
            self._current.give_back()
        self._windows.give_back()


def _with_those_of_rows(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None
) -> list[Optimizer]:
    """The optimizers that are to be stepped: those given, and those of rows that wait for it."""
    given = [] if optimizer is None else optimizer
    optimizers = list(given) if isinstance(given, Sequence) else [given]
    for module in model.modules():
        own = getattr(module, "row_optimizer", None)
        if isinstance(own, FusedOptimizer) and own not in optimizers and not own.updater.auto_apply:
            optimizers.append(own)
    # Rows come first: a step that they refuse has updated no other parameter.
    of_rows = {
        id(updater.optimizer)
        for module in model.modules()
        if (updater := getattr(module, "row_updater", None)) is not None
    }
    return sorted(optimizers, key=lambda each: id(each) not in of_rows)


def _add_span(timeline: Timeline, track: str, what: str, begin: float, end: float) -> None:
    timeline.add(track if what == "move" else "steps", what, begin, end)
