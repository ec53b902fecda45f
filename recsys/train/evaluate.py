"""Quality of a model on the splits of its data, during a run and of a saved model.

Every split has the metrics of `MetricsAccumulator`. Data with groups has GAUC as well, and data
that holds positive samples alone outside training has recall and NDCG at k: of rankings of all
items for its positives.

A question is a group together with what it knows when it chooses: all features of a test positive
but those of the item. Test positives of one group with equal features are one question, with
several right answers. Which items are its candidates:

    items come again        all items. `repeats` of the store's `ranking` says so: its schema has a
                            history of the item
    otherwise               all items but the group's positives of the training part. Right answers
                            that are among those (rare) are a question of their own, and all items
                            are its candidates

An item is never a candidate because it is right. Rows that stand for no item are no candidates: the
row of rare and unknown values, and the row of missing values. A test positive with such a row
cannot be found. It counts as a miss.

The number of questions may be bounded. Then groups are drawn, and of each group equally many
questions, or all that it has. The seed is constant, so all runs on a store answer the same ones.

A candidate is a question with another item: its own row, and the rows of the features that belong
to the item, from the store's catalog. An `AbstractPooledModel`, such as `DLRM`, computes what
depends on the question alone once for each question: the dense vector, and the pooled vectors of
its features. For each candidate the vectors of the item replace those of the question, and the head
computes the score. Any other model scores each candidate as a sample of its own.
"""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm  # in a notebook, its own bar

from recsys._support.machine import set_num_threads
from recsys.batch import Batch, JaggedIds, SampleSource
from recsys.config import EvalConfig, OptimizerConfig, TrainConfig, replace
from recsys.datasets.loader import BatchLoader
from recsys.datasets.store import Store
from recsys.embeddings.tables_module import check_input, device_of
from recsys.errors import ConfigError, TrainingDiverged
from recsys.models.archs import AbstractPooledModel
from recsys.models.batch_train import BatchTrain
from recsys.train.build import autocast, build_model, open_source, require_features_of
from recsys.train.metrics import Metrics, MetricsAccumulator, RankingMetrics, Rankings
from recsys.train.progress import LOWER_LR
from recsys.train.ranks import gather, num_ranks, rank
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn


__all__ = [
    "SavedModel",
    "evaluate_run",
    "evaluate_split",
    "nonzero_counts",
    "open_saved_model",
    "rank_items",
    "scores_of",
    "unknown_values",
    "with_ranking",
]


_SEED = 0  # of the groups and questions that are drawn
_MOST_SCORES = 1 << 22  # held at a time
_BLOCK = 1 << 20  # samples whose groups and labels are read at a time


class SavedModel(NamedTuple):
    """The model of a run, with its data.

    Attributes:
        config: The configuration of the run, for evaluation on this machine.
        source: The data.
        model: Maps a batch to (loss, (loss, logits, labels)); in evaluation mode.
    """

    config: TrainConfig
    source: SampleSource
    model: nn.Module


