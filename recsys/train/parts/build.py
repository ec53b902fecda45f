"""Builds what a configuration names: data, plan, loader, model, optimizers and pipeline."""

from __future__ import annotations

import warnings
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.files import as_argument, existing
from recsys._support.sizes import format_bytes, parse_bytes
from recsys.batch import features_by_table, has_bags
from recsys.datasets.loader import BatchLoader
from recsys.datasets.store import Store
from recsys.datasets.synthetic import SyntheticCriteo
from recsys.embeddings.kernels.cpu.row_map import MAP_BYTES_PER_ROW, MARK_BYTES_PER_SLOT
from recsys.embeddings.popularity.counts import PopularityProfile
from recsys.embeddings.popularity.plan import HotPlan, plan_hot_rows
from recsys.embeddings.staleness.tracker import tracked_bytes
from recsys.embeddings.tables_module import groups_of
from recsys.embeddings.tiers.budget import slot_bytes
from recsys.embeddings.tiers.fetch import HitRates
from recsys.errors import BudgetTooSmall, ConfigError
from recsys.pipeline import (
    FAE,
    Auto,
    HotColdLoader,
    Hotline,
    LookAhead,
    Sequential,
    TrainPipeline,
)
from recsys.pipeline.skip.paper import budget_beside_hot_rows
from recsys.train.parts.models import build_network, needs_rows
from recsys.train.parts.providers import build_embeddings, row_optimizer
from recsys.train.parts.tables import tables_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.batch import Batch, SampleSource
    from recsys.config import ScheduleConfig, TrainConfig
    from recsys.models.batch_train import BatchTrain
    from recsys.models.dlrm import DLRMTrain
    from recsys.pipeline.schedule import Schedule
    from recsys.pipeline.stalls import StageClock
    from recsys.train.run_folder import RunFolder

__all__ = [
    "INIT_FROM_NEEDS",
    "autocast",
    "build_loader",
    "build_model",
    "build_pipeline",
    "choose_plan",
    "cold_folder",
    "dense_optimizer",
    "describe_schedule",
    "describe_source",
    "describe_tiers",
    "open_first_model",
    "open_source",
    "require_features_of",
    "tables_budget",
]

INIT_FROM_NEEDS = (
    "init_from needs a run with the same model.* keys, and data prepared --like its store"
)

_NUM_DRAWN = 8  # mini-batches in which the rows of bags are counted


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
    source: SampleSource
    if not config.is_synthetic:
        source = Store(config.data)
        if source.label_names:
            raise ConfigError(
                f"{config.data}: a model has one label, and this store has labels "
                f"{', '.join(map(repr, source.label_names))}; prepare a store with one of them as "
                "label"
            )
    else:
        source = SyntheticCriteo(**config.synthetic.model_dump())
    for split, samples in source.splits.items():
        if to_train and not samples:
            way_out = (
                "training needs samples in each part; change [split] in the schema, and prepare "
                "the table with it again"
                if isinstance(source, Store) and "schema" in source.meta
                else "a store of several days needs 2 samples or more in its last day and one "
                "before it, any other data 14 or more"
            )
            sizes = ", ".join(f"{name} has {len(part)}" for name, part in source.splits.items())
            raise ConfigError(
                f"{config.data}: the {split} part is empty: of {source.num_samples} samples, "
                f"{sizes}; {way_out}"
            )
    return source


def require_features_of(record: Mapping[str, Any], source: SampleSource) -> None:
    """Check that data has the features of a run, table by table, and encodes values as its data.

    Args:
        record: The run's record.
        source: The data.

    Raises:
        ConfigError: features, their tables, the order of tables, or the entry `encoding` differ.
    """
    found, data = features_by_table(source), record["data"]
    known: dict[str, list[str]] = {table: [] for table in data["table_sizes"]}
    for feature in data.get("features", [{"name": name, "table": name} for name in known]):
        known[feature["table"]].append(feature["name"])
    expected = {table: tuple(names) for table, names in known.items()}
    if list(found.items()) != list(expected.items()):
        raise ConfigError(
            f"{source.describe()['name']}: its features by table must be those of the run, "
            f"{expected}, got {found}; prepare it as the data of the run was prepared"
        )
    if isinstance(source, Store):
        _require_encoding_of(data, source)


