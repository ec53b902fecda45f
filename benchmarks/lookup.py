"""Forward, backward and update of the embeddings alone.

    provider   tables and their update
    recsys     HotColdEmbeddingBagCollection and its optimizer, stepped once per mini-batch
    fbgemm     FBGEMM's table-batched operator, its optimizer fused into backward
    torch      nn.EmbeddingBag(sparse=True) and torch.optim, which has no rowwise_adagrad
    stream     a triad over arrays far larger than the caches: the memory bandwidth

Every provider has its own process. A turn first makes as many untimed steps as timed ones, which
evicts from the shared cache what other providers left there. It ends by waiting until its threads
have stopped spinning. Its result is the mean of its timed steps. No process uses a mini-batch
twice. The gradient of the pooled vectors is random and constant.

With --against, tables have at most 64 MB, and the cases are three batch sizes with SGD at
D=16, and the other optimizers and dims at B=2048.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from model import kaggle_sizes, read_batch, samples, tables_of
from turns import (
    Row,
    Worker,
    bench_arguments,
    compare_checkouts,
    end_turn,
    median_of_ratios,
    prepare_process,
    process_memory,
    ratio,
    rows_by_provider,
    settle,
    show_rows,
    steps_of_turn,
    summarize,
    take_turns,
    timed,
)

from recsys import HotColdEmbeddingBagCollection, JaggedIds
from recsys.embeddings import SGD, Adagrad, RowWiseAdagrad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.datasets import SyntheticCriteo

_OTHERS = {
    "sgd": ("fbgemm", "torch"),
    "rowwise_adagrad": ("fbgemm",),
    "adagrad": ("fbgemm", "torch"),
}
_FORMULAS: dict[str, Callable[..., Any]] = {
    "sgd": SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": Adagrad,
}
_NUM_WARM_UP_ROUNDS = 3
# Kaggle's tables at D=16 are 2 GiB. Larger dims cap them, so that three providers fit in memory.
_MAX_UNCAPPED_DIM = 16
_MAX_ROWS = 1_000_000
_FLOAT_BYTES = 4
_STREAM_FLOATS = 1 << 25  # per array, 128 MiB
_POOL_SAMPLES = 1 << 17  # with --against, the samples that a case's turns repeat
_TINY_ROWS = 1000


def bench_lookup(
    batch_sizes: Sequence[int],
    dims: Sequence[int],
    optimizers: Sequence[str],
    *,
    num_rounds: int,
    table_sizes: Sequence[int],
) -> Iterator[Row]:
    """Measure every provider in every case, and compare recsys with the others.

    Args:
        batch_sizes: B of the cases.
        dims: D of the cases. Above 16, tables are capped at a million rows, and ids are taken
            modulo the size.
        optimizers: "sgd", "rowwise_adagrad" or "adagrad".
        num_rounds: Rounds that count; each provider takes one turn in each.
        table_sizes: Rows per table; Kaggle's if empty.
    """
    num_turns = _NUM_WARM_UP_ROUNDS + num_rounds
    num_samples = max(num_turns * _samples_of_turn(size) for size in batch_sizes)
    source = samples(num_samples, table_sizes)
    pairs: dict[tuple[int, str], list[tuple[list[float], list[float]]]] = defaultdict(list)
    for dim, optimizer in product(dims, optimizers):
        most = max(source.table_sizes.values()) if dim <= _MAX_UNCAPPED_DIM else _MAX_ROWS
        sizes = [min(size, most) for size in source.table_sizes.values()]
        others = _OTHERS[optimizer]
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(name, _Provider, name, sizes, dim, optimizer))
                for name in ("recsys", *others)
            }
            workers["stream"] = stack.enter_context(Worker("stream", _Stream))
            for batch_size in batch_sizes:
                case = f"B={batch_size},D={dim},optimizer={optimizer}"
                lookups = _Lookups.of(source, sizes, batch_size, num_turns)
                for worker in workers.values():
                    worker.call("prepare", lookups.ids)
                found: dict[str, list[float]] = take_turns(
                    {name: partial(worker.call, "turn") for name, worker in workers.items()},
                    num_rounds,
                    num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
                )
                yield from _rows_of_case(case, found, others)
                yield from _bandwidth_rows(case, found, lookups, dim, optimizer)
                for other in others:
                    pairs[batch_size, other].append((found["recsys"], found[other]))
            peaks = {
                name: [float(worker.call("peak_memory_bytes"))]
                for name, worker in workers.items()
                if name != "stream"
            }
            case = f"D={dim},optimizer={optimizer}"
            yield from rows_by_provider("lookup", case, "peak_memory", "bytes", peaks)
    for (batch_size, other), of_cases in pairs.items():
        metric = f"speed_over_{other}"
        yield median_of_ratios("lookup", f"B={batch_size}", "recsys", metric, pairs=of_cases)


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
        optimizer: "sgd", "rowwise_adagrad" or "adagrad".
    """
    state_size = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": dim}[optimizer]
    return _FLOAT_BYTES * (3 * num_lookups * dim + 2 * num_distinct * (dim + state_size))


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
            np.mean([sum(len(np.unique(ids_B)) for ids_B in ids_FB) for ids_FB in timed_steps])
            for _, timed_steps in ids
        ]
        return cls(ids, np.array(num_distinct))


