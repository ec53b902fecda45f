"""Builds what a configuration names: data, tables, model, optimizers, plan, loader and pipeline.

    model.name       class                       embeddings
    dlrm             recsys.models.DLRM          pooled
    dcn_v2           recsys.models.DCNv2         pooled
    deepfm           recsys.models.DeepFM        pooled
    din              recsys.models.DIN           rows, not pooled
    tbsm             recsys.models.TBSM          rows, not pooled
    two_tower        recsys.models.TwoTower      rows, not pooled
    sasrec           recsys.models.SASRec        rows, not pooled
    module:Class     a class of the user's       rows, not pooled, if it has `unpooled = True`

A class of the user's is built as `Class(embeddings, num_dense)`. Its `forward(batch)` takes a
`recsys.batch.Batch` and returns logits, (B,) or (B, 1).

    embeddings   lookup                              update
    recsys       one kernel for all tables           the optimizer's `step`
    torch        nn.EmbeddingBag(sparse=True)        torch.optim on sparse gradients

Both accept `JaggedIds` or a `KeyedJaggedTensor`, return `PooledEmbeddings`, and draw the same
initial rows from the same seed. They have TorchRec's `state_dict` keys, so a model saved with one
loads with the other.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recsys._support.files import existing
from recsys._support.safetensors_dtypes import DTYPES
from recsys._support.sizes import format_bytes, parse_bytes
from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys._support.user_code import current_folder_last, import_class
from recsys.batch import (
    Batch,
    Features,
    PooledEmbeddings,
    SampleSource,
    features_by_table,
    histories_of,
)
from recsys.datasets.loader import BatchLoader
from recsys.datasets.store import Store
from recsys.datasets.synthetic import SyntheticCriteo
from recsys.embeddings.collection import HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.kernels.cpu.row_map import MAP_BYTES_PER_ROW, MARK_BYTES_PER_SLOT
from recsys.embeddings.lookup.abstract import AbstractEmbeddingBags, make_bags
from recsys.embeddings.optimizer import (
    SGD,
    Adagrad,
    Adam,
    PartialRowWiseAdam,
    RowOptimizer,
    RowWiseAdagrad,
)
from recsys.embeddings.popularity.counts import PopularityProfile
from recsys.embeddings.popularity.plan import HotPlan, plan_hot_rows
from recsys.embeddings.staleness.tracker import tracked_bytes
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tables_module import TableModule, groups_of
from recsys.embeddings.tiers.budget import slot_bytes
from recsys.embeddings.tiers.fetch import HitRates
from recsys.errors import BudgetTooSmall, ConfigError, TrainingDiverged
from recsys.models import (
    DIN,
    DLRM,
    TBSM,
    DCNv2,
    DeepFM,
    DLRMTrain,
    MaskedTransformerArch,
    SASRec,
    TwoTower,
)
from recsys.models.batch_train import BatchTrain
from recsys.models.dlrm import initialize_classic
from recsys.models.retrieval import AbstractRetrievalModel, RetrievalTrain
from recsys.pipeline import (
    FAE,
    Auto,
    HotColdLoader,
    Hotline,
    LookAhead,
    Sequential,
    TrainPipeline,
)
from recsys.pipeline.loss_and_output import explain_loss
from recsys.pipeline.skip.paper import budget_beside_hot_rows
from recsys.train.ranks import gather, gather_objects, num_ranks, rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from recsys.config import ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig
    from recsys.pipeline.schedule import Schedule
    from recsys.pipeline.stalls import StageClock

__all__ = [
    "TorchEmbeddingBags",
    "autocast",
    "build_embeddings",
    "build_loader",
    "build_model",
    "build_network",
    "build_pipeline",
    "choose_plan",
    "cold_folder",
    "constants_of",
    "dense_optimizer",
    "describe_schedule",
    "describe_tiers",
    "needs_rows",
    "open_source",
    "row_optimizer",
    "tables_budget",
    "tables_of",
]


def open_source(config: TrainConfig, *, to_train: bool = True) -> SampleSource:
    """Open the data of a configuration.

    Args:
        config: The configuration.
        to_train: Whether a split that is empty is refused.

    Raises:
        StoreError: the folder is not a store.
        ConfigError: a split is empty, a store has several labels, or synthetic data does not go
            with a key.
    """
    source: SampleSource = (
        SyntheticCriteo(**config.synthetic.model_dump())
        if config.is_synthetic
        else Store(config.data)
    )
    if isinstance(source, Store) and source.label_names:
        raise ConfigError(
            f"{config.data}: a model has one label, and this store has labels "
            f"{', '.join(map(repr, source.label_names))}; prepare a store with one of them as label"
        )
    for split, samples in source.splits.items():
        if to_train and not samples:
            sizes = ", ".join(f"{name} has {len(part)}" for name, part in source.splits.items())
            raise ConfigError(
                f"{config.data}: the {split} part is empty: of {source.num_samples} samples, "
                f"{sizes}; training needs samples in each part: change [split] in the schema of a "
                "table and prepare it again, or give more data (14 samples, or days of 2)"
            )
    return source


def tables_of(
    table_sizes: Mapping[str, int], features: Mapping[str, Sequence[str]], model: ModelConfig
) -> list[TableConfig]:
    """The tables of a model, named `t_<table>` as in TorchRec's DLRM.

    Args:
        table_sizes: Rows of each table.
        features: The features of each table.
        model: Has the columns and the pooling of each table.

    Raises:
        ConfigError: `table_dims` or `pooling` names an unknown table.
    """
    for key, named in (("table_dims", model.table_dims), ("pooling", model.pooling)):
        unknown = [table for table in named if table not in table_sizes]
        if unknown:
            raise ConfigError(
                f"model.{key}.{unknown[0]}: the data has no table of that name; its tables are "
                f"{list(table_sizes)}"
            )
    return [
        TableConfig(
            name=f"t_{table}",
            num_embeddings=size,
            embedding_dim=model.table_dims.get(table, model.embedding_dim),
            feature_names=tuple(features[table]),
            pooling=model.pooling.get(table, "sum"),
        )
        for table, size in table_sizes.items()
    ]


def build_model(
    config: TrainConfig,
    source: SampleSource,
    plan: HotPlan | None = None,
    *,
    table_device: str | None = None,
) -> tuple[DLRMTrain | BatchTrain, list[Optimizer]]:
    """Build a model with initial values from `config.seed`, and its optimizers.

    Args:
        config: The configuration.
        source: The data.
        plan: Result of `choose_plan`.
        table_device: Device of the embedding tables, if not `config.device`: "meta" for tables
            that `RunFolder.load_model` maps from the saved model.

    Returns:
        The model, and the optimizers to step after each backward: dense part, then rows.

    Raises:
        ConfigError: the device is not available, the embeddings do not support the optimizer or
            the dimension, or the model does not fit the data.
        MissingDependency: the package of the embeddings is not installed.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': torch sees no CUDA device; use device 'cpu'")
    torch.manual_seed(config.seed)
    device = torch.device(config.device)
    embeddings, of_rows = build_embeddings(
        config.embeddings,
        tables_of(source.table_sizes, features_by_table(source), config.model),
        config.optimizer,
        device if table_device is None else torch.device(table_device),
        budget=tables_budget(config, source),
        plan=plan,
        cold_tier=config.cold_tier,
        cold_path=config.cold_path,
        is_pooled=not needs_rows(config.model),
    )
    model = build_network(config.model, source, embeddings, device)
    tables = set(embeddings.parameters())
    dense_parameters = [parameter for parameter in model.parameters() if parameter not in tables]
    of_dense = dense_optimizer(config, dense_parameters)
    if table_device is None:
        model.to(device)
    return model, [of_dense, of_rows]