def _require_encoding_of(data: Mapping[str, Any], store: Store) -> None:
    """Check that a store encodes values as the data of a run did."""
    encodings = data.get("encoding"), store.meta.get("encoding")
    if None in encodings or encodings[0] == encodings[1]:
        return
    name = data["name"]
    if name == str(store.path):
        raise ConfigError(
            f"store {name} was prepared again after the run, and its values have other rows now, "
            "or its dense columns other rules; train again, or restore the store"
        )
    raise ConfigError(
        f"store {store.path}: values must have the rows, and dense columns the rules, that they "
        f"had in {name}, the data of the run; got others, by the key encoding of meta.json; "
        f"prepare the files with `recsys prepare table FILES --like {as_argument(name)} --out "
        f"STORE`, or train again if {name} was prepared again since"
    )


def open_first_model(config: TrainConfig, source: SampleSource) -> RunFolder | None:
    """The run that `init_from` names; None without one. Warns if that run did not finish.

    The first values of a new run are those of the model that this run has saved. Optimizers, the
    order of samples and schedules of learning rates begin anew.

    Args:
        config: The configuration of the new run.
        source: Its data.

    Raises:
        ConfigError: the folder is not of a run that ended and saved its model, or the data has
            other features, or encodes values in another way, than that of the run.
    """
    if not config.init_from:
        return None
    # It needs pydantic, and benchmarks use this file where there is none.
    from recsys.train.run_folder import RunFolder

    folder = RunFolder.open(config.init_from)
    folder.require_model()
    record = folder.read_record()
    require_features_of(record, source)
    if record["status"] != "finished":
        warnings.warn(
            f"init_from: the status of {folder.path} is {record['status']!r}, not 'finished', and "
            "this run begins with the model that it saved when it stopped",
            stacklevel=2,
        )
    return folder


def describe_source(source: SampleSource) -> dict[str, Any]:
    """Data of a run as its record holds it, with a fingerprint that identifies the data."""
    return {**source.describe(), "fingerprint": source.fingerprint}


def choose_plan(config: TrainConfig, source: SampleSource) -> HotPlan | None:
    """The plan of a run: the rows that never leave fast memory; None for a run without a plan.

    The plan is the file `config.plan`. FAE's schedule without this key makes one, from the lookups
    of the training split.

    Raises:
        BudgetTooSmall: FAE has no room for the rows of a mini-batch.
        ConfigError: FAE has neither a budget nor a plan, or the file does not exist.
        ProfileError: the file is not a plan.
    """
    if config.plan and config.skip.kind == "paper":
        raise ConfigError(
            "skip 'paper' plans the hot rows for the part of the budget that its snapshot "
            f"leaves, got plan {config.plan!r}; drop the key plan"
        )
    if config.plan:
        return _load_plan(config.plan)
    if config.schedule.fae is None:
        return None
    if not config.budget:
        raise ConfigError(
            "schedule 'fae' separates samples by whether all of their rows are in fast "
            "memory; give it a size by budget, or a plan"
        )
    profile = PopularityProfile.count(source, source.splits["train"])
    budget = tables_budget(config, source)
    try:
        return plan_hot_rows(
            profile,
            tables_of(source, config.model),
            budget,
            row_optimizer(config.optimizer),
            window_lookups=_window_lookups(config, source),
            small_share=0,
        )
    except BudgetTooSmall as error:
        if budget == config.budget:
            raise
        raise BudgetTooSmall(
            f"skip 'paper' takes its snapshot of hot rows out of budget={config.budget!r} "
            f"and leaves {format_bytes(int(budget))} to the tables. {error}"
        ) from None


