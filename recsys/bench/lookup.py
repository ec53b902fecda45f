"""`recsys bench lookup`: forward, backward and update of the embeddings alone.

    provider   tables and their update
    recsys     HotColdEmbeddingBagCollection and its optimizer, stepped once per mini-batch
    fbgemm     FBGEMM's table-batched operator, its optimizer fused into backward
    torch      nn.EmbeddingBag(sparse=True) and torch.optim, which has no rowwise_adagrad
    kernels    the two kernels of recsys on the same tables, with only autograd around them
               (`bare_kernels`); the difference to recsys is the time of its Python code
    floor      copies rows out and adds to them in place, and does nothing else (`touched_rows`):
               not a correct update, but nearly all of its memory traffic
    stream     a triad over arrays far larger than the caches: the memory bandwidth

Every provider has its own process, except that `kernels` and `floor` are in that of recsys. In each
round every provider takes a turn, in an order that is drawn for the round. A turn first makes as
many untimed steps as timed ones, which evicts from the shared cache what other providers left
there. It ends by waiting until its threads have stopped spinning. Its result is the mean of its
timed steps. No process uses a mini-batch twice, except that recsys, kernels and floor use the same
ones, a third of the run apart. The gradient of the pooled vectors is random and constant.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from recsys._support.machine import peak_memory_bytes, set_num_threads, tune_allocator
from recsys.batch import JaggedIds
from recsys.bench.parts.bare_kernels import BareKernels, bags_of
from recsys.bench.parts.harness import (
    Row,
    median_of_ratios,
    ratio,
    rows_by_provider,
    steps_of_turn,
    summarize,
    take_turns,
)
from recsys.bench.parts.touched_rows import TouchedRows
from recsys.bench.parts.worker import Worker, end_turn, freeze_garbage, settle
from recsys.config import OptimizerConfig
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.table import TableConfig
from recsys.train.parts.providers import build_embeddings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags

__all__ = ["OPTIMIZERS", "bench_lookup", "step_bytes"]

_OTHERS = {
    "sgd": ("fbgemm", "torch"),
    "rowwise_adagrad": ("fbgemm",),
    "adagrad": ("fbgemm", "torch"),
}
OPTIMIZERS = tuple(_OTHERS)
_OURS = ("recsys", "kernels", "floor")

_NUM_WARM_UP_ROUNDS = 3
# Kaggle's tables at D=16 are 2 GiB. Larger dims cap them, so that three providers fit in memory.
_MAX_UNCAPPED_DIM = 16
_MAX_ROWS = 1_000_000
_FLOAT_BYTES = 4
_STREAM_FLOATS = 1 << 25  # per array, 128 MiB

_B = TypeVar("_B")


def bench_lookup(
    batch_sizes: Sequence[int],
    dims: Sequence[int],
    optimizers: Sequence[str],
    *,
    num_rounds: int,
    table_sizes: Sequence[int] = KAGGLE_TABLE_SIZES,
) -> Iterator[Row]:
    """Measure every provider in every case, and compare recsys with the others.

    Args:
        batch_sizes: B of the cases.
        dims: D of the cases. Above 16, tables are capped at a million rows, and ids are taken
            modulo the size.
        optimizers: Names from `OPTIMIZERS`.
        num_rounds: Rounds that count; each provider takes one turn in each.
        table_sizes: Rows per table.

    Raises:
        ConfigError: a provider does not support such tables.
        MissingDependency: FBGEMM is not installed.
        ChildProcessError: a provider's process failed; the message contains its traceback.
    """
    num_turns = _NUM_WARM_UP_ROUNDS + num_rounds
    source = SyntheticCriteo(
        num_samples=max(7, *(num_turns * _samples_of_turn(size) for size in batch_sizes)),
        table_sizes=table_sizes,
    )
    pairs: dict[tuple[int, str, str], list[tuple[list[float], list[float]]]] = defaultdict(list)
    for dim, optimizer in product(dims, optimizers):
        sizes = _capped(table_sizes, dim)
        others = _OTHERS[optimizer]
        with ExitStack() as stack:
            workers = _start_workers(stack, sizes, dim, optimizer)
            for batch_size in batch_sizes:
                case = f"B={batch_size},D={dim},optimizer={optimizer}"
                lookups = _Lookups.of(source, sizes, batch_size, num_turns)
                found = _measure(workers, case, lookups, num_rounds)
                yield from _rows_of_case(case, found, others)
                yield from _bandwidth_rows(case, found, lookups, dim, optimizer)
                for ours, other in product(_OURS, others):
                    pairs[batch_size, ours, other].append((found[ours], found[other]))
            yield from _peak_memory_rows(workers, f"D={dim},optimizer={optimizer}")
    for (batch_size, ours, other), of_cases in pairs.items():
        metric = f"speed_over_{other}"
        yield median_of_ratios("lookup", f"B={batch_size}", ours, metric, pairs=of_cases)


def step_bytes(num_lookups: int, num_distinct: float, dim: int, optimizer: str) -> float:
    """Bytes that a step with one lookup per feature and sample must read and write.

    Forward reads a row for every lookup and writes it as a pooled vector. Backward reads the
    gradient of every pooled vector. The update reads and writes every distinct row and its state.
    All of these are float32. Ids and intermediate results are not counted. In forward, a row counts
    for each of its lookups, although later ones may hit a cache.

    Args:
        num_lookups: Lookups of the mini-batch.
        num_distinct: Distinct rows among them.
        dim: D.
        optimizer: A name from `OPTIMIZERS`.
    """
    state_size = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": dim}[optimizer]
    return _FLOAT_BYTES * (3 * num_lookups * dim + 2 * num_distinct * (dim + state_size))


def _capped(table_sizes: Sequence[int], dim: int) -> tuple[int, ...]:
    return tuple(size if dim <= _MAX_UNCAPPED_DIM else min(size, _MAX_ROWS) for size in table_sizes)


def _samples_of_turn(batch_size: int) -> int:
    return 2 * steps_of_turn(batch_size) * batch_size


@dataclass(frozen=True)
class _Lookups:
    """The lookups of a case, the same for all providers: R turns of K untimed and K timed steps.

    Attributes:
        ids: (R, 2, K, F, B) int64.
        num_distinct: Mean number of distinct rows in a timed mini-batch of each turn, (R,).
    """

    ids: NDArray[np.int64]
    num_distinct: NDArray[np.float64]

    @classmethod
    def of(
        cls, source: SyntheticCriteo, sizes: Sequence[int], batch_size: int, num_turns: int
    ) -> _Lookups:
        """Take the first samples of a source, with ids modulo the sizes of the tables."""
        batch = source.read(np.arange(num_turns * _samples_of_turn(batch_size)))
        by_feature = batch.sparse_features.values().numpy().reshape(len(sizes), -1)
        by_feature = by_feature % np.array(sizes)[:, None]
        by_step = by_feature.reshape(len(sizes), num_turns, 2, -1, batch_size)
        ids = np.ascontiguousarray(np.moveaxis(by_step, 0, 3))
        num_distinct = [
            np.mean([sum(len(np.unique(ids_B)) for ids_B in ids_FB) for ids_FB in timed])
            for _, timed in ids
        ]
        return cls(ids, np.array(num_distinct))


def _start_workers(
    stack: ExitStack, sizes: Sequence[int], dim: int, optimizer: str
) -> dict[str, Worker]:
    """Start a process for every provider, all at the same time; they end with the stack."""
    case = f"D={dim},optimizer={optimizer}"
    workers = {
        name: stack.enter_context(Worker(name, case, _Provider, name, sizes, dim, optimizer))
        for name in ("recsys", *_OTHERS[optimizer])
    }
    workers["stream"] = stack.enter_context(Worker("stream", case, _Stream))
    for worker in workers.values():
        worker.wait()
    return workers


def _measure(
    workers: Mapping[str, Worker], case: str, lookups: _Lookups, num_rounds: int
) -> dict[str, list[float]]:
    """Seconds per step by provider and round; for the stream, bytes per second."""
    for worker in workers.values():
        worker.case = case
        worker.call("prepare", lookups.ids)
    return take_turns(
        {
            **{name: partial(worker.call, "turn") for name, worker in workers.items()},
            "kernels": partial(workers["recsys"].call, "turn_of_kernels"),
            "floor": partial(workers["recsys"].call, "turn_of_floor"),
        },
        num_rounds,
        num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
    )


def _rows_of_case(
    case: str, found: Mapping[str, Sequence[float]], others: Sequence[str]
) -> list[Row]:
    """Rows of the times and of the ratios between providers."""
    times = {name: [1e3 * s for s in found[name]] for name in (*_OURS, *others)}
    ratio_of = partial(ratio, "lookup", case)
    return [
        *rows_by_provider("lookup", case, "time", "ms", times),
        *(
            ratio_of(ours, f"speed_over_{other}", values=found[ours], baseline=found[other])
            for ours, other in product(_OURS, others)
        ),
    ]


def _bandwidth_rows(
    case: str,
    found: Mapping[str, Sequence[float]],
    lookups: _Lookups,
    dim: int,
    optimizer: str,
) -> list[Row]:
    """Rows of the memory bandwidth and of the share of it that recsys uses."""
    num_lookups = lookups.ids[0, 0, 0].size
    shares = [
        step_bytes(num_lookups, num_distinct, dim, optimizer) / seconds / bandwidth
        for num_distinct, seconds, bandwidth in zip(
            lookups.num_distinct[_NUM_WARM_UP_ROUNDS:],
            found["recsys"],
            found["stream"],
            strict=True,
        )
    ]
    gigabytes = [rate / 1e9 for rate in found["stream"]]
    return [
        summarize("lookup", case, "stream", "bandwidth", "GB/s", gigabytes),
        summarize("lookup", case, "recsys", "bandwidth_share", "ratio", shares),
    ]


def _peak_memory_rows(workers: Mapping[str, Worker], case: str) -> list[Row]:
    peaks = {
        name: [float(worker.call("peak_memory_bytes") or "nan")]
        for name, worker in workers.items()
        if name != "stream"
    }
    return rows_by_provider("lookup", case, "peak_memory", "bytes", peaks)


class _Provider:
    """Lives in a worker: a provider's tables, and the steps of its turns."""

    def __init__(self, name: str, sizes: Sequence[int], dim: int, optimizer: str) -> None:
        set_num_threads(0)
        tune_allocator()
        torch.manual_seed(0)
        self._tables = [
            TableConfig(
                name=f"t_cat_{number}",
                num_embeddings=size,
                embedding_dim=dim,
                feature_names=(f"cat_{number}",),
            )
            for number, size in enumerate(sizes)
        ]
        config = OptimizerConfig(name=optimizer, lr=0.01)
        self._module, self._optimizer = build_embeddings(name, self._tables, config)
        self._keys = [name for table in self._tables for name in table.feature_names]
        freeze_garbage()

    def prepare(self, ids: NDArray[np.int64]) -> None:
        """Set the mini-batches of the next turns."""
        turns = list(torch.from_numpy(ids))
        third = len(turns) // 3
        self._turns, self._turns_of_kernels, self._turns_of_floor = (
            iter(turns[begin:] + turns[:begin]) for begin in (0, third, 2 * third)
        )
        num_features, batch_size = ids.shape[-2:]
        width = num_features * self._tables[0].embedding_dim
        self._gradient = torch.randn(batch_size, width) / batch_size
        settle()

    def turn(self) -> float:
        """Make the next turn's steps; return the mean seconds of a timed step."""
        return self._timed(self._make_steps, *map(self._batches, next(self._turns)))

    def turn_of_kernels(self) -> float:
        """Make a turn with only the two kernels."""
        untimed, timed = map(self._batches, next(self._turns_of_kernels))
        make_steps = partial(self._make_steps_of_kernels, self._bare_kernels)
        return self._timed(make_steps, list(map(bags_of, untimed)), list(map(bags_of, timed)))

    def turn_of_floor(self) -> float:
        """Make a turn that only touches the rows."""
        untimed, timed = map(self._batches, next(self._turns_of_floor))
        make_steps = partial(self._make_steps_of_floor, TouchedRows(self._bare_kernels))
        return self._timed(make_steps, untimed, timed)

    def _timed(
        self, make_steps: Callable[[list[_B]], None], untimed: list[_B], timed: list[_B]
    ) -> float:
        make_steps(untimed)
        begin = time.perf_counter()
        make_steps(timed)
        seconds = (time.perf_counter() - begin) / len(timed)
        end_turn()
        return seconds

    def _batches(self, ids_by_step: Tensor) -> list[JaggedIds]:
        batches = [JaggedIds.from_one_hot(self._keys, ids_FB) for ids_FB in ids_by_step]
        for features in batches:
            features.offsets()  # made when first asked for, and only the others ask, in their steps
        return batches

    def _make_steps(self, batches: list[JaggedIds]) -> None:
        for features in batches:
            pooled = self._module(features).values()
            self._optimizer.zero_grad()
            pooled.backward(self._gradient)
            self._optimizer.step()

    def _make_steps_of_kernels(self, kernels: BareKernels, batches: list[Bags]) -> None:
        for bags in batches:
            kernels.look_up(bags).backward(self._gradient)  # type: ignore[no-untyped-call]
            kernels.update()

    def _make_steps_of_floor(self, floor: TouchedRows, batches: list[JaggedIds]) -> None:
        for features in batches:
            floor(features).backward(self._gradient)
            floor.update()

    @cached_property
    def _bare_kernels(self) -> BareKernels:
        """Kernels on the module's tables, after one update of each, which makes its state."""
        assert isinstance(self._module, HotColdEmbeddingBagCollection)
        [features] = self._batches(torch.zeros(1, len(self._keys), 1, dtype=torch.int64))
        self._module(features).values().sum().backward()
        self._optimizer.step()
        return BareKernels(self._module, features)

    def peak_memory_bytes(self) -> int | None:
        """The most memory that this process has held."""
        return peak_memory_bytes()


class _Stream:
    """Lives in a worker: computes a[i] = b[i] + 3 c[i] with all threads."""

    def __init__(self) -> None:
        set_num_threads(0)
        self._arrays = [torch.rand(_STREAM_FLOATS) for _ in range(3)]

    def prepare(self, ids: NDArray[np.int64]) -> None:
        """Do nothing: a stream looks up no ids."""

    def turn(self) -> float:
        """Bytes read and written per second."""
        a, b, c = self._arrays
        torch.add(b, c, alpha=3.0, out=a)
        begin = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        seconds = time.perf_counter() - begin
        settle()
        return 3 * a.nbytes / seconds
