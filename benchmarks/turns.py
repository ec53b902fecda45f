"""What all benchmarks share: rounds in which providers take turns, processes, statistics, JSON.

A round calls every provider once, in an order that is drawn for the round. So a slow minute of the
machine meets every provider, and ratios of the same round compare like with like. A provider may
live in a `Worker`, a process with memory, allocator and threads of its own.

`--against PATH` compares two commits: `compare_checkouts` runs the benchmark's own file in two
processes, of which one imports `recsys` from this checkout and the other from PATH. Code that runs
there may use only names of `recsys` that both commits have, so it uses public names.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import multiprocessing
import os
import shlex
import signal
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np
import pandas as pd
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

__all__ = [
    "Row",
    "Worker",
    "bench_arguments",
    "compare_checkouts",
    "end_turn",
    "in_own_process",
    "median_of_ratios",
    "prepare_process",
    "process_memory",
    "ratio",
    "rows_by_provider",
    "settle",
    "show_rows",
    "steps_of_turn",
    "summarize",
    "take_turns",
    "timed",
]

_T = TypeVar("_T")
_K = TypeVar("_K")

# The range of n runs contains the true median with probability 1 - 2 / 2**n: over 95 % from 6 on.
_MIN_RUNS_OF_INTERVAL = 6
# OpenMP's threads spin for about 10 ms after a parallel region before they sleep. The kernel may
# update the CPU time of a running thread only every 4 ms, so shorter looks could miss it.
_LOOK_SECONDS = 0.012
_QUIET_SECONDS = 0.001
_MAX_LOOKS = 50

_THIS_CHECKOUT = Path(__file__).resolve().parents[1]
_NUM_PROCESSES = 6  # that a checkout's pairs are divided among
_SLOWER = 1.03


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


# Statistics


def summarize(
    bench: str, case: str, provider: str, metric: str, unit: str, values: Sequence[float]
) -> Row:
    """Summarize the values of several runs as a row."""
    p20, median, p80 = np.percentile(values, [20, 50, 80]).tolist()
    rounds = _resampled(len(values))
    low, high = _interval(np.median(np.asarray(values)[rounds], axis=1), len(values))
    return Row(bench, case, provider, metric, unit, median, p20, p80, len(values), low, high)


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


# Processes


class Worker:
    """A process that makes an object and calls its methods; a context manager that ends it.

    A worker must be idle between calls, so every turn ends with `end_turn` or `settle`; or its
    owner calls `pause`.

    Args:
        name: Names the process in errors.
        make: A top-level function or class, called with `arguments` in the process.
        arguments: Arguments of `make`.
    """

    def __init__(self, name: str, make: Callable[..., object], *arguments: Any) -> None:
        self._name = name
        spawn = multiprocessing.get_context("spawn")
        self._connection, other_end = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other_end, make, arguments), daemon=True)
        self._process.start()
        other_end.close()
        self._is_made = False
        self._is_paused = False

    def wait(self) -> None:
        """Wait until the object is made.

        Raises:
            ChildProcessError: As for `call`.
        """
        if not self._is_made:
            self._receive()
            self._is_made = True

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object and wait for its result.

        Raises:
            ChildProcessError: the process died, or the method raised; with its traceback.
        """
        self.wait()
        if self._is_paused:
            os.kill(cast("int", self._process.pid), signal.SIGCONT)
            self._is_paused = False
        self._connection.send((method, arguments))
        return self._receive()

    def pause(self) -> None:
        """Stop all threads of the process until the next call."""
        os.kill(cast("int", self._process.pid), signal.SIGSTOP)
        self._is_paused = True

    def end(self) -> None:
        """Let the idle process end by itself, which frees its semaphores; a killed one warns."""
        self._connection.close()
        self._process.join()

    def _receive(self) -> Any:
        try:
            answer, failure = self._connection.recv()
        except (EOFError, OSError) as ended:
            self._process.join()
            code = self._process.exitcode
            hint = "; often this means that memory ran out" if code == -signal.SIGKILL else ""
            raise ChildProcessError(
                f"{self._name}: the worker died with exit code {code} and no traceback{hint}"
            ) from ended
        if failure is not None:
            raise ChildProcessError(f"{self._name}: the worker failed:\n{failure}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Do not wait for a worker that is still busy.
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(owner: Connection, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """The main loop of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the owner, and it ends its workers
    made: object = None
    request: tuple[str, tuple[Any, ...]] | None = None
    while True:
        answer: object = None
        failure: str | None = None
        try:
            if request is None:
                made = make(*arguments)
            else:
                method, method_arguments = request
                answer = getattr(made, method)(*method_arguments)
        except Exception:
            failure = traceback.format_exc()
        try:
            owner.send((answer, failure))
            request = owner.recv()
        except (EOFError, OSError):
            return  # the owner has ended


def in_own_process(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a top-level function in a new process, so that its memory is measured separately.

    Raises:
        ChildProcessError: As for `Worker.call`.
    """
    with Worker(function.__name__, partial, function, *arguments) as worker:
        result = worker.call("__call__")
        worker.end()
        return cast("_T", result)


def prepare_process() -> None:
    """Use all cores, and let glibc keep freed memory for the next step, as training does."""
    torch.set_num_threads(
        int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0))
    )
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, at its maximum
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def process_memory() -> dict[str, float]:
    """Memory of this process in bytes, by the system's names, such as "RssAnon" (Linux)."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = 1024.0 * int(value.split()[0])
    return found


def end_turn() -> None:
    """Collect garbage and wait until the process is idle."""
    gc.collect()
    settle()


def settle() -> None:
    """Wait until no thread of this process works or spins, for 0.6 s at most."""
    for _ in range(_MAX_LOOKS):
        before = time.process_time()
        time.sleep(_LOOK_SECONDS)
        if time.process_time() - before < _QUIET_SECONDS:
            return


# Two commits


def compare_checkouts(
    bench: str,
    make_turn: Callable[[Any, bool], Callable[[], float]],
    cases: Sequence[Any],
    options: argparse.Namespace,
) -> Iterator[Row]:
    """Compare the speed of this checkout ("new") and that of `options.against` ("old").

    First a process of each checkout makes one turn of every case on tiny tables, which compiles the
    kernels into numba's cache. Then the pairs are divided among several processes of each checkout,
    because the same code may be slower in one process than in another. A case's interval draws the
    pairs of one process together.

    Args:
        bench: The benchmark's name.
        make_turn: A top-level function. It takes a case and whether tables are tiny, and returns
            a function that makes a turn and returns its seconds per step.
        cases: The cases; `str` names them.
        options: Options of `bench_arguments`: `against`, `pairs`, `only` and `quick`.

    Yields:
        The times of both, their ratio new/old, and at the end its median over all cases.

    Raises:
        SystemExit: after the last row, if a case's interval lies wholly above 1.03.
    """
    cases = [case for case in cases if options.only in str(case)]
    checkouts = {"new": _THIS_CHECKOUT, "old": options.against.resolve()}
    found: dict[str, dict[str, list[float]]] = {str(case): {"new": [], "old": []} for case in cases}
    with _sides(checkouts, make_turn) as sides:
        for case in cases:
            for side in sides.values():
                side.call("begin", case, True)
                side.call("turn")
    num_processes = min(_NUM_PROCESSES, options.pairs)
    num_per_process = options.pairs // num_processes
    for number in range(num_processes):
        with _sides(checkouts, make_turn) as sides:
            for case in cases:
                for side in sides.values():
                    side.call("begin", case, options.quick)
                calls = {name: partial(side.call, "turn") for name, side in sides.items()}
                seconds = take_turns(calls, num_per_process, num_warm_up_rounds=1, seed=number)
                for name, values in seconds.items():
                    found[str(case)][name] += values
                print(f"{case}: process {number + 1} of {num_processes}", file=sys.stderr)
    slower = []
    for name, seconds in found.items():
        milliseconds = {side: [1e3 * each for each in spent] for side, spent in seconds.items()}
        yield from rows_by_provider(bench, name, "time", "ms", milliseconds)
        row = ratio(
            bench,
            name,
            "new",
            "time_over_old",
            values=seconds["old"],
            baseline=seconds["new"],
            is_by_round=True,
            num_per_block=num_per_process,
        )
        yield row
        if row.low is not None and row.low > _SLOWER:
            slower.append(f"{name}: {row.median:.3f} [{row.low:.3f}, {row.high:.3f}]")
    pairs = [(seconds["old"], seconds["new"]) for seconds in found.values()]
    yield median_of_ratios(bench, "all", "new", "time_over_old", pairs=pairs)
    if slower:
        raise SystemExit(f"slower than {options.against}:\n" + "\n".join(slower))


@contextmanager
def _sides(
    checkouts: Mapping[str, Path], make_turn: Callable[[Any, bool], Callable[[], float]]
) -> Iterator[dict[str, Worker]]:
    """A worker for each checkout; they end with the context."""
    with ExitStack() as stack:
        sides = {}
        for name, checkout in checkouts.items():
            before = list(sys.path)
            sys.path.insert(0, str(checkout))  # a spawned process takes it over
            try:
                sides[name] = stack.enter_context(Worker(name, _Side, make_turn, checkout))
            finally:
                sys.path[:] = before
        for side in sides.values():
            side.wait()
        yield sides


class _Side:
    """Lives in a worker: the turns of one checkout."""

    def __init__(
        self, make_turn: Callable[[Any, bool], Callable[[], float]], checkout: Path
    ) -> None:
        prepare_process()
        import recsys

        if not Path(recsys.__file__).resolve().is_relative_to(checkout):
            raise ImportError(f"recsys was imported from {recsys.__file__}, not from {checkout}")
        self._make_turn = make_turn
        self._turn: Callable[[], float] | None = None

    def begin(self, case: object, is_tiny: bool) -> None:
        """Build the tables and mini-batches of a case, and forget those of the last one."""
        self._turn = None
        gc.unfreeze()
        gc.collect()
        torch.manual_seed(0)
        self._turn = self._make_turn(case, is_tiny)
        gc.disable()
        gc.collect()
        gc.freeze()
        settle()

    def turn(self) -> float:
        """Make a turn; return its seconds per step."""
        assert self._turn is not None
        seconds = self._turn()
        end_turn()
        return seconds


# Command line, tables and JSON


def bench_arguments(doc: str | None, *, has_against: bool = False) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark.

    Args:
        doc: The docstring of the benchmark, shown by --help.
        has_against: Whether it compares two commits.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: numbers say nothing")
    if has_against:
        parser.add_argument(
            "--against",
            type=Path,
            metavar="PATH",
            help="compare with the checkout of another commit at PATH, in turns, on a subset of "
            "the cases, and fail if an interval of new/old lies wholly above 1.03",
        )
        parser.add_argument(
            "--only", default="", metavar="TEXT", help="cases with TEXT in the name"
        )
        parser.add_argument("--pairs", type=int, default=30, help="with --against; default: 30")
    return parser


def show_rows(rows: Iterable[Row], options: argparse.Namespace) -> None:
    """Print each row, and write those so far, when it is measured; print a table at the end.

    Args:
        rows: The rows; measured while they are taken.
        options: Options of `bench_arguments`.
    """
    found: list[Row] = []
    failure: SystemExit | None = None
    try:
        for row in rows:
            found.append(row)
            where = f"{row.case}  {row.provider}  {row.metric}"
            print(f"{where}  {row.median:,.2f} {row.unit}", file=sys.stderr, flush=True)
            if options.json is not None:
                _write_rows(options.json, found, {"unfinished": True})
    except SystemExit as ended:
        failure = ended
    table = pd.DataFrame([asdict(row) for row in found])
    print(table.to_string(index=False, float_format=lambda value: f"{value:,.2f}"))
    if options.json is not None:
        _write_rows(options.json, found, {})
    if failure is not None:
        raise failure


def _write_rows(file: Path, rows: Sequence[Row], begin: dict[str, Any]) -> None:
    """Write `{"command", "environment", "rows"}` as JSON, with null for nan."""
    from recsys._support.machine import describe_environment

    found = [
        {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(row).items()
        }
        for row in rows
    ]
    record = {
        **begin,
        "command": shlex.join(["python", *sys.argv]),
        "environment": describe_environment(),
        "rows": found,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2) + "\n")