def build_embeddings(
    provider: str,
    tables: Sequence[TableConfig],
    optimizer: OptimizerConfig,
    device: torch.device | None = None,
    *,
    budget: str = "",
    plan: HotPlan | None = None,
    cold_tier: str = "host",
    cold_path: str = "",
    is_pooled: bool = True,
) -> tuple[AbstractEmbeddingBags | TableModule, torch.optim.Optimizer]:
    """The embedding module of a provider, and the optimizer whose `step` updates its rows.

    Args:
        provider: "recsys" or "torch".
        tables: All tables, with distinct names.
        optimizer: Settings of the row optimizer.
        device: Device of the tables.
        budget: Fast memory, empty for no limit; only for "recsys", as are the next three.
        plan: Rows that never leave fast memory.
        cold_tier: "host" or "file".
        cold_path: Folder of the cold tier "file".
        is_pooled: Whether the rows of a bag are pooled; only "recsys" has another module.

    Returns:
        The module and the optimizer.

    Raises:
        BudgetTooSmall: the budget is below the floor.
        ConfigError: the provider does not support the optimizer, or lookups without pooling.
    """
    if not is_pooled and provider != "recsys":
        raise ConfigError(
            f"embeddings must be 'recsys' for a model that looks rows up without pooling, got "
            f"{provider!r}; choose 'recsys', or another model"
        )
    if provider == "recsys":
        kind = HotColdEmbeddingBagCollection if is_pooled else HotColdEmbeddingCollection
        collection = kind(
            tables,
            device=device,
            optimizer=row_optimizer(optimizer),
            auto_apply=False,
            budget=budget or None,
            plan=plan,
            cold_tier=cold_tier,
            cold_path=cold_path or None,
        )
        assert collection.row_optimizer is not None
        return collection, collection.row_optimizer
    if optimizer.name not in _SPARSE_OPTIMIZERS:
        raise ConfigError(
            f"optimizer.name {optimizer.name!r} is not in torch.optim, so embeddings 'torch' "
            f"cannot use it; choose one of {list(_SPARSE_OPTIMIZERS)}, or embeddings 'recsys'"
        )
    checks = torch.sparse.check_sparse_tensor_invariants
    if not checks.is_enabled():  # type: ignore[no-untyped-call]
        # torch's Adagrad builds sparse tensors. Unless their checks are switched off explicitly,
        # torch warns that they are not checked.
        checks.disable()  # type: ignore[no-untyped-call]
    module = TorchEmbeddingBags(tables, device)
    return module, _SPARSE_OPTIMIZERS[optimizer.name](
        module.parameters(), **constants_of(optimizer)
    )


