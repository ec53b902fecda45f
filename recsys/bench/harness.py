"""What every benchmark needs: turns, rows, their summary, own processes, a file and a table."""

from __future__ import annotations

import gc
import multiprocessing
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from recsys.machine import describe_environment
from recsys.run_folder import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "Row",
    "in_own_process",
    "median_of_ratios",
    "print_rows",
    "ratio",
    "rows_by_provider",
    "steps_of_turn",
    "summarize",
    "take_turns",
    "timed",
    "write_rows",
]

_T = TypeVar("_T")
_K = TypeVar("_K")

# Least to most of n runs holds the median with probability 1 - 2 / 2**n: from 6 on over 95 %.
_MIN_RUNS_OF_INTERVAL = 6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured quantity of one provider in one case.

    Attributes:
        bench: The benchmark's name.
        case: Its parameters, comma-joined key=value.
        provider: Who was measured; ours is "recsys".
        metric: What was measured.
        unit: In what.
        median: Over the runs; `p20` and `p80` likewise.
        num_runs: How many.
        low: Lower end of the median's 95 % interval, by bootstrap; `high` likewise. Both are None
            for fewer than 6 runs, or blocks of runs that are drawn together: even from the least to
            the most of 5 is no 95 % interval.
    """

    bench: str
    case: str
    provider: str
    metric: str
    unit: str
    median: float
    p20: float
    p80: float
    num_runs: int
    low: float | None
    high: float | None


def take_turns(
    calls: Mapping[_K, Callable[[], _T]],
    num_rounds: int,
    *,
    num_warm_up_rounds: int = 3,
    seed: int = 0,
) -> dict[_K, list[_T]]:
    """Call everyone once per round, in an order drawn anew for each round.

    An order that only rotated would keep neighbours together, and whoever follows one that leaves
    the caches warm would always be the faster for it. Python's garbage is collected between rounds,
    not within them; what was there before is not looked through.

    Args:
        calls: By provider.
        num_rounds: Rounds that count.
        num_warm_up_rounds: Rounds before those.
        seed: Of the orders.

    Returns:
        By provider, what its calls returned in the rounds that count.
    """
    results: dict[_K, list[_T]] = {name: [] for name in calls}
    names = list(calls)
    orders = np.random.default_rng(seed)
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    try:
        gc.disable()
        gc.collect()
        if not was_frozen:
            gc.freeze()
        for number in range(-num_warm_up_rounds, num_rounds):
            for name in (names[position] for position in orders.permutation(len(names))):
                result = calls[name]()
                if number >= 0:
                    results[name].append(result)
            gc.collect()
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
    return results


def steps_of_turn(batch_size: int) -> int:
    """Timed steps of a turn, and untimed ones before: small mini-batches need more of either."""
    return min(16, max(1, 8192 // batch_size))


def timed(
    function: Callable[[], object], *, num_before: int = 0, num_timed: int = 1
) -> Callable[[], float]:
    """A call that returns the seconds the function takes.

    Args:
        function: What is measured.
        num_before: Calls before those that are timed: then these follow one of their own, as they
            do outside of a benchmark, and not another's.
        num_timed: Calls that are timed; the result is their mean.
    """

    def call() -> float:
        for _ in range(num_before):
            function()
        begin = time.perf_counter()
        for _ in range(num_timed):
            function()
        return (time.perf_counter() - begin) / num_timed

    return call


def summarize(
    *, bench: str, case: str, provider: str, metric: str, unit: str, values: Sequence[float]
) -> Row:
    """A row from the values of several runs."""
    p20, median, p80 = np.percentile(values, [20, 50, 80]).tolist()
    rounds = _resampled(len(values))
    low, high = _interval(np.median(np.asarray(values)[rounds], axis=1), len(values))
    return Row(
        bench=bench,
        case=case,
        provider=provider,
        metric=metric,
        unit=unit,
        median=median,
        p20=p20,
        p80=p80,
        num_runs=len(values),
        low=low,
        high=high,
    )


def rows_by_provider(
    *, bench: str, case: str, metric: str, unit: str, values: Mapping[str, Sequence[float]]
) -> list[Row]:
    """A row per provider, from the values of its runs."""
    return [
        summarize(
            bench=bench, case=case, provider=provider, metric=metric, unit=unit, values=of_provider
        )
        for provider, of_provider in values.items()
    ]


def ratio(
    *,
    bench: str,
    case: str,
    provider: str,
    metric: str,
    values: Sequence[float],
    baseline: Sequence[float],
    is_by_round: bool = False,
    num_per_block: int = 1,
) -> Row:
    """How many times faster than a baseline, from the times of rounds in which both took turns.

    `median` is the ratio of the medians, unless `is_by_round`, and `low` to `high` its interval,
    rounds drawn in pairs; `p20` and `p80` are those of the rounds' own ratios.

    Args:
        bench: As in `Row`.
        case: As in `Row`.
        provider: As in `Row`.
        metric: As in `Row`.
        values: Of the provider, by round.
        baseline: Of the baseline.
        is_by_round: Whether `median` is that of the rounds' own ratios too: for rounds so far apart
            that the machine is faster in some than in others, of which the medians know nothing.
        num_per_block: Short rounds one behind the other are of one state of the machine, and tell
            less than as many from other times: they are drawn together, in blocks of so many.

    Raises:
        ValueError: the rounds are no whole number of blocks.
    """
    if len(values) % num_per_block:
        raise ValueError(f"rounds must be whole blocks of {num_per_block}, got {len(values)}")
    ours, theirs = np.asarray(values), np.asarray(baseline)
    rounds = _resampled(len(ours), num_per_block=num_per_block)
    if is_by_round:
        median = float(np.median(theirs / ours))
        ratios = np.median((theirs / ours)[rounds], axis=1)
    else:
        median = float(np.median(theirs) / np.median(ours))
        ratios = np.median(theirs[rounds], axis=1) / np.median(ours[rounds], axis=1)
    low, high = _interval(ratios, len(ours) // num_per_block)
    p20, p80 = np.percentile(theirs / ours, [20, 80]).tolist()
    return Row(
        bench=bench,
        case=case,
        provider=provider,
        metric=metric,
        unit="ratio",
        median=median,
        p20=p20,
        p80=p80,
        num_runs=len(ours),
        low=low,
        high=high,
    )


def median_of_ratios(
    *,
    bench: str,
    case: str,
    provider: str,
    metric: str,
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> Row:
    """The median over several cases of how many times faster than a baseline, as `ratio` has it.

    `p20` and `p80` are over the cases, and `num_runs` is their number. `low` to `high` says how
    sure the median is, the cases being these: in each, rounds are drawn anew.

    Args:
        bench: As in `Row`.
        case: What the cases have in common.
        provider: As in `Row`.
        metric: As in `Row`.
        pairs: Per case, the times of the provider and those of the baseline.
    """
    drawn, ratios = [], []
    for number, (values, baseline) in enumerate(pairs):
        ours, theirs = np.asarray(values), np.asarray(baseline)
        rounds = _resampled(len(ours), seed=number)
        drawn.append(np.median(theirs[rounds], axis=1) / np.median(ours[rounds], axis=1))
        ratios.append(np.median(theirs) / np.median(ours))
    low, high = _interval(np.median(drawn, axis=0), min(len(values) for values, _ in pairs))
    p20, median, p80 = np.percentile(ratios, [20, 50, 80]).tolist()
    return Row(
        bench=bench,
        case=case,
        provider=provider,
        metric=metric,
        unit="ratio",
        median=median,
        p20=p20,
        p80=p80,
        num_runs=len(ratios),
        low=low,
        high=high,
    )


def _interval(
    resampled: NDArray[np.float64], num_runs: int
) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of what was computed from draws; none of too few runs."""
    if num_runs < _MIN_RUNS_OF_INTERVAL:
        return None, None
    low, high = np.percentile(resampled, [2.5, 97.5]).tolist()
    return low, high


def _resampled(num_values: int, seed: int = 0, num_per_block: int = 1) -> NDArray[np.int64]:
    """Draws with replacement for the bootstrap; always the same, so that tables can be remade."""
    num_blocks = num_values // num_per_block
    blocks = np.random.default_rng(seed).integers(0, num_blocks, (2000, num_blocks))
    draws = blocks[:, :, np.newaxis] * num_per_block + np.arange(num_per_block)
    return draws.reshape(len(blocks), -1)


def in_own_process(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a top-level function in a fresh process, so that its memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write `{"command", "environment", "rows"}` as JSON."""
    record = {
        "command": shlex.join(["recsys", *sys.argv[1:]]),
        "environment": describe_environment(),
        "rows": [asdict(row) for row in rows],
    }
    write_json(file, record)


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table with a line per row."""
    table = pd.DataFrame([asdict(row) for row in rows])
    print(table.to_string(index=False, float_format=lambda value: f"{value:,.2f}"))
