"""What the processes of journey 7 do, and how they are started without importing all anew."""

import os
import socket

import torch
import torch.distributed as dist
from torch import nn

from recsys.cli import main
from recsys.datasets import BatchLoader, SyntheticCriteo
from recsys.distributed import HotColdEmbeddingBagCollectionSharder
from tests.forks import Fork
from tests.journeys.journey import NUM_ROWS

WORLD = 2


def start(function, *arguments):
    """Start a function in processes with the environment that launchers make."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Fork(_as_rank, rank, port, function, *arguments) for rank in range(WORLD)]


def on_ranks(function, *arguments):
    """The same, to the end; all must succeed."""
    started = start(function, *arguments)
    errors = [rank.end()[1] for rank in started]
    assert [rank.process.exitcode for rank in started] == [0] * WORLD, "\n".join(errors)


def _as_rank(rank, port, function, *arguments):
    known = {
        **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    }
    os.environ.update({key: str(value) for key, value in known.items()})
    torch.set_num_threads(1)
    function(*arguments)


def command(words):
    """`recsys WORDS` on this rank."""
    raise SystemExit(main(words))


def sharded(file, exchange, tiers):
    """A program of TorchRec with tables divided by rows; saves losses and rows of this rank."""
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim import RowWiseAdagrad

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = SyntheticCriteo(num_samples=NUM_ROWS, table_sizes=[1000, 400, 60])
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=size, embedding_dim=8, feature_names=[name]
            )
            for name, size in data.table_sizes.items()
        ]
    )
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    sharder = HotColdEmbeddingBagCollectionSharder({"row_wise_exchange": exchange, **tiers})
    by_rows = dict.fromkeys(data.table_sizes, row_wise())
    plan = construct_module_sharding_plan(tables, by_rows, sharder, WORLD, WORLD, "cpu")
    model = DistributedModelParallel(
        nn.ModuleDict({"tables": tables, "top": nn.Linear(3 * 8, 1)}),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    ).module
    losses = []
    for batch in BatchLoader(data, "train", 64, shuffle=True, seed=0):
        mine = torch.arange(rank, len(batch.labels), WORLD)
        pooled = model["tables"](batch.sparse_features.select(mine).to_torchrec())
        logits = model["top"](torch.cat([pooled[name] for name in data.table_sizes], 1))
        loss = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], batch.labels[mine])
        loss.backward()
        losses.append(loss.detach())
    rates = model["tables"].hit_rates
    rows = [
        value.local_shards()[0].tensor.clone() for value in model["tables"].state_dict().values()
    ]
    found = {"losses": torch.stack(losses), "rows": torch.cat(rows)}
    torch.save(found if rates is None else {"hits": rates.lookups, **found}, f"{file}-{rank}")
    dist.destroy_process_group()
