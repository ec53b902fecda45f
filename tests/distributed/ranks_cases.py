"""What the ranks of the tests do; `ranks_serve.py` calls these functions, on each rank."""

import os
import runpy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks_models import (
    CPU,
    OPTIMIZERS,
    Batch,
    Model,
    TrainModel,
    found_in,
    make_collection,
    of_rank,
    shard,
    train,
)
from ranks_shared import (
    DIM,
    FEATURES,
    LIMITS,
    LR,
    NUM_STEPS,
    ROWS,
    first_rows,
    loss_of,
)
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsys.distributed import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdTrainPipelineSparseDist,
    HotPlanStorageEstimator,
)
from recsys.embeddings import Adagrad, PopularityProfile, TableConfig, plan_hot_rows

BOUNDS = {2: [0, 16, 32], 4: [0, 8, 16, 24, 32]}
# Bytes of each rank: for a few slots, for more of them, and for more than all rows.
BUDGETS = {"few": 6_000, "some": 9_000, "everything": 4 * 2**20}


def budgets(rank, world, kind, optimizer, folder, exchange):
    """What each budget and tier computes."""
    runs = {"resident": None}
    for name, budget in BUDGETS.items():
        runs[f"{name} host"] = {"budget": budget}
        path = str(Path(folder) / name)
        runs[f"{name} file"] = {"budget": budget, "cold_tier": "file", "cold_path": path}
    found = {}
    for name, tiers in runs.items():
        model = shard(world, kind, optimizer, tiers=tiers, exchange=exchange)
        losses = train(model, BOUNDS[world])
        num_tiers = len(model.module.ebc.fetchers())
        found[name] = found_in(model) | {"losses": losses, "num_tiers": num_tiers}
    return found


def trains(rank, world, bounds=None, **options):
    """One run, with any options of `shard`."""
    is_weighted = options.get("is_weighted", False)
    model = shard(world, **options)
    losses = train(model, bounds or BOUNDS[world], is_weighted=is_weighted)
    return found_in(model) | {"losses": losses}


def begins(rank, world, **options):
    """Rows right after sharding a module."""
    return found_in(shard(world, "mixed", **options))


def loads_plain_rows(rank, world):
    """Rows after loading the state dict of a model that is not sharded."""
    model = shard(world, "mixed", tiers={"budget": 12_000}, device="meta")
    train(model, BOUNDS[world], num_steps=1)
    plain = {f"ebc.embedding_bags.{name}.weight": first_rows(name) for name in ROWS}
    model.load_state_dict(model.state_dict() | plain)
    return found_in(model)


def resumes(rank, world, folder, output_dtensor, exchange):
    """A run, and the same one continued from a checkpoint in its middle, under another budget."""
    bounds = BOUNDS[world]

    def state_of(model):
        return {"model": model.state_dict(), "rows": model.fused_optimizer.state_dict()}

    def make(budget):
        options = {"tiers": {"budget": budget}, "output_dtensor": output_dtensor}
        return shard(world, "mixed", "adagrad", exchange=exchange, **options)

    model = make(9_000)
    train(model, bounds, num_steps=3)
    dcp.save(state_of(model), checkpoint_id=folder)
    train(model, bounds, first_step=3)
    found = {"whole": found_in(model)}
    for way in ("loaded in place", "load_state_dict"):
        other = make(8_000)
        train(other, bounds, num_steps=1)  # what it has in slots must not survive
        loaded = state_of(other)
        dcp.load(loaded, checkpoint_id=folder)
        if way == "load_state_dict":
            other.fused_optimizer.load_state_dict(loaded["rows"])
            other.load_state_dict(loaded["model"])
        train(other, bounds, first_step=3)
        found[way] = found_in(other) | {"num_tiers": len(other.module.ebc.fetchers())}
    return found


def pins(rank, world, exchange):
    """A run with a plan of popular rows; how many rows of this rank are pinned."""
    profile = PopularityProfile(configs())
    for step in range(NUM_STEPS):
        profile.add(of_rank(step, 0, 32, 32)[1])
    plan = plan_hot_rows(profile, configs(), "40000", Adagrad(lr=LR, eps=1e-8), window_lookups=40)
    tiers = {"plan": plan, "budget": 17_000}
    model = shard(world, "mixed", "adagrad", tiers=tiers, exchange=exchange)
    losses = train(model, BOUNDS[world])
    num_pinned = sum(int((each.marks.pins > 0).sum()) for each in model.module.ebc.fetchers())
    return found_in(model) | {"losses": losses, "num_pinned": num_pinned}


def configs():
    return [
        TableConfig(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=DIM[name],
            feature_names=tuple(FEATURES[name]),
        )
        for name, num_rows in ROWS.items()
    ]


def pipelines(rank, world, exchange):
    """A plain loop, TorchRec's pipeline, and ours; how many rows were fetched ahead."""
    bounds, found = BOUNDS[world], {}
    options = {"tiers": {"budget": 14_000}, "exchange": exchange}
    model = shard(world, "mixed", "adagrad", **options)
    losses = train(model, bounds)
    found["loop"] = found_in(model) | {"losses": losses}
    for name, pipeline in (
        ("theirs", TrainPipelineSparseDist),
        ("ours", HotColdTrainPipelineSparseDist),
    ):
        model = shard(world, "mixed", "adagrad", model=TrainModel, **options)
        optimizer = torch.optim.SGD(model.module.over.parameters(), lr=LR)
        running, losses, num_ahead = pipeline(model, optimizer, CPU), [], 0
        parts = [
            of_rank(step, bounds[rank], bounds[rank + 1], bounds[-1]) for step in range(NUM_STEPS)
        ]
        batches = iter([Batch(*part) for part in parts])
        for _, _, labels in parts:
            tiers_of_rank = model.module.ebc.fetchers()
            num_ahead += sum(bool(each.num_started) for each in tiers_of_rank)
            losses.append(float(loss_of(running.progress(batches), labels)))
        found[name] = found_in(model) | {"losses": losses, "num_ahead": num_ahead}
    return found


