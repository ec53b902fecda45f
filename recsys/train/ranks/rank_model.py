"""The model of a run, with its tables divided among processes by TorchRec.

`rank_model` builds the model of the configuration around TorchRec's collection, and lets
`DistributedModelParallel` divide the tables, each process with its rows in two tiers. Around the
collection is `RankTables`, which may look ahead:

begin of a step          ids of the last mini-batch in the window start to travel
begin of the next one    they have arrived; slots for their rows are claimed, if there is room
its own step             the lookup finds its ids and rows
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import (  # type: ignore[attr-defined]
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torch.nn.parallel import DistributedDataParallel
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import NoWait, ShardingPlan
from torchrec.optim import RowWiseAdagrad

from recsys.distributed import HotColdEmbeddingBagCollectionSharder
from recsys.distributed.placement import TableCost, place_tables
from recsys.embeddings.table import output_names
from recsys.embeddings.tiers.budget import row_bytes
from recsys.errors import ConfigError
from recsys.pipeline.divided_tables import AbstractDividedTables
from recsys.train.parts.build import dense_optimizer
from recsys.train.parts.models import build_network
from recsys.train.parts.providers import row_optimizer
from recsys.train.parts.tables import tables_of
from recsys.train.ranks.processes import BuiltModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torchrec.distributed.types import Awaitable

    from recsys.batch import JaggedIds, SampleSource
    from recsys.config import TrainConfig
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.table import TableConfig
    from recsys.embeddings.tiers.fetch import Claims, Fetcher
    from recsys.train.checkpoint.contents import Layout

__all__ = ["RankModel", "average_in_order", "rank_model"]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}


class RankModel(NamedTuple):
    """The model of one process.

    Attributes:
        model: For the trainer. `saved` has the rows of this process under the keys of a plain
            model, and no module in place of the tables if it has none.
        layout: Which rows each process has.
        dims: The embedding_dim of each table, by key.
        placement: By table: the rank that has it, or None if it is divided by rows.
    """

    model: BuiltModel
    layout: Layout
    dims: dict[str, int]
    placement: dict[str, int | None]


def rank_model(config: TrainConfig, source: SampleSource, plan: HotPlan | None) -> RankModel:
    """Build the model of this process. A collective.

    Args:
        config: The configuration. The folder `cold_path` is shared by all processes.
        source: The data.
        plan: The rows that never leave fast memory, of whole tables.

    Raises:
        BudgetTooSmall: the budget is below the floor of this process's tables.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    tables = tables_of(source, config.model)
    placement = place_tables(_costs(tables, config, source), num_ranks)
    torch.manual_seed(config.seed)
    collection = EmbeddingBagCollection(
        [_torchrec_table(table, number, rank, config.seed) for number, table in enumerate(tables)],
        device=torch.device("meta"),
    )
    settings = {"lr": config.optimizer.lr}
    if config.optimizer.name != "sgd":
        settings["eps"] = config.optimizer.eps
    apply_optimizer_in_backward(
        _OPTIMIZERS[config.optimizer.name], collection.parameters(), settings
    )
    holder = RankTables(collection)
    network = build_network(config.model, source, holder, torch.device("cpu"))
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
    of_tables = {
        name: row_wise() if place is None else table_wise(rank=place)
        for name, place in placement.items()
    }
    of_module = construct_module_sharding_plan(
        collection, of_tables, sharder, num_ranks, num_ranks, "cpu"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TorchRec's arguments of DDP
        parallel = DistributedModelParallel(
            network,
            device=torch.device("cpu"),
            plan=ShardingPlan({f"model.{path}.collection": of_module}),
            sharders=[sharder],
        )
    average_in_order(parallel)
    holder.agree_on_tiers()
    local = holder.collection.local_tables
    _require_no_running_statistics(network)
    dense = [each for name, each in network.named_parameters() if ".embedding_bags." not in name]
    optimizers = [dense_optimizer(config, dense)]
    rows: nn.Module = nn.Module()
    if local.collection is not None:
        assert local.collection.row_optimizer is not None
        rows = local.collection
        optimizers.append(local.collection.row_optimizer)
    saved = _with_replaced(network.model, holder, rows)
    built = BuiltModel(parallel, saved, optimizers)
    keys = {table.name: f"{path}.embedding_bags.{table.name}.weight" for table in tables}
    dims = {keys[table.name]: table.embedding_dim for table in tables}
    return RankModel(built, _layout(keys, local.tables), dims, placement)


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


def _costs(
    tables: Sequence[TableConfig], config: TrainConfig, source: SampleSource
) -> dict[str, TableCost]:
    """What each table costs; its lookups are counted in the first samples."""
    train = source.splits["train"]
    ids = source.read(torch.arange(train.start, min(train.stop, train.start + 1000)).numpy())
    features = ids.sparse_features
    bounds = features.offsets()[:: features.stride()].tolist()
    lookups = {
        key: bounds[number + 1] - bounds[number] for number, key in enumerate(features.keys())
    }
    state_sizes = row_optimizer(config.optimizer).state_sizes
    return {
        table.name: TableCost(
            table.num_embeddings,
            row_bytes(table.embedding_dim, torch.float32, state_sizes(table.embedding_dim)),
            table.embedding_dim * sum(lookups[feature] for feature in table.feature_names),
        )
        for table in tables
    }


def _torchrec_table(table: TableConfig, number: int, rank: int, seed: int) -> EmbeddingBagConfig:
    """A table as TorchRec describes it; each process draws its own rows."""
    return EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=list(table.feature_names),
        pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
        init_fn=partial(_draw, bound=1 / sqrt(table.num_embeddings), seeds=(seed, number, rank)),
    )


