"""Training speed with less fast memory than the tables take.

    recsys     rows in two tiers, trained by `TrainPipeline` at each budget under each schedule
    resident   the same module with every row in fast memory, in a plain loop: the upper bound
    mmap       with --cold-tier file, in place of it: nn.EmbeddingBag over weights mapped from
               files, and torch.optim.SGD; read-ahead is off, without which it is many times slower

This measures the whole training step of the default model. Each provider has its own process, and
they take turns. A budget is a share of the bytes of rows and state; `floor` is the least that these
mini-batches need. Before its first turn a tier is filled by the steps of other mini-batches, so
filling is not measured. The other provider makes the same steps, so that the memory of the two
processes differs only by the tiers. At a share of 1 everything is resident, so this measures the
pipeline itself.

A turn's untimed steps fill the schedule's window, and use up the lead that the rest after the last
turn gave it: there are four for each mini-batch of look-ahead depth.

With --against, tables have at most 200,000 rows unless --max-rows says more, and the cases are two
budgets under two schedules, Hotline, everything resident, and files.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from model import build_dlrm, build_model, kaggle_sizes, read_batch, samples, tables_of
from torch import nn
from turns import (
    Row,
    Worker,
    bench_arguments,
    compare_checkouts,
    end_turn,
    prepare_process,
    ratio,
    rows_by_provider,
    settle,
    show_rows,
    summarize,
    take_turns,
)

from recsys import PooledEmbeddings, TrainPipeline
from recsys.embeddings import SGD, RowWiseAdagrad
from recsys.pipeline import Hotline, LookAhead, Sequential

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from recsys import Batch, JaggedIds
    from recsys.datasets import SyntheticCriteo
    from recsys.embeddings import TableConfig

_SCHEDULES: dict[str, Any] = {
    "sequential": Sequential(),
    "lookahead-1": LookAhead(1),
    "lookahead-2": LookAhead(2),
    "lookahead-4": LookAhead(4),
    "lookahead-8": LookAhead(8),
    "hotline": Hotline(learning_steps=100),
}
_FORMULAS: dict[str, Callable[..., Any]] = {"sgd": SGD, "rowwise_adagrad": RowWiseAdagrad}
_STATE_SIZES = {"sgd": 0, "rowwise_adagrad": 1}
_SHARES = ["floor", "0.02", "0.05", "0.1", "0.2", "0.5", "1"]
_NUM_WARM_UP_ROUNDS = 3
_SAMPLES_OF_TURN = 8192
_WARM_STEPS_PER_DEPTH, _TIMED_STEPS_PER_DEPTH = 4, 2


class _Run(NamedTuple):
    """A model, and the mini-batches that every provider trains on.

    Attributes:
        table_sizes: Rows per table.
        dim: D.
        batch_size: B.
        optimizer: "sgd" or "rowwise_adagrad".
        cold_tier: "host" or "file".
        num_fill_steps: Mini-batches that fill a tier.
        num_warm: Untimed steps of a turn.
        num_timed: Timed steps of a turn, after those.
    """

    table_sizes: tuple[int, ...]
    dim: int
    batch_size: int
    optimizer: str
    cold_tier: str
    num_fill_steps: int
    num_warm: int
    num_timed: int

    def __str__(self) -> str:
        return (
            f"B={self.batch_size},D={self.dim},cold_tier={self.cold_tier},"
            f"optimizer={self.optimizer}"
        )

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(self.table_sizes)

    @property
    def bytes_of_everything(self) -> int:
        """Bytes of all rows and their state."""
        return self.num_rows * (self.dim + _STATE_SIZES[self.optimizer]) * 4

    def source(self, num_steps: int) -> SyntheticCriteo:
        """The mini-batches."""
        return samples(num_steps * self.batch_size, self.table_sizes)

    def floor(self, num_steps: int) -> int:
        """The least budget for the mini-batches: the row map, and a slot for each row of one."""
        from recsys.embeddings.tiers.budget import floor_bytes, slot_bytes

        source = self.source(num_steps)
        most = 0
        for number in range(num_steps):
            ids = read_batch(source, self.batch_size, number).sparse_features.values().numpy()
            by_table = np.sort(ids.reshape(len(self.table_sizes), -1), axis=1)
            most = max(most, int(np.count_nonzero(np.diff(by_table, axis=1))) + len(by_table))
        of_slot = slot_bytes(self.dim, torch.float32, {"state": _STATE_SIZES[self.optimizer]})
        return floor_bytes(self.num_rows, [(most, of_slot)])


def bench_tiers(
    run: _Run,
    shares: Sequence[str],
    schedules: Sequence[str],
    *,
    num_rounds: int,
    cold_path: Path | None,
) -> Iterator[Row]:
    """Measure every budget under every schedule, compared with the other provider.

    Args:
        run: The model and its mini-batches.
        shares: Shares of the bytes of rows and state, or "floor". At 1 everything is resident.
        schedules: Names of schedules; at a share of 1 only "sequential" is used.
        num_rounds: Rounds that count.
        cold_path: Folder for the files of tables, on the disk to measure; None without files.
    """
    num_turns = num_rounds + _NUM_WARM_UP_ROUNDS
    num_steps = run.num_fill_steps + num_turns * (run.num_warm + run.num_timed) + 8
    everything = run.bytes_of_everything
    other = "resident" if cold_path is None else "mmap"
    with Worker(other, _Trainer, run, num_steps, other, None, "sequential", cold_path) as baseline:
        for share in shares:
            is_resident = share != "floor" and float(share) == 1
            if share == "floor":
                budget: int | None = run.floor(num_steps)
            else:
                budget = None if is_resident else int(float(share) * everything)
            for schedule in ["sequential"] if is_resident else schedules:
                case = f"{run},share={share},schedule={schedule}"
                arguments = run, num_steps, "recsys", budget, schedule, cold_path
                with Worker(case, _Trainer, *arguments) as tiered:
                    baseline.call("begin")
                    tiered.wait()
                    calls = {
                        "recsys": partial(tiered.call, "turn"),
                        other: partial(baseline.call, "turn"),
                    }
                    before = tiered.call("waited_seconds")
                    found = take_turns(calls, num_rounds, num_warm_up_rounds=_NUM_WARM_UP_ROUNDS)
                    yield from _rows_of(case, run, found, other)
                    waited = tiered.call("waited_seconds") - before
                    waited /= num_turns * (run.num_warm + run.num_timed)
                    values = tiered.call("values", budget or everything)
                    values["exposed_fetch", "ms"] = 1e3 * waited
                    for (metric, unit), value in values.items():
                        yield summarize("tiers", case, "recsys", metric, unit, [float(value)])


def _rows_of(case: str, run: _Run, seconds: Mapping[str, Sequence[float]], other: str) -> list[Row]:
    """Rows of the times, of the speeds, and of their ratio."""
    times = {name: [1e3 * each for each in spent] for name, spent in seconds.items()}
    speeds = {name: [run.batch_size / each for each in spent] for name, spent in seconds.items()}
    metric = "share_of_resident_speed" if other == "resident" else "speed_over_mmap"
    return [
        *rows_by_provider("tiers", case, "time", "ms", times),
        *rows_by_provider("tiers", case, "speed", "samples/s", speeds),
        ratio(
            "tiers",
            case,
            "recsys",
            metric,
            values=seconds["recsys"],
            baseline=seconds[other],
        ),
    ]


class _Trainer:
    """Lives in a worker: a model, and the steps of its turns."""

    def __init__(
        self,
        run: _Run,
        num_steps: int,
        provider: str,
        budget: int | None,
        schedule: str,
        cold_path: Path | None,
    ) -> None:
        prepare_process()
        torch.manual_seed(0)
        self._run, self._provider = run, provider
        self._source = run.source(num_steps)
        if provider == "mmap":
            assert cold_path is not None
            bags = _MappedBags(tables_of(self._source, run.dim), cold_path)
            of_rows = torch.optim.SGD(bags.parameters(), lr=0.01)
            self._model, self._optimizers = build_dlrm(bags, run.dim, [of_rows])
        else:
            files: dict[str, Any] = {"cold_tier": "file", "cold_path": cold_path}
            self._model, self._optimizers = build_model(
                self._source,
                run.dim,
                _FORMULAS[run.optimizer](lr=0.01),
                budget=budget,
                **(files if budget is not None and run.cold_tier == "file" else {}),
            )
        self._pipeline = TrainPipeline(self._model, self._optimizers, schedule=_SCHEDULES[schedule])
        self._ahead = getattr(_SCHEDULES[schedule], "depth", 0)
        self._queue: deque[Batch] = deque()
        self._iterator = iter(self._queue.popleft, None)
        self._next = self._untrained = 0
        self._train(run.num_fill_steps)
        settle()

    def begin(self) -> None:
        """Begin again with the first mini-batch after those that fill a tier."""
        self._next = self._run.num_fill_steps
        self._queue.clear()
        self._untrained = 0
        settle()

    def turn(self) -> float:
        """Make the next turn's steps; return the mean seconds of a timed one."""
        num_timed = self._run.num_timed
        self._make(self._run.num_warm + num_timed)
        self._train(self._run.num_warm)
        begin = time.perf_counter()
        self._train(num_timed)
        seconds = time.perf_counter() - begin
        end_turn()
        return seconds / num_timed

    def waited_seconds(self) -> float:
        """Seconds that training has waited for rows until now."""
        from recsys.train.build import describe_tiers

        tiers = describe_tiers(self._model)
        return 0.0 if tiers is None else float(tiers["exposed_fetch_seconds"])

    def _make(self, num_steps: int) -> None:
        """Make the mini-batches of the next steps, and those for the window ahead."""
        while self._untrained < num_steps + self._ahead:
            self._queue.append(read_batch(self._source, self._run.batch_size, self._next))
            self._next += 1
            self._untrained += 1

    def _train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._make(1)
            if self._provider == "recsys":
                self._pipeline.progress(self._iterator)
            else:
                loss, _ = self._model(next(self._iterator))
                for optimizer in self._optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in self._optimizers:
                    optimizer.step()
            self._untrained -= 1

    def values(self, budget: int) -> dict[tuple[str, str], float]:
        """The budget, and what the tiers report, by metric and unit."""
        share = budget / self._run.bytes_of_everything
        found: dict[tuple[str, str], float] = {
            ("budget", "bytes"): budget,
            ("budget_share", "ratio"): share,
            ("mean_depth", "mini-batches"): self._pipeline.mean_depth,
        }
        model: Any = self._model.model
        rates = model.sparse_arch.embedding_bag_collection.hit_rates
        if rates is None:
            return found
        return found | {
            ("lookup_hit_rate", "ratio"): rates.lookups,
            ("unique_hit_rate", "ratio"): rates.distinct_rows,
        }


