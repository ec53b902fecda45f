"""Tables on several processes, beside TorchRec with FBGEMM's kernels.

    provider          sharder                                  rows in fast memory
    recsys            HotColdEmbeddingBagCollectionSharder     all
    recsys_budget     the same with a budget                   some
    recsys_pooled     the first, which exchanges parts         all
    torchrec_fbgemm   TorchRec's, with FBGEMM's kernels        all

The plans are table-wise and row-wise. Row-wise, `recsys` exchanges distinct rows, `recsys_pooled`
parts of pooled vectors; table-wise, there is nothing to choose. W processes on this machine, with
one thread each, exchange through gloo. In every process the tables of all providers live side by
side, with the same first rows and the same optimizer (row-wise Adagrad), and the providers take
turns. A round's time is that of its slowest rank.

A step looks up a rank's samples, multiplies the pooled vectors by one fixed linear layer, goes
backward from the binary cross entropy, and updates the rows in backward. So the time of a step is
that of the tables and their exchanges. `loopback_sent` is what the system counted in the same
turns: everything that the processes send each other, headers included.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from model import kaggle_sizes, samples
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from turns import (
    Row,
    Worker,
    bench_arguments,
    end_turn,
    prepare_process,
    ratio,
    rows_by_provider,
    show_rows,
    steps_of_turn,
    summarize,
    take_turns,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

_TORCHREC = "torchrec_fbgemm"
_MAX_TABLE_BYTES = 32_000_000
_NUM_BATCHES = 32
_NUM_WARM_UP_ROUNDS = 5  # a budget's slots fill in them
_TIMEOUT = timedelta(minutes=5)
_DEVICES = Path("/proc/net/dev")


class _Provider(NamedTuple):
    """A sharder, with its settings and the plan of all tables.

    Attributes:
        name: The provider's name in results.
        plan: "table_wise" or "row_wise".
        exchange: What recsys exchanges row-wise; empty for its default.
        has_budget: Whether a rank has a budget.
    """

    name: str
    plan: str
    exchange: str = ""
    has_budget: bool = False


_PROVIDERS = (
    _Provider("recsys", "table_wise"),
    _Provider("recsys_budget", "table_wise", has_budget=True),
    _Provider(_TORCHREC, "table_wise"),
    _Provider("recsys", "row_wise", "rows"),
    _Provider("recsys_budget", "row_wise", "rows", has_budget=True),
    _Provider("recsys_pooled", "row_wise", "pooled"),
    _Provider(_TORCHREC, "row_wise"),
)


class _Case(NamedTuple):
    """What the ranks train.

    Attributes:
        world_size: W.
        batch_size: B, of all ranks together.
        dim: D.
        table_sizes: Rows per table.
        budget_share: Fast memory of a rank with a budget, as a share of the bytes of its rows.
    """

    world_size: int
    batch_size: int
    dim: int
    table_sizes: Sequence[int]
    budget_share: float


def bench_distributed(cases: Sequence[_Case], *, num_rounds: int) -> Iterator[Row]:
    """Measure all providers at each number of processes.

    Args:
        cases: One for each number of processes.
        num_rounds: Rounds that count; each provider takes one turn in each.
    """
    for case in cases:
        name = (
            f"W={case.world_size},B={case.batch_size},D={case.dim},max_rows={max(case.table_sizes)}"
        )
        numbers = range(len(_PROVIDERS))
        with ExitStack() as stack:
            # The threads end last: they wait for processes, which `Worker` ends.
            threads = stack.enter_context(ThreadPoolExecutor(case.world_size))
            # The ranks meet at this store as long as they live. The system chooses a free port.
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            workers = [
                stack.enter_context(Worker(f"rank {rank}", _Rank, rank, store.port, case))
                for rank in range(case.world_size)
            ]
            on_all = partial(_on_all, threads, workers)
            turns = take_turns(
                {number: partial(_turn, on_all, number) for number in numbers},
                num_rounds,
                num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
            )
        for plan in ("table_wise", "row_wise"):
            of_plan = {
                provider.name: turns[number]
                for number, provider in enumerate(_PROVIDERS)
                if provider.plan == plan
            }
            yield from _rows_of_plan(f"{name},plan={plan}", of_plan, case.world_size)


def _on_all(
    threads: ThreadPoolExecutor, workers: Sequence[Worker], method: str, *arguments: Any
) -> list[Any]:
    """Call a method of all ranks at once, since all must call a collective; results by rank."""
    futures = [threads.submit(worker.call, method, *arguments) for worker in workers]
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    return [future.result() for future in futures]


class _Turn(NamedTuple):
    """A turn of all ranks: seconds per step of the slowest, mean loss, bytes over the loopback."""

    seconds: float
    loss: float
    loopback: float


def _turn(on_all: Callable[..., list[tuple[float, float]]], number: int) -> _Turn:
    before = _loopback_bytes()
    found = on_all("turn", number)
    seconds, losses = zip(*found, strict=True)
    return _Turn(max(seconds), float(np.mean(losses)), _loopback_bytes() - before)


def _loopback_bytes() -> float:
    """Bytes that this machine has sent to itself; NaN if it does not say."""
    if not _DEVICES.is_file():
        return float("nan")
    lines = (line.partition(":") for line in _DEVICES.read_text().splitlines())
    return sum(int(numbers.split()[8]) for device, _, numbers in lines if device.strip() == "lo")


def _rows_of_plan(case: str, turns: Mapping[str, Sequence[_Turn]], world_size: int) -> list[Row]:
    """Times, speeds over TorchRec, the loss of the last step, and bytes by process and step."""
    seconds = {name: [turn.seconds for turn in found] for name, found in turns.items()}
    times = {name: [1e3 * each for each in spent] for name, spent in seconds.items()}
    losses = {name: [found[-1].loss] for name, found in turns.items()}
    batch_size = int(dict(pair.split("=") for pair in case.split(","))["B"])
    num_steps = 2 * steps_of_turn(batch_size)  # timed and untimed
    rows = rows_by_provider("distributed", case, "time", "ms", times)
    rows += rows_by_provider("distributed", case, "loss", "nats", losses)
    rows += [
        summarize(
            "distributed",
            case,
            name,
            "loopback_sent",
            "bytes",
            [turn.loopback / num_steps / world_size for turn in found],
        )
        for name, found in turns.items()
    ]
    return rows + [
        ratio(
            "distributed",
            case,
            name,
            f"speed_over_{_TORCHREC}",
            values=spent,
            baseline=seconds[_TORCHREC],
        )
        for name, spent in seconds.items()
        if name != _TORCHREC
    ]


class _Rank:
    """Lives in a worker: a rank's share of the tables of all providers, and its steps."""

    def __init__(self, rank: int, port: int, case: _Case) -> None:
        prepare_process()
        torch.set_num_threads(1)
        # TorchRec calls functions of torch by their old names.
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        store = TCPStore("localhost", port, is_master=False, timeout=_TIMEOUT)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=case.world_size, timeout=_TIMEOUT
        )
        self._case = case
        self._keys = [f"cat_{number}" for number in range(len(case.table_sizes))]
        self._sharded = [_shard(provider, self._keys, case) for provider in _PROVIDERS]
        self._next = [0] * len(_PROVIDERS)
        drawn = torch.randn(len(self._keys), case.dim, generator=torch.Generator().manual_seed(0))
        self._weights = dict(zip(self._keys, drawn, strict=True))
        source = samples(_NUM_BATCHES * case.batch_size, case.table_sizes)
        share = case.batch_size // case.world_size
        firsts = np.arange(_NUM_BATCHES)[:, np.newaxis] * case.batch_size + rank * share
        batch = source.read((firsts + np.arange(share)).ravel())
        ids = batch.sparse_features.values().view(len(case.table_sizes), _NUM_BATCHES, share)
        self._ids = ids.transpose(0, 1).contiguous()
        self._labels = batch.labels.view(_NUM_BATCHES, share)
        gc.disable()
        gc.collect()
        gc.freeze()

    def turn(self, number: int) -> tuple[float, float]:
        """Make untimed and then timed steps of a provider; all ranks call it at once.

        Args:
            number: The provider's place.
        """
        num_steps = steps_of_turn(self._case.batch_size)
        for batch in self._batches(number, num_steps):
            self._step(number, *batch)
        batches = self._batches(number, num_steps)
        dist.barrier()
        begin = time.perf_counter()
        for batch in batches:
            loss = self._step(number, *batch)
        seconds = (time.perf_counter() - begin) / num_steps
        end_turn()
        return seconds, float(loss)

    def _batches(self, number: int, num_steps: int) -> list[tuple[Any, Tensor]]:
        from recsys import JaggedIds

        found = []
        for _ in range(num_steps):
            place = self._next[number] % _NUM_BATCHES
            self._next[number] += 1
            features = JaggedIds.from_one_hot(self._keys, self._ids[place]).to_torchrec()
            found.append((features, self._labels[place]))
        return found

    def _step(self, number: int, features: Any, labels: Tensor) -> Tensor:
        pooled = self._sharded[number](features).wait()
        # The columns are in the order of the plan.
        weight = torch.cat([self._weights[key] for key in pooled.keys()])  # noqa: SIM118
        loss = nn.functional.binary_cross_entropy_with_logits(pooled.values() @ weight, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _shard(provider: _Provider, keys: Sequence[str], case: _Case) -> Any:
    """This rank's part of a collection. Table-wise, rank `n` has tables `n`, `n + W`, ..."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv

    from recsys.distributed import HotColdEmbeddingBagCollectionSharder

    rank, world_size = dist.get_rank(), dist.get_world_size()
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{key}", num_embeddings=size, embedding_dim=case.dim, feature_names=[key]
            )
            for key, size in zip(keys, case.table_sizes, strict=True)
        ],
        device=torch.device("meta"),
    )
    settings: dict[str, Any] = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.01,
        "eps": 1e-8,
    }
    if provider.exchange:
        settings["row_wise_exchange"] = provider.exchange
    if provider.has_budget:
        num_rows = _rows_of_rank(rank, provider.plan, case)
        settings["budget"] = int(case.budget_share * num_rows * case.dim * 4)
    kind = (
        EmbeddingBagCollectionSharder
        if provider.name == _TORCHREC
        else HotColdEmbeddingBagCollectionSharder
    )
    sharder = kind(fused_params=settings)
    rules = {
        f"t_{key}": row_wise(compute_kernel="fused")
        if provider.plan == "row_wise"
        else table_wise(rank=number % world_size, compute_kernel="fused")
        for number, key in enumerate(keys)
    }
    plan = construct_module_sharding_plan(collection, rules, sharder, world_size, world_size, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all rows fit a budget
        sharded: Any = sharder.shard(
            collection, plan, ShardingEnv(world_size, rank, dist.group.WORLD), torch.device("cpu")
        )
    for table, sharded_rows in enumerate(sharded.state_dict().values()):
        for part in sharded_rows.local_shards():
            first = part.metadata.shard_offsets[0]
            part.tensor.copy_(_first_rows(table, first, *part.tensor.shape))
    return sharded


def _rows_of_rank(rank: int, plan: str, case: _Case) -> int:
    if plan == "table_wise":
        return sum(case.table_sizes[rank :: case.world_size])
    blocks = [(size, -(-size // case.world_size)) for size in case.table_sizes]
    return sum(max(0, min(block, size - rank * block)) for size, block in blocks)


def _first_rows(table: int, first: int, num_rows: int, dim: int) -> Tensor:
    """Rows (num_rows, D) in [-0.05, 0.05) of a table, from row `first` on, for every provider.

    They are a cheap hash of their place, because drawing them would take longer than the steps.
    """
    rows = torch.arange(first, first + num_rows).unsqueeze(1) * 7919
    columns = torch.arange(dim) * 104_729
    return (rows + columns + table * 1_299_709).remainder(1009).float() / 10_090 - 0.05


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch-size", type=int, default=16384, help="over all processes")
    parser.add_argument("--dim", type=int, default=16, help="a multiple of 4")
    parser.add_argument("--budget-share", type=float, default=0.2)
    options = parser.parse_args()
    sizes = kaggle_sizes(20_000 if options.quick else _MAX_TABLE_BYTES // (4 * options.dim))
    batch_size = 512 if options.quick else options.batch_size
    cases = [
        _Case(world_size, batch_size, options.dim, sizes, options.budget_share)
        for world_size in ([2] if options.quick else options.world_sizes)
    ]
    show_rows(bench_distributed(cases, num_rounds=3 if options.quick else 30), options)


if __name__ == "__main__":
    main()
