"""Models, plans and training of the ranks of the tests."""

import warnings

import torch
import torch.distributed as dist
import torch.fx
from ranks_shared import (
    DIM,
    EPS,
    FEATURES,
    KEYS,
    LR,
    NUM_STEPS,
    ROWS,
    OverArch,
    first_rows,
    global_batch,
    is_row_wise,
    loss_of,
    part,
)
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.streamable import Pipelineable

from recsys.distributed import HotColdEmbeddingBagCollectionSharder

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": LR}),
    "adagrad": (torch.optim.Adagrad, {"lr": LR, "eps": EPS}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": LR, "eps": EPS}),
}
CPU = torch.device("cpu")
torch.fx.wrap("loss_of")  # TorchRec's pipelines trace the model


class Model(nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.ebc, self.over = collection, OverArch()

    def forward(self, dense, features):
        return self.over(dense, self.ebc(features))


class Batch(Pipelineable):
    def __init__(self, dense, features, labels):
        self.dense, self.features, self.labels = dense, features, labels

    def to(self, device, non_blocking=False):
        return self

    def record_stream(self, stream):
        pass


class TrainModel(Model):
    """As TorchRec's pipelines call it: a batch in, (loss, logits) out."""

    def forward(self, batch):
        logits = super().forward(batch.dense, batch.features)
        return loss_of(logits, batch.labels), logits.detach()


def make_collection(device="meta", is_weighted=False, pooling=PoolingType.SUM):
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=DIM[name],
            feature_names=FEATURES[name],
            pooling=pooling,
        )
        for name, num_rows in ROWS.items()
    ]
    return EmbeddingBagCollection(
        tables=configs, is_weighted=is_weighted, device=torch.device(device)
    )


def plan_of(collection, sharder, kind, world, owners=None):
    """The plan; `owners` are the ranks of table-wise tables, by default one after the other."""
    shardings = {}
    for number, name in enumerate(ROWS):
        rank = number % world if owners is None else owners[number]
        shardings[name] = row_wise() if is_row_wise(kind, number) else table_wise(rank=rank)
    return construct_module_sharding_plan(collection, shardings, sharder, world, world, "cpu")


def shard(
    world,
    kind="table_wise",
    optimizer="sgd",
    *,
    tiers=None,
    owners=None,
    device="cpu",
    model=Model,
    is_weighted=False,
    is_mean=False,
    output_dtensor=False,
    exchange="pooled",
    sharder=HotColdEmbeddingBagCollectionSharder,
):
    """A model under `DistributedModelParallel`; its tables start with `first_rows`."""
    if sharder is HotColdEmbeddingBagCollectionSharder:
        tiers = {"row_wise_exchange": exchange} | (tiers or {})
    pooling = PoolingType.MEAN if is_mean else PoolingType.SUM
    collection = make_collection(device, is_weighted, pooling)
    if device != "meta":
        with torch.no_grad():
            for name, bag in collection.embedding_bags.items():
                bag.weight.copy_(first_rows(name))
    whole = model(collection)
    kind_of_optimizer, settings = OPTIMIZERS[optimizer]
    apply_optimizer_in_backward(kind_of_optimizer, collection.parameters(), dict(settings))
    sharder = sharder(tiers)
    plan = plan_of(collection, sharder, kind, world, owners)
    env = ShardingEnv(world, dist.get_rank(), dist.group.WORLD, output_dtensor=output_dtensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all rows fit a budget
        return DistributedModelParallel(
            whole, env=env, device=CPU, plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
        )


def of_rank(step, begin, end, total, is_weighted=False):
    """Dense features, sparse features and labels of some samples of a mini-batch."""
    lengths, values, dense, labels, weights = global_batch(step, total, is_weighted)
    of_part, its_lengths, its_weights = part(lengths, values, begin, end, weights)
    features = KeyedJaggedTensor(
        keys=KEYS, values=of_part, lengths=its_lengths, weights=its_weights
    )
    return dense[begin:end], features, labels[begin:end]


def train(model, bounds, num_steps=NUM_STEPS, first_step=0, *, is_weighted=False, optimizer=None):
    """Losses of this rank."""
    rank = dist.get_rank()
    optimizer = optimizer or torch.optim.SGD(model.module.over.parameters(), lr=LR)
    losses = []
    for step in range(first_step, num_steps):
        begin, end = bounds[rank], bounds[rank + 1]
        dense, features, labels = of_rank(step, begin, end, bounds[-1], is_weighted)
        optimizer.zero_grad()
        loss = loss_of(model(dense, features), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def pieces(value):
    """A rank's parts of a sharded tensor: (first row, rows)."""
    if hasattr(value, "local_shards"):
        return [
            (each.metadata.shard_offsets[0], each.tensor.detach().clone())
            for each in value.local_shards()
        ]
    local = value.to_local()
    # Without shards there is still an offset.
    found = zip(local.local_offsets(), local.local_shards(), strict=False)
    return [(offset[0], each.detach().clone()) for offset, each in found]


def found_in(model):
    """Rows and state of this rank, and the dense weights."""
    rows = {
        key.split(".")[-2]: pieces(value)
        for key, value in model.state_dict().items()
        if key.endswith(".weight") and not key.startswith("over.")
    }
    state = {
        name: pieces(value)
        for of_table in model.fused_optimizer.state_dict()["state"].values()
        for name, value in of_table.items()
    }
    dense = {key: value.detach().clone() for key, value in model.module.over.state_dict().items()}
    return {"rows": rows, "state": state, "dense": dense}
