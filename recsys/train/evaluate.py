"""Saved models, opened; quality of a model on the splits of its data, also during a run.

Every split has the metrics of `MetricsAccumulator`. Data with groups has GAUC as well, and data
that holds positive samples alone outside training has recall and NDCG at k.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm  # in a notebook, its own bar

from recsys._support.files import as_argument
from recsys._support.machine import set_num_threads
from recsys.batch import feature_tables
from recsys.config import OptimizerConfig, TrainConfig, load_config, replace
from recsys.datasets.loader import BatchLoader
from recsys.datasets.store import Store
from recsys.embeddings.tables_module import check_input, device_of
from recsys.errors import ConfigError, TrainingDiverged
from recsys.models.batch_train import BatchTrain
from recsys.train.build import autocast, build_model, open_source
from recsys.train.metrics import MetricsAccumulator
from recsys.train.progress import LOWER_LR
from recsys.train.ranking import rank_baselines, rank_items
from recsys.train.ranks import gather, num_ranks, rank
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn

    from recsys.batch import Batch, SampleSource

__all__ = [
    "INIT_FROM_NEEDS",
    "evaluate",
    "evaluate_run",
    "open_first_model",
    "open_saved_model",
    "scores_of",
    "with_ranking",
]


INIT_FROM_NEEDS = (
    "init_from needs a run with the same model.* keys, and data prepared --like its store"
)


def evaluate(
    model: nn.Module,
    source: SampleSource,
    split: str,
    config: TrainConfig,
    max_samples: int | None = None,
    *,
    is_ranked: bool = True,
    show: bool = False,
) -> dict[str, Any]:
    """Metrics over a split in the precision of a run. A collective.

    Args:
        model: Maps a batch to (loss, (loss, logits, labels)).
        source: The data.
        split: "test" or "validation".
        config: The configuration of the run.
        max_samples: Stop after this number of samples.
        is_ranked: Whether to rank items, too, if the data is to be ranked.
        show: Draw a progress bar, which stays.

    Raises:
        IdOutOfRange: an id is not a row of its table, here or in training before.
        TrainingDiverged: a logit is not finite.
    """
    accumulator = MetricsAccumulator()
    batch_size = config.eval.batch_size
    loader = BatchLoader(
        source, split, batch_size, shuffle=False, rank=rank(), num_ranks=num_ranks()
    )
    groups = source.groups if isinstance(source, Store) else None
    may_be_probabilities = isinstance(model, BatchTrain)  # recsys's own models return logits
    with autocast(config), _evaluating(model):
        for batch in tqdm(loader, f"evaluate {split}", disable=not show):
            wanted = None if max_samples is None else max_samples - accumulator.num_samples
            scores, labels = scores_of(model, batch)
            own = torch.from_numpy(scores), torch.from_numpy(labels)
            of_all = gather(-(-batch_size // num_ranks()), *own)
            scores, labels = (found.numpy() for found in of_all)
            num_bad = int((~np.isfinite(scores)).sum())
            if num_bad:
                raise TrainingDiverged(
                    f"{split}: {num_bad} of {len(scores)} logits are not finite; {LOWER_LR}"
                )
            accumulator.add(scores[:wanted], labels[:wanted])
            if may_be_probabilities:
                may_be_probabilities = bool(((scores >= 0) & (scores <= 1)).all())
            if accumulator.num_samples == max_samples:
                break
    judged = source.splits[split][: accumulator.num_samples]
    found = accumulator.result(None if groups is None else groups[judged.start : judged.stop])
    if may_be_probabilities and found["num_samples"] >= 100 and (found["calibration"] or 0) > 1.2:
        warnings.warn(
            "all logits of the model lie in [0, 1], as probabilities do, and its predictions are "
            "too high; if forward ends with a sigmoid, leave it out: the loss and predictions "
            "apply one",
            stacklevel=3,
        )
    return with_ranking(found, model, source, split, config) if is_ranked else found


def with_ranking(
    found: dict[str, Any], model: nn.Module, source: SampleSource, split: str, config: TrainConfig
) -> dict[str, Any]:
    """The metrics of a split with recall and NDCG at k, if the data is to be ranked.

    Those of two baselines stand beside them.

    Args:
        found: Its metrics without them.
        model: Maps a batch to (loss, (loss, logits, labels)).
        source: The data.
        split: "test" or "validation".
        config: The configuration of the run.

    Raises:
        IdOutOfRange: an id is not a row of its table.
        TrainingDiverged: a logit is not finite.
    """
    if not isinstance(source, Store) or "ranking" not in source.meta or source.groups is None:
        return found
    if not source.splits["train"]:
        warnings.warn(
            f"{source.path} has no training part: what its groups chose before is not known, so "
            "no items are ranked; evaluate on the store that the model was trained on",
            stacklevel=4,
        )
        return found
    keys = config.eval
    with autocast(config), _evaluating(model):
        ranking = rank_items(
            model,
            source,
            split,
            k=keys.ranking_k,
            most_questions=keys.ranking_groups,
            batch_size=keys.batch_size,
        )
    baselines = rank_baselines(source, split, keys.ranking_k, keys.ranking_groups)
    return found | ranking | baselines


def scores_of(model: nn.Module, batch: Batch) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Logits and labels of a mini-batch on any device, on the CPU."""
    _, (_, logits, labels) = model(batch.to(device_of(model)))
    return logits.float().cpu().numpy(), labels.cpu().numpy()


