"""Rankings of all items for the test positives of a store, judged by recall and NDCG at k.

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
computes the score. A retrieval model, such as `TwoTower`, scores a question and all items by one
matrix product. Any other model scores each candidate as a sample of its own.

Baselines say what twenty lines reach on the same questions, without a model:

    popularity    an item's score is the number of its training positives
    item_knn      an item's score is the sum, over the items that the question knows, of the cosine
                  of both: the number of groups whose training positives have both, divided by the
                  root of the product of the numbers of groups that have one. A question knows the
                  items of its history, or, in a store without one, those of its group's training
                  positives. Of each known item the nearest 200 count, and of a large training part
                  the last 16 million samples
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.jit import kernel
from recsys.batch import Batch, JaggedIds
from recsys.embeddings.tables_module import device_of
from recsys.errors import TrainingDiverged
from recsys.models.archs import AbstractPooledModel
from recsys.models.retrieval import AbstractRetrievalModel
from recsys.train.metrics import Rankings
from recsys.train.progress import LOWER_LR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.datasets.store import Store

__all__ = ["ItemScorer", "Items", "rank_baselines", "rank_items", "samples_by_group"]

_SEED = 0  # of the groups and questions that are drawn
_MOST_SCORES = 1 << 22  # held at a time
_BLOCK = 1 << 20  # samples whose groups and labels are read at a time
# Of baselines.
_METRICS = ("recall_at_k", "recall_standard_error", "ndcg_at_k", "ndcg_standard_error")
_NEIGHBORS = 200
_MOST_SAMPLES = 1 << 24  # of the training part that item_knn reads: the last ones
_MOST_KEPT = 1 << 15  # items whose neighbors are kept


def rank_items(
    model: nn.Module, store: Store, split: str, *, k: int, most_questions: int, batch_size: int
) -> dict[str, Any]:
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
    items = Items(store)
    scorer = ItemScorer(model, items, batch_size, keeps_vectors=True)

    def score(questions: Sequence[Question]) -> NDArray[np.float32]:
        scores = np.zeros((len(questions), items.num_rows), np.float32)
        asked = store.read(np.array([question.sample for question in questions], np.int64))
        for rows, found in scorer.blocks(asked):
            scores[:, rows] = found.float().cpu().numpy()
        num_bad = int((~np.isfinite(scores)).sum())
        if num_bad:
            raise TrainingDiverged(
                f"{split}, ranking: {num_bad} of {scores.size} scores are not finite; {LOWER_LR}"
            )
        return scores

    return rank_by(score, store, split, k=k, most_questions=most_questions, most_at_once=batch_size)


def rank_by(
    score: Callable[[Sequence[Question]], NDArray[Any]],
    store: Store,
    split: str,
    *,
    k: int,
    most_questions: int,
    most_at_once: int = _MOST_SCORES,
) -> dict[str, Any]:
    """Rank all items by any scores.

    Args:
        score: The scores of all rows of the item's table for some questions, (Q, E).
        store: As for `rank_items`, as are `split`, `k` and `most_questions`.
        split: "test" or "validation".
        k: Number of items that recall and NDCG count.
        most_questions: Bound of the number of questions; 0 for all questions of all groups.
        most_at_once: The most questions that are scored at a time.
    """
    items = Items(store)
    assert store.groups is not None
    of_blocks = [np.unique(store.groups[block]) for block in _positives(store, store.splits[split])]
    groups = np.unique(np.concatenate([np.empty(0, np.int32), *of_blocks]))
    per_group: int | None = None
    generator = np.random.Generator(np.random.PCG64(_SEED))
    if most_questions:
        if most_questions < len(groups):
            groups = np.sort(generator.choice(groups, most_questions, replace=False))
        per_group = most_questions // max(1, len(groups))
    own = samples_by_group(store, store.splits[split], groups)
    known = samples_by_group(store, store.splits["train"], groups)
    found = Rankings(k)
    most = max(1, min(most_at_once, _MOST_SCORES // items.num_rows))
    asked = (
        question
        for group in own
        for question in _drawn(
            _questions(store, items, group, own[group], known[group]), per_group, generator
        )
    )
    while questions := list(islice(asked, most)):
        for of_question, question in zip(score(questions), questions, strict=True):
            is_candidate = np.ones(items.num_rows, np.bool_)
            is_candidate[: items.first_row] = False
            is_candidate[question.left_out] = False
            right = np.unique(question.rows[question.rows >= items.first_row])
            num_unknown = int(np.count_nonzero(question.rows < items.first_row))
            found.add(question.group, of_question, right, is_candidate, num_unknown)
    return found.result()


class Question(NamedTuple):
    """A question and its right answers.

    Attributes:
        group: The group that asks.
        sample: Number of the first of its test positives.
        rows: Rows of the item in its test positives, (T,).
        left_out: Rows of the items that are no candidates.
        known: Rows of the items of the group's training positives, in their order.
    """

    group: int
    sample: int
    rows: NDArray[np.int64]
    left_out: NDArray[np.int64]
    known: NDArray[np.int64]


class Items:
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
        columns = store.meta.get("schema", {}).get("categorical", {})
        self.first_row = 1 + any(  # row 1 is for missing values, if a column has them apart
            column.get("missing") == "own" and (column.get("table") or name) == table
            for name, column in columns.items()
        )
        ones = [feature.name for feature in store.features if not feature.is_bag]
        self._column = store.sparse[:, ones.index(item)]
        self._catalog = store.catalog
        self._features = [feature.name for feature in store.features]

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


def _positives(store: Store, samples: range) -> Iterator[NDArray[np.int64]]:
    """Numbers of the positive samples of a split, some at a time."""
    for begin in range(samples.start, samples.stop, _BLOCK):
        block = np.arange(begin, min(begin + _BLOCK, samples.stop))
        yield block[store.labels[block] == 1]


def samples_by_group(
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
    items: Items,
    group: int,
    samples: NDArray[np.int64],
    known: NDArray[np.int64],
) -> list[Question]:
    """The questions of a group.

    Args:
        store: The store.
        items: Its items.
        group: The group.
        samples: Numbers of its positives of the split.
        known: Numbers of its positives of the training part.
    """
    rows, listed = items.of_samples(samples), items.of_samples(known)
    listed = listed[listed >= items.first_row]
    before = listed[:0] if items.come_again else np.unique(listed)
    are_known = np.isin(rows, before)
    answers: dict[tuple[object, ...], list[int]] = {}
    for position, features in enumerate(_known(store, items, samples)):
        answers.setdefault((*features, bool(are_known[position])), []).append(position)
    return [
        Question(
            group,
            int(samples[positions[0]]),
            rows[positions],
            left_out=before[:0] if are_known[positions[0]] else before,
            known=listed,
        )
        for positions in answers.values()
    ]


def _drawn(
    questions: list[Question], most: int | None, generator: np.random.Generator
) -> list[Question]:
    """At most so many of the questions, in their order; None for all."""
    if most is None or len(questions) <= most:
        return questions
    chosen = np.sort(generator.choice(len(questions), most, replace=False))
    return [questions[number] for number in chosen.tolist()]


def _known(store: Store, items: Items, samples: NDArray[np.int64]) -> Iterator[tuple[bytes, ...]]:
    """What each sample holds, but for its item, in a form that can be compared."""
    batch = store.read(samples)
    features = batch.sparse_features
    values, offsets = features.values().numpy(), features.offsets().tolist()
    others = [number for number, key in enumerate(features.keys()) if key not in items.names]
    firsts = [number * len(samples) for number in others]
    for position, dense in enumerate(batch.dense_features.numpy()):
        bags = [
            values[offsets[first + position] : offsets[first + position + 1]].tobytes()
            for first in firsts
        ]
        yield (dense.tobytes(), *bags)


class ItemScorer:
    """Scores all items of a store by a model, some of them at a time.

    Args:
        model: As for `rank_items`.
        items: The items of the store.
        batch_size: The most candidates of a forward pass.
        keeps_vectors: Whether the vectors of all items of a retrieval model are kept once they are
            computed, (E, D).
    """

    def __init__(
        self, model: nn.Module, items: Items, batch_size: int, *, keeps_vectors: bool = False
    ) -> None:
        self._train_model, self._items, self._batch_size = model, items, batch_size
        # On several processes, TorchRec's `DistributedModelParallel` is around it.
        self._model: Any = getattr(model, "module", model).model
        self._kept: dict[int, Tensor] | None = {} if keeps_vectors else None

    def blocks(self, asked: Batch) -> Iterator[tuple[slice, Tensor]]:
        """Rows of some items, and their scores, (Q, n), until all items have been scored.

        Args:
            asked: Q questions, whose items are not read.
        """
        if isinstance(self._model, AbstractRetrievalModel):
            return self._by_vectors(asked)
        if isinstance(self._model, AbstractPooledModel):
            return self._by_head(asked)
        return self._by_samples(asked)

    def _slices(self, size: int) -> Iterator[slice]:
        for begin in range(self._items.first_row, self._items.num_rows, size):
            yield slice(begin, min(begin + size, self._items.num_rows))

    def _by_vectors(self, asked: Batch) -> Iterator[tuple[slice, Tensor]]:
        device = device_of(self._train_model)
        asked = asked.to(device)
        users, _ = self._model.vectors(asked.dense_features, asked.sparse_features)
        for rows in self._slices(self._batch_size):
            vectors = None if self._kept is None else self._kept.get(rows.start)
            if vectors is None:
                vectors = self._model.items(torch.arange(rows.start, rows.stop, device=device))
                if self._kept is not None:
                    self._kept[rows.start] = vectors
            with torch.autocast(device.type, enabled=False):  # 8 bits are too few to rank items
                scores = users @ vectors.T
            yield rows, scores

    def _by_samples(self, asked: Batch) -> Iterator[tuple[slice, Tensor]]:
        """Each pair of question and item is a sample."""
        device = device_of(self._train_model)
        for rows in self._slices(max(1, self._batch_size // len(asked))):
            num_items = rows.stop - rows.start
            pairs = torch.arange(len(asked) * num_items)
            candidates = asked.select(pairs // num_items)
            candidates.sparse_features = self._items.put_into(
                candidates.sparse_features, pairs % num_items + rows.start
            )
            _, (_, logits, _) = self._train_model(candidates.to(device))
            yield rows, logits.view(len(asked), num_items)

    def _by_head(self, asked: Batch) -> Iterator[tuple[slice, Tensor]]:
        """Q vectors of each feature, and those of `batch_size` items, are held at a time."""
        model: AbstractPooledModel = self._model
        device = next(model.dense_arch.parameters()).device
        names = model.sparse_arch.sparse_feature_names
        of_item = [names.index(name) for name in self._items.names]
        asked = asked.to(device)
        dense = model.dense_arch(asked.dense_features)
        pooled = model.sparse_arch(asked.sparse_features)
        for rows in self._slices(self._batch_size):
            num_items = rows.stop - rows.start
            vectors = model.sparse_arch(self._items.as_features(rows).to(device))[:, of_item]
            num_pairs = len(asked) * num_items
            # Not a list: small results between large ones would keep freed memory from use.
            logits = torch.empty(num_pairs, device=device)
            for begin in range(0, num_pairs, self._batch_size):
                end = min(begin + self._batch_size, num_pairs)
                pairs = torch.arange(begin, end, device=device)
                question, item = pairs // num_items, pairs % num_items
                candidates = pooled[question]
                candidates[:, of_item] = vectors[item]
                logits[begin:end] = model.head(dense[question], candidates).squeeze(-1)
            yield rows, logits.view(len(asked), num_items)


@lru_cache(maxsize=4)  # a store does not change, and a run evaluates several times
def rank_baselines(
    store: Store, split: str, k: int, most_questions: int
) -> dict[str, float | None]:
    """Recall and NDCG of each baseline and their errors, by names such as `item_knn_recall_at_k`.

    Args:
        store: As for `rank_items`, as are the others.
        split: "test" or "validation".
        k: Number of items that recall and NDCG count.
        most_questions: Bound of the number of questions.
    """
    counts = store.item_counts()
    neighbors = _Neighbors(store, len(counts))
    scorers: dict[str, Callable[[Sequence[Question]], NDArray[Any]]] = {
        "popularity": lambda questions: np.tile(counts, (len(questions), 1)),
        "item_knn": neighbors.score,
    }
    found: dict[str, float | None] = {}
    for name, score in scorers.items():
        ranking = rank_by(score, store, split, k=k, most_questions=most_questions)
        found |= {f"{name}_{metric}": ranking[metric] for metric in _METRICS}
    return found


class _Neighbors:
    """Items near each item, by the groups of the training part.

    Args:
        store: The store.
        num_items: E.
    """

    def __init__(self, store: Store, num_items: int) -> None:
        assert store.groups is not None
        samples, items = store.splits["train"][-_MOST_SAMPLES:], Items(store)
        positives = np.flatnonzero(store.labels[samples.start : samples.stop]) + samples.start
        rows = items.of_samples(positives)
        pairs = (store.groups[positives].astype(np.int64) << 32) | rows
        pairs = np.unique(pairs[rows >= items.first_row])  # group by group
        groups, self._items = pairs >> 32, pairs & 0xFFFFFFFF
        self._store, self._num_items = store, num_items
        names = [name for name, of in store.histories.items() if of == items.names[0]]
        self._history = next(iter(names), None)
        self._ends = np.cumsum(np.bincount(groups))
        self._groups = groups[np.argsort(self._items, kind="stable")]  # item by item
        self._sizes = np.bincount(self._items, minlength=num_items)
        self._item_ends = np.cumsum(self._sizes)
        self._of_item = lru_cache(_MOST_KEPT)(self._find)

    def score(self, questions: Sequence[Question]) -> NDArray[np.float32]:
        """The scores of all items for questions, (Q, E)."""
        scores = np.zeros((len(questions), self._num_items), np.float32)
        for of_question, question in zip(scores, questions, strict=True):
            known = question.known
            if self._history is not None:
                batch = self._store.read(np.array([question.sample]))
                known = batch.sparse_features[self._history].values().numpy()
            for item in known.tolist():
                near, cosines = self._of_item(item)
                of_question[near] += cosines
        return scores

    def _find(self, item: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The nearest items of one, and their cosines."""
        end = self._item_ends[item]
        groups = self._groups[end - self._sizes[item] : end]
        counts = np.zeros(self._num_items, np.int64)
        _count_kernel(groups, self._items, self._ends, counts)
        counts[item] = 0
        near = np.flatnonzero(counts)
        cosines = counts[near] / np.sqrt(self._sizes[near] * max(1, self._sizes[item]))
        nearest = np.argsort(-cosines, kind="stable")[:_NEIGHBORS]
        return near[nearest], cosines[nearest].astype(np.float32)


@kernel
def _count_kernel(
    groups: NDArray[np.int64],
    items: NDArray[np.int64],
    ends: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> None:
    """Count the groups that have each item, among these groups."""
    for group in groups:
        for position in range(ends[group - 1] if group else 0, ends[group]):
            counts[items[position]] += 1
