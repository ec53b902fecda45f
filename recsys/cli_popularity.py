"""The commands about which rows are popular: parse, build, call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from recsys.config import SYNTHETIC_PREFIX, load_config
from recsys.embeddings.plan import RANKINGS
from recsys.errors import ConfigError
from recsys.files import require_new
from recsys.sizes import format_bytes

if TYPE_CHECKING:
    import argparse

    from recsys.datasets.source import SampleSource

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_popularity_commands", "parse_samples"]

_NUMBER = r"\d+\.?\d*|\.\d+"
# Of the rows seen: the sets of hot rows whose coverage is printed.
_SHARES = (0.001, 0.01, 0.1, 1.0)


def add_popularity_commands(commands: _Commands) -> None:
    """Add `profile` and `plan`."""
    profile = commands.add_parser(
        "profile", help="count lookups per row; print what the most popular rows would serve"
    )
    profile.add_argument("store", metavar="STORE", help="a store, or synthetic:criteo-kaggle")
    profile.add_argument("--out", required=True, type=Path, metavar="FILE", help="an .npz file")
    profile.add_argument(
        "--samples",
        default=":",
        metavar="A:B",
        help="which to count: numbers (0:1000), or shares where one has a point (0:0.5); the "
        "coverage is then of those behind B; default: all",
    )
    profile.add_argument(
        "--rate", type=float, default=1.0, metavar="R", help="share of these to count; default 1"
    )
    profile.set_defaults(run_command=_profile)

    plan = commands.add_parser(
        "plan", help="choose the rows to be hot under a budget; print what budgets would serve"
    )
    plan.add_argument("profile", metavar="PROFILE", help="what `recsys profile` made")
    plan.add_argument(
        "--budget", required=True, metavar="SIZE", help="of fast memory, as 256MiB or 2GiB"
    )
    plan.add_argument("--out", required=True, type=Path, metavar="FILE", help="an .npz file")
    plan.add_argument(
        "--ranking",
        default=RANKINGS[0],
        choices=RANKINGS,
        help="what makes a row hotter than another; the last two are FAE's",
    )
    plan.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="of the training that it is for"
    )
    plan.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="likewise: model.embedding_dim, optimizer.name and batch_size matter; may be repeated",
    )
    plan.set_defaults(run_command=_plan)


def parse_samples(text: str, num_samples: int) -> range:
    """A run of samples from `A:B`, either of which may be left out.

    Args:
        text: Two sample numbers; or two shares of all samples, where at least one has a point.
        num_samples: How many there are.

    Raises:
        ConfigError: it is neither, or no run of them.
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
            f"samples {text!r} are {begin} to {end}, but must be some of the {num_samples} there "
            "are; name others"
        )
    return range(begin, end)


def _profile(options: argparse.Namespace) -> int:
    from recsys.embeddings.coverage import format_coverages
    from recsys.embeddings.popularity import PopularityProfile

    source = _open(options.store)
    samples = parse_samples(options.samples, source.num_samples)
    require_new(options.out)
    profile = PopularityProfile.count(source, samples, rate=options.rate)
    profile.save(options.out)

    num_rows, num_seen = sum(profile.table_sizes.values()), profile.num_rows_seen
    of_all = f" of {profile.num_samples_seen:,}" if profile.rate < 1 else ""
    print(
        f"{options.out}: {profile.num_lookups:,} lookups of {profile.num_samples:,}{of_all} "
        f"samples; {num_seen:,} of {num_rows:,} rows in {len(profile.table_sizes)} tables seen"
    )
    if not profile.num_samples:
        return 0
    later = range(samples.stop, source.num_samples)
    measured = later if later else samples
    print(
        f"\nhad they been hot in samples {measured.start:,} to {measured.stop:,}"
        f"{', which come later' if later else ', the same ones'}:"
    )
    nums_rows = [max(int(share * num_seen), 1) for share in _SHARES]
    print(format_coverages(profile.coverages(nums_rows, source, measured), num_seen))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from recsys.build import table_configs
    from recsys.embeddings.plan import plan_hot_rows
    from recsys.embeddings.popularity import PopularityProfile
    from recsys.embeddings.providers import row_optimizer

    config = load_config(options.config, options.set)
    profile = PopularityProfile.load(options.profile)
    require_new(options.out)
    plan = plan_hot_rows(
        profile,
        table_configs(profile.table_sizes, config.model.embedding_dim),
        options.budget,
        row_optimizer(config.optimizer),
        ranking=options.ranking,
        window_lookups=config.batch_size,
    )
    plan.save(options.out)
    parts = (plan.map_bytes, plan.shared_bytes, plan.pinned_bytes)
    of_map, shared, pinned = (format_bytes(num_bytes) for num_bytes in parts)
    print(
        f"{options.out}: {plan.num_pinned:,} of {sum(profile.table_sizes.values()):,} rows pinned "
        f"in {pinned}, beside a row map of {of_map} and {shared} for mini-batches"
    )
    print(f"\nof the lookups that were counted (later ones miss more):\n{plan}")
    return 0


def _open(name: str) -> SampleSource:
    from recsys.build import open_source
    from recsys.datasets.store import Store

    if name.startswith(SYNTHETIC_PREFIX):
        return open_source(load_config(None, [], data=name))
    return Store(name)