class TorchEmbeddingBags(AbstractEmbeddingBags):
    """One `nn.EmbeddingBag(mode="sum", sparse=True)` per table; lookups run one after another.

    Args:
        tables: All tables.
        device: Device of the tables.
    """

    def __init__(self, tables: Sequence[TableConfig], device: torch.device | None = None) -> None:
        super().__init__(tables)
        rows = [
            torch.empty(table.num_embeddings, table.embedding_dim, device=device)
            for table in self._tables
        ]
        self.embedding_bags = make_bags(self._tables, rows)
        self.reset_parameters()

    def table_weights(self) -> Sequence[Tensor]:
        """The rows of every table, (E, D)."""
        return [bag.weight for bag in self.embedding_bags.values()]  # type: ignore[misc]  # Module.__getattr__

    def forward(self, features: Features) -> PooledEmbeddings:
        """Look up and pool the rows of every bag.

        Args:
            features: `JaggedIds`, or a `KeyedJaggedTensor` of TorchRec.

        Shape:
            result (B, sum of dims).
        """
        modules = list(self.embedding_bags.values())
        pooled = [
            modules[table](values, offsets[:-1], weights)
            for (table, _), (values, offsets, weights) in zip(
                self._lookups, self._bags(features), strict=True
            )
        ]
        return PooledEmbeddings(self._output_keys, self._output_dims, torch.cat(pooled, dim=1))


def needs_rows(config: ModelConfig) -> bool:
    """Whether the model of a configuration looks rows up without pooling.

    Raises:
        ConfigError: the class of the user's cannot be imported; or rows are not pooled, and
            `table_dims` or `pooling` are set.
    """
    takes_rows = config.name in ("din", "tbsm", "two_tower", "sasrec")
    if ":" in config.name:
        takes_rows = bool(getattr(_custom_class(config.name), "unpooled", False))
    if takes_rows and (config.table_dims or config.pooling):
        raise ConfigError(
            "model.table_dims and model.pooling are for models that pool their bags in the lookup, "
            f"and {config.name!r} does not; drop them"
        )
    return takes_rows


