"""Recommendations of a saved model: the items with the highest scores for each user.

    FILE.parquet    <group>    the user, as in the column of the schema's key group
                    <item>     the item, as in the column of the schema's [negatives]
                    rank       int64, from 1 up
                    score      float32, the logit of the model; higher is better

What is known of a user comes from the store: the features of the newest sample of its group, and
its histories. The item of that sample is added to the histories that list it, as the next row of
the group would have it; histories with a key `where`, and those that a column has, stay as they
are. Newest is by time if the store has times, else by position in the store, where the test part is
last.

Users are scored some at a time, and items block by block, so memory is bounded. On the CPU, tables
are mapped from the saved model, which may be larger than memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from recsys.batch import Batch, JaggedIds
from recsys.datasets.store import GROUPS, Store
from recsys.datasets.tabular.encode import read_schema
from recsys.datasets.tabular.read import Frames, TableFiles
from recsys.datasets.tabular.schema import GROUP, Schema
from recsys.embeddings.tables_module import check_input
from recsys.errors import ConfigError, DatasetFormatError
from recsys.train.build import autocast
from recsys.train.evaluate import open_saved_model
from recsys.train.predict import (
    Written,
    new_parquet,
    values_in,
    values_of_rows,
    write_parquet,
)
from recsys.train.ranking import Items, ItemScorer, samples_by_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pandas as pd
    from numpy.typing import NDArray

__all__ = ["Recommender", "recommend_run"]

_USERS_AT_ONCE = 512


class Recommender:
    """The model of a run, ready to recommend items.

    Args:
        run_dir: A run that saved its model.
        store: Where the store of the run is now; or a store that `recsys prepare table --like` made
            of newer rows, whose users it recommends for. Default: where it was in training.
        batch_size: Items, or pairs of user and item, of a forward pass.

    Raises:
        ConfigError: there is no saved model, it does not fit the data, the data has no groups and
            items, or `batch_size` is less than 1.
        StoreError: the store does not exist, or is damaged.
    """

    def __init__(
        self, run_dir: str | Path, *, store: str | Path | None = None, batch_size: int = 8192
    ) -> None:
        self._config, source, self._model = open_saved_model(run_dir, store, batch_size=batch_size)
        if (
            not isinstance(source, Store)
            or "ranking" not in source.meta
            or not (source.path / GROUPS).is_file()
        ):
            raise ConfigError(
                f"{self._config.data} must be a store of pairs of groups and items, whose schema "
                f"has group and [negatives], with its {GROUPS}; name another by --store, or "
                "prepare it again"
            )
        self.store = source
        self._schema, self._items = read_schema(source), Items(source)
        self._scorer = ItemScorer(self._model, self._items, batch_size)
        self._group_values = values_in(source.path / GROUPS)
        self._item_values = values_of_rows(source, self._items.names[0])

    @property
    def users_schema(self) -> Schema:
        """The schema of a table of users: of its columns, that of groups alone is read."""
        # Not checked: a table of users has no label.
        return Schema.model_construct(
            group=self._schema.group,
            delimiter=self._schema.delimiter,
            quote=self._schema.quote,
            missing_values=self._schema.missing_values,
        )

    def top(
        self, frame: pd.DataFrame | pa.Table, k: int = 20, *, with_seen: bool = False
    ) -> pd.DataFrame:
        """The best items of each user.

        Args:
            frame: Its column of the schema's key group is read; a user may come again.
            k: How many items; a user for whom fewer are left gets fewer rows.
            with_seen: Whether items of the user's own samples may come again.

        Returns:
            A row for each user and item, as in the file: users in the order of their first rows,
            the best item first.

        Raises:
            ConfigError: `k` is less than 1.
            DatasetFormatError: the frame lacks the column or has no row, the store has no positive
                sample of a user, or the model gives no finite score.
            TypeError: it is no frame.
        """
        users = self.users_in(Frames(frame, self.users_schema))
        return pa.concat_tables(self.recommend(users, k, with_seen=with_seen)).to_pandas()

    def users_in(self, table: Frames | TableFiles) -> pa.Array:
        """The values of the column of groups, as text, each once, by first appearance.

        Args:
            table: Rows of `users_schema`.

        Raises:
            DatasetFormatError: the table has no row, lacks the column, or breaks its format.
        """
        found = [batch.column(GROUP).cast("large_string").unique() for batch in table.batches()]
        if not found:
            raise DatasetFormatError("a table of users must have at least one row, got none")
        return pa.concat_arrays(found).unique()

    def recommend(self, users: pa.Array, k: int, *, with_seen: bool = False) -> Iterator[pa.Table]:
        """The best items of users, some users at a time.

        Args:
            users: What `users_in` returns.
            k: See `top`.
            with_seen: See `top`.

        Raises:
            ConfigError: `k` is less than 1.
            DatasetFormatError: the store has no positive sample of a user, or the model gives no
                finite score.
        """
        if k < 1:
            raise ConfigError(f"top must be at least 1, got {k}")
        groups, samples = self._known(users)
        names = [self._schema.group, self._items.names[0], "rank", "score"]
        for begin in range(0, len(groups), _USERS_AT_ONCE):
            chosen = groups[begin : begin + _USERS_AT_ONCE]
            of_users = [samples[group] for group in chosen.tolist()]
            scores, rows = self._best(of_users, min(k, self._items.num_rows), with_seen=with_seen)
            is_item = np.isfinite(scores)
            asker, position = np.nonzero(is_item)
            arrays = [
                self._group_values.take(pa.array(chosen[asker])),
                self._item_values.take(pa.array(rows[is_item])),
                pa.array(position + 1),
                pa.array(scores[is_item]),
            ]
            yield pa.Table.from_arrays(arrays, names)
        check_input(self._model)

    def _known(self, users: pa.Array) -> tuple[NDArray[np.int32], Mapping[int, NDArray[np.int64]]]:
        """The groups of users, and the numbers of the positive samples of each group.

        Raises:
            DatasetFormatError: there is none of a user.
        """
        values = self._group_values.cast("large_string")
        found = pc.index_in(users, value_set=values).fill_null(-1)
        groups = found.to_numpy().astype(np.int32)
        samples = samples_by_group(self.store, range(self.store.num_samples), np.unique(groups))
        lacking = [
            position for position, group in enumerate(groups.tolist()) if not len(samples[group])
        ]
        if lacking:
            raise DatasetFormatError(
                f"{self._schema.group} {users[lacking[0]].as_py()!r}: {self.store.path} has no "
                f"positive sample of {len(lacking)} of the {len(groups)} users, of whom it is the "
                "first; leave them out, or name a store with their rows"
            )
        return groups, samples

    def _best(
        self, samples: Sequence[NDArray[np.int64]], k: int, *, with_seen: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and rows of the best items of U users; -inf where there are fewer.

        Args:
            samples: The numbers of the positive samples of each user.
            k: How many items.
            with_seen: Whether the items of these samples are candidates.

        Shape:
            results (U, k).
        """
        times = self.store.times
        ages = [numbers if times is None else times[numbers] for numbers in samples]
        newest = [
            numbers[np.lexsort((numbers, age))[-1]]
            for numbers, age in zip(samples, ages, strict=True)
        ]
        asked = self._questions(np.array(newest))
        seen = self._items.of_samples(np.concatenate(samples))
        askers = np.repeat(np.arange(len(samples)), [len(numbers) for numbers in samples])
        best = torch.full((len(samples), k), -torch.inf)
        best_rows = torch.zeros(len(samples), k, dtype=torch.int64)
        with torch.no_grad(), autocast(self._config):
            for rows, found in self._scorer.blocks(asked):
                scores = found.float().cpu()
                if not scores.isfinite().all():
                    raise DatasetFormatError(
                        "a score must be finite, and the model gives none for some of the users; "
                        "train again with a lower learning rate"
                    )
                if not with_seen:
                    is_inside = (rows.start <= seen) & (seen < rows.stop)
                    scores[askers[is_inside], seen[is_inside] - rows.start] = -torch.inf
                best, chosen = torch.cat([best, scores], 1).topk(k)
                earlier = best_rows.gather(1, chosen.clamp(max=k - 1))
                best_rows = torch.where(chosen < k, earlier, chosen - k + rows.start)
        return best.numpy(), best_rows.numpy()

    def _questions(self, samples: NDArray[np.int64]) -> Batch:
        """Samples, with the item of each added to the histories that list it."""
        batch, histories = self.store.read(samples), self._schema.history
        features, columns = batch.sparse_features, []
        for name in features.keys():  # noqa: SIM118  # not a dictionary
            bags = list(torch.split(features[name].values(), features[name].lengths().tolist()))
            history = histories.get(name)
            if history is not None and history.of in self._items.names and not history.where:
                own = torch.split(features[history.of].values(), 1)
                bags = [
                    torch.cat(pair)[-history.max_length :] for pair in zip(bags, own, strict=True)
                ]
            columns += bags
        lengths = torch.tensor([0, *map(len, columns)])
        batch.sparse_features = JaggedIds(features.keys(), torch.cat(columns), lengths.cumsum(0))
        return batch


def recommend_run(
    run_dir: str | Path,
    users: Sequence[str | Path],
    out: str | Path,
    *,
    k: int = 20,
    with_seen: bool = False,
    batch_size: int = 8192,
    store: str | Path | None = None,
) -> Written:
    """Recommend items by the model of a run, and write a Parquet file.

    Args:
        run_dir: A run that saved its model.
        users: Files with the column of groups; others are not read. A user may come again.
        out: A new file, with a name that ends in .parquet.
        k: How many items for each user.
        with_seen: Whether items of the user's own samples may come again.
        batch_size: See `Recommender`.
        store: See `Recommender`.

    Raises:
        AlreadyExists: `out` exists.
        ConfigError: as of `Recommender`, or `k` is less than 1, or `out` is not named .parquet.
        DatasetFormatError: a file cannot be read, lacks the column, or as of `Recommender.top`.
        FileNotFoundError: a file does not exist.
        StoreError: the store is damaged.
    """
    out = new_parquet(out)
    recommender = Recommender(run_dir, store=store, batch_size=batch_size)
    asked = recommender.users_in(TableFiles(users, recommender.users_schema, with_hash=False))
    tables = recommender.recommend(asked, k, with_seen=with_seen)
    return write_parquet(out, tables, pa.table({}))
