"""Runs `Paper`: takes the snapshots, finds the stale rows of an epoch, and names stale samples.

    hot mini-batch `first_snapshot` is taken    first snapshot
    first one after the window is taken         second snapshot, threshold, stale rows
    it and each later one of the epoch          samples whose rows are all stale are dropped
    next epoch                                  no row is stale

No mini-batch is taken ahead. So at the time when a mini-batch is taken, the rows are those after
the update of the mini-batch before it.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch

from recsys._support.states import SavedState
from recsys._support.user_warnings import warn_caller
from recsys.datasets.loader import BatchIterator
from recsys.embeddings.staleness.sampled_inputs import MOST_INPUTS, SampledInputs
from recsys.embeddings.staleness.tracked_tables import groups_in, names_of
from recsys.errors import ConfigError
from recsys.pipeline.fae import HotColdLoader
from recsys.pipeline.skip.hot_rows import HotRows
from recsys.pipeline.skip.paper import draw_places, search_threshold
from recsys.pipeline.skip.refill import EVERYTHING, Chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.pipeline.model_tables import ModelTables
    from recsys.pipeline.skip.paper import Paper, Search
    from recsys.pipeline.skip.refill import RawBatch

__all__ = ["PaperClassifier"]

_STATE_KEYS = ("epoch", "is_decided", "hot_rows", "snapshots", "updated", "stale", "decisions")


class PaperClassifier:
    """Names the samples of each mini-batch that `Paper` drops.

    Args:
        paper: The constants.
        model: The model that is trained.
        tables: The tables of the model.
        setting: The setting, for errors.
        max_depth: The most mini-batches that the schedule takes ahead.

    Attributes:
        paper: As given.
        decisions: One entry for each epoch in which stale rows were looked for, in JSON types:
            `epoch`; `last_of_window`, the hot mini-batch before the second snapshot; `num_sampled`;
            `threshold`, `tries`, `share` and `has_converged` of the `Search`; `num_hot_rows`, and
            `num_unseen_rows` among them, which were not updated in the window; `num_stale_rows` by
            table.

    Raises:
        ValueError: the schedule takes mini-batches ahead; the model has no recsys modules, or the
            rows of one are not updated by recsys; or another tracker follows them.
    """

    def __init__(
        self, paper: Paper, model: nn.Module, tables: ModelTables, setting: str, max_depth: int
    ) -> None:
        if max_depth:
            raise ValueError(
                f"{setting} decides after a hot mini-batch which samples come next, so no "
                f"mini-batch may be taken ahead, got a schedule of depth {max_depth}; use "
                "Sequential()"
            )
        self.paper, self._tables, self._setting = paper, tables, setting
        groups = groups_in([model])
        self._names = names_of([model], groups)
        self._hot_rows = {group: HotRows(group) for group in groups}
        self._device = groups[0].device
        self._numbers = {group: number for number, group in enumerate(groups)}
        for group in groups:
            if group.before_update is not None:
                raise ValueError(
                    f"{setting}: another tracker follows the rows of {group.names}; close() the "
                    "pipeline that has it"
                )
        for group, rows in self._hot_rows.items():
            group.before_update = rows.marks.before_update
        self.decisions: list[dict[str, Any]] = []
        self._loader: HotColdLoader | None = None
        self._epoch, self._is_decided = 0, False

    def close(self) -> None:
        """Stop following rows."""
        for group, rows in self._hot_rows.items():
            if group.before_update == rows.marks.before_update:
                group.before_update = None

    @property
    def num_bytes(self) -> int:
        """The most bytes of fast memory that it takes, beside the budget of the tables."""
        return sum(each.num_bytes for each in self._hot_rows.values())

    def require_loader(self, iterator: Any) -> HotColdLoader:
        """The loader of an iterator.

        Raises:
            ValueError: it is not the loader that `Paper` needs.
        """
        loader = iterator.loader if isinstance(iterator, BatchIterator) else None
        if not isinstance(loader, HotColdLoader):
            raise ValueError(  # noqa: TRY004  # the choice is wrong, not only the type
                f"{self._setting} needs the hot mini-batches of a HotColdLoader, got an iterator "
                f"of {type(loader or iterator).__name__}; iterate a HotColdLoader with "
                "FAE(rate=100, is_adaptive=False), or choose another policy"
            )
        if loader.fae.is_adaptive or loader.fae.rate != 100:
            raise ValueError(
                f"{self._setting} needs all cold mini-batches of an epoch before the hot ones, got "
                f"{loader.fae}; use FAE(rate=100, is_adaptive=False)"
            )
        if self._loader is None:
            self._loader = loader
            self._warn_of_no_effect(loader)
        elif self._loader is not loader:
            raise ValueError(
                f"{self._setting} follows the hot mini-batches of one loader, got an iterator of a "
                "second one; train on one loader"
            )
        return loader

    def chooser(self, iterator: Iterator[Any]) -> Callable[[RawBatch], Chosen]:
        """What chooses from the mini-batches of an iterator; it does not keep the iterator alive.

        Args:
            iterator: One that `require_loader` accepts.
        """
        return partial(self._choose, ref(iterator))

    def _choose(self, known: ref[Any], raw: RawBatch) -> Chosen:
        """Choose from the mini-batch that an iterator has just returned."""
        is_stale = self._stale_samples(raw.batch, raw.size, known())
        return EVERYTHING if is_stale is None else Chosen(np.flatnonzero(~is_stale))

    def _stale_samples(
        self, batch: Any, batch_size: int, iterator: Any
    ) -> NDArray[np.bool_] | None:
        """Which samples of a mini-batch are dropped, (B,); None if no row is stale."""
        loader = self.require_loader(iterator)
        if loader.epoch != self._epoch:
            self._begin_epoch(loader.epoch)
        number = loader.last_hot_number(iterator)
        if number is None:
            return None
        last = self.paper.last_of_window(loader.num_hot_batches)
        if number == self.paper.first_snapshot and not self._is_decided:
            for each in self._hot_rows.values():
                each.begin()
        if number > last and not self._is_decided:
            self._decide(loader, last)
        if not any(each.marks.num_stale for each in self._hot_rows.values()):
            return None
        return self._classify(batch, batch_size)

    def stale_rows(self) -> dict[str, NDArray[np.int64]]:
        """The rows of each table that are stale now, ascending."""
        return {
            name: each.marks.stale_rows(table)
            for each, names in zip(self._hot_rows.values(), self._names, strict=True)
            for table, name in enumerate(names)
        }

    def report(self) -> dict[str, Any]:
        """What was decided, and `memory_bytes`, in JSON types; see `decisions`."""
        return {"memory_bytes": self.num_bytes, "decisions": self.decisions}

    def state_dict(self) -> dict[str, Any]:
        """Everything that later mini-batches depend on: JSON types, and tensors.

        Between the snapshots it has the first one; afterwards it has the stale rows.
        """
        hot_rows = self._hot_rows.values()
        snapshots = [rows.before for rows in hot_rows if rows.before is not None]
        return {
            "epoch": self._epoch,
            "is_decided": self._is_decided,
            "hot_rows": self._digest(),
            "snapshots": [snapshot.flatten() for snapshot in snapshots],
            "updated": [torch.from_numpy(rows.marks.counted()[0]) for rows in hot_rows],
            "stale": [torch.from_numpy(rows.stale_rows()) for rows in hot_rows],
            "decisions": [dict(decision) for decision in self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with the same hot rows.

        Raises:
            ConfigError: other rows are hot, or `state` is no state of a classifier.
        """
        found = SavedState(f"{self._setting} state", state, _STATE_KEYS)
        hot_rows = list(self._hot_rows.values())
        if found["hot_rows"] != self._digest():
            raise ConfigError(
                f"{self._setting}: the hot rows differ from those of the checkpoint, so it would "
                "drop other samples; continue with the budget and the plan of the run"
            )
        epoch, is_decided = found.whole("epoch"), found.flag("is_decided")
        snapshots = _tensors(found, "snapshots", (0, len(hot_rows)))
        updated = _tensors(found, "updated", (len(hot_rows),))
        stale = _tensors(found, "stale", (len(hot_rows),))
        decisions = found["decisions"]
        if not isinstance(decisions, list) or not all(isinstance(one, dict) for one in decisions):
            raise found.error("decisions", "a list of dictionaries")
        for rows, of_updated, of_stale in zip(hot_rows, updated, stale, strict=True):
            for key, values in (("updated", of_updated), ("stale", of_stale)):
                if not rows.has_rows(values):
                    raise found.error(key, "rows of the tables, ascending")
        for rows, snapshot in zip(hot_rows, snapshots, strict=False):
            if not rows.fits(snapshot):
                raise found.error("snapshots", "a number for each column of each hot row")
        for number, rows in enumerate(hot_rows):
            rows.restore(snapshots[number] if snapshots else None, updated[number], stale[number])
        self._epoch, self._is_decided = epoch, is_decided
        self.decisions = [dict(decision) for decision in decisions]

    def reset(self) -> None:
        """Forget all that was found."""
        self._begin_epoch(0)
        self.decisions = []

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._is_decided = epoch, False
        for each in self._hot_rows.values():
            each.forget()
            each.mark_fresh()

    def _decide(self, loader: HotColdLoader, last: int) -> None:
        """Take the second snapshot, look for a threshold, and mark stale rows.

        After an error, the next mini-batch decides.
        """
        hot_rows, paper = self._hot_rows.values(), self.paper
        left = loader.hot_samples(last + 1)
        num_sampled = paper.num_sampled(loader.num_hot_samples)
        has_snapshot = all(each.before is not None for each in hot_rows)
        if not (num_sampled and has_snapshot):
            self._is_decided = True
            if num_sampled:
                warn_caller(
                    f"{self._setting} drops nothing in epoch {self._epoch}: it was given no state, "
                    "and its first mini-batch came after the first snapshot; continue a run by its "
                    "state",
                )
            return
        num_unseen = sum(
            each.end(counts_unseen_rows_as_stale=paper.counts_unseen_rows_as_stale)
            for each in hot_rows
        )
        places = draw_places(paper.seed, self._epoch, len(left), num_sampled)
        found = search_threshold(self._levels(loader, left[places]), paper)
        for each in hot_rows:
            each.mark_stale(found.threshold)
        self._is_decided = True
        self.decisions.append(self._summary(last, num_sampled, found, num_unseen))
        for each in hot_rows:
            each.forget()

    def _summary(
        self, last: int, num_sampled: int, found: Search, num_unseen: int
    ) -> dict[str, Any]:
        """An entry of `decisions`."""
        return {
            "epoch": self._epoch,
            "last_of_window": last,
            "num_sampled": num_sampled,
            **found._asdict(),
            "num_hot_rows": sum(len(each.rows) for each in self._hot_rows.values()),
            "num_unseen_rows": num_unseen,
            "num_stale_rows": {name: len(rows) for name, rows in self.stale_rows().items()},
        }

    def _levels(self, loader: HotColdLoader, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """The level of each sample, (n,)."""
        found = [np.empty(0)]
        for begin in range(0, len(samples), MOST_INPUTS):
            some = samples[begin : begin + MOST_INPUTS]
            batch, size = loader.source.read(some).to(self._device), len(some)
            parts = [
                (self._numbers[group], lookups, bags)
                for (group, lookups), bags in self._tables.parts(batch, size, self._setting)
            ]
            inputs = SampledInputs([each.marks.first_rows for each in self._hot_rows.values()])
            inputs.add(np.arange(size), parts, size, np.arange(size))
            _, rows_of_inputs = inputs.newest(size)
            levels = np.zeros(size)
            for each, rows in zip(self._hot_rows.values(), rows_of_inputs, strict=True):
                assert each.changes is not None
                rows.raise_levels(each.rows, each.changes, levels)
            found.append(levels)
        return np.concatenate(found)

    def _classify(self, batch: Any, batch_size: int) -> NDArray[np.bool_]:
        is_stale = np.ones(batch_size, np.bool_)
        for (group, lookups), bags in self._tables.parts(batch, batch_size, self._setting):
            self._hot_rows[group].marks.all_stale(lookups, bags, is_stale)
        return is_stale

    def _digest(self) -> str:
        """A digest of the hot rows."""
        digest = hashlib.sha256()
        for each in self._hot_rows.values():
            digest.update(each.rows.astype("<i8").tobytes())
            digest.update(b"|")
        return digest.hexdigest()[:16]

    def _warn_of_no_effect(self, loader: HotColdLoader) -> None:
        """Warn if no epoch has a sample of hot samples after the window."""
        paper, num_batches = self.paper, loader.num_hot_batches
        last = paper.last_of_window(num_batches)
        num_sampled = paper.num_sampled(loader.num_hot_samples)
        if last >= num_batches - 1 or not num_sampled:
            warn_caller(
                f"{self._setting} has no effect: the second snapshot comes after hot mini-batch "
                f"{last}, and the sample has {num_sampled} of the hot samples after it, but an "
                f"epoch has {num_batches} hot mini-batches; lower first_snapshot, or raise "
                "sample_share",
            )


def _tensors(found: SavedState, key: str, lengths: tuple[int, ...]) -> list[Tensor]:
    """A list of tensors (n,) in a state, of one of these lengths."""
    values = found.items(key, lengths, "tensors")
    named = {f"{key}, number {number}": value for number, value in enumerate(values)}
    entries = SavedState("skip=Paper state", named, named)
    return [entries.tensor(name) for name in named]
