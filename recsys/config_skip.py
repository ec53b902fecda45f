"""The keys of `skip`: which samples, or updates of rows, a run leaves out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from recsys._support.config_fields import Keys, key
from recsys.embeddings.staleness.settings import Staleness
from recsys.errors import ConfigError
from recsys.pipeline.skip.paper import Paper
from recsys.pipeline.skip.policies import (
    DropInput,
    FreezeRows,
    Guard,
    Importance,
    Observe,
    Policy,
    RandomDrop,
    Subsample,
)

__all__ = ["GuardConfig", "ImportanceConfig", "PaperConfig", "SkipConfig", "StalenessConfig"]

_KEYS_OF: dict[str, tuple[str, ...]] = {
    "none": (),
    "observe": ("share", "staleness"),
    "drop_input": ("share", "staleness", "guard"),
    "freeze_rows": ("share", "staleness", "guard"),
    "subsample": ("share", "keep", "seed", "staleness", "guard"),
    "importance": ("share", "seed", "importance", "guard"),
    "random_drop": ("share", "seed", "weighted", "refill"),
    "paper": ("seed", "paper"),
}


_KINDS: dict[str, Any] = {
    "none": lambda: None,
    "observe": Observe,
    "drop_input": DropInput,
    "freeze_rows": FreezeRows,
    "subsample": Subsample,
    "importance": Importance,
    "random_drop": RandomDrop,
}


class StalenessConfig(Keys):
    """When a row counts as stale; see `recsys.embeddings.Staleness`."""

    window: int = key(1000, "steps over which rows' drift is measured", least=33)
    min_updates: int = key(16, "updates in a window; a row with fewer is unknown", least=1)
    patience: int = key(2, "windows in a row that a row's drift must be small", least=1)
    max_rows: int = key(2**17, "rows that are followed at once", least=1)
    count_every: int = key(4, "updates are counted in every n-th step", least=1)

    @model_validator(mode="after")
    def _check(self) -> StalenessConfig:
        self.settings()
        return self

    def settings(self) -> Staleness:
        """The settings of a tracker with these keys.

        Raises:
            ConfigError: keys conflict.
        """
        try:
            return Staleness(**self.model_dump())
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("staleness: ")) from None


class GuardConfig(Keys):
    """When quality is checked, and what it may lose; see `recsys.pipeline.Guard`."""

    every: int = key(1000, "steps from one check to the next; 0: no guard", least=0)
    steps: int = key(50, "steps of a check, in which nothing is skipped", least=10)
    logloss: float = key(0.01, "rise of the logloss allowed, relative", above=0)
    calibration: float = key(0.02, "change of calibration allowed, relative", above=0)

    @model_validator(mode="after")
    def _check(self) -> GuardConfig:
        others = [name for name in self.keys_set() if name != "every"]
        if self.every == 0 and others:
            raise ConfigError(
                f"{others[0]} means nothing with every 0, got {getattr(self, others[0])}; set "
                "every above 0, or drop the key"
            )
        self.settings()
        return self

    def settings(self) -> Guard | None:
        """The guard of these keys; None for no guard.

        Raises:
            ConfigError: keys conflict.
        """
        if self.every == 0:
            return None
        try:
            return Guard(**self.model_dump())
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("Guard: ")) from None


class PaperConfig(Keys):
    """The constants of Slipstream's published code; see `recsys.pipeline.Paper`."""

    first_snapshot: int = key(1000, "hot mini-batch of an epoch before the first snapshot", least=0)
    window_share: float = key(
        0.03, "hot mini-batches between the snapshots, as a share", least=0, most=1
    )
    target: float = key(0.3, "share of hot samples to drop", least=0, most=1)
    tolerance: float = key(0.08, "how far from target the share may be", least=0, most=1)
    highest_threshold: float = key(0.1, "the highest threshold tried", above=0)
    first_threshold: float = key(0.05, "the threshold tried first", above=0)
    max_tries: int = key(25, "thresholds tried at most", least=1)
    sample_share: float = key(
        0.001, "hot samples that the threshold is found on, as a share", least=0, most=1
    )

    @model_validator(mode="after")
    def _check(self) -> PaperConfig:
        self.settings(0)
        return self

    def settings(self, seed: int) -> Paper:
        """The policy of these keys.

        Args:
            seed: Seed of the policy's sample.

        Raises:
            ConfigError: keys conflict.
        """
        try:
            return Paper(**self.model_dump(), seed=seed)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("Paper: ")) from None