class _MappedBags(nn.Module):
    """One `nn.EmbeddingBag` per table, over weights in a mapped file of their own."""

    def __init__(self, tables: Sequence[TableConfig], folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._tables = list(tables)
        self.embedding_bags = nn.ModuleDict()
        for table in tables:
            shape = table.num_embeddings, table.embedding_dim
            memory = np.memmap(folder / f"mmap_{table.name}.bin", np.float32, "w+", shape=shape)
            memory[:] = 0.01
            memory.flush()
            base: Any = memory.base
            base.madvise(mmap.MADV_RANDOM)
            weight = torch.from_numpy(memory)
            self.embedding_bags[table.name] = nn.EmbeddingBag.from_pretrained(
                weight, freeze=False, mode="sum", sparse=True
            )

    def forward(self, features: JaggedIds) -> PooledEmbeddings:
        keys, dims = features.keys(), [table.embedding_dim for table in self._tables]
        pooled = [
            bag(features[key].values(), features[key].offsets()[:-1])
            for key, bag in self.embedding_bags.items()
        ]
        return PooledEmbeddings(keys, dims, torch.cat(pooled, dim=1))

    def embedding_bag_configs(self) -> list[TableConfig]:
        """The tables, for `DLRM`."""
        return self._tables


class _Case(NamedTuple):
    """A case of --against."""

    run: _Run
    share: float
    schedule: str

    def __str__(self) -> str:
        return f"{self.run},share={self.share:g},schedule={self.schedule}"


_CASES = (
    (0.05, "sequential", "host"),
    (0.05, "lookahead-2", "host"),
    (0.2, "sequential", "host"),
    (0.2, "lookahead-2", "host"),
    (0.2, "hotline", "host"),
    (1, "sequential", "host"),
    (0.2, "lookahead-2", "file"),
)
_FILL_SAMPLES, _NUM_STEPS, _MAX_ROWS = 60 * 1024, 400, 200_000


def make_turn(case: _Case, is_tiny: bool) -> Callable[[], float]:
    """A turn of --against."""
    run = case.run
    if is_tiny:
        run = run._replace(table_sizes=kaggle_sizes(20_000), batch_size=128, num_fill_steps=4)
    budget = None if case.share == 1 else int(case.share * run.bytes_of_everything)
    folder = tempfile.TemporaryDirectory(prefix="recsys-bench-")
    trainer = _Trainer(run, _NUM_STEPS, "recsys", budget, case.schedule, Path(folder.name))

    def turn() -> float:
        assert folder.name  # kept as long as the turn
        return trainer.turn()

    return turn


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__, has_against=True)
    parser.add_argument("--shares", nargs="+", help=f"or floor; default: {' '.join(_SHARES)}")
    parser.add_argument(
        "--schedules", nargs="+", default=["sequential", "lookahead-2"], choices=list(_SCHEDULES)
    )
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--optimizer", default="rowwise_adagrad", choices=list(_FORMULAS))
    parser.add_argument(
        "--cold-path", type=Path, help="measure tables in files, in this folder, with sgd"
    )
    parser.add_argument("--max-rows", type=int, help="of a table")
    options = parser.parse_args()
    if options.against is not None:
        sizes, settings = kaggle_sizes(options.max_rows or _MAX_ROWS), (options.optimizer, "host")
        num_fill = max(8, min(60, _FILL_SAMPLES // options.batch_size))
        run = _Run(sizes, options.dim, options.batch_size, *settings, num_fill, 8, 8)
        cases = [
            _Case(run._replace(cold_tier=tier), share, schedule) for share, schedule, tier in _CASES
        ]
        show_rows(compare_checkouts("tiers", make_turn, cases, options), options)
        return
    depth = max(getattr(_SCHEDULES[name], "depth", 0) for name in options.schedules)
    num_timed = max(
        1 if options.quick else min(16, max(4, _SAMPLES_OF_TURN // options.batch_size)),
        _TIMED_STEPS_PER_DEPTH * depth,
    )
    run = _Run(
        table_sizes=(20_000,) * 26 if options.quick else kaggle_sizes(options.max_rows or 1 << 31),
        dim=options.dim,
        batch_size=128 if options.quick else options.batch_size,
        optimizer="sgd" if options.cold_path else options.optimizer,
        cold_tier="file" if options.cold_path else "host",
        num_fill_steps=5 if options.quick else 1500 * 2048 // options.batch_size,
        num_warm=max(num_timed, _WARM_STEPS_PER_DEPTH * depth),
        num_timed=num_timed,
    )
    shares = options.shares or (["floor", "0.2", "1"] if options.quick else _SHARES)
    rows = bench_tiers(
        run,
        shares,
        options.schedules,
        num_rounds=3 if options.quick else 30,
        cold_path=options.cold_path,
    )
    show_rows(rows, options)


if __name__ == "__main__":
    main()