def _rows_of_case(
    case: str, found: Mapping[str, Sequence[float]], others: Sequence[str]
) -> list[Row]:
    """Rows of the times and of the ratios between providers."""
    times = {name: [1e3 * s for s in found[name]] for name in ("recsys", *others)}
    ratio_of = partial(ratio, "lookup", case, "recsys")
    return [
        *rows_by_provider("lookup", case, "time", "ms", times),
        *(
            ratio_of(f"speed_over_{other}", values=found["recsys"], baseline=found[other])
            for other in others
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


class _Provider:
    """Lives in a worker: a provider's tables, and the steps of its turns."""

    def __init__(self, name: str, sizes: Sequence[int], dim: int, optimizer: str) -> None:
        from recsys.train.build import build_embeddings

        prepare_process()
        torch.manual_seed(0)
        tables = tables_of(samples(0, sizes), dim)
        if name == "fbgemm":
            from fbgemm import FbgemmEmbeddingBags

            self._module: Any = FbgemmEmbeddingBags(tables, optimizer, 0.01)
            self._optimizer: torch.optim.Optimizer = self._module.optimizer
        else:
            # Not an OptimizerConfig, which needs pydantic.
            config: Any = SimpleNamespace(name=optimizer, lr=0.01, eps=1e-10, betas=(0.9, 0.999))
            self._module, self._optimizer = build_embeddings(name, tables, config)
        self._keys = [name for table in tables for name in table.feature_names]
        self._dim = dim

    def prepare(self, ids: NDArray[np.int64]) -> None:
        """Set the mini-batches of the next turns."""
        self._turns = iter(torch.from_numpy(ids))
        num_features, batch_size = ids.shape[-2:]
        self._gradient = torch.randn(batch_size, num_features * self._dim) / batch_size
        settle()

    def turn(self) -> float:
        """Make the next turn's steps; return the mean seconds of a timed step."""
        untimed_steps, timed_steps = (self._batches(ids) for ids in next(self._turns))
        self._make_steps(untimed_steps)
        begin = time.perf_counter()
        self._make_steps(timed_steps)
        seconds = (time.perf_counter() - begin) / len(timed_steps)
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

    def peak_memory_bytes(self) -> float:
        """The most memory that this process has held."""
        return process_memory()["VmHWM"]


class _Stream:
    """Lives in a worker: computes a[i] = b[i] + 3 c[i] with all threads."""

    def __init__(self) -> None:
        prepare_process()
        self._arrays = [torch.rand(_STREAM_FLOATS) for _ in range(3)]

    def prepare(self, ids: NDArray[np.int64]) -> None:
        """Do nothing: a stream looks up no ids."""

    def turn(self) -> float:
        """Bytes read and written per second."""
        a, b, c = self._arrays
        seconds = timed(partial(torch.add, b, c, alpha=3.0, out=a), num_before=1)()
        settle()
        return 3 * a.nbytes / seconds


class _Case(NamedTuple):
    """A case of --against."""

    batch_size: int
    dim: int
    optimizer: str

    def __str__(self) -> str:
        return f"B={self.batch_size},D={self.dim},optimizer={self.optimizer}"


_CASES = (
    _Case(128, 16, "sgd"),
    _Case(2048, 16, "sgd"),
    _Case(16384, 16, "sgd"),
    _Case(2048, 16, "rowwise_adagrad"),
    _Case(2048, 64, "adagrad"),
    _Case(2048, 128, "sgd"),
)


def make_turn(case: _Case, is_tiny: bool) -> Callable[[], float]:
    """A turn of --against."""
    sizes = kaggle_sizes(_TINY_ROWS if is_tiny else _MAX_ROWS * _MAX_UNCAPPED_DIM // case.dim)
    num_batches = max(4, _POOL_SAMPLES // case.batch_size)
    source = samples(num_batches * case.batch_size, sizes)
    batches = cycle(
        [
            read_batch(source, case.batch_size, number).sparse_features
            for number in range(num_batches)
        ]
    )
    module = HotColdEmbeddingBagCollection(
        tables_of(source, case.dim), optimizer=_FORMULAS[case.optimizer](lr=0.01), auto_apply=False
    )
    gradient = torch.randn(case.batch_size, len(sizes) * case.dim) / case.batch_size

    def step() -> None:
        pooled = module(next(batches)).values()
        assert module.row_optimizer is not None
        module.row_optimizer.zero_grad()
        pooled.backward(gradient)
        module.row_optimizer.step()

    num_steps = steps_of_turn(case.batch_size)
    return timed(step, num_before=num_steps, num_timed=8 * num_steps)


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__, has_against=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048, 16384])
    parser.add_argument("--dims", type=int, nargs="+", help="default: 16 64 128; with --quick 16")
    parser.add_argument("--optimizers", nargs="+", default=list(_OTHERS), choices=list(_OTHERS))
    options = parser.parse_args()
    if options.against is not None:
        rows = compare_checkouts("lookup", make_turn, _CASES, options)
    else:
        rows = bench_lookup(
            options.batch_sizes,
            options.dims or ([16] if options.quick else [16, 64, 128]),
            options.optimizers,
            num_rounds=3 if options.quick else 30,
            table_sizes=[_TINY_ROWS] * 26 if options.quick else (),
        )
    show_rows(rows, options)


if __name__ == "__main__":
    main()
