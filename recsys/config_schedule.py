"""The keys of `schedule`: what runs when."""

from __future__ import annotations

from dataclasses import dataclass, fields

from recsys.config_fields import at_least, key, one_of
from recsys.errors import ConfigError

__all__ = ["ScheduleConfig"]

_NAMES = ("", "sequential", "lookahead", "hotline", "fae", "auto")
_PERMUTING = ("permute_within_batch", "permutation_seed")
_KEYS_OF = {
    "sequential": _PERMUTING,
    "lookahead": ("depth", *_PERMUTING),
    "": ("depth", *_PERMUTING),
    "hotline": ("depth", "learning_share", "pinned_share", *_PERMUTING),
    "fae": ("rate", "adaptive", "min_rate", "max_rate", "patience", "factor", "sample_rate"),
    "auto": _PERMUTING,
}


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """What runs when; of these names, "fae" alone changes the order of samples, and so numbers.

    "hotline" changes the order in which floats are summed.
    """

    name: str = key(
        "",
        "sequential, lookahead, hotline, fae, or auto to have it measured; empty: lookahead where "
        "rows are in two tiers",
    )
    depth: int = key(
        0, "mini-batches whose rows are fetched ahead; 0: two with lookahead, none with hotline"
    )
    learning_share: float = key(
        0.05, "of hotline: share of the steps after which popular rows are chosen, again and again"
    )
    pinned_share: float = key(0.5, "of hotline: share of fast memory that popular rows may keep")
    permute_within_batch: bool = key(
        False, "draw the order of samples in each mini-batch anew: what rounding alone does"
    )
    permutation_seed: int = key(0, "of permute_within_batch")
    rate: float = key(50.0, "of fae: percent of the cold, then of the hot mini-batches in a turn")
    adaptive: bool = key(True, "of fae: whether the validation loss changes the rate")
    min_rate: float = key(1.0, "of fae: the rate is no lower")
    max_rate: float = key(100.0, "of fae: nor higher")
    patience: int = key(4, "of fae: falls of the loss, one after the other, that raise the rate")
    factor: float = key(2.0, "of fae: by what the rate is raised, or lowered where the loss rises")
    sample_rate: float = key(0.05, "of fae: share of the training samples that tells popular rows")

    def __post_init__(self) -> None:
        one_of("name", self.name, _NAMES if not self.name else _NAMES[1:])
        at_least("depth", self.depth, 0)
        at_least("permutation_seed", self.permutation_seed, 0)
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample_rate must lie in (0, 1], got {self.sample_rate}")
        for name in ("learning_share", "pinned_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.permutation_seed and not self.permute_within_batch:
            raise ConfigError(
                "permutation_seed means nothing without permute_within_batch, got "
                f"{self.permutation_seed}; set that to true, or drop the key"
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("name", *_KEYS_OF[self.name]) and value != each.default:
                names = [
                    repr(name) for name, keys in _KEYS_OF.items() if name and each.name in keys
                ]
                raise ConfigError(
                    f"{each.name} means nothing with name {self.name!r}, got {value}; set name to "
                    f"{names[0]}, or drop the key"
                )