def build_network(
    config: ModelConfig, source: SampleSource, embeddings: nn.Module, device: torch.device
) -> DLRMTrain | BatchTrain:
    """Build a model with its loss, and draw the initial values of its dense part.

    Args:
        config: Names the model.
        source: The data: its number of dense features, and its histories.
        embeddings: A collection: pooled, or of rows if `needs_rows(config)`.
        device: Device of the dense part.

    Returns:
        A module that maps a mini-batch to (loss, (loss, logits, labels)); its `model` is the model.

    Raises:
        ConfigError: sizes do not fit each other, the model does not fit the data, or the class of
            the user's does not take the two arguments or makes a model that cannot be saved.
    """
    if ":" in config.name:
        with device:
            return BatchTrain(_build_custom(config.name, embeddings, source.num_dense))
    retrieval = config.two_tower or config.sasrec
    schema = source.meta.get("schema", {}) if isinstance(source, Store) else {}
    if retrieval is None and schema.get("negatives", {}).get("per_positive") == 0:
        raise ConfigError(
            f"model.name {config.name!r} learns from positives and negatives, and the training "
            "part has positives alone; choose 'two_tower' or 'sasrec', or set per_positive in "
            "[negatives] and prepare the data again"
        )
    try:
        build = _build if retrieval is None else _build_retrieval
        model: Any = build(config, source, embeddings, device)
    except ValueError as error:  # sizes do not fit each other, or the data
        raise ConfigError(f"model.name {config.name!r}: {error}") from error
    if config.init == "classic":
        initialize_classic(model)
    if retrieval is None:
        return DLRMTrain(model)
    assert isinstance(source, Store)
    counts = torch.from_numpy(source.item_counts()).to(device) if retrieval.num_sampled else None
    return RetrievalTrain(model, retrieval.num_sampled, counts, retrieval.row_decay)


def _build_retrieval(
    config: ModelConfig, source: SampleSource, embeddings: nn.Module, device: torch.device
) -> AbstractRetrievalModel:
    if not isinstance(source, Store) or "ranking" not in source.meta:
        raise ValueError(
            "needs a store of pairs of groups and items: a schema with group and [negatives]; "
            f"{source.describe()['name']} is none; choose another model"
        )
    ranking = source.meta["ranking"]
    num_items = source.table_sizes[source.feature_tables[ranking["item"]]]
    catalog = np.empty((num_items, 0)) if source.catalog is None else source.catalog
    arguments = (
        embeddings,
        source.histories,
        (ranking["item"], *ranking["item_features"]),
        torch.tensor(catalog, device=device),
        source.num_dense,
    )
    if config.two_tower is not None:
        settings = config.two_tower.model_dump(exclude={"num_sampled", "row_decay", "mlp"})
        return TwoTower(*arguments, config.two_tower.mlp, **settings, dense_device=device)
    assert config.sasrec is not None
    settings = config.sasrec.model_dump(exclude={"num_sampled", "row_decay"})
    return SASRec(*arguments, **settings, dense_device=device)


def _build(
    config: ModelConfig, source: SampleSource, embeddings: Any, device: torch.device
) -> nn.Module:
    sizes = (source.num_dense, config.dense_arch, config.over_arch)
    if config.name == "dlrm":
        transformer, interaction = config.interaction.masked_transformer, None
        if transformer is not None:
            interaction = MaskedTransformerArch(
                len(embeddings.output_keys()),
                config.embedding_dim,
                **transformer.model_dump(),
                device=device,
            )
        return DLRM(embeddings, *sizes, device, interaction=interaction)
    if config.dcn_v2 is not None:
        cross = config.dcn_v2
        return DCNv2(embeddings, *sizes, cross.num_layers, cross.low_rank_dim, device)
    if config.name == "deepfm":
        return DeepFM(embeddings, *sizes, device)
    histories = histories_of(source)
    if not histories:
        raise ValueError(
            "needs a history: a feature of kind sequence that shares its table with a feature of "
            f"kind one, the candidate; {source.describe()['name']} has none; declare "
            "[history.NAME] of a categorical column in the schema, or give [sequence.COLUMN] the "
            "column's table, or choose another model"
        )
    if config.din is not None:
        return DIN(
            embeddings,
            source.num_dense,
            histories,
            config.over_arch,
            attention_layer_sizes=config.din.attention,
            dense_device=device,
        )
    assert config.tbsm is not None
    return TBSM(
        embeddings,
        source.num_dense,
        histories,
        config.tbsm.num_steps,
        config.dense_arch,
        config.over_arch,
        tower_layer_sizes=config.tbsm.tower,
        num_heads=config.tbsm.num_heads,
        dense_device=device,
    )


