"""The model of a run on several processes, with its tables divided among them by TorchRec.

`build_rank_model` builds the model of the configuration around TorchRec's collection, and lets
`DistributedModelParallel` divide the tables, each process with its rows in two tiers. Around the
collection is `RankTables`, which may look ahead:

begin of a step          ids of the last mini-batch in the window start to travel
begin of the next one    they have arrived; slots for their rows are claimed, if there is room
its own step             the lookup finds its ids and rows
"""

from __future__ import annotations

import copy
from functools import partial
from math import sqrt
from shutil import rmtree
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import (  # type: ignore[attr-defined]
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import Awaitable, NoWait, ShardingPlan
from torchrec.optim import RowWiseAdagrad

from recsys.batch import JaggedIds, SampleSource, features_by_table
from recsys.distributed import HotColdEmbeddingBagCollectionSharder
from recsys.embeddings.table import output_names
from recsys.errors import ConfigError, refuse
from recsys.pipeline.model_tables import AbstractDividedTables
from recsys.train.build import (
    build_network,
    constants_of,
    dense_optimizer,
    needs_rows,
    tables_of,
)
from recsys.train.checkpoint import Checkpoints
from recsys.train.checkpoint.restore import Share
from recsys.train.export import export_checkpoint
from recsys.train.ranks import any_of, gather_objects, num_ranks, rank

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from recsys.config import TrainConfig
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.tiers.fetch import Claims, Fetcher

__all__ = [
    "average_gradients",
    "build_rank_model",
    "require_supported",
    "save_rank_model",
]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}


def require_supported(config: TrainConfig, source: SampleSource, *, keeps_best: bool) -> None:
    """Check that the processes of this run can train a configuration.

    Args:
        config: The configuration.
        source: The data.
        keeps_best: Whether early stopping keeps the best weights.

    Raises:
        ConfigError: they cannot.
    """
    world, size = num_ranks(), config.batch_size
    last = len(source.splits["train"]) % size
    rules = [
        ("embeddings", config.embeddings, ("recsys",)),
        ("device", config.device, ("cpu",)),
        ("init_from", config.init_from, ("",)),
        ("optimizer.name", config.optimizer.name, tuple(_OPTIMIZERS)),
        ("schedule", config.schedule.kind, ("", "sequential", "lookahead")),
        ("skip", config.skip.kind, ("none",)),
        ("early_stopping.keep", "best" if keeps_best else "last", ("last",)),
    ]
    refuse(
        *(
            (
                value not in allowed,
                f"{key} must be {' or '.join(map(repr, allowed))} on {world} processes, got "
                f"{value!r}; change it, or train on one process",
            )
            for key, value, allowed in rules
        ),
        (
            needs_rows(config.model),
            f"model.name {config.model.name!r} looks rows up without pooling, which {world} "
            "processes do not support; choose a model that pools, such as 'dlrm', or train on one "
            "process",
        ),
        (
            size % world > 0,
            f"batch_size must be a multiple of the number of processes, {world}, got {size}; "
            f"start a number that divides {size}, or, for a new run, set it to "
            f"{-(-size // world) * world}",
        ),
        (
            0 < last < world,
            f"the last mini-batch of an epoch has {last} samples, fewer than the {world} "
            f"processes, with batch_size {size}; start fewer processes, or, for a new run, choose "
            "another batch_size",
        ),
    )


def save_rank_model(file: Path, model: nn.Module, share: Share) -> None:
    """Write the model with the rows of all processes. A collective.

    Each process writes its own rows, to a checkpoint beside the file, from which the first process
    writes the file.

    Args:
        file: Is replaced.
        model: Has the rows of this process, by the keys of a plain model.
        share: Of this process.

    Raises:
        OSError: the disk is full, or the folder no longer exists.
    """
    folder = file.with_name(f"{file.name}.parts")
    with Checkpoints(folder, model=model, share=share) as checkpoints:
        checkpoints.save()
        checkpoints.wait(strict=True)
    if not rank():
        export_checkpoint(folder, folder / file.name).replace(file)
        rmtree(folder)


