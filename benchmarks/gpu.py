"""Embeddings and training steps on one CUDA GPU, beside PyTorch and FBGEMM.

    lookup    forward, backward and update of the embeddings alone, every row on the device
    step      a training step of the default model, with a share of the rows on the device

    provider   rows
    resident   recsys, all on the device: the ceiling of a step
    recsys     in two tiers: a share on the device, the others in the host's memory
    torch      nn.EmbeddingBag(sparse=True) and torch.optim, all on the device
    fbgemm     FBGEMM's table-batched operator: all on the device for a lookup; for a step in
               managed memory, with a cache of the same share, filled for the next mini-batch
               between forward and backward, as TorchRec's pipeline with prefetching does

All have Criteo Kaggle's 26 tables (16.1 GiB at D=128), SGD, and take turns in one process. A turn's
untimed steps fill the window of a schedule, and the caches of the device. Providers without slots
train on the same few mini-batches again and again; slots keep rows, so a schedule gets new ones.

With --device cpu --quick the program can be tried without a GPU; FBGEMM is then left out.
"""

from __future__ import annotations

import warnings
from collections import deque
from functools import partial
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

import torch
from model import build_dlrm, build_model, kaggle_sizes, read_batch, samples, tables_of
from torch import nn
from turns import (
    Row,
    bench_arguments,
    prepare_process,
    ratio,
    rows_by_provider,
    show_rows,
    summarize,
    take_turns,
    timed,
)

from recsys import Batch, HotColdEmbeddingBagCollection, PooledEmbeddings, TrainPipeline
from recsys.embeddings import SGD
from recsys.pipeline import Hotline, LookAhead, Sequential

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from recsys import JaggedIds
    from recsys.datasets import SyntheticCriteo
    from recsys.embeddings import TableConfig

_SCHEDULES: dict[str, Any] = {
    "sequential": Sequential(),
    "lookahead-1": LookAhead(1),
    "lookahead-2": LookAhead(2),
    "hotline": Hotline(learning_steps=100),
}
_LEARNING_RATE = 0.01
_NUM_CYCLED = 8  # mini-batches that providers without slots train on


