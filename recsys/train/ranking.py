"""Rankings of all items for the test positives of a store, judged by recall and NDCG at k.

A question is a group together with what it knows when it chooses: all features of a test positive
but those of the item. Test positives of one group with equal features are one question, with
several right answers. All items are ranked for each question. The group's positives of the training
part are no candidates, unless they are right answers again.

Rows that stand for no item are never candidates: the row of rare and unknown values, and the row of
missing values. A test positive with such a row cannot be found. It counts as a miss.

Beside the model's rankings stand those by popularity: by an item's positives in the training part,
the same for every question.

The item is replaced in the features of a test positive: its own row, and the rows of the features
that belong to the item, from the store's catalog. Dense features stay as they are.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys.train.ranking_metrics import RankingMetrics, Rankings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Batch
    from recsys.datasets.store import Store

__all__ = ["rank_items"]

_SEED = 0  # of the groups that are drawn: all runs on a store answer the same questions
_MOST_SCORES = 1 << 22  # held at a time
_BLOCK = 1 << 20  # samples whose groups and labels are read at a time


def rank_items(
    score: Callable[[Batch], NDArray[np.float32]],
    store: Store,
    split: str,
    *,
    k: int,
    num_groups: int,
    batch_size: int,
) -> RankingMetrics:
    """Rank all items for the positives of a split.

    Args:
        score: Scores of the samples of a mini-batch on the CPU, higher for better.
        store: A store with `ranking` in its `meta.json`, groups and a catalog.
        split: "test" or "validation".
        k: Number of items that recall and NDCG count.
        num_groups: Groups to take, drawn from those with positives in the split; 0 for all.
        batch_size: Samples per call of `score`.
    """
    items = _Items(store)
    own, known = _Positives(store, store.splits[split]), _Positives(store, store.splits["train"])
    popularity = items.popularity(known)
    groups = own.groups()
    if 0 < num_groups < len(groups):
        generator = np.random.Generator(np.random.PCG64(_SEED))
        groups = np.sort(generator.choice(groups, num_groups, replace=False))
    own.keep(groups)
    known.keep(groups)
    found, by_popularity = Rankings(k), Rankings(k)
    most = max(1, _MOST_SCORES // items.num_rows)
    asked = _questions(store, items, own, groups)
    while questions := list(islice(asked, most)):
        scores = _score_all(score, store, items, questions, batch_size)
        for of_question, question in zip(scores, questions, strict=True):
            is_candidate = np.ones(items.num_rows, np.bool_)
            is_candidate[: items.first_row] = False
            is_candidate[items.of_samples(known.of(question.group))] = False
            right = np.unique(question.rows[question.rows >= items.first_row])
            is_candidate[right] = True
            num_unknown = int(np.count_nonzero(question.rows < items.first_row))
            found.add(of_question, right, is_candidate, num_unknown)
            by_popularity.add(popularity, right, is_candidate, num_unknown)
    return found.result(by_popularity)


class _Question(NamedTuple):
    """A question and its right answers.

    Attributes:
        group: The group that asks.
        sample: Number of the first of its test positives.
        rows: Rows of the item in its test positives, (T,).
    """

    group: int
    sample: int
    rows: NDArray[np.int64]


class _Items:
    """The items of a store, as rows of their table, and how they stand in a mini-batch.

    Args:
        store: The store.

    Attributes:
        num_rows: Rows of the table.
        first_row: The first row that stands for an item.
        names: The features that belong to the item, the item first.
    """

    def __init__(self, store: Store) -> None:
        item = store.meta["ranking"]["item"]
        self.names = [item, *store.meta["ranking"]["item_features"]]
        table = store.feature_tables[item]
        self.num_rows = store.table_sizes[table]
        self.first_row = 1 + _has_row_for_missing(store, table)
        ones = [each.name for each in store.features if not each.is_bag]
        self._column = store.sparse[:, ones.index(item)]
        self._catalog = store.catalog

    def of_samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the items of samples, (n,) each."""
        return self._column[samples].astype(np.int64)

    def popularity(self, positives: _Positives) -> NDArray[np.int64]:
        """A score of each row, (E,): rows of more positives first, then rows that come first."""
        counts = np.zeros(self.num_rows, np.int64)
        for block in positives.blocks():
            counts += np.bincount(self._column[block], minlength=self.num_rows)
        return counts * self.num_rows - np.arange(self.num_rows)

    def put(self, batch: Batch, rows: NDArray[np.int64]) -> None:
        """Replace the items of a mini-batch in place by these rows, (B,)."""
        columns = [rows]
        if self._catalog is not None:
            columns += list(self._catalog[rows].T)
        features = batch.sparse_features
        keys, values, offsets = features.keys(), features.values(), features.offsets()
        for name, column in zip(self.names, columns, strict=True):
            begin = int(offsets[keys.index(name) * len(rows)])
            values[begin : begin + len(rows)] = torch.from_numpy(column.astype(np.int64))