def _custom_class(name: str) -> type[nn.Module]:
    return import_class("model.name", name, nn.Module, "torch.nn.Module")


def _build_custom(name: str, embeddings: nn.Module, num_dense: int) -> nn.Module:
    """Build a class of the user's.

    Raises:
        ConfigError: it does not take the two arguments, or a run could not save it.
    """
    custom = _custom_class(name)
    try:
        with current_folder_last():
            model: nn.Module = custom(embeddings, num_dense)
    except TypeError as error:
        raise ConfigError(
            f"model.name {name!r}: the class is built as {custom.__name__}(embeddings, num_dense), "
            f"which raised a TypeError: {error}"
        ) from error
    with DisableTorchFunctionSubclass():  # internal read of the tables
        state = model.state_dict()
    for key, value in state.items():
        if (
            not isinstance(value, torch.Tensor)
            or key.endswith("_extra_state")
            or is_lazy(value)
            or value.layout is not torch.strided
            or value.dtype not in DTYPES.values()
            or not value.is_contiguous()
        ):
            raise ConfigError(
                f"model.name {name!r}: {key} of its state dict cannot be saved: it must be a "
                "dense, contiguous tensor that has a shape, in one of "
                f"{sorted(map(str, DTYPES.values()))}; convert it, or register it with "
                "persistent=False"
            )
    return model


def row_optimizer(config: OptimizerConfig) -> RowOptimizer:
    """The recsys optimizer for a configuration."""
    return _ROW_OPTIMIZERS[config.name](**constants_of(config))


