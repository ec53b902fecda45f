"""Shared by all benchmarks: turns, summaries as rows, JSON files and tables."""

from __future__ import annotations

import gc
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import torch

from recsys._support.machine import describe_environment
from recsys.train.run_files.run_folder import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "ModelledRow",
    "Row",
    "median_of_ratios",
    "modelled",
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

# The range of n runs contains the true median with probability 1 - 2 / 2**n: over 95 % from 6 on.
_MIN_RUNS_OF_INTERVAL = 6


@dataclass(frozen=True)
class Row:
    """One measured quantity of one provider in one case.

    Attributes:
        bench: The benchmark's name.
        case: Its parameters, comma-joined key=value.
        provider: The implementation that was measured, such as "recsys" or "torch".
        metric: The measured quantity.
        unit: Its unit.
        median: Median over the runs.
        p20: 20th percentile over the runs.
        p80: 80th percentile over the runs.
        num_runs: Number of runs.
        low: Lower end of the median's 95 % interval, by bootstrap. None for fewer than 6 runs or
            blocks of runs, because even the range of 5 runs is not a 95 % interval.
        high: Upper end of the interval; None as `low`.
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


@dataclass(frozen=True)
class ModelledRow(Row):
    """A quantity that was computed by a model instead of measured.

    Attributes:
        modelled: True, so that the JSON says it.
    """

    modelled: bool = True


def take_turns(
    calls: Mapping[_K, Callable[[], _T]],
    num_rounds: int,
    *,
    num_warm_up_rounds: int = 3,
    seed: int = 0,
) -> dict[_K, list[_T]]:
    """Call every provider once per round, in an order that is drawn for each round.

    With a rotated order, a provider would always follow the same one, and would be faster if that
    one leaves the caches warm. Python's garbage is collected between rounds, not within them.
    Objects that existed before the first round are not scanned.

    Args:
        calls: By provider.
        num_rounds: Rounds that count.
        num_warm_up_rounds: Rounds before those.
        seed: Seed of the orders.

    Returns:
        By provider, the results of its calls in the rounds that count.
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
    """Timed steps of a turn, and also untimed steps before them; more for small mini-batches."""
    return min(16, max(1, 8192 // batch_size))


def timed(
    function: Callable[[], object],
    *,
    num_before: int = 0,
    num_timed: int = 1,
    device: str = "cpu",
) -> Callable[[], float]:
    """Make a function that measures how many seconds a call of `function` takes.

    Args:
        function: The function to measure.
        num_before: Untimed calls first, so that the timed calls find the caches as their own
            earlier calls leave them, not as another provider leaves them.
        num_timed: Timed calls; the result is their mean.
        device: Where the function computes. With "cuda", time ends when the device has finished.
    """

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    def call() -> float:
        for _ in range(num_before):
            function()
        wait()
        begin = time.perf_counter()
        for _ in range(num_timed):
            function()
        wait()
        return (time.perf_counter() - begin) / num_timed

    return call


def summarize(
    bench: str, case: str, provider: str, metric: str, unit: str, values: Sequence[float]
) -> Row:
    """Summarize the values of several runs as a row."""
    p20, median, p80 = np.percentile(values, [20, 50, 80]).tolist()
    rounds = _resampled(len(values))
    low, high = _interval(np.median(np.asarray(values)[rounds], axis=1), len(values))
    return Row(bench, case, provider, metric, unit, median, p20, p80, len(values), low, high)


def modelled(
    bench: str, case: str, provider: str, metric: str, unit: str, values: Sequence[float]
) -> ModelledRow:
    """Summarize the values that a model computes from several inputs as a row."""
    return ModelledRow(**asdict(summarize(bench, case, provider, metric, unit, values)))


def rows_by_provider(
    bench: str, case: str, metric: str, unit: str, values: Mapping[str, Sequence[float]]
) -> list[Row]:
    """Summarize the runs of several providers, one row each."""
    return [
        summarize(bench, case, name, metric, unit, of_provider)
        for name, of_provider in values.items()
    ]


def ratio(
    bench: str,
    case: str,
    provider: str,
    metric: str,
    *,
    values: Sequence[float],
    baseline: Sequence[float],
    is_by_round: bool = False,
    num_per_block: int = 1,
) -> Row:
    """How many times faster a provider is than a baseline, from rounds in which both took turns.

    `median` is the ratio of the medians, unless `is_by_round`. `low` and `high` are its interval,
    for which rounds are drawn in pairs. `p20` and `p80` are percentiles of the rounds' ratios.

    Args:
        bench: As in `Row`.
        case: As in `Row`.
        provider: As in `Row`.
        metric: As in `Row`.
        values: Seconds of the provider, by round.
        baseline: Seconds of the baseline, by round.
        is_by_round: Whether `median` is the median of the rounds' ratios. Use it if rounds are so
            far apart in time that the machine's speed changes between them.
        num_per_block: Rounds that are drawn together. Consecutive short rounds see the same state
            of the machine, so they carry less information than rounds at different times.

    Raises:
        ValueError: the number of rounds is not a multiple of `num_per_block`.
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
    return Row(bench, case, provider, metric, "ratio", median, p20, p80, len(ours), low, high)


def median_of_ratios(
    bench: str,
    case: str,
    provider: str,
    metric: str,
    *,
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> Row:
    """The median over several cases of the ratios that `ratio` computes.

    `p20` and `p80` are over the cases, and `num_runs` is their number. `low` and `high` are the
    interval of the median for these cases: within each case rounds are drawn again.

    Args:
        bench: As in `Row`.
        case: The parameters that all cases have in common.
        provider: As in `Row`.
        metric: As in `Row`.
        pairs: For each case, the seconds of the provider and those of the baseline, by round.
    """
    drawn, ratios = [], []
    for number, (values, baseline) in enumerate(pairs):
        ours, theirs = np.asarray(values), np.asarray(baseline)
        rounds = _resampled(len(ours), seed=number)
        drawn.append(np.median(theirs[rounds], axis=1) / np.median(ours[rounds], axis=1))
        ratios.append(np.median(theirs) / np.median(ours))
    low, high = _interval(np.median(drawn, axis=0), min(len(values) for values, _ in pairs))
    p20, median, p80 = np.percentile(ratios, [20, 50, 80]).tolist()
    return Row(bench, case, provider, metric, "ratio", median, p20, p80, len(ratios), low, high)


def _interval(
    resampled: NDArray[np.float64], num_runs: int
) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of a bootstrapped statistic; (None, None) for too few runs."""
    if num_runs < _MIN_RUNS_OF_INTERVAL:
        return None, None
    low, high = np.percentile(resampled, [2.5, 97.5]).tolist()
    return low, high


def _resampled(num_values: int, seed: int = 0, num_per_block: int = 1) -> NDArray[np.int64]:
    """Draw rounds with replacement for the bootstrap; the fixed seed makes tables reproducible."""
    num_blocks = num_values // num_per_block
    blocks = np.random.default_rng(seed).integers(0, num_blocks, (2000, num_blocks))
    draws = blocks[:, :, np.newaxis] * num_per_block + np.arange(num_per_block)
    return draws.reshape(len(blocks), -1)


def write_rows(file: Path, rows: Sequence[Row], *, are_all: bool = True) -> None:
    """Write `{"command", "environment", "rows"}` as JSON; `unfinished` too, if rows are missing."""
    record: dict[str, Any] = {} if are_all else {"unfinished": True}
    record |= {
        "command": shlex.join(["recsys", *sys.argv[1:]]),
        "environment": describe_environment(),
        "rows": [asdict(row) for row in rows],
    }
    write_json(file, record)


def print_rows(rows: Sequence[Row]) -> None:
    """Print the rows as a table, and those of a model as a second one."""
    measured = [row for row in rows if not isinstance(row, ModelledRow)]
    computed = [row for row in rows if isinstance(row, ModelledRow)]
    _print_table(measured)
    if computed:
        print("\nComputed by a model, not measured:")
        _print_table(computed)


def _print_table(rows: Sequence[Row]) -> None:
    table = pd.DataFrame([asdict(row) for row in rows])
    print(table.to_string(index=False, float_format=lambda value: f"{value:,.2f}"))