def build_rank_model(
    config: TrainConfig, source: SampleSource, plan: HotPlan | None
) -> tuple[nn.Module, nn.Module, list[Optimizer], Share]:
    """Build the model of this process. A collective.

    Args:
        config: The configuration. The folder `cold_path` is shared by all processes.
        source: The data.
        plan: The rows that never leave fast memory, of whole tables.

    Returns:
        What maps a mini-batch to (loss, (loss, logits, labels)). The model with the rows of this
        process by the keys of a plain model, and no module in place of the tables if there are
        none. The optimizers of the dense part, then of the rows. What this process saves and
        restores.

    Raises:
        BudgetTooSmall: the budget is below the floor of this process's tables.
    """
    tables = tables_of(source.table_sizes, features_by_table(source), config.model)
    torch.manual_seed(config.seed)
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
                pooling=PoolingType[table.pooling.upper()],
                init_fn=partial(_draw, 1 / sqrt(table.num_embeddings), config.seed, number),
            )
            for number, table in enumerate(tables)
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(
        _OPTIMIZERS[config.optimizer.name],
        collection.parameters(),
        constants_of(config.optimizer),
    )
    holder = RankTables(collection)
    network = build_network(config.model, source, holder, torch.device("cpu"))
    _require_no_running_statistics(network)
    sharder = HotColdEmbeddingBagCollectionSharder(
        {
            "budget": config.budget or None,
            "plan": plan,
            "cold_tier": config.cold_tier,
            "cold_path": config.cold_path or None,
            "row_wise_exchange": "rows",  # the same vectors on any number of processes
        }
    )
    [path] = [name for name, module in network.model.named_modules() if module is holder]
    world = num_ranks()
    # Divided by rows, a process sends least. Of fewer rows, one process might have none.
    of_tables = {
        table.name: row_wise() if table.num_embeddings >= world**2 else table_wise(number % world)
        for number, table in enumerate(tables)
    }
    of_module = construct_module_sharding_plan(collection, of_tables, sharder, world, world, "cpu")
    divided_model = DistributedModelParallel(
        network,
        device=torch.device("cpu"),
        plan=ShardingPlan({f"model.{path}.collection": of_module}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    [holder.has_tiers] = any_of(bool(holder.fetchers()))
    local = holder.collection.local_tables
    dense = [value for name, value in network.named_parameters() if ".embedding_bags." not in name]
    for parameter in dense:  # a user's model may have drawn others on each process
        dist.broadcast(parameter.detach(), 0)
    optimizers: list[Optimizer] = [dense_optimizer(config, dense)]
    trained = [parameter for parameter in dense if parameter.requires_grad]
    optimizers[0].register_step_pre_hook(lambda *_: average_gradients(trained))
    rows: nn.Module = nn.Module()
    if local.collection is not None:
        assert local.collection.row_optimizer is not None
        rows = local.collection
        optimizers.append(local.collection.row_optimizer)
    keys = {table.name: f"{path}.embedding_bags.{table.name}.weight" for table in tables}
    begins = {table.name: int(table.local_metadata.shard_offsets[0]) for table in local.tables}
    ends = {table.name: begins[table.name] + int(table.local_rows) for table in local.tables}
    of_ranks = gather_objects((begins, ends))
    layout = {
        key: [(begins.get(name, 0), ends.get(name, 0)) for begins, ends in of_ranks]
        for name, key in keys.items()
    }
    share = Share(rank(), world, layout, gather_objects)
    return divided_model, _with_replaced(network.model, holder, rows), optimizers, share


def _require_no_running_statistics(network: nn.Module) -> None:
    """Refuse batch normalization: its statistics would be of one process's samples.

    Raises:
        ConfigError: the model has it.
    """
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"{name}: {type(module).__name__} would see each process's samples alone; use "
                "LayerNorm, or train on one process"
            )


def _draw(bound: float, seed: int, number: int, weight: Tensor) -> None:
    """Draw rows uniformly in +-bound, the same for the same seed, table and process."""
    mixed = ((seed + 1) * 1_000_003 + number + 1) * 1_000_003 + rank() + 1
    weight.uniform_(-bound, bound, generator=torch.Generator().manual_seed(mixed % 2**63))


def _with_replaced(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """A module that shares everything with another, but for one module in it."""
    if module is old:
        return new
    copied = copy.copy(module)
    copied._modules = {
        name: None if child is None else _with_replaced(child, old, new)
        for name, child in module._modules.items()
    }
    return copied


class RankTables(AbstractDividedTables):
    """The tables of a run on several processes.

    Args:
        collection: TorchRec's. `DistributedModelParallel` replaces it by the sharded one.

    Shape:
        input: ids of this process's B samples; result: their pooled vectors, a `KeyedTensor`, in
        the order of the tables.
    """

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection: Any = collection
        self._output_keys = output_names(collection.embedding_bag_configs())
        # Of each mini-batch whose ids were sent: TorchRec's context, and the ids of all processes
        # for the rows of this one.
        self._sent: WeakKeyDictionary[JaggedIds, tuple[Any, Awaitable[Any]]] = WeakKeyDictionary()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return list(self.collection.embedding_bag_configs())

    def output_keys(self) -> list[str]:
        """The feature of each pooled vector, in column order."""
        return self._output_keys

    def forward(self, ids: JaggedIds) -> KeyedTensor:
        """Look up; ids that were not sent before are sent now. A collective."""
        context, arriving = self._sent.pop(ids, (None, None))
        if arriving is None:
            pooled = self.collection(ids.to_torchrec())
        else:
            pooled = self.collection.compute_and_output_dist(context, arriving.wait())
        columns = pooled.to_dict()  # in an order that depends on the number of processes
        found = [columns[name] for name in self._output_keys]
        return KeyedTensor(
            self._output_keys, [vectors.shape[1] for vectors in found], torch.cat(found, 1)
        )

    def fetchers(self) -> list[Fetcher]:
        """What moves this process's rows; empty if all are in fast memory."""
        return list(self.collection.local_tables.fetchers())

    def send(self, features: JaggedIds) -> None:
        """Start to send ids; returns when all processes know how many they will get."""
        context = self.collection.create_context()
        sent = self.collection.input_dist(context, features.to_torchrec())
        self._sent[features] = context, sent.wait()

    def prefetch(self, features: JaggedIds) -> Claims:
        """Wait for ids that were sent, and start to fetch this process's rows."""
        context, arriving = self._sent[features]
        ids = arriving.wait()
        self._sent[features] = context, NoWait(ids)
        # Which `compute_and_output_dist` begins.
        context.claims = self.collection.local_tables.prefetch(ids)
        return list(context.claims)


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace gradients by their means over all processes. A collective.

    They are sent as one tensor. So every step sums them in the same order, the first one after a
    run is resumed, too. `DistributedDataParallel` arranges its buckets anew after its first steps.

    Args:
        parameters: Those of the dense part, the same on all processes.
    """
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        for parameter in parameters
    ]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    means = torch.split(flat, [parameter.numel() for parameter in parameters])
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean.view_as(parameter).to(parameter.dtype)