def require_features_of(record: Mapping[str, Any], source: SampleSource) -> None:
    """Check that data has the features of a run, table by table, and encodes values as its data.

    Args:
        record: The run's record.
        source: The data.

    Raises:
        ConfigError: features, their tables, the order of tables, or the entry `encoding` differ.
    """
    found, data = feature_tables(source), record["data"]
    known = data.get("features", [{"name": name, "table": name} for name in data["table_sizes"]])
    expected = {feature["name"]: feature["table"] for feature in known}
    if list(found.items()) != list(expected.items()):
        raise ConfigError(
            f"{source.describe()['name']}: its features and their tables must be those of the run, "
            f"{expected}, got {found}; prepare it as the data of the run was prepared"
        )
    encoding = source.meta.get("encoding") if isinstance(source, Store) else None
    if None not in (encoding, data.get("encoding")) and encoding != data["encoding"]:
        raise ConfigError(
            f"store {source.describe()['name']}: values must have the rows, and dense columns the "
            f"rules, that they had in {data['name']}, the data of the run; got others, by the key "
            "encoding of meta.json; prepare the files with `recsys prepare table FILES --like "
            f"{as_argument(data['name'])} --out STORE`, or train again if {data['name']} was "
            "prepared again since"
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
    folder = RunFolder.open_model(config.init_from)
    require_features_of(folder.read_record(), source)
    return folder


def open_saved_model(
    run_dir: str | Path, data: str | Path | None = None, **changes: Any
) -> tuple[TrainConfig, SampleSource, nn.Module]:
    """Open the model of a run and its data.

    On the CPU, tables are mapped from the saved model, which may be larger than memory. The model
    of a run on a GPU is evaluated there if the run had no budget, and else on the CPU.

    Args:
        run_dir: A run that saved its model.
        data: A store or synthetic data; default: the data of the run.
        changes: Other values for keys of the run's configuration.

    Returns:
        The configuration of the run, for evaluation on this machine. The data. The model, which
        maps a batch to (loss, (loss, logits, labels)), in evaluation mode.

    Raises:
        ConfigError: there is no saved model, it does not fit the data, or the data encodes values
            in another way than that of the run.
        StoreError: the data does not exist, or is damaged.
    """
    folder = RunFolder.open(run_dir)
    trained = load_config(folder.config_file)
    if data is None:
        folder.require_data(trained.data)
    config = replace(
        trained,
        data=trained.data if data is None else str(data),
        # Without what is for training alone. Plain SGD allocates no state, and updates nothing.
        optimizer=OptimizerConfig(),
        dense_optimizer=None,
        budget="",
        plan="",
        cold_tier="host",
        cold_path="",
        **changes,
    )
    has_device = torch.cuda.is_available()
    if config.device == "cuda" and (trained.budget or not has_device):
        fault = "has no room for all tables, maybe" if has_device else "is not available"
        warnings.warn(f"device 'cuda' of the run {fault}; evaluating on 'cpu'", stacklevel=3)
        config = replace(config, device="cpu")
    source = open_source(config, to_train=False)
    if folder.record_file.is_file():
        require_features_of(folder.read_record(), source)
    set_num_threads(config.num_threads)
    model, _ = build_model(config, source, table_device="meta" if config.device == "cpu" else None)
    folder.load_model(model.model)
    return config, source, model.eval()


def evaluate_run(
    run_dir: str | Path, data: str | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, int]]]:
    """Evaluate a saved model on the test and validation splits.

    A split without samples is left out, such as the validation split of a store that
    `recsys prepare table --like` made.

    Args:
        run_dir: A run that saved its model.
        data: A store or synthetic data; default: the data of the run.

    Returns:
        The metrics by split. By split and column, how many values have no row of their own: they
        share row 0 of their table, because training has them too rarely, or not at all. Columns
        without such values are left out, and so are splits without such columns.

    Raises:
        ConfigError: there is no saved model, it does not fit the data, or both splits are empty.
    """
    config, source, model = open_saved_model(run_dir, data)
    splits = [split for split in ("test", "validation") if source.splits[split]]
    if not splits:
        raise ConfigError(
            f"{config.data} has no test and no validation sample; name other data, or predict its "
            "samples with `recsys predict`"
        )
    metrics = {split: evaluate(model, source, split, config) for split in splits}
    counts = source.meta.get("unknown", {}) if isinstance(source, Store) else {}
    # `+` leaves out what is 0.
    unknown = {split: dict(+Counter(counts.get(split, {}))) for split in splits}
    return metrics, {split: columns for split, columns in unknown.items() if columns}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside the `with` block.

    After it, torch's random generators are as before, so training is the same whether or not the
    model draws random numbers here.

    Raises:
        IdOutOfRange: an id is not a row of its table, here or in training before.
    """
    was_training, device = model.training, device_of(model)
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
        check_input(model)
    finally:
        model.train(was_training)