class ImportanceConfig(Keys):
    """Which samples policy importance keeps; see `recsys.pipeline.Importance`."""

    least: float = key(0.1, "least probability of a sample to be kept", above=0, most=0.95)
    bits: int = key(16, "the model that predicts samples has 2**bits weights", least=8, most=24)
    lr: float = key(0.05, "its learning rate", above=0, most=1)
    warm_up: int = key(100, "mini-batches that are kept whole first", least=0)


class SkipConfig(Keys):
    """Which samples, or updates of rows, a run leaves out.

    "observe" measures and changes nothing. "drop_input" leaves out samples whose rows are all
    stale. "freeze_rows" does not update stale rows. "subsample" keeps a part of the samples whose
    rows are all stale, with a larger weight. "importance" keeps samples with a probability that
    grows with the error of a small model's prediction, with a weight of 1 / probability.
    "random_drop" leaves out random samples, for comparison. "paper" does what Slipstream's
    published code does.
    """

    policy: Literal[
        "none",
        "observe",
        "drop_input",
        "freeze_rows",
        "subsample",
        "importance",
        "random_drop",
        "paper",
    ] = key("none", "what is left out")
    share: float = key(0.2, "share of the samples to skip", above=0, most=0.95)
    keep: float = key(0.25, "subsample: share of stale samples that it keeps", above=0, most=0.95)
    weighted: bool = key(False, "random_drop: whether the others get weight 1 / (1 - share)")
    refill: bool = key(True, "random_drop: whether later samples replace those left out")
    seed: int = key(0, "seed of random choices; 0: the seed of the run", least=0)
    staleness: StalenessConfig = key(StalenessConfig, "when a row is stale")
    guard: GuardConfig = key(GuardConfig, "checks of quality, which lower or stop skipping")
    importance: ImportanceConfig = key(ImportanceConfig, "constants of policy importance")
    paper: PaperConfig = key(PaperConfig, "constants of policy paper")

    @model_validator(mode="after")
    def _check(self) -> SkipConfig:
        try:
            self.settings(0)
        except ConfigError as error:
            raise ConfigError(str(error).partition(": ")[2]) from None
        for name in self.keys_set():
            if name == "policy" or name in _KEYS_OF[self.policy]:
                continue
            value = getattr(self, name)
            inner = f".{value.keys_set()[0]}" if isinstance(value, Keys) else ""
            fitting = " or ".join(repr(each) for each, keys in _KEYS_OF.items() if name in keys)
            instead = "set paper.target" if (self.policy, name) == ("paper", "share") else ""
            raise ConfigError(
                f"{name}{inner} means nothing with policy {self.policy!r}; "
                f"{instead or f'set policy to {fitting}'}, or drop the key"
            )
        return self

    def settings(self, run_seed: int) -> Policy | Paper | None:
        """The policy of these keys; None to train on everything.

        Args:
            run_seed: The seed of the run, for `seed` 0.

        Raises:
            ConfigError: keys conflict.
        """
        seed = self.seed or run_seed
        if self.policy == "paper":
            return self.paper.settings(seed)
        values = {name: getattr(self, name) for name in _KEYS_OF[self.policy]}
        for name in {"staleness", "guard"} & set(values):
            values[name] = values[name].settings()
        if "seed" in values:
            values["seed"] = seed
        if self.policy == "importance":
            values |= values.pop("importance").model_dump()
        found: Policy | None = _KINDS[self.policy](**values)
        return found

    @property
    def needs_stale_rows(self) -> bool:
        """Whether the policy follows the drift of rows."""
        return "staleness" in _KEYS_OF[self.policy]

    @property
    def needs_rows(self) -> bool:
        """Whether the policy follows rows, or learns from row numbers."""
        return self.needs_stale_rows or self.policy == "importance"
