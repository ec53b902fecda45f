"""`recsys bench distributed`: tables on several processes, beside TorchRec with FBGEMM's kernels.

    provider          sharder                                  rows in fast memory
    recsys            HotColdEmbeddingBagCollectionSharder     all
    recsys_budget     the same with a budget                   some
    recsys_pooled     the first, which exchanges parts         all
    torchrec_fbgemm   TorchRec's, with FBGEMM's kernels        all

The plans are table-wise and row-wise. Row-wise, `recsys` exchanges distinct rows, `recsys_pooled`
parts of pooled vectors; table-wise, there is nothing to choose. The command starts W processes on
this machine, with one thread each, which exchange through gloo. In every process the tables of all
providers live side by side, with the same first rows and the same optimizer (row-wise Adagrad), and
the providers take turns. A round's time is that of its slowest rank.

Bytes and time of collectives come from steps of their own, which are not timed
(`recsys.bench.ranks.collectives` says what is counted). What more processes would send is computed
from ids (`recsys.bench.ranks.traffic`); these rows have `"modelled": true`.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recsys._support.machine import set_num_threads
from recsys.bench.parts.harness import (
    Row,
    modelled,
    ratio,
    rows_by_provider,
    summarize,
    take_turns,
)
from recsys.bench.ranks.group import RankGroup
from recsys.bench.ranks.providers import TORCHREC, Case
from recsys.bench.ranks.traffic import LINKS, traffic_of
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from recsys.bench.ranks.collectives import Use
    from recsys.bench.ranks.providers import Provider
    from recsys.bench.ranks.rank import RankTurn

__all__ = ["MODELLED_WORLD_SIZES", "bench_distributed", "scaled_table_sizes"]

MODELLED_WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128)
_BENCH = "distributed"
_MAX_TABLE_BYTES = 32_000_000
_NUM_BATCHES = 32
_NUM_WARM_UP_ROUNDS = 5  # a budget's slots fill in them
_NUM_COUNTED_STEPS = 4
_NUM_MODELLED_BATCHES = 4
_DEVICES = Path("/proc/net/dev")


def scaled_table_sizes(dim: int) -> tuple[int, ...]:
    """Kaggle's table sizes, with at most 32 MB of rows in a table.

    Every process has its part of the tables of all providers.
    """
    most = _MAX_TABLE_BYTES // (4 * dim)
    return tuple(min(size, most) for size in KAGGLE_TABLE_SIZES)


def bench_distributed(
    world_sizes: Sequence[int],
    *,
    batch_size: int,
    dim: int,
    num_rounds: int,
    providers: Sequence[Provider],
    table_sizes: Sequence[int] = (),
    modelled_world_sizes: Sequence[int] = MODELLED_WORLD_SIZES,
) -> Iterator[Row]:
    """Measure all providers at each number of processes, and model larger numbers.

    Args:
        world_sizes: Numbers of processes.
        batch_size: B, over all processes.
        dim: D.
        num_rounds: Rounds that count; each provider takes one turn in each.
        providers: What is measured.
        table_sizes: Rows per table; by default, `scaled_table_sizes`.
        modelled_world_sizes: Numbers of processes of the model.

    Raises:
        BudgetTooSmall: a budget is too small for a mini-batch.
        ConfigError: FBGEMM has no such dim, or the batch cannot be divided equally.
        MissingDependency: TorchRec or FBGEMM is not installed.
        ChildProcessError: a process failed; the message contains its traceback.
    """
    _check(world_sizes, batch_size, dim)
    set_num_threads(1)  # as the ranks do, for the record of the run
    sizes = tuple(table_sizes) or scaled_table_sizes(dim)
    for world_size in world_sizes:
        yield from _measure(world_size, batch_size, dim, sizes, providers, num_rounds)
    yield from _modelled_rows(modelled_world_sizes, batch_size, dim, sizes)


def _check(world_sizes: Sequence[int], batch_size: int, dim: int) -> None:
    place = "bench distributed"
    for world_size in world_sizes:
        if batch_size % world_size:
            raise ConfigError(
                f"{place}: --batch-size must be a multiple of every world size, got {batch_size} "
                f"for {world_size} processes; change one of the two"
            )
    if dim % 4:
        raise ConfigError(f"{place}: --dim must be a multiple of 4 for FBGEMM, got {dim}")
    missing = [name for name in ("torchrec", "fbgemm_gpu") if find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"{place} compares recsys with TorchRec, and {' and '.join(missing)} cannot be "
            "imported; pip install 'recsys[torchrec]'"
        )


def _case(world_size: int, batch_size: int, dim: int, sizes: Sequence[int]) -> str:
    return f"W={world_size},B={batch_size},D={dim},max_rows={max(sizes)}"


def _measure(
    world_size: int,
    batch_size: int,
    dim: int,
    sizes: Sequence[int],
    providers: Sequence[Provider],
    num_rounds: int,
) -> list[Row]:
    case = Case(world_size, batch_size, dim, sizes, _NUM_BATCHES, providers)
    numbers = range(len(providers))
    with RankGroup(case) as ranks:
        turns: dict[int, list[list[RankTurn]]] = take_turns(
            {number: partial(ranks.call, "turn", number) for number in numbers},
            num_rounds,
            num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
        )
        counted, on_loopback = [], []
        for number in numbers:
            before = _loopback_bytes()
            counted.append(ranks.call("count", number, _NUM_COUNTED_STEPS))
            on_loopback.append(
                [
                    (after - first) / _NUM_COUNTED_STEPS / world_size
                    for first, after in zip(before, _loopback_bytes(), strict=True)
                ]
            )
        budgets = {
            number: ranks.call("budget", number)
            for number in numbers
            if providers[number].budget_share is not None
        }
    rows: list[Row] = []
    for plan in dict.fromkeys(provider.plan for provider in providers):
        of_plan = {each.name: n for n, each in enumerate(providers) if each.plan == plan}
        name = f"{_case(world_size, batch_size, dim, sizes)},plan={plan}"
        rows += _rows_of_times(name, {each: turns[n] for each, n in of_plan.items()})
        for provider, number in of_plan.items():
            rows += _rows_of_collectives(name, provider, counted[number])
            rows += [
                summarize(_BENCH, name, provider, "loopback_sent", "bytes", [sent])
                for sent in on_loopback[number]
            ]
            if number in budgets:
                rows += _rows_of_budget(name, provider, budgets[number])
    return rows


def _loopback_bytes() -> list[int]:
    """Bytes that this machine has sent to itself, as one number; empty if it does not say."""
    if not _DEVICES.is_file():
        return []
    lines = (line.partition(":") for line in _DEVICES.read_text().splitlines())
    return [int(numbers.split()[8]) for device, _, numbers in lines if device.strip() == "lo"]


def _rows_of_times(case: str, turns: Mapping[str, list[list[RankTurn]]]) -> list[Row]:
    """Times of the slowest rank, speeds over TorchRec, and the loss of the last step."""
    seconds = {
        name: [max(turn.seconds for turn in of_round) for of_round in rounds]
        for name, rounds in turns.items()
    }
    losses = {
        name: [float(np.mean([turn.loss for turn in rounds[-1]]))] for name, rounds in turns.items()
    }
    times = {name: [1e3 * each for each in spent] for name, spent in seconds.items()}
    rows = rows_by_provider(_BENCH, case, "time", "ms", times)
    rows += rows_by_provider(_BENCH, case, "loss", "nats", losses)
    metric = f"speed_over_{TORCHREC}"
    return rows + [
        ratio(_BENCH, case, name, metric, values=spent, baseline=seconds[TORCHREC])
        for name, spent in seconds.items()
        if name != TORCHREC and TORCHREC in seconds
    ]


def _rows_of_collectives(
    case: str, provider: str, counted: Sequence[Sequence[Mapping[tuple[str, str], Use]]]
) -> list[Row]:
    """Means over the ranks, for each collective and for all of them; a value for each step.

    Args:
        case: The case.
        provider: The provider.
        counted: By rank and step.
    """
    num_steps = len(counted[0])
    values: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0] * num_steps)
    for of_rank in counted:
        for step, uses in enumerate(of_rank):
            for (collective, dtype), use in uses.items():
                one = f"{case},collective={collective},dtype={dtype}"
                for name in (case, one):
                    for metric, unit, value in (
                        ("calls", "calls", use.calls),
                        ("bytes_sent", "bytes", use.bytes_sent),
                        ("collective_time", "ms", 1e3 * use.seconds),
                    ):
                        values[name, metric, unit][step] += value / len(counted)
    return [
        summarize(_BENCH, name, provider, metric, unit, by_step)
        for (name, metric, unit), by_step in values.items()
    ]


def _rows_of_budget(case: str, provider: str, budgets: Sequence[tuple[float, float]]) -> list[Row]:
    """The fast memory of a rank and the hit rate of its lookups; the mean over the ranks."""
    num_bytes, hit_rate = np.mean(budgets, axis=0).tolist()
    return [
        summarize(_BENCH, case, provider, "budget", "bytes", [num_bytes]),
        summarize(_BENCH, case, provider, "lookup_hit_rate", "ratio", [hit_rate]),
    ]


def _modelled_rows(
    world_sizes: Sequence[int], batch_size: int, dim: int, sizes: Sequence[int]
) -> list[Row]:
    """What each design sends, and how long that takes on a link; a value for each mini-batch."""
    source = SyntheticCriteo(
        num_samples=max(7, _NUM_MODELLED_BATCHES * batch_size), table_sizes=sizes
    )
    samples = np.arange(_NUM_MODELLED_BATCHES * batch_size).reshape(-1, batch_size)
    batches = [
        source.read(each).sparse_features.values().numpy().reshape(len(sizes), batch_size)
        for each in samples
    ]
    rows: list[Row] = []
    for world_size in world_sizes:
        case = _case(world_size, batch_size, dim, sizes)
        found = [traffic_of(ids, sizes, world_size, dim) for ids in batches]
        for design in found[0]:
            traffics = [by_design[design] for by_design in found]
            sent = [each.bytes_sent for each in traffics]
            rows.append(modelled(_BENCH, case, design, "bytes_sent", "bytes", sent))
            for link, speed in LINKS.items():
                times = [1e3 * each.seconds(speed) for each in traffics]
                rows.append(
                    modelled(_BENCH, f"{case},link={link}", design, "link_time", "ms", times)
                )
    return rows