def tables_budget(config: TrainConfig, source: SampleSource) -> str:
    """The budget of the tables: without what a policy of skipping keeps of rows beside them.

    Raises:
        BudgetTooSmall: that takes the whole budget.
    """
    of_tracker = _tracker_bytes(config, source) if config.budget else 0
    if of_tracker:
        left = parse_bytes(config.budget, "budget") - of_tracker
        if left <= 0:
            raise BudgetTooSmall(
                f"skip {config.skip.kind!r} takes {format_bytes(of_tracker)} to follow rows, and "
                f"budget is {config.budget!r}; raise it, or lower staleness.max_rows of the policy"
            )
        return str(left)
    if config.skip.kind != "paper" or not config.budget:
        return config.budget
    dim, dtype = config.model.embedding_dim, torch.float32
    of_slot = slot_bytes(dim, dtype, row_optimizer(config.optimizer).state_sizes(dim))
    sizes, of_row = list(source.table_sizes.values()), dim * dtype.itemsize
    budget = parse_bytes(config.budget, "budget")
    return str(budget_beside_hot_rows(budget, sizes, of_row, of_slot))


def _window_lookups(config: TrainConfig, source: SampleSource) -> int:
    """The rows that a plan reserves for each feature in one mini-batch.

    With one row a sample these are as many as samples. The rows of bags are counted in mini-batches
    that are drawn from the training split, by the table with the most for each of its features.
    """
    if not has_bags(source):
        return config.batch_size
    tables, train = features_by_table(source), source.splits["train"]
    generator = np.random.default_rng(config.seed)
    most = 1
    for _ in range(_NUM_DRAWN):
        size = min(config.batch_size, len(train))
        drawn = source.read(train.start + generator.choice(len(train), size, replace=False))
        for features in tables.values():
            rows = np.concatenate([drawn.sparse_features[name].values() for name in features])
            most = max(most, ceil(len(np.unique(rows)) / len(features)))
    return most


def _tracker_bytes(config: TrainConfig, source: SampleSource) -> int:
    """Bytes of the budget that following the drift of rows takes; 0 without it."""
    keys = config.skip.staleness
    if keys is None:
        return 0
    tables = [
        torch.empty(size, config.model.dim_of(table), device="meta")
        for table, size in source.table_sizes.items()
    ]
    return tracked_bytes(tables, keys.settings())


def _load_plan(file: str) -> HotPlan:
    """Load the plan of a configuration.

    Raises:
        ConfigError: there is no such file.
        ProfileError: it is not a plan.
    """
    try:
        return HotPlan.load(file)
    except FileNotFoundError as error:
        raise ConfigError(
            f"plan: there is no file {file}; make it with `recsys profile` and `recsys plan`, or "
            "leave the key out"
        ) from error