class _Bench:
    """The tables and mini-batches of one D and B.

    Args:
        table_sizes: Rows per table.
        dim: D.
        batch_size: B.
        device: Where models train.
        num_rounds: Rounds that count.
        num_fill_samples: Samples that fill slots before the first turn.
    """

    def __init__(
        self,
        table_sizes: Sequence[int],
        dim: int,
        batch_size: int,
        device: torch.device,
        num_rounds: int,
        num_fill_samples: int,
    ) -> None:
        self._dim, self._batch_size, self._device = dim, batch_size, device
        self._num_rounds, self._num_fill = num_rounds, -(-num_fill_samples // batch_size)
        self._source: SyntheticCriteo = samples(1 << 30, table_sizes)
        self._everything = sum(table_sizes) * dim * 4
        self._case = f"B={batch_size},D={dim}"
        self._cycled = [self._batch(number) for number in range(_NUM_CYCLED)]
        self._num_timed = max(4, min(16, 2**18 // batch_size))

    def lookup(self) -> Iterator[Row]:
        """Measure the embeddings alone."""
        case = f"{self._case},part=lookup"
        tables = tables_of(self._source, self._dim)
        ours = HotColdEmbeddingBagCollection(
            tables, device=self._device, optimizer=SGD(lr=_LEARNING_RATE), auto_apply=False
        )
        plain = _PlainBags(tables, self._device)
        assert ours.row_optimizer is not None
        providers: dict[str, tuple[nn.Module, torch.optim.Optimizer | None]] = {
            "recsys": (ours, ours.row_optimizer),
            "torch": (plain, torch.optim.SGD(plain.parameters(), lr=_LEARNING_RATE)),
        }
        if self._device.type == "cuda":
            providers["fbgemm"] = _FbgemmBags(tables, self._device, None), None
        gradient = torch.randn(self._batch_size, len(tables) * self._dim, device=self._device)
        steps = {
            name: self._lookup_step(module, optimizer, gradient / self._batch_size)
            for name, (module, optimizer) in providers.items()
        }
        seconds = self._turns(steps)
        times = {name: [1e3 * each for each in spent] for name, spent in seconds.items()}
        yield from rows_by_provider("gpu", case, "time", "ms", times)
        for name in steps:
            if name != "recsys":
                yield ratio(
                    "gpu",
                    case,
                    "recsys",
                    f"speed_over_{name}",
                    values=seconds["recsys"],
                    baseline=seconds[name],
                )

    def _lookup_step(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, gradient: torch.Tensor
    ) -> Callable[[], None]:
        following = cycle(self._cycled)

        def step() -> None:
            pooled = module(next(following).sparse_features).values()
            if optimizer is not None:
                optimizer.zero_grad()
            pooled.backward(gradient)
            if optimizer is not None:
                optimizer.step()

        return step

    def steps(self, share: float, schedules: Sequence[str], *, has_others: bool) -> Iterator[Row]:
        """Measure training steps with a share of the rows on the device.

        Args:
            share: The budget, as a share of the bytes of all rows.
            schedules: Names of schedules.
            has_others: Whether `torch` and `fbgemm` take turns, too.
        """
        resident, _ = self._pipeline(None, "sequential")
        steps: dict[tuple[str, str], Callable[[], None]] = {("resident", ""): resident}
        hit_rates: dict[tuple[str, str], Callable[[], float]] = {}
        for schedule in schedules:
            name = "recsys", schedule
            steps[name], hit_rates[name] = self._pipeline(int(share * self._everything), schedule)
        if has_others:
            plain = _PlainBags(tables_of(self._source, self._dim), self._device)
            of_rows = torch.optim.SGD(plain.parameters(), lr=_LEARNING_RATE)
            model, optimizers = build_dlrm(plain, self._dim, [of_rows], device=self._device)
            steps["torch", ""] = self._plain_step(model, optimizers)
            if self._device.type == "cuda":
                steps["fbgemm", ""] = self._fbgemm_step(share)
        peaks = dict.fromkeys(steps, 0.0)
        seconds = self._turns({name: self._peak(step, name, peaks) for name, step in steps.items()})
        for name, spent in seconds.items():
            provider, schedule = name
            case = f"{self._case},part=step,share={share:g}"
            if schedule:
                case += f",schedule={schedule}"
            about = "gpu", case, provider
            yield summarize(*about, "time", "ms", [1e3 * each for each in spent])
            speeds = [self._batch_size / each for each in spent]
            yield summarize(*about, "throughput", "samples/s", speeds)
            yield summarize(*about, "peak_memory", "bytes", [peaks[name]])
            if provider != "resident":
                baseline = seconds["resident", ""]
                metric = "share_of_resident_speed"
                yield ratio(*about, metric, values=spent, baseline=baseline)
            if name in hit_rates:
                yield summarize(*about, "lookup_hit_rate", "ratio", [hit_rates[name]()])

    def _turns(self, steps: dict[Any, Callable[[], None]]) -> dict[Any, list[float]]:
        turns = {
            name: timed(step, num_before=8, num_timed=self._num_timed, device=str(self._device))
            for name, step in steps.items()
        }
        return take_turns(turns, self._num_rounds, num_warm_up_rounds=1)

    def _peak(
        self, step: Callable[[], None], name: tuple[str, str], peaks: dict[tuple[str, str], float]
    ) -> Callable[[], None]:
        """A step that keeps the largest growth of the device's memory within it."""
        if self._device.type != "cuda":
            return step

        def watched() -> None:
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            step()
            grown = torch.cuda.max_memory_allocated(self._device) - before
            peaks[name] = max(peaks[name], float(grown))

        return watched

    def _pipeline(
        self, budget: int | None, schedule: str
    ) -> tuple[Callable[[], None], Callable[[], float]]:
        """A step under a schedule, and the hit rate until now."""
        model, optimizers = build_model(
            self._source, self._dim, SGD(lr=_LEARNING_RATE), device=self._device, budget=budget
        )
        model.to(self._device)
        depth = getattr(_SCHEDULES[schedule], "depth", 0)
        queue: deque[Batch] = deque()
        numbers = cycle(range(_NUM_CYCLED)) if budget is None else count()

        def step() -> None:
            while len(queue) <= depth:
                number = next(numbers)
                queue.append(self._cycled[number] if budget is None else self._batch(number))
            pipeline.progress(iterator)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of too few slots
            pipeline = TrainPipeline(model, optimizers, schedule=_SCHEDULES[schedule])
            iterator = iter(queue.popleft, None)
            for _ in range(0 if budget is None else self._num_fill):
                step()
        return step, partial(_hit_rate, model)

    def _plain_step(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Callable[[], None]:
        following = cycle(self._cycled)

        def step() -> None:
            loss, _ = model(next(following))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()

        return step

    def _fbgemm_step(self, share: float) -> Callable[[], None]:
        bags = _FbgemmBags(tables_of(self._source, self._dim), self._device, share)
        model, [of_dense] = build_dlrm(bags, self._dim, [], device=self._device)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        numbers = count()
        batches = deque([self._batch(next(numbers))])

        def step() -> None:
            batch = batches.popleft()
            batches.append(self._batch(next(numbers)))
            current = torch.cuda.current_stream()
            of_dense.zero_grad()
            current.wait_stream(side)
            loss, _ = model(batch)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                ids = batches[0].sparse_features
                bags.table_batched.prefetch(ids.values(), ids.offsets(), forward_stream=current)
            batches[0].record_stream(side)
            loss.backward()
            of_dense.step()

        for _ in range(self._num_fill):
            step()
        return step

    def _batch(self, number: int) -> Batch:
        batch = read_batch(self._source, self._batch_size, number).to(self._device)
        batch.sparse_features.offsets()  # made when first asked for
        return batch


def _hit_rate(model: Any) -> float:
    rates = model.model.sparse_arch.embedding_bag_collection.hit_rates
    return 1.0 if rates is None else float(rates.lookups)


class _OneHotBags(nn.Module):
    """Tables with one lookup per feature and sample, for `DLRM`."""

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        super().__init__()
        self._tables = list(tables)

    def embedding_bag_configs(self) -> list[TableConfig]:
        """The tables, in order."""
        return self._tables

    def _pooled(self, values: torch.Tensor) -> PooledEmbeddings:
        keys = [name for table in self._tables for name in table.feature_names]
        dims = [table.embedding_dim for table in self._tables]
        return PooledEmbeddings(keys, dims, values)


class _PlainBags(_OneHotBags):
    """One `nn.EmbeddingBag` per table on the device."""

    def __init__(self, tables: Sequence[TableConfig], device: torch.device) -> None:
        super().__init__(tables)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(
                table.num_embeddings, table.embedding_dim, mode="sum", sparse=True, device=device
            )
            for table in tables
        )

    def forward(self, features: JaggedIds) -> PooledEmbeddings:
        ids = features.values().view(len(self.bags), -1, 1)
        pooled = [bag(each) for bag, each in zip(self.bags, ids, strict=True)]
        return self._pooled(torch.cat(pooled, dim=1))


class _FbgemmBags(_OneHotBags):
    """FBGEMM's operator; with a share in managed memory, with a cache of that share."""

    def __init__(
        self, tables: Sequence[TableConfig], device: torch.device, share: float | None
    ) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        super().__init__(tables)
        location = EmbeddingLocation.DEVICE if share is None else EmbeddingLocation.MANAGED_CACHING
        cache = {} if share is None else {"cache_load_factor": share, "prefetch_pipeline": True}
        self.table_batched = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (table.num_embeddings, table.embedding_dim, location, ComputeDevice.CUDA)
                for table in tables
            ],
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=_LEARNING_RATE,
            pooling_mode=PoolingMode.SUM,
            stochastic_rounding=False,
            device=device,
            **cache,
        )

    def forward(self, features: JaggedIds) -> PooledEmbeddings:
        return self._pooled(self.table_batched(features.values(), features.offsets()))


def bench_gpu(bench: _Bench, shares: Sequence[float], schedules: Sequence[str]) -> Iterator[Row]:
    """Measure lookups, then steps at each share; the first beside all other providers."""
    yield from bench.lookup()
    for number, share in enumerate(shares):
        yield from bench.steps(share, schedules, has_others=number == 0)


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16384)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.1, 0.05, 0.2, 0.5], help="of all rows"
    )
    parser.add_argument("--schedules", nargs="+", default=list(_SCHEDULES), choices=_SCHEDULES)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-rows", type=int, default=1 << 31, help="of a table")
    options = parser.parse_args()
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu is for trying the program; add --quick")
    prepare_process()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", 0)
    if options.quick:
        bench = _Bench((900, 800, 70, 3), 8, 64, device, 2, 512)
        show_rows(bench_gpu(bench, [0.5], options.schedules), options)
        return
    bench = _Bench(
        kaggle_sizes(options.max_rows),
        options.dim,
        options.batch_size,
        device,
        options.rounds,
        3_000_000,
    )
    show_rows(bench_gpu(bench, options.shares, options.schedules), options)


if __name__ == "__main__":
    main()
