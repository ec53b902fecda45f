"""Cases of collections without pooling."""

from pathlib import Path

import torch
import torch.distributed as dist
from ranks_models import CPU, OPTIMIZERS, Batch, found_in, of_rank, plan_of, train
from ranks_shared import (
    FEATURES,
    LR,
    NUM_STEPS,
    OUTPUTS,
    ROWS,
    SEQUENCE_DIM,
    SequenceArch,
    first_sequence_rows,
    loss_of,
    pool_in_order,
)
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recsys.distributed import HotColdEmbeddingCollectionSharder, HotColdTrainPipelineSparseDist

torch.fx.wrap("pool_in_order")  # TorchRec's pipelines trace the model
torch.fx.wrap("loss_of")


class Model(nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.ec, self.over = collection, SequenceArch()

    def forward(self, dense, features):
        rows = self.ec(features)
        pooled = {}
        for name in OUTPUTS:  # TorchRec's pipelines trace this
            pooled[name] = pool_in_order(rows[name].values(), rows[name].lengths())
        return self.over(dense, pooled)


class TrainModel(Model):
    """As TorchRec's pipelines call it: a batch in, (loss, logits) out."""

    def forward(self, batch):
        logits = super().forward(batch.dense, batch.features)
        return loss_of(logits, batch.labels), logits.detach()


def shard(world, kind, optimizer, tiers=None, *, model=Model, sharder=None):
    """A model under `DistributedModelParallel`; its tables start with `first_sequence_rows`."""
    configs = [
        EmbeddingConfig(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=SEQUENCE_DIM,
            feature_names=FEATURES[name],
        )
        for name, num_rows in ROWS.items()
    ]
    collection = EmbeddingCollection(tables=configs, device=CPU)
    with torch.no_grad():
        for name, embedding in collection.embeddings.items():
            embedding.weight.copy_(first_sequence_rows(name))
    of_tables, settings = OPTIMIZERS[optimizer]
    apply_optimizer_in_backward(of_tables, collection.parameters(), dict(settings))
    sharder = (sharder or HotColdEmbeddingCollectionSharder)(tiers)
    plan = plan_of(collection, sharder, kind, world)
    return DistributedModelParallel(
        model(collection),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"ec": plan}),
        sharders=[sharder],
    )


def sequences(rank, world, kind, optimizers, folder, bounds):
    """What each optimizer and tier computes."""
    found = {}
    for optimizer in optimizers:
        path = str(Path(folder) / optimizer)
        for name, tiers in {
            "resident": None,
            "host": {"budget": 8_000},
            "file": {"budget": 8_000, "cold_tier": "file", "cold_path": path},
        }.items():
            model = shard(world, kind, optimizer, tiers)
            losses = train(model, bounds)
            num_tiers = len(model.module.ec.fetchers())
            found[f"{optimizer} {name}"] = found_in(model) | {
                "losses": losses,
                "num_tiers": num_tiers,
            }
    return found


def no_samples(rank, world):
    """Rank 0 has no samples in the second step."""
    model = shard(world, "mixed", "sgd")
    for step, bounds in enumerate(([0, 16, 32], [0, 0, 32])):
        train(model, bounds, num_steps=step + 1, first_step=step)


def sequences_in_a_pipeline(rank, world, bounds):
    """A run in our pipeline, detached for an evaluation; how many rows were fetched ahead."""
    model = shard(world, "mixed", "adagrad", {"budget": 14_000}, model=TrainModel)
    optimizer = torch.optim.SGD(model.module.over.parameters(), lr=LR)
    running, losses, num_ahead = HotColdTrainPipelineSparseDist(model, optimizer, CPU), [], 0
    begin, end = bounds[rank], bounds[rank + 1]
    parts = [of_rank(step, begin, end, bounds[-1]) for step in range(NUM_STEPS)]
    batches = iter([Batch(*part) for part in parts])
    for step, (_, _, labels) in enumerate(parts):
        num_ahead += sum(bool(each.num_started) for each in model.module.ec.fetchers())
        if step == 3:
            running.detach().eval()
            with torch.no_grad():
                model(Batch(*parts[0]))
            model.train()
        losses.append(float(loss_of(running.progress(batches), labels)))
    return found_in(model) | {"losses": losses, "num_ahead": num_ahead}