def build_loader(
    config: TrainConfig,
    source: SampleSource,
    plan: HotPlan | None,
    rank: int = 0,
    num_ranks: int = 1,
) -> BatchLoader | HotColdLoader:
    """A loader of the training split, in the order of the schedule; arguments as for `BatchLoader`.

    FAE classifies every sample as hot or cold, and keeps the result in the folder of the store.
    """
    # `build_model` refuses a device that is missing.
    pin_memory = config.device == "cuda" and torch.cuda.is_available()
    fae = config.schedule.fae
    if fae is None:
        return BatchLoader(
            source,
            "train",
            config.batch_size,
            shuffle=config.shuffle,
            seed=config.seed,
            prefetch=config.prefetch,
            pin_memory=pin_memory,
            permutation_seed=config.permutation_seed or None,
            rank=rank,
            num_ranks=num_ranks,
        )
    assert plan is not None
    is_hot = plan.find_hot_samples(source, source.splits["train"])
    if is_hot.all() or not is_hot.any():
        warnings.warn(
            f"schedule 'fae' has no effect: {'all' if is_hot.all() else 'no'} samples "
            f"are hot with budget={config.budget!r}; choose another budget, or another schedule",
            stacklevel=3,
        )
    return HotColdLoader(
        source,
        "train",
        config.batch_size,
        is_hot,
        FAE(
            rate=fae.rate,
            is_adaptive=fae.adaptive,
            min_rate=fae.min_rate,
            max_rate=fae.max_rate,
            patience=fae.patience,
            factor=fae.factor,
        ),
        seed=config.seed,
        prefetch=config.prefetch,
        pin_memory=pin_memory,
    )


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
        plan: Result of `choose_plan`; None to read the file `config.plan`, if set.
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
    if plan is None and config.plan:
        plan = _load_plan(config.plan)
    torch.manual_seed(config.seed)
    device = torch.device(config.device)
    embeddings, of_rows = build_embeddings(
        config.embeddings,
        tables_of(source, config.model),
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
    dense_parameters = [each for each in model.parameters() if each not in tables]
    of_dense = dense_optimizer(config, dense_parameters)
    if table_device is None:
        model.to(device)
    return model, [of_dense, of_rows]


def dense_optimizer(config: TrainConfig, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The optimizer of the dense part."""
    dense, is_cpu = config.resolved_dense_optimizer, config.device == "cpu"
    if dense.name == "sgd":
        return torch.optim.SGD(parameters, lr=dense.lr)
    # Fused: one call for all parameters takes a third of the time on the CPU.
    if dense.name == "adam":
        betas = (dense.betas[0], dense.betas[1])
        return torch.optim.Adam(
            parameters, lr=dense.lr, betas=betas, eps=dense.eps, fused=is_cpu or None
        )
    return torch.optim.Adagrad(parameters, lr=dense.lr, eps=dense.eps, fused=is_cpu or None)


def build_pipeline(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    config: TrainConfig,
    clock: StageClock,
    num_steps: int,
    processes: Any = None,
) -> TrainPipeline:
    """Build the pipeline that makes the steps of a run.

    Args:
        model: A model from `build_model`.
        optimizers: Its optimizers from `build_model`.
        config: Configuration of the run.
        clock: Clock that records every stage.
        num_steps: Steps of the run.
        processes: Those that divide each mini-batch, a `Processes`; None for this one alone.
    """
    batch_size = config.batch_size // (1 if processes is None else processes.num_ranks)

    def forward(batch: Batch) -> tuple[Tensor, Any]:
        with autocast(config):
            loss, output = model(batch)
        if processes is not None:
            output = processes.gather_step(batch_size, batch, *output)
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


def _schedule(config: ScheduleConfig, num_steps: int) -> Schedule | Auto | None:
    """The schedule of a configuration; None lets the pipeline choose."""
    if config.kind in ("sequential", "fae"):
        return Sequential()
    if config.kind == "auto":
        return Auto()
    if config.hotline is not None:
        learning_steps = ceil(config.hotline.learning_share * num_steps)
        return Hotline(learning_steps, config.hotline.pinned_share)
    return None if config.lookahead is None else LookAhead(config.lookahead.depth)


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
        depth = pipeline.schedule.depth
        return {"name": "lookahead", "depth": depth, "mean_depth": pipeline.mean_depth}
    if pipeline.popular_split is not None:
        return {"name": "hotline", **pipeline.popular_split.describe()}
    return {"name": "sequential"}


def describe_tiers(model: nn.Module) -> dict[str, Any] | None:
    """Hit rates since the tiers were made, bytes moved, memory; None where all rows are resident.

    A lookup hits if its row was in fast memory when its mini-batch claimed slots;
    `unique_hit_rate` counts each row once per mini-batch. `cold_row_share` is the share of these
    that were used in cold memory, because slots were too few. `exposed_fetch_seconds` is the time
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
    hot = zip(num_rows, slots, row_bytes, strict=True)
    rates = HitRates.of(group.fetcher for group in groups)
    return {
        "cold_tier": "host" if all(group.files is None for group in groups) else "file",
        "hot_bytes": sum(
            of_map * MAP_BYTES_PER_ROW + count * (size + MARK_BYTES_PER_SLOT)
            for of_map, count, size in hot
        ),
        "num_slots": sum(slots),
        "num_rows": sum(num_rows),
        "num_lookups": sum(each.lookups for each in counts),
        "lookup_hit_rate": rates.lookups,
        "unique_hit_rate": rates.distinct_rows,
        "fetched_bytes": sum(
            each.fetched * size for each, size in zip(counts, row_bytes, strict=True)
        ),
        "written_back_bytes": sum(
            each.written * size for each, size in zip(counts, row_bytes, strict=True)
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
    if config.cold_tier == "host":
        return ""
    return config.cold_path or str(existing(run_dir))


def autocast(config: TrainConfig) -> torch.autocast:
    """A context that gives a forward pass the precision of `config`.

    "bf16" multiplies the matrices of the dense part in bfloat16. Parameters, embedding rows, the
    last layer, the loss and all updates stay in float32.
    """
    return torch.autocast(config.device, torch.bfloat16, enabled=config.precision == "bf16")