def dense_optimizer(config: TrainConfig, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The optimizer of the dense part."""
    dense = config.resolved_dense_optimizer
    constants = constants_of(dense)
    if dense.name != "sgd" and config.device == "cpu":
        constants["fused"] = True  # one call for all parameters takes a third of the time
    return _DENSE_OPTIMIZERS[dense.name](parameters, **constants)


def constants_of(config: OptimizerConfig) -> dict[str, Any]:
    """The arguments of an optimizer, as torch and recsys name them."""
    found: dict[str, Any] = {"lr": config.lr}
    if config.name != "sgd":
        found["eps"] = config.eps
    if "adam" in config.name:
        found["betas"] = (config.betas[0], config.betas[1])
    return found


_ROW_OPTIMIZERS: dict[str, Callable[..., RowOptimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
    "partial_rowwise_adam": PartialRowWiseAdam,
}
_DENSE_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
_SPARSE_OPTIMIZERS = _DENSE_OPTIMIZERS | {"adam": torch.optim.SparseAdam}


def choose_plan(config: TrainConfig, source: SampleSource) -> HotPlan | None:
    """The plan of a run: the rows that never leave fast memory; None for a run without a plan.

    The plan is the file `config.plan`. FAE's schedule without this key makes one, from the lookups
    of the training split.

    Raises:
        BudgetTooSmall: FAE has no room for the rows of a mini-batch.
        ConfigError: FAE has neither a budget nor a plan.
        FileNotFoundError: there is no such file.
        ProfileError: the file is not a plan.
    """
    if config.plan:
        return HotPlan.load(config.plan)
    if config.schedule.fae is None:
        return None
    if not config.budget:
        raise ConfigError(
            "schedule 'fae' separates samples by whether all of their rows are in fast "
            "memory; give it a size by budget, or a plan"
        )
    return plan_hot_rows(
        PopularityProfile.count(source, source.splits["train"]),
        tables_of(source.table_sizes, features_by_table(source), config.model),
        tables_budget(config, source),
        row_optimizer(config.optimizer),
        window_lookups=config.batch_size,
        small_share=0,
    )


def tables_budget(config: TrainConfig, source: SampleSource) -> str:
    """The budget of the tables: without what a policy of skipping keeps of rows beside them.

    Raises:
        BudgetTooSmall: that takes the whole budget.
    """
    if not config.budget:
        return ""
    budget, dtype = parse_bytes(config.budget, "budget"), torch.float32
    if config.skip.kind == "paper":
        dim, sizes = config.model.embedding_dim, list(source.table_sizes.values())
        of_slot = slot_bytes(dim, dtype, row_optimizer(config.optimizer).state_sizes(dim))
        return str(budget_beside_hot_rows(budget, sizes, dim * dtype.itemsize, of_slot))
    staleness = getattr(config.skip.settings(seed=0), "staleness", None)
    if staleness is None:
        return config.budget
    tables = [
        torch.empty(table.num_embeddings, table.embedding_dim, device="meta")
        for table in tables_of(source.table_sizes, features_by_table(source), config.model)
    ]
    of_tracker = tracked_bytes(tables, staleness)
    if of_tracker >= budget:
        raise BudgetTooSmall(
            f"skip {config.skip.kind!r} takes {format_bytes(of_tracker)} to follow rows, and "
            f"budget is {config.budget!r}; raise it, or lower staleness.max_rows of the policy"
        )
    return str(budget - of_tracker)


def build_loader(
    config: TrainConfig,
    source: SampleSource,
    plan: HotPlan | None,
) -> BatchLoader | HotColdLoader:
    """A loader of this process's part of the training split, in the order of the schedule.

    FAE classifies every sample as hot or cold, and keeps the result in the folder of the store.
    """
    # `build_model` refuses a device that is missing.
    pin_memory = config.device == "cuda" and torch.cuda.is_available()
    fae = config.schedule.fae
    if fae is None or plan is None:
        return BatchLoader(
            source,
            "train",
            config.batch_size,
            shuffle=config.shuffle,
            seed=config.seed,
            prefetch=config.prefetch,
            pin_memory=pin_memory,
            permutation_seed=config.permutation_seed or None,
            rank=rank(),
            num_ranks=num_ranks(),
        )
    is_hot = plan.find_hot_samples(source, source.splits["train"])
    return HotColdLoader(
        source,
        "train",
        config.batch_size,
        is_hot,
        FAE(rate=fae.rate, is_adaptive=fae.adaptive),
        seed=config.seed,
        prefetch=config.prefetch,
        pin_memory=pin_memory,
    )


def build_pipeline(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    config: TrainConfig,
    clock: StageClock,
    num_steps: int,
) -> TrainPipeline:
    """Build the pipeline that makes the steps of a run.

    Args:
        model: A model from `build_model`.
        optimizers: Its optimizers from `build_model`.
        config: Configuration of the run.
        clock: Clock that records every stage.
        num_steps: Steps of the run.
    """
    batch_size = config.batch_size // num_ranks()  # processes divide each mini-batch

    def forward(batch: Batch) -> tuple[Tensor, Any]:
        with autocast(config):
            loss, output = model(batch)
        if num_ranks() > 1:
            output = _output_of_all(batch_size, batch, *output)
        return loss, output

    return TrainPipeline(
        model,
        optimizers,
        config.device,
        schedule=_schedule(config.schedule, num_steps),
        skip=config.skip.settings(config.seed),
        custom_model_fwd=forward,
        clock=clock,
        batch_size=batch_size,
    )


def _output_of_all(
    most: int, batch: Batch, loss: Tensor, logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss, logits and labels of a mini-batch of all processes. A collective.

    Args:
        most: The most samples that a process has; the same on all.
        batch: This process's part.
        loss: The mean over its samples, detached, as are the others.
        logits: Predictions of its samples.
        labels: Labels of its samples.

    Raises:
        TrainingDiverged: the loss of one process is not finite; all raise.
    """
    own_sum = loss.reshape(1) * len(labels)
    sums, all_logits, all_labels = gather(most, own_sum, logits, labels)
    if not sums.isfinite().all():
        own = "" if own_sum.isfinite() else explain_loss(loss.item(), batch)
        found = enumerate(gather_objects(own))
        raise TrainingDiverged(next(f"process {number}: {text}" for number, text in found if text))
    return sums.sum() / len(all_labels), all_logits, all_labels


def _schedule(config: ScheduleConfig, num_steps: int) -> Schedule | Auto | None:
    """The schedule of a configuration; None lets the pipeline choose."""
    hotline = config.hotline
    if hotline is not None:
        return Hotline(ceil(hotline.learning_share * num_steps), hotline.pinned_share)
    of_kind: dict[str, Schedule | Auto] = {
        "sequential": Sequential(),
        "fae": Sequential(),
        "auto": Auto(),
    }
    return of_kind.get(config.kind, config.lookahead)


def describe_schedule(
    pipeline: TrainPipeline, loader: BatchLoader | HotColdLoader
) -> dict[str, Any]:
    """The schedule of a run as its record holds it.

    `mean_depth` is the average number of mini-batches ahead whose rows had room. `rate` is FAE's
    rate at the end, and `num_swaps` the number of losses that it used. For "auto" the record holds
    its choice, if the run was long enough, the measurements, and settings that repeat the choice.
    """
    if isinstance(loader, HotColdLoader):
        return {
            "name": "fae",
            "hot_sample_share": loader.hot_share,
            "rate": loader.scheduler.rate,
            "num_swaps": loader.scheduler.num_swaps,
        }
    if pipeline.choice is not None:
        return {"name": "auto", **pipeline.choice.describe()}
    if isinstance(pipeline.schedule, LookAhead):
        return {
            "name": "lookahead",
            "depth": pipeline.schedule.depth,
            "mean_depth": pipeline.mean_depth,
        }
    if pipeline.popular_split is not None:
        return {"name": "hotline", **pipeline.popular_split.describe()}
    return {"name": "sequential"}


def describe_tiers(model: nn.Module) -> dict[str, Any] | None:
    """Hit rates since the tiers were made, bytes moved, memory; None where all rows are resident.

    A lookup hits if its row was in fast memory when its mini-batch claimed slots;
    `unique_hit_rate` counts each row once per mini-batch. `cold_row_share` is the share of these
    that were used in the cold tier, because slots were too few. `exposed_fetch_seconds` is the time
    spent waiting for transfers, of rows fetched and of rows written back.
    """
    groups = [group for group in groups_of(model) if group.fetcher is not None]
    if not groups:
        return None
    counts = [group.fetcher.counts for group in groups]
    row_bytes = [
        group.dim * group.dtype.itemsize + sum(group.dims[1:]) * group.compute_dtype.itemsize
        for group in groups
    ]
    num_rows = [int(group.first_rows[-1]) for group in groups]
    slots = [group.num_slots for group in groups]
    rates = HitRates.of(group.fetcher for group in groups)
    return {
        "cold_tier": "host" if all(group.files is None for group in groups) else "file",
        "hot_bytes": sum(
            of_map * MAP_BYTES_PER_ROW + count * (size + MARK_BYTES_PER_SLOT)
            for of_map, count, size in zip(num_rows, slots, row_bytes, strict=True)
        ),
        "num_slots": sum(slots),
        "num_rows": sum(num_rows),
        "num_lookups": sum(group_counts.lookups for group_counts in counts),
        "lookup_hit_rate": rates.lookups,
        "unique_hit_rate": rates.distinct_rows,
        "fetched_bytes": sum(
            group_counts.fetched * size
            for group_counts, size in zip(counts, row_bytes, strict=True)
        ),
        "written_back_bytes": sum(
            group_counts.written * size
            for group_counts, size in zip(counts, row_bytes, strict=True)
        ),
        "cold_row_share": sum(one.left for one in counts) / max(1, sum(one.rows for one in counts)),
        "exposed_fetch_seconds": sum(group.fetcher.waited for group in groups),
    }


def cold_folder(config: TrainConfig, run_dir: Path) -> str:
    """The folder on whose disk a run has its rows in files; "" if they are in memory.

    Args:
        config: The configuration of the run.
        run_dir: Its folder, which may not exist yet.
    """
    return "" if config.cold_tier == "host" else config.cold_path or str(existing(run_dir))


def autocast(config: TrainConfig) -> torch.autocast:
    """A context that gives a forward pass the precision of `config`.

    "bf16" multiplies the matrices of the dense part in bfloat16. Parameters, embedding rows, the
    last layer, the loss and all updates stay in float32.
    """
    return torch.autocast(config.device, torch.bfloat16, enabled=config.precision == "bf16")