def _draw(weight: Tensor, bound: float, seeds: Sequence[int]) -> None:
    """Draw rows uniformly in +-bound, the same for the same seeds."""
    mixed = 0
    for seed in seeds:  # as Python hashes a tuple, roughly
        mixed = (mixed * 1_000_003 + seed + 1) % 2**63
    weight.uniform_(-bound, bound, generator=torch.Generator().manual_seed(mixed))


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


def _layout(keys: Mapping[str, str], local: Sequence[Any]) -> Layout:
    """Which rows each process has of each table, by key. A collective.

    Args:
        keys: The key of each table, by name.
        local: This process's tables, as TorchRec describes them.
    """
    own = {}
    for table in local:
        first = int(table.local_metadata.shard_offsets[0])
        own[table.name] = first, first + int(table.local_rows)
    of_ranks: list[dict[str, tuple[int, int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, own)
    return {key: [of_rank.get(name, (0, 0)) for of_rank in of_ranks] for name, key in keys.items()}


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

    def agree_on_tiers(self) -> None:
        """Find out whether any process has rows in two tiers, after sharding. A collective."""
        found = torch.tensor(len(self.fetchers()))
        dist.all_reduce(found)
        self.has_tiers = bool(found)

    def forward(self, ids: JaggedIds) -> KeyedTensor:
        """Look up; ids that were not sent before are sent now. A collective."""
        sent = self._sent.pop(ids, None)
        if sent is None:
            return self._in_order(self.collection(_keyed(ids)))
        context, arriving = sent
        return self._in_order(self.collection.compute_and_output_dist(context, arriving.wait()))

    def fetchers(self) -> list[Fetcher]:
        """What moves this process's rows; empty if all are in fast memory."""
        return list(self.collection.local_tables.fetchers())

    def _in_order(self, pooled: Any) -> KeyedTensor:
        """Vectors with their columns in the order of the tables, on any number of processes."""
        columns = pooled.to_dict()
        found = [columns[name] for name in self._output_keys]
        return KeyedTensor(
            self._output_keys, [each.shape[1] for each in found], torch.cat(found, 1)
        )

    def send(self, features: JaggedIds) -> None:
        """Start to send ids; returns when all processes know how many they will get."""
        context = self.collection.create_context()
        self._sent[features] = context, self.collection.input_dist(context, _keyed(features)).wait()

    def prefetch(self, features: JaggedIds) -> Claims:
        """Wait for ids that were sent, and start to fetch this process's rows."""
        context, arriving = self._sent[features]
        ids = arriving.wait()
        self._sent[features] = context, NoWait(ids)
        # Which `compute_and_output_dist` begins.
        context.claims = self.collection.local_tables.prefetch(ids)
        return list(context.claims)


def _keyed(ids: JaggedIds) -> KeyedJaggedTensor:
    """The ids as TorchRec takes them."""
    return KeyedJaggedTensor(
        ids.keys(),
        ids.values(),
        lengths=ids.lengths(),
        offsets=ids.offsets(),
    )


def average_in_order(parallel: nn.Module) -> None:
    """Average the gradients of the dense part in the order of the processes, from now on.

    `DistributedDataParallel` puts gradients into buckets, and arranges them anew after the first
    steps of a process. gloo's all_reduce adds the parts of a bucket in different orders. So with
    three processes or more, the first steps after a run is resumed would round sums differently.
    Here every process adds its share of a bucket, in the order of the processes:

        bucket of each process    -- all_to_all -->    its share of all buckets
        the share's mean          -- all_gather -->    the mean of all buckets

    Both send as many bytes as an all_reduce.

    Args:
        parallel: The model with its tables divided. With fewer than three processes it stays as it
            is, because the sum of two numbers has one order.
    """
    if dist.get_world_size() < 3:
        return
    for module in parallel.modules():
        if isinstance(module, DistributedDataParallel):
            # PyTorch refuses a function with annotations in strings, such as those of this file.
            module.register_comm_hook(None, lambda _, bucket: _average(bucket))


def _average(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of a bucket over all processes. A collective."""
    gradients, num_ranks = bucket.buffer(), dist.get_world_size()
    if gradients.is_sparse:  # of a table of the user's own; gloo adds these in order
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None stands for all
    padding = -len(gradients) % num_ranks
    shares = torch.nn.functional.pad(gradients, (0, padding)).view(num_ranks, -1)
    received = torch.empty_like(shares)
    dist.all_to_all_single(received, shares)
    total = received[0]
    for each in received[1:]:
        total += each
    dist.all_gather(list(shares), total / num_ranks)
    gradients.copy_(shares.view(-1)[: len(gradients)])
    found: torch.futures.Future[Tensor] = torch.futures.Future()
    found.set_result(gradients)
    return found
