"""Hotline's split of a mini-batch: popular samples, and the others, whose rows are fetched."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from recsys._support.states import SavedState
from recsys._support.user_warnings import warn_caller
from recsys.pipeline.hotline.loss_parts import is_loss_a_sum
from recsys.pipeline.micro_batches import select_samples
from recsys.pipeline.model_tables import cancel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from recsys.embeddings.tiers.ahead import Prefetched
    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.pipeline.schedule import Hotline

__all__ = ["MicroBatch", "PopularSplit"]

_NUM_SIZES = 16  # different sizes that a part can have
# Device types for which the host waits before each split. Tests add "cpu".
_HOST_WAITS_FOR = {"cuda"}
_COUNTERS = (
    "num_steps",
    "num_split",
    "num_samples",
    "num_popular",
    "num_promoted",
    "num_demoted",
)


class MicroBatch(NamedTuple):
    """A part of a mini-batch.

    Attributes:
        batch: The part, of the mini-batch's type.
        samples: Numbers of its samples in the mini-batch, (M,) int64.
        weight: Weight of its loss: M / B if the loss is a mean over samples, 1 if it is a sum.
        was_missing: Whether a row had to be fetched.
        claims: Its claims; empty until `PopularSplit.split` divides those of the mini-batch.
    """

    batch: Any
    samples: Tensor
    weight: float
    was_missing: bool
    claims: Sequence[Prefetched] = ()


class PopularSplit:
    """Splits mini-batches, and learns which rows are popular.

    Args:
        schedule: Its settings.
        model: The model that is trained.
        tiers: Returns the model's tiers.

    Attributes:
        num_steps: Mini-batches seen.
        num_split: Mini-batches split.
        num_samples: Samples seen after the learning steps.
        num_popular: Samples among these that had all rows in fast memory.
        num_promoted: Rows that were pinned because they became popular.
        num_demoted: Rows that were unpinned because they were no longer popular.
        is_loss_a_sum: Whether the loss is a sum over samples; False for a mean, None until known.
    """

    def __init__(
        self, schedule: Hotline, model: nn.Module, tiers: Callable[[], Sequence[Tiers]]
    ) -> None:
        self._schedule, self._tiers = schedule, tiers
        # Weak keys, so that tiers that were replaced by others with other slots can be freed.
        self._num_rows: WeakKeyDictionary[Tiers, int] = WeakKeyDictionary()  # claimed so far
        self._most_rows: WeakKeyDictionary[Tiers, int] = WeakKeyDictionary()  # by one mini-batch
        self.num_steps = self.num_split = self.num_samples = self.num_popular = 0
        self.num_promoted = self.num_demoted = 0
        self.is_loss_a_sum: bool | None = None
        self._has_warned_of_sizes = False
        self._never_splits = _warn_if_never_split(schedule, model)
        if not self._never_splits:
            _warn_of_layers(schedule, model)
            _warn_of_waiting(schedule, tiers())

    def choose(
        self,
        batch: Any,
        claims: Sequence[Prefetched] | None,
        model: nn.Module,
        compute: Callable[[Any], tuple[Tensor, Any]],
    ) -> list[MicroBatch]:
        """Divide a mini-batch into popular samples and the others; empty if it stays whole.

        Args:
            batch: The mini-batch.
            claims: Its claims.
            model: As for `is_loss_a_sum`, which runs on the first mini-batch that is split.
            compute: As for `is_loss_a_sum`.
        """
        self.num_steps += 1
        if claims is None or self._never_splits:
            return []
        sizes = {size for claim in claims for size in claim.batch_sizes()}
        if len(sizes) != 1:
            self._warn_of_sizes(sizes)
            return []
        [batch_size] = sizes
        if self.num_steps == 1:  # raise in the first step, not after the learning steps
            select_samples(batch, torch.arange(batch_size), batch_size)
        if self.num_steps <= self._schedule.learning_steps:
            return []
        is_missing = reduce(or_, (each for claim in claims for each in claim.missing_samples()))
        num_missing = int(is_missing.sum())
        self.num_samples += batch_size
        self.num_popular += batch_size - num_missing
        num_popular = _rounded(batch_size - num_missing, batch_size)
        popular = (~is_missing).nonzero().flatten()[:num_popular]
        if not num_missing or not num_popular:
            return []
        is_other = torch.ones(batch_size, dtype=torch.bool)
        is_other[popular] = False
        parts = [popular, is_other.nonzero().flatten()]
        batches = [select_samples(batch, samples, batch_size) for samples in parts]
        if self.is_loss_a_sum is None:
            lengths = [len(samples) for samples in parts]
            self.is_loss_a_sum = is_loss_a_sum(
                self._schedule, model, compute, batch, batches, lengths
            )
            if self.is_loss_a_sum is None or any(claim.is_given_up for claim in claims):
                return []
        return [
            MicroBatch(
                part, samples, 1.0 if self.is_loss_a_sum else len(samples) / batch_size, was_missing
            )
            for part, samples, was_missing in zip(batches, parts, (False, True), strict=True)
        ]

    def split(self, parts: Sequence[MicroBatch], claims: Sequence[Prefetched]) -> list[MicroBatch]:
        """Divide the claims of a mini-batch among its parts.

        Args:
            parts: What `choose` returned.
            claims: The claims of the mini-batch; the parts own them afterwards.
        """
        self.num_split += 1
        of_parts = [(part.samples, part.was_missing) for part in parts]
        of_claims: list[list[Prefetched]] = []
        try:
            of_claims.extend(
                claim.split(of_parts) for claim in claims
            )  # keeps those before an error
        except BaseException:
            for claimed in of_claims:
                cancel(claimed)
            raise
        return [
            part._replace(claims=[each[number] for each in of_claims])
            for number, part in enumerate(parts)
        ]

    def learn(self) -> None:
        """Choose the popular rows again if it is time; called after each step."""
        self._count_rows()
        period = self._schedule.learning_steps
        if not period or self.num_steps % period:
            return
        for tiers in self._tiers():
            num_left = self._most_rows.get(tiers, 0)
            promoted, demoted = tiers.residency.pin_popular(self._schedule.pinned_share, num_left)
            self.num_promoted += promoted
            self.num_demoted += demoted

    def _count_rows(self) -> None:
        """Count the rows that a mini-batch claims; on a device, this waits for transfers."""
        for tiers in self._tiers():
            count = tiers.residency.counts.num_rows
            if tiers in self._num_rows:  # the first step claims for the whole window
                claimed = count - self._num_rows[tiers]
                self._most_rows[tiers] = max(claimed, self._most_rows.get(tiers, 0))
            self._num_rows[tiers] = count

    def describe(self) -> dict[str, Any]:
        """For a run record: shares of the steps and samples after the learning steps."""
        num_steps = max(1, self.num_steps - self._schedule.learning_steps)
        return {
            "learning_steps": self._schedule.learning_steps,
            "split_step_share": self.num_split / num_steps,
            "popular_sample_share": self.num_popular / max(1, self.num_samples),
            "num_promoted": self.num_promoted,
            "num_demoted": self.num_demoted,
        }

    def state_dict(self) -> dict[str, Any]:
        """The counters, and what was learned about the loss and the rows.

        JSON types, except for `popular_rows`: for each of the model's tiers an int32 tensor (M,)
        with the rows that are pinned because they are popular.
        """
        tiers = self._tiers()
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "is_loss_a_sum": self.is_loss_a_sum,
            "num_rows": [sum(each.sizes) for each in tiers],
            "most_rows": [self._most_rows.get(each, 0) for each in tiers],
            "popular_rows": [torch.from_numpy(each.hot.popular_rows()) for each in tiers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved; pins as many of its popular rows as fit.

        Rows are ignored if the state's tiers have other tables.

        Raises:
            ConfigError: `state` is no state of a split.
        """
        found, tiers = SavedState("popular split state", state, self.state_dict()), self._tiers()
        counters = {name: found.whole(name) for name in _COUNTERS}
        is_loss_a_sum = None if found["is_loss_a_sum"] is None else found.flag("is_loss_a_sum")
        num_rows = [sum(each.sizes) for each in tiers]
        if found["num_rows"] == num_rows:
            most_rows = found.wholes("most_rows", len(tiers))
            popular = found.items("popular_rows", (len(tiers),), "tensors")
            for rows, most in zip(popular, num_rows, strict=True):
                if not _are_distinct_rows(rows, most):
                    raise found.error("popular_rows", f"distinct rows in [0, {most})")
            for each, most, rows in zip(tiers, most_rows, popular, strict=True):
                self._most_rows[each] = most
                share = self._schedule.pinned_share
                each.residency.pin_as_popular(rows.long().cpu().numpy(), share, most)
        for name, value in counters.items():
            setattr(self, name, value)
        self.is_loss_a_sum = is_loss_a_sum
        self._num_rows.clear()  # the counts of the tiers are now those of the state

    def _warn_of_sizes(self, sizes: set[int]) -> None:
        if sizes and not self._has_warned_of_sizes:
            self._has_warned_of_sizes = True
            warn_caller(
                f"schedule={self._schedule} splits no mini-batch whose lookups have different "
                f"numbers of bags, got {sorted(sizes)}: it is not known which bag belongs to which "
                "sample; call modules with ids of B samples, such as (B, K) instead of (B * K,), "
                "or use LookAhead, which fetches these rows ahead",
            )


