"""The commands about popular rows: `profile` and `plan`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from recsys._support.files import require_new
from recsys._support.sizes import counted, format_bytes, parse_bytes
from recsys.cli.checks import require_data
from recsys.config import load_config
from recsys.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

__all__ = ["add_popularity_options", "parse_samples"]

_NUMBER = r"\d+\.?\d*|\.\d+"
# Sets of hot rows whose coverage is printed, as shares of the rows seen.
_SHARES = (0.001, 0.01, 0.1, 1.0)


def add_popularity_options(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Give `profile` and `plan` their options."""
    profile = commands["profile"]
    profile.add_argument("store", metavar="STORE", help="a store, or synthetic:criteo-kaggle")
    profile.add_argument("--out", required=True, type=Path, metavar="FILE", help="new .npz file")
    profile.add_argument(
        "--samples",
        default=":",
        metavar="A:B",
        help="samples to count: numbers (0:1000), or shares if one has a point (0:0.5); the "
        "coverage is measured on the samples after B; default: all",
    )
    profile.set_defaults(run_command=_profile)

    plan = commands["plan"]
    plan.add_argument("profile", metavar="PROFILE", help="file written by `recsys profile`")
    plan.add_argument(
        "--budget", required=True, metavar="SIZE", help="fast memory, such as 256MiB or 2GiB"
    )
    plan.add_argument("--out", required=True, type=Path, metavar="FILE", help="new .npz file")
    plan.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="configuration of the training that will use the plan",
    )
    plan.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set one key of that configuration; model.embedding_dim, optimizer.name and "
        "batch_size matter; may be repeated",
    )
    plan.set_defaults(run_command=_plan)


def parse_samples(text: str, num_samples: int) -> range:
    """The range of samples that `A:B` names; A and B may be left out.

    Args:
        text: Two sample numbers, or two shares of all samples if at least one has a point.
        num_samples: Number of samples.

    Raises:
        ConfigError: the text is neither, or the range is empty or not within the samples.
    """
    found = re.fullmatch(rf"({_NUMBER})?:({_NUMBER})?", text)
    has_shares = "." in text
    if not found or (has_shares and any(float(part or 0) > 1 for part in found.groups())):
        raise ConfigError(
            f"samples must be A:B, two numbers as in 0:1000 or two shares as in 0:0.5, got {text!r}"
        )
    begin, end = (
        default if part is None else int(float(part) * num_samples) if has_shares else int(part)
        for part, default in zip(found.groups(), (0, num_samples), strict=True)
    )
    if not 0 <= begin < end <= num_samples:
        raise ConfigError(
            f"samples {text!r} are {begin} to {end}, but must be a range within the {num_samples} "
            "samples; name others"
        )
    return range(begin, end)


def _profile(options: argparse.Namespace) -> int:
    config = load_config(None, [], data=options.store)
    require_data(config.data)

    from recsys.embeddings.popularity.counts import PopularityProfile, format_coverages
    from recsys.train.parts.build import open_source

    source = open_source(config, to_train=False)
    samples = parse_samples(options.samples, source.num_samples)
    require_new(options.out)
    profile = PopularityProfile.count(source, samples)
    profile.save(options.out)

    num_rows, num_seen = sum(profile.table_sizes.values()), profile.num_rows_seen
    print(
        f"{options.out}: {profile.num_lookups:,} lookups of {profile.num_samples:,} samples; "
        f"{num_seen:,} of {num_rows:,} rows in "
        f"{counted(len(profile.table_sizes), 'table')} seen"
    )
    if not profile.num_samples:
        return 0
    later = range(samples.stop, source.num_samples)
    measured = later if later else samples
    print(
        f"\ncoverage, measured on samples {measured.start:,} to {measured.stop:,}"
        f"{', which come later' if later else ', the same ones'}:"
    )
    nums_rows = [max(int(share * num_seen), 1) for share in _SHARES]
    print(format_coverages(profile.coverages(nums_rows, source, measured), num_seen))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from recsys.embeddings.popularity.files import require_profile

    config = load_config(options.config, options.set)
    parse_bytes(options.budget, "budget")
    require_profile(Path(options.profile))
    require_new(options.out)

    from recsys.embeddings.popularity.counts import PopularityProfile
    from recsys.embeddings.popularity.plan import plan_hot_rows
    from recsys.train.parts.providers import row_optimizer
    from recsys.train.parts.tables import table_configs

    profile = PopularityProfile.load(options.profile)
    plan = plan_hot_rows(
        profile,
        table_configs(
            profile.table_sizes,
            config.model.embedding_dim,
            profile.features,
            table_dims=config.model.table_dims,
        ),
        options.budget,
        row_optimizer(config.optimizer),
        window_lookups=config.batch_size,
    )
    plan.save(options.out)
    parts = (plan.map_bytes, plan.shared_bytes, plan.pinned_bytes)
    of_map, shared, pinned = (format_bytes(num_bytes) for num_bytes in parts)
    print(
        f"{options.out}: {plan.num_pinned:,} of {sum(profile.table_sizes.values()):,} rows pinned "
        f"in {pinned}, with a row map of {of_map} and {shared} for mini-batches"
    )
    print(
        "\nshares of the counted lookups (a run also misses each pinned row the first time, and "
        f"later lookups miss more):\n{plan}"
    )
    return 0