def beside_fbgemm(rank, world, kind, optimizer, exchange):
    """Ours, and TorchRec's own sharder with the same plan, rows and state: outputs and one step."""
    bounds, found = BOUNDS[world], {}
    ours = shard(world, kind, optimizer, tiers={"budget": 16_000}, exchange=exchange)
    train(ours, bounds, num_steps=3)  # for state that is not zero
    theirs = shard(world, kind, optimizer, sharder=EmbeddingBagCollectionSharder)
    theirs.load_state_dict(ours.state_dict())
    theirs.fused_optimizer.load_state_dict(ours.fused_optimizer.state_dict())
    for name, model in (("ours", ours), ("theirs", theirs)):
        dense, features, _ = of_rank(3, bounds[rank], bounds[rank + 1], bounds[-1])
        model.eval()
        with torch.no_grad():
            outputs = model(dense, features)
        model.train()
        before = found_in(model)
        losses = train(model, bounds, first_step=3, num_steps=4)
        found[name] = {
            "outputs": outputs,
            "losses": losses,
            "before": before,
            "after": found_in(model),
            "keys": [
                list(model.state_dict()),
                {key: list(state) for key, state in state_of_rows(model).items()},
                list(dict(model.named_parameters())),
                list(dict(in_backward_optimizer_filter(model.named_parameters()))),
            ],
        }
    return found


def state_of_rows(model):
    return model.fused_optimizer.state_dict()["state"]


def error_of(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def bad_ids(rank, world, kind):
    """The second mini-batch of rank 1 has a bad id."""
    is_weighted = kind == "mixed"
    exchange = "rows" if is_weighted else "pooled"
    model = shard(world, kind, is_weighted=is_weighted, exchange=exchange)
    train(model, BOUNDS[world], num_steps=1, is_weighted=is_weighted)
    dense, features, _ = of_rank(1, 8 * rank, 8 * rank + 8, 32, is_weighted)
    if rank == 1:
        features.values()[3] = LIMITS["f0"] + 7
    model(dense, features)


def schedules(rank, world):
    """A learning rate of 0, then one that is not, set as in TorchRec."""
    model = shard(world, "mixed", tiers={"budget": "1MiB"})
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=LR),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    found = [found_in(model)]
    for lr in (0.0, LR):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        train(model, BOUNDS[world], num_steps=1, optimizer=optimizer)
        found.append(found_in(model))
    return found


def plans(rank, world):
    """The bytes that TorchRec's planner counts for each table, by where its rows are."""
    collection = make_collection()
    kind, settings = OPTIMIZERS["adagrad"]
    apply_optimizer_in_backward(kind, collection.parameters(), settings)
    profile = PopularityProfile(configs())
    profile.add(of_rank(0, 0, 32, 32)[1])
    plan = plan_hot_rows(profile, configs(), 20_000, Adagrad(lr=LR), window_lookups=20)
    topology = Topology(world_size=world, compute_device="cpu")
    found = {
        "tables": {
            name: (table.slot_bytes, table.num_features, len(plan.pinned_rows(name)))
            for name, table in plan.tables.items()
        },
    }
    for cold_tier in (None, "host", "file"):
        estimators = [EmbeddingPerfEstimator(topology)]
        if cold_tier is not None:
            estimators.append(HotPlanStorageEstimator(plan, topology, cold_tier=cold_tier))
        enumerator = EmbeddingEnumerator(
            topology, 16, estimator=estimators if cold_tier is not None else None
        )
        model = nn.Module()
        model.ebc = collection
        sharder = HotColdEmbeddingBagCollectionSharder({"plan": plan})
        options = enumerator.enumerate(model, [sharder])
        found[str(cold_tier)] = {
            (option.name, option.sharding_type): [shard.storage.ddr for shard in option.shards]
            for option in options
        }
        planner = EmbeddingShardingPlanner(topology=topology, enumerator=enumerator)
        chosen = planner.collective_plan(model, [sharder], dist.group.WORLD)
        found[f"{cold_tier} plan"] = sorted(chosen.plan["ebc"])
    return found


def example(rank, world, root):
    """Losses of the example, on few samples, and how many lookups hit."""
    module = runpy.run_path(str(Path(root) / "examples" / "torchrec_distributed.py"))
    return module["train"](num_samples=28_000, batch_size=512, budget="200KiB")


def docs(rank, world, snippets, folder):
    """Rows of a model that the snippets of the docs shard, save and load."""
    os.chdir(folder)
    names = {"model": Model(make_collection("meta"))}
    for snippet in snippets:
        exec(compile(snippet, "docs/distributed.md", "exec"), names)
    num_tiers = len(names["model"].module.ebc.fetchers())
    train(names["model"], BOUNDS[world])
    return {"num_tiers": num_tiers} | found_in(names["model"])
