"""The file of an ablation: a base configuration and the table `[ablate]`.

    [ablate]
    seeds = [0, 1, 2]
    target_auc = 0.70              # optional: measure the training time to this AUC
    target_split = "test"          # split of that AUC; default "test"
    eval_every_samples = 4096      # training samples between evaluations; default 4096
    baseline = "none"              # optional: compare all others with this variation, in pairs
    late_share = 0.25              # optional: mean quality over this last share of the training

    [[ablate.variations]]          # named sets of keys, ...
    name = "sgd"
    optimizer.lr = 0.1

    [ablate.grid]                  # ... crossed with every combination of these values
    embeddings = ["torch", "fbgemm"]

Variations or grid may be left out, but not both. All other keys are those of `recsys train`.
"""

from __future__ import annotations

import re
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from recsys._support.config_fields import build_with_file
from recsys._support.nested_keys import flat
from recsys.config import build_config, put_key, read_tree
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from recsys.config import TrainConfig

__all__ = ["AblationConfig", "Cell", "Variation", "load_ablation"]

_MOST_VARIATIONS = 10_000
_KEYS = (
    "seeds",
    "target_auc",
    "target_split",
    "eval_every_samples",
    "baseline",
    "late_share",
    "variations",
    "grid",
)
_TARGET_KEYS = {"eval.every_steps": "eval_every_samples", "eval.split": "target_split"}
_KEYS_OF_ALL = ("eval.ranking_k", "eval.ranking_groups")  # they decide what recall and NDCG mean


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One way to run the base configuration.

    Attributes:
        name: The name in the file. A combination of the grid is named `key=value`, joined by
            commas; a list is written `[8;4]`.
        keys: The values that it sets, by dotted key.
    """

    name: str
    keys: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of an ablation.

    Attributes:
        name: Name of its folder.
        variation: Name of its variation.
        seed: Seed of the initial values and of the order of samples.
        config: The whole configuration.
    """

    name: str
    variation: str
    seed: int
    config: TrainConfig


