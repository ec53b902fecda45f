"""Replays the claims of a run: which rows each mini-batch fetches and writes back.

A `TrainPipeline` takes the run's own mini-batches in the run's own order, and claims slots for them
ahead as in training. Only the model is missing: a step claims its rows, marks them as updated and
releases them. So the counts are those of training, also where a depth finds too few free slots.
The tables have two columns, whatever the run has, and their transfers are not timed.

Claims themselves are timed, by the processor time of the calling thread: a run spends that time
beside computing, and spends more of it the more rows miss.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import islice
from statistics import median
from time import thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.embeddings import SGD
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.tiers.counts import TierCounts
from recsys.embeddings.tiers.slot_costs import map_bytes, slot_bytes
from recsys.embeddings.tiers.ticket import NotEnoughSlots
from recsys.errors import BudgetTooSmall
from recsys.pipeline import LookAhead, Sequential, TrainPipeline
from recsys.train.parts.build import build_loader
from recsys.train.parts.tables import tables_of
from recsys.what_if.changes import depth_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from numpy.typing import NDArray

    from recsys.batch import Batch, JaggedIds, SampleSource
    from recsys.config import TrainConfig
    from recsys.embeddings.tiers.ahead import Prefetched

__all__ = ["Replay", "Replayed"]

_DIM = 2  # with one column, rows would take no more than the row map, and all would be resident


class Replayed(NamedTuple):
    """The claims of some steps, in their order.

    Attributes:
        num_steps: Steps.
        num_samples: Samples of these steps.
        claimed_in: The step in which each claim was made, from 0, (C,).
        claimed_for: The step whose mini-batch it is for, (C,); later claims of a mini-batch
            replace earlier ones.
        fetched: Rows to fetch, (C,).
        written_back: Rows to write back before, (C,).
        num_lookups: Values looked up.
        num_hits: Those whose row was in its slot.
        mean_depth: Mini-batches ahead whose rows had slots, on average.
        claim_seconds: Processor time of a step's claims; the median of all steps.
    """

    num_steps: int
    num_samples: int
    claimed_in: NDArray[np.int64]
    claimed_for: NDArray[np.int64]
    fetched: NDArray[np.int64]
    written_back: NDArray[np.int64]
    num_lookups: int
    num_hits: int
    mean_depth: float
    claim_seconds: float

    @classmethod
    def resident(cls, num_steps: int, num_samples: int) -> Replayed:
        """Steps that find every row in fast memory."""
        none = np.zeros(0, np.int64)
        return cls(num_steps, num_samples, none, none, none, none, 1, 1, 0.0, 0.0)

    @property
    def hit_rate(self) -> float:
        """Share of the lookups whose row was in its slot."""
        return self.num_hits / max(1, self.num_lookups)


class Replay:
    """Replays a run with other numbers of slots, depths and mini-batches.

    Args:
        config: The configuration of the run. Its tables have one `embedding_dim`, and its model
            pools their rows in the lookup.
        source: Its data.
    """

    def __init__(self, config: TrainConfig, source: SampleSource) -> None:
        self._source = source
        tables = [replace(table, embedding_dim=_DIM) for table in tables_of(source, config.model)]
        num_rows = sum(table.num_embeddings for table in tables)
        one_slot = map_bytes(num_rows) + slot_bytes(_DIM, torch.float32, {})
        optimizer = SGD(lr=0.0)
        self._tables = HotColdEmbeddingBagCollection(tables, optimizer=optimizer, budget=one_slot)

    def run(self, config: TrainConfig, num_slots: int, most_steps: int) -> Replayed:
        """Replay the first steps of a run.

        Args:
            config: Its configuration, with the tables of the first one.
            num_slots: Its slots.
            most_steps: Steps to replay, at most.

        Raises:
            BudgetTooSmall: a mini-batch needs more slots.
        """
        depth = depth_of(config)
        claims = _Claims(self._tables)
        claims.start(num_slots)
        schedule = LookAhead(depth) if depth else Sequential()
        pipeline = TrainPipeline(claims, None, schedule=schedule)
        num_steps = 0
        loader: Any = build_loader(config, self._source, None)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the result tells that the depth is smaller
                for _ in range(config.epochs):
                    batches = claims.numbered(iter(loader), num_steps)
                    for _ in islice(pipeline.steps(batches), most_steps - num_steps):
                        num_steps += 1
                        claims.end_step()
                    batches.close()
                    if num_steps == most_steps:
                        break
            return claims.found(num_steps, pipeline.mean_depth)
        except NotEnoughSlots as error:
            needed = error.num_needed
        finally:
            pipeline.detach()
            claims.stop()
        raise BudgetTooSmall(
            f"a mini-batch of {config.batch_size} samples needs {needed:,} rows in fast memory, "
            f"and the budget has slots for {num_slots:,}; ask for a larger budget"
        )


class _Claims(nn.Module):
    """A model that claims the rows of its mini-batch, and computes nothing.

    Args:
        tables: Makes the claims.
    """

    def __init__(self, tables: HotColdEmbeddingBagCollection) -> None:
        super().__init__()
        self.tables, self.loss = tables, nn.Parameter(torch.zeros(()))
        self._step = self._num_samples = 0
        self._claims: list[tuple[int, int, int, int]] = []
        self._seconds: list[float] = []
        self._of_step = 0.0
        self._numbers: dict[int, int] = {}  # of mini-batches, by the id() of their features

    def start(self, num_slots: int) -> None:
        """Make empty slots, and count claims from now on."""
        for tiers in self.tables.tiers():
            tiers.resize(num_slots)
            tiers.residency.counter.start_from(TierCounts())
        self._claim_ahead = self.tables.prefetch
        vars(self.tables)["prefetch"] = self._prefetch  # the pipeline calls it

    def stop(self) -> None:
        """Leave the tables to the next replay."""
        del vars(self.tables)["prefetch"]

    def numbered(self, batches: Iterator[Batch], first: int) -> Generator[Batch]:
        """The mini-batches, whose steps have the numbers from `first` on."""
        for number, batch in enumerate(batches, first):
            self._numbers[id(batch.sparse_features)] = number
            yield batch

    def _prefetch(self, features: JaggedIds) -> Prefetched:
        """Claim ahead, as `prefetch` of the tables does."""
        before, begin = self._moved(), thread_time()
        found = self._claim_ahead(features)
        self._of_step += thread_time() - begin
        self._note(features, before)
        return found

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        """Claim what was not claimed ahead, then release all of it as after an update."""
        before, begin = self._moved(), thread_time()
        with DisableTorchFunctionSubclass():  # internal reads of tables
            for group, lookups, bags in self.tables.parts(batch.sparse_features):
                tiers = group.tiers
                assert tiers is not None
                for ticket in tiers.claim(group.space(), lookups, bags):
                    tiers.residency.mark_updated(ticket)
                    ticket.release()
        self._of_step += thread_time() - begin
        self._num_samples += len(batch.labels)
        self._note(batch.sparse_features, before)
        return self.loss * 1.0, None

    def end_step(self) -> None:
        """Begin the next step."""
        self._step += 1
        self._seconds.append(self._of_step)
        self._of_step = 0.0

    def found(self, num_steps: int, mean_depth: float) -> Replayed:
        """What was claimed."""
        claims = np.array(self._claims, np.int64).reshape(-1, 4)
        counts = self._counts()
        return Replayed(
            num_steps,
            self._num_samples,
            claimed_in=claims[:, 0],
            claimed_for=claims[:, 1],
            fetched=claims[:, 2],
            written_back=claims[:, 3],
            num_lookups=counts.num_lookups,
            num_hits=counts.num_hits,
            mean_depth=mean_depth,
            claim_seconds=median(self._seconds),
        )

    def _note(self, features: JaggedIds, before: tuple[int, int]) -> None:
        """Note a claim, if rows move for it."""
        fetched, written = (now - then for now, then in zip(self._moved(), before, strict=True))
        if fetched or written:
            self._claims.append((self._step, self._numbers[id(features)], fetched, written))

    def _moved(self) -> tuple[int, int]:
        counts = self._counts()
        return counts.num_fetched, counts.num_written_back

    def _counts(self) -> TierCounts:
        [tiers] = self.tables.tiers()
        return tiers.residency.counts
