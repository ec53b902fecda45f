"""Policies: settings for `TrainPipeline(..., skip=)` that say what training leaves out.

Observe      nothing; counts what the others would leave out
DropInput    samples whose lookups are all of stale rows
Subsample    a part of these samples, and gives the others a larger weight
FreezeRows   gradients and updates of stale rows
Importance   samples that are predicted well, and gives the others a larger weight
RandomDrop   random samples: the control for all of these
Paper        what Slipstream's published code leaves out

A row is *stale* if it has stopped changing although it is trained; see `Staleness`. The order of
samples is kept. Later samples replace those that are left out, so mini-batches keep their size;
with `Importance` and `RandomDrop(refill=False)` they get smaller instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recsys._support.untrusted import AbstractSettings, setting
from recsys.embeddings.staleness.settings import LEAD, Staleness
from recsys.errors import ConfigError

__all__ = [
    "DropInput",
    "FreezeRows",
    "Guard",
    "Importance",
    "Observe",
    "Paper",
    "Policy",
    "RandomDrop",
    "Subsample",
    "stale_share",
]

_GUARD = "checks of quality, which lower or stop skipping"
_SEED = "seed of its random choices; 0: that of the run"
_STALE = "when a row is stale"


@dataclass(frozen=True, kw_only=True)
class Guard(AbstractSettings):
    """When quality is checked while a run skips, and what it may lose; see `QualityGuard`.

    Args:
        every: Steps from the start of a window to the start of the next one; 0 for no windows.
        steps: Steps of a window; nothing is skipped in them.
        logloss: Rise of the logloss that is allowed, relative.
        calibration: Change of mean prediction / mean label that is allowed, relative.

    Raises:
        ConfigError: a number is out of range.
    """

    every: int = setting(1000, "steps from one check to the next; 0: no guard", ge=0)
    steps: int = setting(50, "steps of a check, in which nothing is skipped", ge=10)
    logloss: float = setting(0.01, "rise of the logloss allowed, relative", gt=0)
    calibration: float = setting(0.02, "change of calibration allowed, relative", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.every < self.steps + LEAD:
            raise ConfigError(
                f"Guard: every must be at least steps + {LEAD}, so that a decision holds before "
                f"the next window, got {self.every} with steps {self.steps}"
            )


@dataclass(frozen=True)
class AbstractPolicy(AbstractSettings):
    """What training leaves out, as a value; checked when it is made.

    Raises:
        ConfigError: a value is out of range.
    """

    share: float = setting(0.2, "share of the samples to skip", gt=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        name, values = type(self).__name__, vars(self)
        if values.get("guard", ...) is None:  # as TOML says it, which has no None
            object.__setattr__(self, "guard", Guard(every=0))
        guard, staleness = values.get("guard"), values.get("staleness")
        least = values.get("keep", values.get("least", 0))
        if self.share + least > 1:
            raise ConfigError(
                f"{name}: share must be at most {1 - least:g}, because every sample is kept with "
                f"a probability of at least {least:g}, got {self.share:g}; lower one of them"
            )
        if guard is not None and staleness is not None and 0 < guard.every < staleness.window:
            raise ConfigError(
                f"{name}: guard.every must be at least staleness.window, because a lowered share "
                f"holds from the next window of staleness on; got every {guard.every} and window "
                f"{staleness.window}"
            )


@dataclass(frozen=True)
class Observe(AbstractPolicy):
    """Trains as without it, and measures which rows are stale.

    Args:
        share: The share of samples all of whose rows are stale at the threshold.
        staleness: How staleness is measured.

    Raises:
        ConfigError: a value is out of range.
    """

    staleness: Staleness = setting(Staleness, _STALE)


@dataclass(frozen=True)
class DropInput(AbstractPolicy):
    """Leaves out samples all of whose rows are stale.

    Args:
        share: The share of samples to leave out. It is reached if enough samples have only rows
            whose staleness is known.
        staleness: How staleness is measured.
        guard: Checks quality, and stops skipping; None for no check.

    Raises:
        ConfigError: a value is out of range.
    """

    staleness: Staleness = setting(Staleness, _STALE)
    guard: Guard | None = setting(Guard, _GUARD)


@dataclass(frozen=True)
class FreezeRows(AbstractPolicy):
    """Trains on all samples, but neither updates stale rows nor writes them back.

    Args:
        share: The share of samples all of whose rows are stale at the threshold.
        staleness: How staleness is measured.
        guard: Checks quality, and stops skipping; None for no check.

    Raises:
        ConfigError: a value is out of range.
    """

    staleness: Staleness = setting(Staleness, _STALE)
    guard: Guard | None = setting(Guard, _GUARD)


@dataclass(frozen=True)
class Subsample(AbstractPolicy):
    """Keeps a sample all of whose rows are stale with probability `keep`, and weight 1 / `keep`.

    So every sample adds to the gradient what it adds without skipping, in expectation. The model
    must multiply losses by the weights (`uses_sample_weights = True`), as `DLRMTrain` does.

    Args:
        share: The share of samples to leave out.
        keep: The probability. The threshold is set so that share / (1 - keep) of the samples have
            only stale rows.
        staleness: How staleness is measured.
        guard: Checks quality, and stops skipping; None for no check.
        seed: Seed of the random choices; in a configuration, 0 is that of the run.

    Raises:
        ConfigError: a value is out of range.
    """

    keep: float = setting(0.25, "share of stale samples that it keeps", gt=0, lt=1)
    staleness: Staleness = setting(Staleness, _STALE)
    guard: Guard | None = setting(Guard, _GUARD)
    seed: int = setting(0, _SEED, ge=0)


@dataclass(frozen=True)
class Importance(AbstractPolicy):
    """Leaves out samples that are already predicted well, and gives the others a larger weight.

    A logistic model predicts p, the probability of label 1, for each sample before its step. A
    sample with label y is kept with probability q, and then has weight 1 / q:

        q = min(1, max(least, c |y - p|))

    c is chosen for each mini-batch so that the probabilities sum to (1 - `share`) B. Systematic
    sampling keeps that many samples, give or take one. |y - p| is the size of the gradient of the
    loss in the logit, so samples with a small gradient are mostly left out. Every sample adds to
    the gradient what it adds without skipping, in expectation (q * 1 / q = 1): a poor prediction
    makes gradients noisier, but not biased.

    The kept samples of a raw mini-batch make one mini-batch. So there are as many steps as without
    skipping, each with fewer samples. Losses are divided by the raw B: the weights also have the
    factor kept / B, because the model divides by the number of samples that it gets. The model must
    multiply losses by the weights (`uses_sample_weights = True`), as `DLRMTrain` does, and
    mini-batches must have `labels` of 0 and 1.

    The logistic model learns from the samples that are trained on, with their weights 1 / q. See
    `recsys.pipeline.skip.importance`.

    Args:
        share: The share of samples to leave out.
        least: The least probability of a sample to be kept. The largest weight is 1 / least.
        seed: Seed of the random choices; in a configuration, 0 is that of the run.
        bits: The logistic model has 2**bits weights for rows, chosen by a hash.
        lr: Its learning rate (Adagrad).
        warm_up: Mini-batches before it is used; these are kept whole. At least 48 are.
        guard: Checks quality, and stops skipping; None for no check.

    Raises:
        ConfigError: a value is out of range.

    References:
        Zhao and Zhang (2015), Stochastic optimization with importance sampling for regularized loss
        minimization. Katharopoulos and Fleuret (2018), Not all samples are created equal: deep
        learning with importance sampling. Both choose samples in proportion to the size of their
        gradient, and divide by the probability.
    """

    share: float = setting(0.25, "share of the samples to skip", gt=0, lt=1)
    least: float = setting(0.1, "least probability of a sample to be kept", gt=0, lt=1)
    seed: int = setting(0, _SEED, ge=0)
    bits: int = setting(16, "the model that predicts samples has 2**bits weights", ge=8, le=24)
    lr: float = setting(0.05, "its learning rate", gt=0, lt=1)
    warm_up: int = setting(100, "mini-batches that are kept whole first", ge=0)
    guard: Guard | None = setting(Guard, _GUARD)


@dataclass(frozen=True)
class RandomDrop(AbstractPolicy):
    """Leaves out random samples, each with probability `share`. Needs no recsys modules.

    Args:
        share: The share of samples to leave out.
        seed: Seed of the random choices; in a configuration, 0 is that of the run.
        weighted: Whether the others get weight 1 / (1 - share). The model must then multiply losses
            by the weights, as for `Subsample`.
        refill: Whether later samples replace those that are left out. If not, mini-batches get
            smaller, as under `Importance`: (1 - share) B samples of each are kept, give or take
            one, and weights also have the factor kept / B.

    Raises:
        ConfigError: a value is out of range.
    """

    seed: int = setting(0, _SEED, ge=0)
    weighted: bool = setting(False, "whether the others get weight 1 / (1 - share)")
    refill: bool = setting(True, "whether later samples replace those left out")


@dataclass(frozen=True, kw_only=True)
class Paper(AbstractSettings):
    """Drops hot samples whose rows have stopped changing, as Slipstream's published code does.

    Each epoch begins with its cold mini-batches; the hot ones follow. Two snapshots of the hot rows
    are taken in the hot part. A bisection then looks for a threshold under which the target share
    of a sample of the later hot samples is stale. Stale samples are dropped for the rest of the
    epoch. If the bisection does not converge, the threshold is 0 and no sample is dropped. The next
    epoch decides anew; no row is checked again before.

    This needs the mini-batches of a `HotColdLoader` with `FAE(rate=100, is_adaptive=False)`, and a
    schedule that takes no mini-batch ahead. A run that begins within an epoch, without its state,
    drops nothing in this epoch. The hot rows are those that a plan pins, or all if all
    are resident. The snapshot takes as much memory as the hot rows without their optimizer state,
    and is not part of the tables' budget.

    Two things differ from the published code. There the window ends before the last mini-batch that
    is trained on in it, so some samples are trained on twice. And it cannot train for a second
    epoch, because the first one releases memory that both need.

    Args:
        first_snapshot: The first snapshot is taken before the update of the hot mini-batch with
            this number, counted from 0 in each epoch.
        window_share: Hot mini-batches between the snapshots, as a share of those of an epoch.
        target: Share of hot samples to drop.
        tolerance: How far the sample's stale share may be from `target`.
        highest_threshold: The highest threshold that the bisection considers; the lowest is 0.
        first_threshold: The first threshold that it tries.
        max_tries: The largest number of thresholds that it tries.
        sample_share: Size of the sample, as a share of the hot samples of an epoch. It is drawn
            with replacement from the hot samples after the window.
        seed: Seed of the sample; in a configuration, 0 is that of the run.

    Raises:
        ConfigError: a constant is out of range.
    """

    first_snapshot: int = setting(
        1000, "hot mini-batch of an epoch before the first snapshot", ge=0
    )
    window_share: float = setting(
        0.03, "hot mini-batches between the snapshots, as a share", ge=0, le=1
    )
    target: float = setting(0.3, "share of hot samples to drop", ge=0, le=1)
    tolerance: float = setting(0.08, "how far from target the share may be", ge=0, le=1)
    highest_threshold: float = setting(0.1, "the highest threshold tried", gt=0)
    first_threshold: float = setting(0.05, "the threshold tried first", gt=0)
    max_tries: int = setting(25, "thresholds that are tried at most", ge=0)
    sample_share: float = setting(
        0.001, "hot samples that the threshold is found on, as a share", ge=0, le=1
    )
    seed: int = setting(0, _SEED, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.first_threshold < self.highest_threshold:
            raise ConfigError(
                "Paper: thresholds must be 0 < first_threshold < highest_threshold, got "
                f"{self.first_threshold} and {self.highest_threshold}"
            )

    def last_of_window(self, num_hot_batches: int) -> int:
        """The hot mini-batch after whose update the second snapshot is taken.

        Args:
            num_hot_batches: Hot mini-batches of an epoch.
        """
        return self.first_snapshot + round(self.window_share * num_hot_batches)

    def num_sampled(self, num_hot_samples: int) -> int:
        """The size of the sample.

        Args:
            num_hot_samples: Hot samples of an epoch.
        """
        return int(self.sample_share * num_hot_samples)


Policy = Observe | DropInput | FreezeRows | Subsample | Importance | RandomDrop | Paper


def stale_share(policy: Any) -> float:
    """The share of samples that are to have stale rows only."""
    if isinstance(policy, Subsample):
        return min(1.0, policy.share / (1 - policy.keep))
    return float(policy.share)
