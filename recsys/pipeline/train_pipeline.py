"""`TrainPipeline`: makes training steps while rows for later mini-batches are fetched.

iterator -> window      the current mini-batch, and those ahead of it
window   -> claims      slots for their rows, which are fetched in the background
current  -> model       forward; backward; every row is updated once

A claim is a hint. It is never released, and after an error there is nothing to clean up.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.untrusted import is_whole, require_state
from recsys.errors import ConfigError, TrainingDiverged
from recsys.pipeline.auto import Auto, Choice
from recsys.pipeline.hotline import PopularSplit
from recsys.pipeline.loss_and_output import explain_loss, require_loss_and_output
from recsys.pipeline.micro_batches import join_outputs, labelled_samples
from recsys.pipeline.model_tables import ModelTables
from recsys.pipeline.optimizers import optimizers_to_step
from recsys.pipeline.schedule import Hotline, LookAhead, Schedule, Sequential
from recsys.pipeline.skip.skipping import Skipping
from recsys.pipeline.stalls import StageClock
from recsys.pipeline.tiers_state import load_tiers_state, tiers_state
from recsys.pipeline.window import Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.pipeline.hotline import MicroBatch
    from recsys.pipeline.skip.policies import Policy
    from recsys.pipeline.window import MiniBatch, Window

__all__ = ["TrainPipeline"]

_STATE_KEYS = (
    *("depth", "num_steps", "num_ahead"),
    *("tiers", "popular_split", "choice", "skipping"),
)


class TrainPipeline:
    """Takes mini-batches from an iterator; each `progress` trains the model on one.

    Under every schedule losses and rows equal those of a plain loop to the last bit, except that
    floats are summed in another order when `Hotline` splits a mini-batch. With `skip` they equal
    those of each other schedule. Between two steps the model is an ordinary model: evaluation,
    checkpoints and `weight` see the newest value of every row. After an error or Ctrl-C the next
    `progress` continues with the mini-batch after the failed one.

    Mini-batches taken ahead are kept by iterator. `progress` with another iterator, such as one for
    evaluation, neither uses nor loses them. The state of a `BatchLoader` or `HotColdLoader` does
    not count them: it names the next sample to be trained on.

    Everything runs in the calling thread, except that rows which are fetched ahead are moved by a
    background thread of each table group (on CUDA, on a stream), in the order of the requests.
    `progress` waits for the rows of a mini-batch before
    its forward; if `Hotline` splits it, in the forward of the other samples. After a transfer has
    failed, every `progress` raises `TiersFailed`.

    Args:
        model: Maps a mini-batch to (loss, output), as TorchRec's train models do.
        optimizer: The optimizer of the dense part, or several, or None. Recsys optimizers of rows
            need not be listed; they step with it, once per step. Those given to `accelerate` must.
        device: Where mini-batches are moved; None leaves them where they are.
        schedule: What runs when; `Auto()` measures and chooses. Default: `LookAhead(depth=2)`
            where rows are fetched from files, to a CUDA device, or on several processes, else
            `Sequential()`.
        ids: Maps a mini-batch to what recsys modules will look up: either sparse features, or a
            dictionary from a module's name in the model to the input of its forward (features, a
            tensor, a tuple of arguments; a list of these if it is called several times). Without
            it, collections look up the sparse features in the mini-batch.
        custom_model_fwd: Called in place of `model`, for example under `torch.autocast`.
        clock: Measures the stages.
        batch_size: Samples of a whole mini-batch, if the loss is a mean over samples. The loss of a
            smaller mini-batch, such as the last one, is then multiplied by its share of a whole
            one before backward, so that each sample counts as much. None: as in a plain loop. If
            tensors of a mini-batch differ in length, its `labels` are counted.
        skip: What training leaves out, such as `DropInput()`; None for nothing. Its docstring says
            whether later samples replace those left out.

    Attributes:
        schedule: The schedule, or the default.
        clock: The clock that measures the stages.
        popular_split: Splits mini-batches and counts them; None unless the schedule is `Hotline`.
        choice: What `Auto` has measured and chosen; None unless the schedule is `Auto`.
        skipping: Counts what is left out; None without `skip`.

    Raises:
        ConfigError: `batch_size` is no integer of at least 1.
        TypeError: `schedule` or `skip` is of another type.
        ValueError: `optimizer` lists one twice, or `skip` does not fit the model or the schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None,
        device: torch.device | str | None = None,
        *,
        schedule: Schedule | Auto | None = None,
        ids: Callable[[Any], Any] | None = None,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
        clock: StageClock | None = None,
        batch_size: int | None = None,
        skip: Policy | None = None,
    ) -> None:
        if not isinstance(schedule, Schedule | Auto | None):
            raise TypeError(f"schedule must be one such as LookAhead(), or None, got {schedule!r}")
        if batch_size is not None and not is_whole(batch_size, 1):
            raise ConfigError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        self._model, self._forward = model, custom_model_fwd or model
        self._device = None if device is None else torch.device(device)
        self._tables = ModelTables(model, ids)
        self._optimizers = optimizers_to_step(model, optimizer)
        self._batch_size = batch_size
        self.clock = clock or StageClock()
        self.clock.watch(self._tables.waited)
        by_default = LookAhead() if self._tables.gain_by_looking_ahead() else Sequential()
        self.schedule = schedule = schedule or by_default
        self.popular_split: PopularSplit | None = None
        self.choice: Choice | None = None
        self._max_depth = 0
        self._switch_to(Sequential())
        if not self._tables:  # all rows are in fast memory
            pass
        elif isinstance(schedule, Auto):
            self.choice = Choice(schedule)
            self._max_depth = max(
                getattr(candidate, "depth", 0) for candidate in schedule.candidates
            )
            self._switch_to(self.choice.current)
        else:
            self._switch_to(schedule)
            self._max_depth = self._depth
            if isinstance(schedule, Hotline):
                self.popular_split = PopularSplit(schedule, model, self._tables)
        self._windows = Windows()
        self._current: MiniBatch | None = None
        self.skipping: Skipping | None = None
        if skip is not None:
            self._new_skipping = partial(
                Skipping, skip, model, self._tables, self._max_depth, self.clock
            )
            self.skipping = self._new_skipping()

    @property
    def mean_depth(self) -> float:
        """Mini-batches ahead that were claimed, on average over steps of this schedule."""
        return self._num_ahead / max(1, self._num_steps)

    @property
    def num_untold(self) -> int:
        """Mini-batches taken ahead that their iterator, without `num_waiting`, counts as used."""
        return self._windows.num_untold

    def progress(self, iterator: Iterator[Any]) -> tuple[Tensor, Any]:
        """Train on the next mini-batch, or only compute its loss if `model.training` is False.

        In training this also takes the mini-batches ahead. They wait for later calls with the same
        iterator, in training or not. Its exceptions are raised after the mini-batches before them.

        Args:
            iterator: Returns mini-batches; only this pipeline may use it. Each must stay unchanged
                until its step, and page-locked memory until a GPU has copied it. If the iterator is
                deleted, those that wait are dropped.

        Returns:
            The loss and the output of the model. In training the loss is detached.

        Raises:
            StopIteration: there is no mini-batch left.
            TrainingDiverged: the loss, on the CPU, is nan or inf, and no parameter was updated; or
                the gradient of a row contains nan or inf (`NonFiniteGradient`), and only other
                rows were updated (on CUDA none).
            RuntimeError: the model, an optimizer or a hook raised `StopIteration`.
            ValueError: the schedule looks ahead, but the iterator must not be read ahead (that of a
                `HotColdLoader` with `FAE(is_adaptive=True)`); `skip` does not fit the model or the
                iterator, or was closed; or `recsys.restore` has replaced a module.
            TypeError: the model did not return (loss, output).
            Exception: any error of the iterator, the model, an optimizer or a transfer of rows.
        """
        self.clock.mark("other")
        begin = perf_counter()
        try:
            if getattr(iterator, "is_over", False):  # closed: its loader will return these again
                self._windows.drop(iterator)
            window = self._windows.of(iterator)
            self._current = self._next_batch(iterator, window)
            self.clock.mark("load")
            try:
                found = self._step(self._current, window)
            except StopIteration as error:  # the caller would take it for the end of the data
                raise RuntimeError("a training step raised StopIteration") from error
        except StopIteration:
            raise
        except BaseException:
            if self.skipping is not None:
                self.skipping.cancel_step()
            raise
        else:
            if self.choice is not None and self._model.training:
                self.choice.add(perf_counter() - begin)
                if self.choice.current != self._current_schedule:
                    self._switch_to(self.choice.current)
            return found
        finally:
            self._current = None

    def steps(self, batches: Iterable[Any]) -> Generator[tuple[Tensor, Any]]:
        """The results of `progress`, until there is no mini-batch left.

        If this generator is closed early, it closes the iterator that it has made. When a
        `BatchLoader` or `HotColdLoader` is then iterated again, it continues with the next
        mini-batch to be trained on.

        Args:
            batches: For example a loader, for one pass. An iterator passed here is never closed.
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

    def detach(self) -> nn.Module:
        """Wait until no row is on its way.

        A later `progress` continues with the mini-batches that were taken from its iterator.

        Returns:
            The model.
        """
        self._tables.settle()
        return self._model

    def state_dict(self) -> dict[str, Any]:
        """What the pipeline has counted and learned; the position is in the loader's state.

        JSON types, except for the tensors of `PopularSplit.state_dict`.
        """
        split, choice = self.popular_split, self.choice
        return {
            "depth": self._depth,
            "num_steps": self._num_steps,
            "num_ahead": self._num_ahead,
            "tiers": tiers_state(self._tables.fetchers),
            "popular_split": None if split is None else split.state_dict(),
            "choice": None if choice is None else choice.state_dict(),
            "skipping": None if self.skipping is None else self.skipping.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the counts and choices of `state`, after rows and optimizers were loaded.

        The schedule, the budget and the tiers may be others than those of `state`. Parts of the
        state that do not apply to them are ignored.

        Raises:
            ConfigError: `state` is no state of a pipeline.
        """
        found = require_state("pipeline state", state, _STATE_KEYS)
        self.detach()
        self._windows.num_untold = 0
        load_tiers_state(self._tables.fetchers, found["tiers"])
        self.clock.watch(self._tables.waited)
        if self.popular_split is not None and found["popular_split"] is not None:
            self.popular_split.load_state_dict(found["popular_split"])
        if self.choice is not None and found["choice"] is not None:
            self.choice.load_state_dict(found["choice"])
            self._switch_to(self.choice.current)
        if self.skipping is not None:
            self._windows.drop_all()  # what was taken ahead is taken again
            self.skipping.close()
            self.skipping = self._new_skipping()
            if found["skipping"] is not None:
                self.skipping.load_state_dict(found["skipping"])
        if found["depth"] == self._depth:
            self._num_steps, self._num_ahead = int(found["num_steps"]), int(found["num_ahead"])

    def __del__(self) -> None:
        """Stop what a policy of skipping runs."""
        skipping: Skipping | None = getattr(self, "skipping", None)
        if skipping is not None and not sys.is_finalizing():
            skipping.close()

    def _next_batch(self, iterator: Iterator[Any], window: Window) -> MiniBatch:
        """Take the next mini-batch, and fill the window with those ahead of it."""
        is_training = self._model.training
        reason = getattr(iterator, "in_turn_because", "")
        try:
            if reason and is_training and self._max_depth:
                raise ValueError(f"schedule={self.schedule} takes mini-batches ahead, but {reason}")
            if self.skipping is not None:
                self.skipping.attach(self._windows, iterator, is_training=is_training)
            depth = self._depth if is_training else 0
            window.fill(iterator, self._tables.num_to_take(depth), self._device)
            return window.pop(iterator, self._device)
        finally:
            if is_training:
                self._windows.num_untold = window.num_untold(iterator)
            if not window:
                self._windows.drop(iterator)

    def _step(self, current: MiniBatch, window: Window) -> tuple[Tensor, Any]:
        if not self._model.training:
            return self._compute(current.batch)
        if self.skipping is not None:
            self.skipping.begin_step(current)
        self._tables.require_same_modules()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._num_steps += 1
        window.send(current, self._tables)
        parts = self._split(current)
        if self._tables:
            if self._depth and current.claims is None:  # those ahead must not take its slots
                current.claims = self._tables.prefetch(current.batch)
            self._tables.begin(current.claims, is_waiting=not parts)
            if current.claims is not None:
                self._look_ahead(window)
        weight = self._weight_of(current)
        if parts:
            loss, output = self._train_on_parts(parts, weight)
        else:
            loss, output = self._train_on(current.batch, weight)
        for optimizer in self._optimizers:
            optimizer.step()
        if self.popular_split:
            self.popular_split.learn()
        if self.skipping is not None:
            self.skipping.end_step(current, output)
        self.clock.mark("update")
        return loss, output

    def _weight_of(self, current: MiniBatch) -> float:
        """The factor of a mini-batch's loss: its share of the samples of a whole one, at most 1."""
        if self._batch_size is None:
            return 1.0
        refilled = current.refilled
        size = labelled_samples(current.batch) if refilled is None else refilled.size
        return min(1.0, (size or self._batch_size) / self._batch_size)

    def _switch_to(self, schedule: Schedule) -> None:
        """Use the depth of another schedule from now on."""
        self._current_schedule = schedule
        self._depth = schedule.depth if isinstance(schedule, LookAhead) else 0
        self._num_steps = self._num_ahead = 0

    def _split(self, current: MiniBatch) -> list[MicroBatch]:
        """The popular samples and the others, for which rows are fetched; empty for no split."""
        split = self.popular_split
        if split is None:
            return []
        parts = split.choose(current.batch, self._model, self._compute)
        current.prefetch(self._tables)
        return parts

    def _compute(self, batch: Any) -> tuple[Tensor, Any]:
        found = self._forward(batch)
        self.clock.mark("forward")
        return found

    def _train_on(self, batch: Any, weight: float) -> tuple[Tensor, Any]:
        """Forward and backward.

        Args:
            batch: A mini-batch, or a part of one.
            weight: Factor of a scalar loss; a loss for each sample is summed without it.
        """
        loss, output = require_loss_and_output(self._compute(batch), self._model)
        total = loss.sum() if loss.dim() else loss
        # On another device, `item` would wait for it.
        if total.is_cpu and not isfinite(total.item()):
            raise TrainingDiverged(explain_loss(total.item(), batch))
        if weight != 1.0 and not loss.dim():
            total = total * weight
        total.backward()  # type: ignore[no-untyped-call]
        self.clock.mark("backward")
        return loss.detach(), output

    def _train_on_parts(self, parts: Sequence[MicroBatch], weight: float) -> tuple[Tensor, Any]:
        """Forward and backward of each part; gradients add up, and every row is updated once."""
        with ExitStack() as stack:
            for optimizer in self._tables.row_optimizers():
                stack.enter_context(optimizer.update_once())
            found = [self._train_on(part.batch, weight * part.weight) for part in parts]
            is_sum = self.popular_split is not None and self.popular_split.is_loss_a_sum
            sums = [loss for loss, _ in found] if is_sum else None
            loss, output = join_outputs(found, [part.samples for part in parts], sums)
        return loss, output

    def _look_ahead(self, window: Window) -> None:
        """Claim slots for as many of the mini-batches ahead as the schedule wants."""
        for _, mini_batch in zip(range(self._depth), window.batches, strict=False):
            mini_batch.prefetch(self._tables)
            if mini_batch.claims is None:  # later ones must not take its slots
                break
            self._num_ahead += bool(mini_batch.claims)