def _are_distinct_rows(rows: Any, num_rows: int) -> bool:
    """Whether a value from a state is a tensor of distinct rows in [0, num_rows)."""
    if not isinstance(rows, torch.Tensor) or rows.dim() != 1 or rows.dtype != torch.int32:
        return False
    found = rows.cpu().numpy()
    is_inside = bool(((found >= 0) & (found < num_rows)).all())
    return is_inside and len(np.unique(found)) == len(found)


def _warn_if_never_split(schedule: Hotline, model: nn.Module) -> bool:
    """Whether a module needs whole mini-batches; a warning names the module."""
    for name, module in model.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            warn_caller(
                f"schedule={schedule} splits no mini-batch, because of {name!r} "
                f"({type(module).__name__}): scale_grad_by_freq=True divides by counts of the "
                "whole mini-batch; use LookAhead, which fetches rows ahead",
            )
            return True
    return False


def _warn_of_layers(schedule: Hotline, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            difference = "statistics of each part alone"
        elif isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            difference = "other random draws than for the whole mini-batch"
        else:
            continue
        warn_caller(
            f"schedule={schedule} computes on mini-batches in two parts, and {name!r} "
            f"({type(module).__name__}) has {difference}: steps are not those of whole "
            "mini-batches; use LookAhead for these",
        )
        return


def _warn_of_waiting(schedule: Hotline, tiers: Sequence[Tiers]) -> None:
    for device in (each.hot.rows.device for each in tiers):
        if device.type in _HOST_WAITS_FOR:
            warn_caller(
                f"schedule={schedule} splits mini-batches on the host, which waits for '{device}' "
                "in each step, and computes on the parts op by op; use LookAhead, which fetches "
                "the same rows and is faster there",
            )
            return


def _rounded(num_popular: int, batch_size: int) -> int:
    """Round the number of popular samples down; the remaining ones go to the other part.

    Libraries such as oneDNN compile a matrix-product kernel for each size, so sizes should be few.
    """
    step = max(1, batch_size // _NUM_SIZES)
    return num_popular // step * step