def evaluate_split(
    model: nn.Module,
    source: SampleSource,
    split: str,
    batch_size: int,
    max_samples: int | None = None,
    *,
    is_divided: bool = False,
    show: bool = False,
) -> Metrics:
    """Metrics over a split, without a ranking.

    Args:
        model: Maps a batch to (loss, (loss, logits, labels)).
        source: The data. All scores are kept, as `MetricsAccumulator` does.
        split: "train", "test" or "validation".
        batch_size: Samples per forward pass.
        max_samples: Stop after this number of samples.
        is_divided: Whether the processes of a run divide each mini-batch. Then this is a
            collective.
        show: Draw a progress bar, which stays.

    Raises:
        IdOutOfRange: an id is not a row of its table, here or in training before.
        TrainingDiverged: a logit is not finite.
    """
    accumulator = MetricsAccumulator()
    place, world = (rank(), num_ranks()) if is_divided else (0, 1)
    loader = BatchLoader(source, split, batch_size, shuffle=False, rank=place, num_ranks=world)
    groups = source.groups if isinstance(source, Store) else None
    may_be_probabilities = isinstance(model, BatchTrain)  # recsys's own models return logits
    with _evaluating(model):
        for batch in tqdm(loader, f"evaluate {split}", disable=not show):
            wanted = None if max_samples is None else max_samples - accumulator.num_samples
            scores, labels = scores_of(model, batch)
            if is_divided:
                own = torch.from_numpy(scores), torch.from_numpy(labels)
                scores, labels = (found.numpy() for found in gather(-(-batch_size // world), *own))
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
    if groups is not None:
        first = source.splits[split].start
        groups = groups[first : first + accumulator.num_samples]
    found = accumulator.result(groups)
    if may_be_probabilities and found.num_samples >= 100 and (found.calibration or 0) > 1.2:
        warnings.warn(_NO_LOGITS, stacklevel=3)
    return found


_NO_LOGITS = (
    "all logits of the model lie in [0, 1], as probabilities do, and its predictions are too high; "
    "if forward ends with a sigmoid, leave it out: the loss and predictions apply one"
)


def with_ranking(
    found: Metrics, model: nn.Module, source: SampleSource, split: str, config: EvalConfig
) -> Metrics:
    """The metrics of a split with recall and NDCG at k, if the data is to be ranked.

    Args:
        found: Its metrics without them.
        model: Maps a batch to (loss, (loss, logits, labels)).
        source: The data.
        split: "test" or "validation".
        config: Has `k`, the bound of the questions, and the candidates per forward pass.

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
            stacklevel=3,
        )
        return found
    with _evaluating(model):
        ranking = rank_items(
            model,
            source,
            split,
            k=config.ranking_k,
            most_questions=config.ranking_groups,
            batch_size=config.batch_size,
        )
    return dataclasses.replace(found, ranking=ranking)


def rank_items(
    model: nn.Module, store: Store, split: str, *, k: int, most_questions: int, batch_size: int
) -> RankingMetrics:
    """Rank all items for the positives of a split; call it without gradients.

    Args:
        model: Maps a mini-batch to (loss, (loss, logits, labels)); its `model` is the model. With
            several processes each scores all candidates, and this is a collective.
        store: A store with `ranking` in its `meta.json`, groups and a catalog.
        split: "test" or "validation".
        k: Number of items that recall and NDCG count.
        most_questions: Bound of the number of questions; 0 for all questions of all groups.
        batch_size: Candidates per forward pass.

    Raises:
        TrainingDiverged: a score is not finite.
    """
    items = _Items(store)
    assert store.groups is not None
    of_blocks = [np.unique(store.groups[block]) for block in _positives(store, store.splits[split])]
    groups = np.unique(np.concatenate([np.empty(0, np.int32), *of_blocks]))
    per_group: int | None = None
    generator = np.random.Generator(np.random.PCG64(_SEED))
    if most_questions:
        if most_questions < len(groups):
            groups = np.sort(generator.choice(groups, most_questions, replace=False))
        per_group = most_questions // max(1, len(groups))
    own = _by_group(store, store.splits[split], groups)
    known = _by_group(store, store.splits["train"], groups)
    found = Rankings(k)
    most = max(1, min(batch_size, _MOST_SCORES // items.num_rows))
    asked = (
        question
        for group in own
        for question in _drawn(
            _questions(store, items, group, own[group], known[group]), per_group, generator
        )
    )
    # On several processes, TorchRec's `DistributedModelParallel` is around it.
    scorer = getattr(model, "module", model).model
    while questions := list(islice(asked, most)):
        samples = np.array([each.sample for each in questions], np.int64)
        if isinstance(scorer, AbstractPooledModel):
            scores = _score_by_head(scorer, store.read(samples), items, batch_size)
        else:
            scores = _score_by_samples(model, store.read(samples), items, batch_size)
        num_bad = int((~np.isfinite(scores)).sum())
        if num_bad:
            raise TrainingDiverged(
                f"{split}, ranking: {num_bad} of {scores.size} scores are not finite; {LOWER_LR}"
            )
        for of_question, question in zip(scores, questions, strict=True):
            is_candidate = np.ones(items.num_rows, np.bool_)
            is_candidate[: items.first_row] = False
            is_candidate[question.left_out] = False
            right = np.unique(question.rows[question.rows >= items.first_row])
            num_unknown = int(np.count_nonzero(question.rows < items.first_row))
            found.add(question.group, of_question, right, is_candidate, num_unknown)
    return found.result()


class _Question(NamedTuple):
    """A question and its right answers.

    Attributes:
        group: The group that asks.
        sample: Number of the first of its test positives.
        rows: Rows of the item in its test positives, (T,).
        left_out: Rows of the items that are no candidates.
    """

    group: int
    sample: int
    rows: NDArray[np.int64]
    left_out: NDArray[np.int64]


class _Items:
    """The items of a store, as rows of their table, and how they stand in a mini-batch.

    Args:
        store: The store.

    Attributes:
        num_rows: Rows of the table, E.
        first_row: The first row that stands for an item.
        come_again: Whether a group chooses items again that it has chosen before.
        names: The C features that belong to the item, the item first.
    """

    def __init__(self, store: Store) -> None:
        ranking = store.meta["ranking"]
        item = ranking["item"]
        self.names = [item, *ranking["item_features"]]
        self.come_again: bool = ranking.get("repeats", False)
        table = store.feature_tables[item]
        self.num_rows = store.table_sizes[table]
        self.first_row = 1 + _has_row_for_missing(store, table)
        ones = [each.name for each in store.features if not each.is_bag]
        self._column = store.sparse[:, ones.index(item)]
        self._catalog = store.catalog
        self._features = [each.name for each in store.features]

    def of_samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the items of samples, (n,) each."""
        return self._column[samples].astype(np.int64)

    def as_features(self, rows: slice) -> JaggedIds:
        """Samples of these items, one each, whose other features look up row 0."""
        numbers = torch.arange(rows.start, rows.stop)
        ids = torch.zeros(len(self._features), len(numbers), dtype=torch.int64)
        return self.put_into(JaggedIds.from_one_hot(self._features, ids), numbers)

    def put_into(self, features: JaggedIds, rows: torch.Tensor) -> JaggedIds:
        """The same samples with other items.

        Args:
            features: Features of B samples.
            rows: Rows of the new items.

        Shape:
            rows (B,) int64.
        """
        values, size = features.values().clone(), features.stride()
        rows_of = [rows]
        if self._catalog is not None:
            rows_of += list(torch.from_numpy(self._catalog[rows.numpy()].astype(np.int64)).T)
        for name, own in zip(self.names, rows_of, strict=True):
            begin = int(features.offsets()[features.keys().index(name) * size])
            values[begin : begin + size] = own
        if features.is_known_one_hot():
            return JaggedIds.from_one_hot(features.keys(), values.view(-1, size))
        return JaggedIds(features.keys(), values, features.offsets())


def _has_row_for_missing(store: Store, table: str) -> bool:
    """Whether row 1 of a table stands for missing values: one of its columns has them apart."""
    schema = store.meta.get("schema", {})
    return any(
        column.get("missing") == "own" and (column.get("table") or name) == table
        for name, column in schema.get("categorical", {}).items()
    )


def _positives(store: Store, samples: range) -> Iterator[NDArray[np.int64]]:
    """Numbers of the positive samples of a split, some at a time."""
    for begin in range(samples.start, samples.stop, _BLOCK):
        block = np.arange(begin, min(begin + _BLOCK, samples.stop))
        yield block[store.labels[block] == 1]


def _by_group(
    store: Store, samples: range, groups: NDArray[np.int32]
) -> dict[int, NDArray[np.int64]]:
    """Numbers of the positive samples of each of these groups, which ascend."""
    of_samples = store.groups
    assert of_samples is not None
    found = [block[np.isin(of_samples[block], groups)] for block in _positives(store, samples)]
    numbers = np.concatenate([np.empty(0, np.int64), *found])
    numbers = numbers[np.argsort(of_samples[numbers], kind="stable")]
    begins = np.searchsorted(of_samples[numbers], groups)
    return dict(zip(groups.tolist(), np.split(numbers, begins[1:]), strict=True))


def _questions(
    store: Store,
    items: _Items,
    group: int,
    samples: NDArray[np.int64],
    known: NDArray[np.int64],
) -> list[_Question]:
    """The questions of a group.

    Args:
        store: The store.
        items: Its items.
        group: The group.
        samples: Numbers of its positives of the split.
        known: Numbers of its positives of the training part.
    """
    rows, before = items.of_samples(samples), items.of_samples(known)
    before = before[:0] if items.come_again else np.unique(before[before >= items.first_row])
    are_known = np.isin(rows, before)
    answers: dict[tuple[object, ...], list[int]] = {}
    for place, features in enumerate(_known(store, items, samples)):
        answers.setdefault((*features, bool(are_known[place])), []).append(place)
    return [
        _Question(
            group,
            int(samples[places[0]]),
            rows[places],
            left_out=before[:0] if are_known[places[0]] else before,
        )
        for places in answers.values()
    ]


def _drawn(
    questions: list[_Question], most: int | None, generator: np.random.Generator
) -> list[_Question]:
    """At most so many of the questions, in their order; None for all."""
    if most is None or len(questions) <= most:
        return questions
    chosen = np.sort(generator.choice(len(questions), most, replace=False))
    return [questions[number] for number in chosen.tolist()]


def _known(store: Store, items: _Items, samples: NDArray[np.int64]) -> Iterator[tuple[bytes, ...]]:
    """What each sample holds, but for its item, in a form that can be compared."""
    batch = store.read(samples)
    features = batch.sparse_features
    values, offsets = features.values().numpy(), features.offsets().tolist()
    others = [number for number, key in enumerate(features.keys()) if key not in items.names]
    firsts = [number * len(samples) for number in others]
    for place, dense in enumerate(batch.dense_features.numpy()):
        bags = [
            values[offsets[first + place] : offsets[first + place + 1]].tobytes()
            for first in firsts
        ]
        yield (dense.tobytes(), *bags)


def _score_by_samples(
    model: nn.Module, asked: Batch, items: _Items, batch_size: int
) -> NDArray[np.float32]:
    """`_score_by_head` for any model: each pair of question and item is a sample."""
    num_questions, num_items = len(asked), items.num_rows - items.first_row
    scores = np.zeros((num_questions, items.num_rows), np.float32)
    found = []
    for begin in range(0, num_questions * num_items, batch_size):
        pairs = torch.arange(begin, min(begin + batch_size, num_questions * num_items))
        candidates = asked.select(pairs // num_items)
        candidates.sparse_features = items.put_into(
            candidates.sparse_features, pairs % num_items + items.first_row
        )
        found.append(scores_of(model, candidates)[0])
    scores[:, items.first_row :] = np.concatenate(found).reshape(num_questions, num_items)
    return scores


def _score_by_head(
    model: AbstractPooledModel, asked: Batch, items: _Items, batch_size: int
) -> NDArray[np.float32]:
    """Scores of all items for each question, (Q, E); those of rows that are no items are 0.

    Q vectors of each feature, and those of `batch_size` items, are held at a time.
    """
    device = next(model.dense_arch.parameters()).device
    names = model.sparse_arch.sparse_feature_names
    of_item = [names.index(name) for name in items.names]
    num_questions, asked = len(asked), asked.to(device)
    dense = model.dense_arch(asked.dense_features)
    pooled = model.sparse_arch(asked.sparse_features)
    scores = np.zeros((num_questions, items.num_rows), np.float32)
    for first in range(items.first_row, items.num_rows, batch_size):
        rows = slice(first, min(first + batch_size, items.num_rows))
        num_items = rows.stop - rows.start
        vectors = model.sparse_arch(items.as_features(rows).to(device))[:, of_item]
        logits = []
        num_pairs = num_questions * num_items
        for begin in range(0, num_pairs, batch_size):
            pairs = torch.arange(begin, min(begin + batch_size, num_pairs), device=device)
            question, item = pairs // num_items, pairs % num_items
            candidates = pooled[question]
            candidates[:, of_item] = vectors[item]
            logits.append(model.head(dense[question], candidates).squeeze(-1))
        of_block = torch.cat(logits).view(num_questions, num_items)
        scores[:, rows] = of_block.float().cpu().numpy()
    return scores


def scores_of(model: nn.Module, batch: Batch) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Logits and labels of a mini-batch on any device, on the CPU."""
    _, (_, logits, labels) = model(batch.to(device_of(model)))
    return logits.float().cpu().numpy(), labels.cpu().numpy()


def open_saved_model(run_dir: str | Path, data: str | None = None, **changes: str) -> SavedModel:
    """Open the model of a run and its data.

    On the CPU, tables are mapped from the saved model, which may be larger than memory. The model
    of a run on a GPU is evaluated there if the run had no budget, and else on the CPU.

    Args:
        run_dir: A run that saved its model.
        data: A store or synthetic data; default: the data of the run.
        changes: Other values for keys of the run's configuration.

    Raises:
        ConfigError: there is no saved model, it does not fit the data, the data encodes values in
            another way than that of the run, or it is empty.
        StoreError: the data does not exist, or is damaged.
    """
    folder = RunFolder.open(run_dir)
    trained = folder.read_config()
    if data is None:
        folder.require_data(trained.data)
    config = replace(
        trained,
        data=trained.data if data is None else data,
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
    if not source.num_samples:
        raise ConfigError(f"{config.data} has no sample; name other data")
    if folder.record_file.is_file():
        require_features_of(folder.read_record(), source)
    set_num_threads(config.num_threads)
    table_device = "meta" if config.device == "cpu" else None
    model, _ = build_model(config, source, table_device=table_device)
    folder.load_model(model.model)
    return SavedModel(config, source, model.eval())


def evaluate_run(run_dir: str | Path, data: str | None = None) -> dict[str, Metrics]:
    """Metrics of a saved model on the test and validation splits, by split.

    A split without samples is left out, such as the validation split of a store that
    `recsys prepare table --like` made.

    Args:
        run_dir: A run that saved its model.
        data: A store or synthetic data; default: the data of the run.

    Raises:
        ConfigError: there is no saved model, it does not fit the data, or both splits are empty.
    """
    config, source, model = open_saved_model(run_dir, data)
    metrics = {}
    splits = [split for split in ("test", "validation") if source.splits[split]]
    if not splits:
        raise ConfigError(
            f"{config.data} has no test and no validation sample; name other data, or predict its "
            "samples with `recsys predict`"
        )
    with autocast(config):
        for split in splits:
            found = evaluate_split(model, source, split, config.eval.batch_size)
            metrics[split] = with_ranking(found, model, source, split, config.eval)
    return metrics


def unknown_values(run_dir: str | Path, data: str | None = None) -> dict[str, dict[str, int]]:
    """Values of the test and validation splits that have no row of their own, by split and column.

    They share row 0 of their table: training has them too rarely, or not at all. Columns without
    such values are left out, and so are splits without such columns.

    Args:
        run_dir: A run.
        data: A store or synthetic data; default: the data of the run.
    """
    config = RunFolder.open(run_dir).read_config()
    source = open_source(config if data is None else replace(config, data=data), to_train=False)
    counts = source.meta.get("unknown", {}) if isinstance(source, Store) else {}
    found = {split: nonzero_counts(counts.get(split, {})) for split in ("test", "validation")}
    return {split: columns for split, columns in found.items() if columns}


def nonzero_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts that are not 0, in their order."""
    return {name: count for name, count in counts.items() if count}


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
