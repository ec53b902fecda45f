"""The keys of `schedule`: when rows are fetched, mini-batches computed and rows updated."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from recsys._support.config_fields import Keys, key
from recsys.errors import ConfigError

__all__ = ["ScheduleConfig"]

_PERMUTING = ("permute_within_batch", "permutation_seed")
_KEYS_OF = {
    "sequential": _PERMUTING,
    "lookahead": ("depth", *_PERMUTING),
    "": ("depth", *_PERMUTING),
    "hotline": ("learning_share", "pinned_share", *_PERMUTING),
    "fae": ("rate", "adaptive", "min_rate", "max_rate", "patience", "factor"),
    "auto": _PERMUTING,
}


class ScheduleConfig(Keys):
    """When rows are fetched, mini-batches computed and rows updated.

    "hotline" changes the order in which floats are summed. "fae" changes the order of samples, and
    with it the results. The other schedules give bit-equal results on the CPU.
    """

    name: Literal["", "sequential", "lookahead", "hotline", "fae", "auto"] = key(
        "",
        "schedule; auto measures which is fastest; empty: lookahead with files or cuda, else "
        "sequential",
    )
    depth: int = key(
        0,
        "lookahead: mini-batches whose rows are fetched ahead; 0: two",
        least=0,
    )
    learning_share: float = key(
        0.05,
        "hotline: share of the steps after which it repeats the choice of popular rows",
        least=0,
        most=1,
    )
    pinned_share: float = key(
        0.5, "hotline: share of the fast memory that popular rows may keep", least=0, most=1
    )
    permute_within_batch: bool = key(
        False,
        "shuffle the samples of each mini-batch, to measure the effect of rounding",
        resume="fixed",
    )
    permutation_seed: int = key(0, "seed of permute_within_batch", least=0, resume="fixed")
    rate: float = key(
        50.0,
        "fae: percent of the cold, then of the hot mini-batches issued before it switches",
        above=0,
        most=100,
    )
    adaptive: bool = key(True, "fae: change the rate by the validation loss")
    min_rate: float = key(1.0, "fae: lowest rate", above=0, most=100)
    max_rate: float = key(100.0, "fae: highest rate", above=0, most=100)
    patience: int = key(4, "fae: falls of the loss in a row that raise the rate", least=1)
    factor: float = key(2.0, "fae: factor by which the rate rises, or falls", above=1)

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.permutation_seed and not self.permute_within_batch:
            raise ConfigError(
                "permutation_seed means nothing without permute_within_batch, got "
                f"{self.permutation_seed}; set that to true, or drop the key"
            )
        for key_set in self.keys_set():
            if key_set not in ("name", *_KEYS_OF[self.name]):
                names = [repr(name) for name, keys in _KEYS_OF.items() if name and key_set in keys]
                raise ConfigError(
                    f"{key_set} means nothing with name {self.name!r}, got "
                    f"{getattr(self, key_set)}; set name to {names[0]}, or drop the key"
                )
        return self