@dataclass(frozen=True, kw_only=True)
class AblationConfig:
    """A base configuration, its variations and their seeds.

    Attributes:
        base: Nested keys of the base configuration.
        variations: In the order in which they run.
        seeds: In the order in which they run.
        target_auc: Measure the training time to this AUC; None to measure none.
        target_split: Split of that AUC, "test" or "validation".
        eval_every_samples: Training samples between two evaluations.
        baseline: Name of the variation with which the others are compared; None for none.
        late_share: Last share of the training samples over which evaluations are averaged; None to
            average none.
    """

    base: Mapping[str, Any]
    variations: tuple[Variation, ...]
    seeds: tuple[int, ...]
    target_auc: float | None = None
    target_split: str = "test"
    eval_every_samples: int = 4096
    baseline: str | None = None
    late_share: float | None = None

    def __post_init__(self) -> None:
        if not self.seeds or any(type(seed) is not int or seed < 0 for seed in self.seeds):
            raise ConfigError(
                f"ablate.seeds must be a list of integers of at least 0, got {list(self.seeds)}"
            )
        _all_distinct("ablate.seeds", self.seeds)
        names = [variation.name for variation in self.variations]
        _all_distinct("names of variations", names)
        if self.target_auc is not None and not 0 < self.target_auc < 1:
            raise ConfigError(f"ablate.target_auc must be between 0 and 1, got {self.target_auc}")
        if self.target_split not in ("validation", "test"):
            raise ConfigError(
                "ablate.target_split must be one of 'validation', 'test'; "
                f"got {self.target_split!r}"
            )
        if not 1 <= self.eval_every_samples < 2**63:
            raise ConfigError(
                "ablate.eval_every_samples must be at least 1, got "
                f"{str(self.eval_every_samples)[:40]}, and less than 2**63"
            )
        if self.baseline is not None and (self.baseline not in names or len(names) < 2):
            raise ConfigError(
                f"ablate.baseline must name one of two or more variations, got {self.baseline!r}; "
                f"the variations are {names[:20]}"
            )
        if self.late_share is not None and not 0 < self.late_share <= 1:
            raise ConfigError(f"ablate.late_share must be in (0, 1], got {self.late_share}")
        for variation in self.variations:
            for key, value in variation.keys.items():
                if isinstance(value, dict):
                    # It would replace the whole table of the base.
                    raise ConfigError(
                        f"variation {variation.name!r}: {key} is a table, got {value!r}; set its "
                        f"keys one by one, as in {key}.{next(iter(value), 'KEY')} = ..., under "
                        "[[ablate.variations]] if they belong together"
                    )
                if key in _KEYS_OF_ALL:
                    raise ConfigError(
                        f"variation {variation.name!r} sets {key} to {value!r}: recall and NDCG "
                        "must mean the same in all variations; set it in the base configuration"
                    )
                self._check_free(key, f"variation {variation.name!r}")
        for key in flat(self.base):
            self._check_free(key, "the base configuration")
        # Checks all folder names and all configurations before the first run.
        _all_distinct("folder names of cells", [cell.name for cell in self.cells()])

    def cells(self) -> list[Cell]:
        """All training runs: every variation with the first seed, then with the next seed.

        Raises:
            ConfigError: a configuration is not valid.
        """
        return [
            Cell(
                name=f"{_as_file_name(variation.name)}-seed{seed}",
                variation=variation.name,
                seed=seed,
                config=self._config(variation, seed),
            )
            for seed in self.seeds
            for variation in self.variations
        ]

    def describe(self) -> dict[str, Any]:
        """The ablation in JSON types; the keys about the target are null without a target.

        `baseline` and `late_share` are there if they are set.
        """
        has_target = self.target_auc is not None
        options = {"baseline": self.baseline, "late_share": self.late_share}
        return {
            "seeds": list(self.seeds),
            "target_auc": self.target_auc,
            "target_split": self.target_split if has_target else None,
            "eval_every_samples": self.eval_every_samples if has_target else None,
            **{key: value for key, value in options.items() if value is not None},
            "variations": {variation.name: dict(variation.keys) for variation in self.variations},
            "base": dict(self.base),
        }

    def _config(self, variation: Variation, seed: int) -> TrainConfig:
        # One model per cell would fill the disk, so models are saved only on request.
        tree = deepcopy({"save_model": False, **self.base, "seed": seed})
        try:
            for key, value in variation.keys.items():
                put_key(tree, key, value)
            config = build_config(tree)
        except ConfigError as error:
            raise ConfigError(f"variation {variation.name!r}: {error}") from None
        if self.target_auc is None:
            return config
        every_steps = max(1, self.eval_every_samples // config.batch_size)
        evaluation = replace(config.eval, every_steps=every_steps, split=self.target_split)
        return replace(config, eval=evaluation)

    def _check_free(self, key: str, place: str) -> None:
        """Check that a key is not one that the table `[ablate]` sets.

        Raises:
            ConfigError: it is.
        """
        decided = {"seed": "seeds"} | ({} if self.target_auc is None else _TARGET_KEYS)
        if key in decided:
            raise ConfigError(f"{place} sets {key}, which ablate.{decided[key]} sets; drop {key}")


def load_ablation(file: Path, settings: Sequence[str] = ()) -> AblationConfig:
    """Read the file of an ablation and apply `key=value` settings.

    Raises:
        ConfigError: a key is unknown, is set in two places, or has a wrong value.
    """
    tree, others = read_tree(file, settings), read_tree(None, settings)
    return build_with_file(partial(_build_ablation, settings=settings), tree, others, file)


def _build_ablation(tree: Mapping[str, Any], settings: Sequence[str]) -> AblationConfig:
    """Build an ablation from nested keys, to which the settings are applied already.

    Raises:
        ConfigError: a key is unknown, is set in two places, or has a wrong value.
    """
    table = tree.get("ablate")
    if not isinstance(table, dict):
        raise ConfigError("there is no table [ablate]; it needs seeds, and variations or a grid")
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"unknown key ablate.{key}; keys are {list(_KEYS)}")
    if "target_auc" not in table:
        for key in _TARGET_KEYS.values():
            if key in table:
                raise ConfigError(f"ablate.{key} means nothing without ablate.target_auc; drop it")
    _check_types(table)
    variations = _variations(table)
    for setting in settings:
        key = setting.partition("=")[0].strip()
        for variation in variations:
            if any(_overlap(key, varied) for varied in variation.keys):
                raise ConfigError(
                    f"--set {setting} has no effect: variation {variation.name!r} sets this key; "
                    "drop the setting, or change the variation"
                )
    values = {key: table[key] for key in table if key not in ("seeds", "variations", "grid")}
    return AblationConfig(
        base={key: value for key, value in tree.items() if key != "ablate"},
        variations=variations,
        seeds=tuple(table.get("seeds", ())),
        **values,
    )


