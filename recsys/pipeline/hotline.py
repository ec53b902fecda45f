"""Hotline's split of a mini-batch: popular samples, and the others, whose rows are fetched.

`PopularSplit` divides mini-batches and learns which rows are popular. `is_loss_a_sum` measures
whether the loss of a mini-batch is the mean or the sum of the losses of its parts.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import reduce
from math import isfinite
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from recsys._support.untrusted import require_state
from recsys._support.user_code import warn_caller
from recsys.pipeline.micro_batches import join_outputs, select_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from recsys.embeddings.tiers.fetch import Fetcher
    from recsys.pipeline.model_tables import ModelTables
    from recsys.pipeline.schedule import Hotline

__all__ = ["MicroBatch", "PopularSplit", "is_loss_a_sum"]

_NUM_SIZES = 16  # different sizes that a part can have
_TOLERANCE = 1e-3
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
    """

    batch: Any
    samples: Tensor
    weight: float


class PopularSplit:
    """Splits mini-batches, and learns which rows are popular.

    Args:
        schedule: Its settings.
        model: The model that is trained.
        tables: The tables of the model.

    Attributes:
        num_steps: Mini-batches seen.
        num_split: Mini-batches split.
        num_samples: Samples seen after the learning steps.
        num_popular: Samples among these whose rows were all pinned.
        num_promoted: Rows that were pinned because they became popular.
        num_demoted: Rows that were unpinned because they were no longer popular.
        is_loss_a_sum: Whether the loss is a sum over samples; False for a mean, None until known.
    """

    def __init__(self, schedule: Hotline, model: nn.Module, tables: ModelTables) -> None:
        self._schedule, self._tables = schedule, tables
        self.num_steps = self.num_split = self.num_samples = self.num_popular = 0
        self.num_promoted = self.num_demoted = 0
        self.is_loss_a_sum: bool | None = None
        self._has_warned_of_sizes = False
        _warn_of_modules(schedule, model)

    def choose(
        self,
        batch: Any,
        model: nn.Module,
        compute: Callable[[Any], tuple[Tensor, Any]],
    ) -> list[MicroBatch]:
        """Divide a mini-batch into popular samples and the others; empty if it stays whole.

        Args:
            batch: The mini-batch.
            model: As for `is_loss_a_sum`, which runs on the first mini-batch that is split.
            compute: As for `is_loss_a_sum`.
        """
        self.num_steps += 1
        is_learning = self.num_steps <= self._schedule.learning_steps
        if is_learning and self.num_steps > 1:
            return []
        try:
            unpinned = self._tables.unpinned_samples(batch)
        except Exception:  # the step will fail in the same way, and raise the error
            return []
        sizes = set(map(len, unpinned))
        if len(sizes) != 1:
            self._warn_of_sizes(sizes)
            return []
        [batch_size] = sizes
        if self.num_steps == 1:  # raise in the first step, not after the learning steps
            select_samples(batch, torch.arange(batch_size), batch_size)
        if is_learning:
            return []
        popular = (~reduce(or_, unpinned).cpu()).nonzero().flatten()
        self.num_samples += batch_size
        self.num_popular += len(popular)
        if len(popular) == batch_size:
            return []
        popular = popular[: _rounded(len(popular), batch_size)]
        if not len(popular):
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
            if self.is_loss_a_sum is None:
                return []
        self.num_split += 1
        return [
            MicroBatch(part, samples, 1.0 if self.is_loss_a_sum else len(samples) / batch_size)
            for part, samples in zip(batches, parts, strict=True)
        ]

    def learn(self) -> None:
        """Choose the popular rows again if it is time; called after each step."""
        period = self._schedule.learning_steps
        if not period or self.num_steps % period:
            return
        for fetcher in self._tables.fetchers:
            promoted, demoted = fetcher.pin_popular(self._most_pinned(fetcher))
            self.num_promoted += promoted
            self.num_demoted += demoted

    def _most_pinned(self, fetcher: Fetcher) -> int:
        return int(self._schedule.pinned_share * len(fetcher.marks.row_of_slot))

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

        JSON types, except for `popular_rows`: for each table group with slots an int32 tensor
        (M,) with its rows that are pinned because they are popular.
        """
        fetchers = self._tables.fetchers
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "is_loss_a_sum": self.is_loss_a_sum,
            "num_rows": [len(fetcher.marks.slot_of_row) for fetcher in fetchers],
            "popular_rows": [torch.from_numpy(fetcher.popular.copy()) for fetcher in fetchers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved; pins as many of its popular rows as fit.

        Rows are ignored if the state's tiers have other tables.

        Raises:
            ConfigError: `state` is no state of a split.
        """
        found = require_state("popular split state", state, self.state_dict())
        fetchers = self._tables.fetchers
        if found["num_rows"] == [len(fetcher.marks.slot_of_row) for fetcher in fetchers]:
            for fetcher, rows in zip(fetchers, found["popular_rows"], strict=True):
                fetcher.pin(rows.cpu().numpy(), self._most_pinned(fetcher))
        for name in _COUNTERS:
            setattr(self, name, found[name])
        self.is_loss_a_sum = found["is_loss_a_sum"]

    def _warn_of_sizes(self, sizes: set[int]) -> None:
        if sizes and not self._has_warned_of_sizes:
            self._has_warned_of_sizes = True
            warn_caller(
                f"schedule={self._schedule} splits no mini-batch whose lookups have different "
                f"numbers of bags, got {sorted(sizes)}: it is not known which bag belongs to which "
                "sample; call modules with ids of B samples, such as (B, K) instead of (B * K,), "
                "or use LookAhead, which fetches these rows ahead",
            )