def _has_row_for_missing(store: Store, table: str) -> bool:
    """Whether row 1 of a table stands for missing values: one of its columns has them apart."""
    schema = store.meta.get("schema", {})
    return any(
        column.get("missing") == "own" and (column.get("table") or name) == table
        for name, column in schema.get("categorical", {}).items()
    )


class _Positives:
    """Numbers of the positive samples of a split, by group.

    Args:
        store: A store with groups.
        samples: The split.
    """

    def __init__(self, store: Store, samples: range) -> None:
        assert store.groups is not None
        self._groups, self._labels, self._samples = store.groups, store.labels, samples
        self._kept: NDArray[np.int64] = np.empty(0, np.int64)
        self._groups_of_kept: NDArray[np.int32] = np.empty(0, np.int32)

    def groups(self) -> NDArray[np.int32]:
        """The groups that have positives, ascending."""
        found = [np.unique(self._groups[block]) for block in self.blocks()]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int32)

    def keep(self, groups: NDArray[np.int32]) -> None:
        """Find the positives of these groups; `of` is for them only. Groups ascend."""
        found = [block[np.isin(self._groups[block], groups)] for block in self.blocks()]
        numbers = np.concatenate(found) if found else self._kept
        order = np.argsort(self._groups[numbers], kind="stable")
        self._kept = numbers[order]
        self._groups_of_kept = self._groups[self._kept]

    def of(self, group: int) -> NDArray[np.int64]:
        """Numbers of the positives of a group, ascending."""
        begin, end = np.searchsorted(self._groups_of_kept, [group, group + 1])
        return self._kept[begin:end]

    def blocks(self) -> Iterator[NDArray[np.int64]]:
        """Numbers of all positives, some at a time."""
        for begin in range(self._samples.start, self._samples.stop, _BLOCK):
            block = np.arange(begin, min(begin + _BLOCK, self._samples.stop))
            yield block[self._labels[block] == 1]


def _questions(
    store: Store, items: _Items, positives: _Positives, groups: NDArray[np.int32]
) -> Iterator[_Question]:
    """The questions of these groups, in the order of the groups."""
    for group in groups.tolist():
        samples = positives.of(group)
        rows = items.of_samples(samples)
        answers: dict[tuple[bytes, ...], list[int]] = {}
        for place, known in enumerate(_known(store, items, samples)):
            answers.setdefault(known, []).append(place)
        for places in answers.values():
            yield _Question(group, int(samples[places[0]]), rows[places])


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


def _score_all(
    score: Callable[[Batch], NDArray[np.float32]],
    store: Store,
    items: _Items,
    questions: Sequence[_Question],
    batch_size: int,
) -> NDArray[np.float32]:
    """Scores of all items for each question, (Q, E); those of rows that are no items are 0."""
    num_items = items.num_rows - items.first_row
    scores = np.zeros((len(questions), items.num_rows), np.float32)
    asked = store.read(np.array([each.sample for each in questions], np.int64))
    for begin in range(0, len(questions) * num_items, batch_size):
        end = min(begin + batch_size, len(questions) * num_items)
        rows_of_scores, rows = np.divmod(np.arange(begin, end), num_items)
        rows += items.first_row
        batch = asked.select(torch.from_numpy(rows_of_scores))
        items.put(batch, rows)
        scores[rows_of_scores, rows] = score(batch)
    return scores
