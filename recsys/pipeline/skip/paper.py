"""What the policy `Paper` leaves out: its order, its snapshots, its search for a threshold.

    change of a row      largest absolute change of a number of the row between two snapshots
    stale row            a hot row with a change under the threshold
    level of a sample    largest change of the rows that it looks up
    stale sample         a sample with a level under the threshold: each of its rows is stale

    hot mini-batch `first_snapshot` is taken    first snapshot
    first one after the window is taken         second snapshot, threshold, stale rows
    it and each later one of the epoch          samples whose rows are all stale are dropped
    next epoch                                  no row is stale

No mini-batch is taken ahead. So at the time when a mini-batch is taken, the rows are those after
the update of the mini-batch before it.

The source is the authors' review artefact, anonymous6116/Slipstream of March 2023, in particular
`Slipstream/slipstream.py`. The paper itself (arXiv 2404.04270) gives no constants.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.untrusted import require_state
from recsys.datasets.loader import BatchIterator
from recsys.embeddings.staleness.marks import RowMarks, marks_bytes
from recsys.embeddings.staleness.tracker import groups_in, input_levels, table_rows
from recsys.embeddings.tiers.budget import map_bytes
from recsys.errors import ConfigError
from recsys.pipeline.fae import HotColdLoader
from recsys.pipeline.skip.refill import EVERYTHING, Chosen

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import ref

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.pipeline.model_tables import ModelTables
    from recsys.pipeline.skip.policies import Paper
    from recsys.pipeline.skip.refill import RawBatch

__all__ = ["PaperClassifier", "budget_beside_hot_rows", "draw_places", "search_threshold"]

_BYTES_PER_ROW = 8 + 8  # a row number and a change


class Search(NamedTuple):
    """The result of a search for a threshold.

    Attributes:
        threshold: The threshold; 0 if the search has not converged.
        tries: How many thresholds were tried.
        share: Share of the sample that is stale under the threshold tried last.
        has_converged: Whether that share is within the tolerance.
    """

    threshold: float
    tries: int
    share: float
    has_converged: bool


def search_threshold(levels: NDArray[np.float64], paper: Paper) -> Search:
    """Look for a threshold under which the target share of the sample is stale, by bisection.

    Args:
        levels: The level of each sample.
        paper: The constants.

    Shape:
        levels (n,), n at least 1.
    """
    least, most = paper.target - paper.tolerance, paper.target + paper.tolerance
    # The published code compares float32 numbers.
    low, high, threshold, share = 0.0, paper.highest_threshold, paper.first_threshold, 0.0
    for tries in range(1, paper.max_tries + 1):
        share = int((levels < np.float32(threshold)).sum()) / len(levels)
        if least <= share <= most:
            return Search(threshold, tries, share, has_converged=True)
        if share < least:
            low = threshold
        else:
            high = threshold
        threshold = (low + high) / 2
    return Search(0.0, paper.max_tries, share, has_converged=False)


def draw_places(seed: int, epoch: int, num_left: int, num_sampled: int) -> NDArray[np.int64]:
    """Draw a sample with replacement: a function of seed and epoch.

    Args:
        seed: The seed.
        epoch: The epoch.
        num_left: Number of samples to draw from.
        num_sampled: Number of samples to draw.

    Shape:
        result (num_sampled,), in [0, num_left).
    """
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.integers(num_left, size=num_sampled)


def budget_beside_hot_rows(
    budget_bytes: int, sizes: Sequence[int], row_bytes: int, slot_bytes: int
) -> int:
    """The part of a budget for the tables of one dim, so that the rest suffices for the policy.

    Args:
        budget_bytes: The budget for both.
        sizes: E of each table.
        row_bytes: Bytes of a row, without its state.
        slot_bytes: Bytes of a slot.

    Returns:
        Bytes. They may be below the floor of a budget; then no plan can be made.
    """
    of_map = map_bytes(sum(sizes))
    left = max(0, budget_bytes - of_map - marks_bytes(sum(sizes)))
    of_tables = of_map + left * slot_bytes // (slot_bytes + row_bytes + _BYTES_PER_ROW)
    return min(budget_bytes, of_tables)


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
            `threshold`, `tries`, `share` and `has_converged` of the `Search`; `num_hot_rows`; and
            `num_stale_rows` by table.

    Raises:
        ValueError: the schedule takes mini-batches ahead; or the model has no recsys modules, or
            the rows of one are not updated by recsys.
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
        self._marks = marks = RowMarks(groups_in([model]))
        hot_rows = []
        for group, table in marks.first_tables.items():
            first, end = marks.first_rows[[table, table + len(group.tables)]]
            fetcher = group.fetcher
            planned = np.arange(end - first) if fetcher is None else np.sort(fetcher.planned)
            hot_rows.append(planned.astype(np.int64) + first)
        self._hot_rows = np.concatenate(hot_rows)
        self._row_bytes = max(group.dim * group.tables[0].dtype.itemsize for group in marks.groups)
        self.decisions: list[dict[str, Any]] = []
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._is_decided = epoch, False
        self._before: list[Tensor] = []  # the first snapshot, table by table
        self._marks.set_stale(np.empty(0, np.int64))

    @property
    def num_bytes(self) -> int:
        """The most bytes of fast memory that it takes, beside the budget of the tables."""
        of_rows = len(self._hot_rows) * (self._row_bytes + _BYTES_PER_ROW)
        return marks_bytes(sum(self._marks.sizes)) + of_rows

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
        return loader

    def choose(self, known: ref[Any], raw: RawBatch) -> Chosen:
        """Choose from the mini-batch that an iterator has just returned.

        Args:
            known: The iterator, which this does not keep alive; one that `require_loader` accepts.
            raw: The mini-batch.
        """
        iterator: Any = known()
        loader = self.require_loader(iterator)
        if loader.epoch != self._epoch:
            self._begin_epoch(loader.epoch)
        number = loader.last_hot_number(iterator)
        if number is None:
            return EVERYTHING
        if not self._is_decided:
            last = self.paper.last_of_window(loader.num_hot_batches)
            if number == self.paper.first_snapshot:
                self._before = [rows for _, rows in table_rows(self._marks, self._hot_rows)]
            if number > last:
                self._decide(loader, last)
        if not len(self._marks.stale):
            return EVERYTHING
        parts = self._tables.parts(raw.batch, raw.size, self._setting)
        is_stale = self._marks.all_stale(parts, raw.size)
        return Chosen(np.flatnonzero(~is_stale)) if is_stale.any() else EVERYTHING

    def _decide(self, loader: HotColdLoader, last: int) -> None:
        """Take the second snapshot, look for a threshold, and mark stale rows.

        After an error, the next mini-batch decides.
        """
        num_sampled = self.paper.num_sampled(loader.num_hot_samples)
        if num_sampled and self._before:
            changes = self._changes()
            left = loader.hot_samples(last + 1)
            positions = draw_places(self.paper.seed, self._epoch, len(left), num_sampled)
            batch = loader.source.read(left[positions]).to(self._marks.groups[0].device)
            parts = self._tables.parts(batch, num_sampled, self._setting)
            samples = self._marks.rows_of_samples(parts, num_sampled, np.arange(num_sampled))
            levels = input_levels(samples, self._hot_rows, changes)
            found = search_threshold(levels, self.paper)
            # The published code compares float32 numbers.
            stale = self._hot_rows[changes < np.float32(found.threshold)]
            self._marks.set_stale(stale)
            summary = {"epoch": self._epoch, "last_of_window": last, "num_sampled": num_sampled}
            of_tables = {name: len(rows) for name, rows in self._marks.by_table(stale).items()}
            of_rows = {"num_hot_rows": len(self._hot_rows), "num_stale_rows": of_tables}
            self.decisions.append(summary | found._asdict() | of_rows)
        self._is_decided, self._before = True, []

    def _changes(self) -> NDArray[np.float64]:
        """The change of each hot row since the first snapshot; nan is no change under a threshold.

        References:
            The authors' `slipstream.py`: every column's change is compared with the threshold.
        """
        changes = np.empty(len(self._hot_rows))
        of_tables = table_rows(self._marks, self._hot_rows)
        for before, (chosen, now) in zip(self._before, of_tables, strict=True):
            change = (now.float() - before.to(now.device).float()).abs().amax(1)
            changes[chosen] = change.cpu().numpy()
        return changes

    def report(self) -> dict[str, Any]:
        """What was decided, and `memory_bytes`, in JSON types; see `decisions`."""
        return {"memory_bytes": self.num_bytes, "decisions": self.decisions}

    def state_dict(self) -> dict[str, Any]:
        """Everything that later mini-batches depend on: JSON types, and tensors.

        Between the snapshots it has the first one; afterwards it has the stale rows.
        """
        return {
            "epoch": self._epoch,
            "is_decided": self._is_decided,
            "hot_rows": hashlib.sha256(self._hot_rows.tobytes()).hexdigest()[:16],
            "snapshots": [rows.cpu().clone() for rows in self._before],
            "stale": torch.from_numpy(self._marks.stale.copy()),
            "decisions": [dict(decision) for decision in self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with the same hot rows.

        Raises:
            ConfigError: other rows are hot, or `state` is no state of a classifier.
        """
        own = self.state_dict()
        found = require_state(f"{self._setting} state", state, own)
        if found["hot_rows"] != own["hot_rows"]:
            raise ConfigError(
                f"{self._setting}: the hot rows differ from those of the checkpoint, so it would "
                "drop other samples; continue with the budget and the plan of the run"
            )
        self._begin_epoch(found["epoch"])
        self._is_decided = found["is_decided"]
        self._before = [rows.clone() for rows in found["snapshots"]]
        self._marks.set_stale(found["stale"].cpu().numpy().copy())
        self.decisions = [dict(decision) for decision in found["decisions"]]