def _warn_of_modules(schedule: Hotline, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            difference = "statistics of each part alone"
        elif isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            difference = "other random draws than for the whole mini-batch"
        elif getattr(module, "scale_grad_by_freq", False):
            difference = "scale_grad_by_freq=True, which divides by counts of each part alone"
        else:
            continue
        warn_caller(
            f"schedule={schedule} computes on mini-batches in two parts, and {name!r} "
            f"({type(module).__name__}) has {difference}: steps are not those of whole "
            "mini-batches; use LookAhead for these",
        )
        return


def _rounded(num_popular: int, batch_size: int) -> int:
    """Round the number of popular samples down; the remaining ones go to the other part.

    Libraries such as oneDNN compile a matrix-product kernel for each size, so sizes should be few.
    """
    step = max(1, batch_size // _NUM_SIZES)
    return num_popular // step * step


def is_loss_a_sum(
    schedule: Hotline,
    model: nn.Module,
    compute: Callable[[Any], tuple[Tensor, Any]],
    batch: Any,
    parts: Sequence[Any],
    sizes: Sequence[int],
) -> bool | None:
    """Whether the loss of a mini-batch is the sum of its parts' losses, or their weighted mean.

    The model computes the loss of the mini-batch and of each part, in evaluation mode and without
    gradient. So dropout and BatchNorm have no effect, and no slot is claimed. Afterwards every
    module's mode and torch's random state are as before.

    Two values count as equal if they differ by at most 0.001 of the largest loss, or by 4 times the
    machine epsilon of the loss's dtype if that is more. Losses in float32 differ by about 1e-6,
    because floats are summed in another order. Under bfloat16 autocast, where the loss is float32,
    they differ by less than 1e-4. A loss in bfloat16 is itself rounded to 0.004. A term of the loss
    that is smaller than this tolerance is not detected.

    Args:
        schedule: Named in errors.
        model: Its modules are in evaluation mode while this function runs.
        compute: Maps a mini-batch to (loss, output).
        batch: The mini-batch.
        parts: Its two parts.
        sizes: The number of samples of each part.

    Returns:
        None if this mini-batch cannot decide it: both hold (losses near 0), or a loss is not
        finite.

    Raises:
        ValueError: neither holds, or there is a loss for each sample; or an output does not have
            one row for each sample.
    """
    with _evaluating(model):
        found: list[Any] = [compute(part) for part in (batch, *parts)]
    if not all(isinstance(result, tuple | list) and len(result) == 2 for result in found):
        raise ValueError(
            f"schedule={schedule} measures the loss in evaluation mode, and there the model must "
            f"return (loss, output) as in training, got {type(found[0]).__name__}; return both, or "
            "use LookAhead"
        )
    # Raises if the output does not have one row for each sample of the mini-batch.
    join_outputs(found[:1], [torch.arange(sum(sizes))])
    losses: list[Tensor] = [loss for loss, _ in found]
    if losses[0].dim():
        raise ValueError(
            f"schedule={schedule} needs a loss that is a mean or a sum over samples, got one of "
            f"shape {tuple(losses[0].shape)}; return its mean or sum, or use LookAhead"
        )
    whole, *of_parts = (loss.item() for loss in losses)
    if not all(isfinite(loss) for loss in (whole, *of_parts)):
        return None
    mean = sum(loss * size for loss, size in zip(of_parts, sizes, strict=True)) / sum(sizes)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(losses[0].dtype).eps)
    allowed = tolerance * max(map(abs, (whole, *of_parts)))
    is_mean, is_sum = (bool(abs(whole - made) <= allowed) for made in (mean, sum(of_parts)))
    if is_mean and is_sum:
        return None
    if is_mean or is_sum:
        return is_sum
    raise ValueError(
        f"schedule={schedule} computes on a mini-batch in two parts, so the loss must be a mean or "
        f"a sum over samples, but it is {whole:.6g} of {sum(sizes)} samples, {of_parts[0]:.6g} of "
        f"{sizes[0]} of them and {of_parts[1]:.6g} of the other {sizes[1]}; return a mean over "
        "samples, or use LookAhead"
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes and torch's random state are restored afterwards."""
    # Not `model.eval()`: a module may override it and do more.
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        for module, _ in modes:
            module.training = False
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