def _check_types(table: Mapping[str, Any]) -> None:
    kinds = {
        "seeds": (list, "a list of integers"),
        "target_auc": (float, "a number between 0 and 1"),
        "target_split": (str, '"test" or "validation"'),
        "eval_every_samples": (int, "a number of samples"),
        "baseline": (str, "the name of a variation"),
        "late_share": (float, "a number in (0, 1]"),
        "variations": (list, "tables [[ablate.variations]]"),
        "grid": (dict, "a table of lists"),
    }
    for key, value in table.items():
        kind, meaning = kinds[key]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ConfigError(f"ablate.{key} must be {meaning}, got {value!r}")


def _variations(table: Mapping[str, Any]) -> tuple[Variation, ...]:
    """Every named variation with every combination of the grid."""
    named = [_named_variation(entry) for entry in table.get("variations", [])]
    grid = flat(table.get("grid", {}))
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"ablate.grid.{key} must be a list of values, got {values!r}")
        for variation in named:
            if any(_overlap(key, other) for other in variation.keys):
                raise ConfigError(f"{key} is set by variation {variation.name!r} and by the grid")
    if not named and not grid:
        raise ConfigError(
            "ablate needs [[ablate.variations]] or [ablate.grid]; for the base configuration "
            'alone, write one variation with nothing but name = "base"'
        )
    num_cells = max(len(named), 1) * prod(map(len, grid.values()))
    if num_cells > _MOST_VARIATIONS:
        raise ConfigError(
            f"ablate must have at most {_MOST_VARIATIONS} variations, got {num_cells} combinations "
            "of [[ablate.variations]] and [ablate.grid]; shorten the lists of the grid"
        )
    found = []
    for variation in named or [Variation(name="", keys={})]:
        for values in product(*grid.values()):
            keys = dict(zip(grid, values, strict=True))
            pairs = [f"{key}={_short(value)}" for key, value in keys.items()]
            name = ",".join(filter(None, [variation.name, *pairs]))
            found.append(Variation(name=name, keys={**variation.keys, **keys}))
    return tuple(found)


def _named_variation(entry: Any) -> Variation:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(
            "a variation needs a name of letters, digits and any of . _ + -, "
            f"got {name!r} in {entry!r}"
        )
    return Variation(name=name, keys=flat({key: entry[key] for key in entry if key != "name"}))


def _overlap(key: str, other: str) -> bool:
    """Whether two dotted keys are equal, or one is a table that contains the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _short(value: Any) -> str:
    """A value as part of a variation's name, in which commas and = separate keys."""
    return str(value).translate(str.maketrans(",=", ";:", " "))


def _as_file_name(name: str) -> str:
    return re.sub(r"[^\w.=,+\[\]-]", "_", name)


def _all_distinct(what: str, values: Sequence[Any]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise ConfigError(f"{what} must be distinct, got {value!r} twice")
