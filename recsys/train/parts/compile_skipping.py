"""Compiles the kernels of skipping before a run's clock starts."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.batch import JaggedIds, feature_tables, has_bags
from recsys.embeddings import HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.staleness.row_marks import RowMarks
from recsys.embeddings.staleness.settings import LEAD, Staleness
from recsys.embeddings.staleness.tracker import StalenessTracker
from recsys.pipeline.skip.importance import (
    Weights,
    draw_systematically,
    features_of,
    keep_probabilities,
    learn,
    predict,
)
from recsys.train.parts.providers import row_optimizer, with_bags

if TYPE_CHECKING:
    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["compile_skipping"]

_NUM_ROWS = 1000
_WINDOW = LEAD + 1  # the shortest
_BITS = 8


def compile_skipping(config: TrainConfig, source: SampleSource) -> None:
    """Run the kernels that the policy of a run needs, on a small table.

    The mini-batches have one feature. A small one and one with as many ids as a mini-batch of the
    run, since some kernels are compiled for one thread and for several.

    Args:
        config: The configuration.
        source: The data; its ids have the dtype of training.
    """
    if not (config.skip.needs_rows or config.skip.policy == "paper"):
        return
    rows_dtype = source.read(np.arange(1)).sparse_features.values().dtype
    num_ids, is_jagged = config.batch_size * len(feature_tables(source)), has_bags(source)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that small tables may fit the budget completely
        module = _small_module(config)
        for size in (2, num_ids):
            values = torch.arange(size, dtype=rows_dtype, device=config.device) % 2
            ids = JaggedIds.from_one_hot(["table"], values[None])
            if is_jagged:
                ids = with_bags(ids)
            if config.skip.policy == "importance":
                _predict(module, ids, source.num_dense)
            else:
                _follow(config, module, ids)


def _small_module(config: TrainConfig) -> HotColdEmbeddingBagCollection:
    dim = config.model.embedding_dim
    table = TableConfig(
        name="table", num_embeddings=_NUM_ROWS, embedding_dim=dim, feature_names=("table",)
    )
    formula = row_optimizer(config.optimizer)
    row_bytes = 4 * (dim + sum(formula.state_sizes(dim).values()))
    # A byte less than all rows take. Rows of one number are shorter than what slots need for each.
    is_tiered = bool(config.budget or config.plan) and row_bytes > 4
    return HotColdEmbeddingBagCollection(
        [table],
        device=torch.device(config.device),
        optimizer=formula,
        budget=_NUM_ROWS * row_bytes - 1 if is_tiered else None,
    )


def _follow(config: TrainConfig, module: HotColdEmbeddingBagCollection, ids: JaggedIds) -> None:
    """Follow rows to the end of two windows, and leave out those of half of the samples."""
    freezes_rows = config.skip.policy == "freeze_rows"
    staleness = Staleness(
        window=_WINDOW,
        min_updates=1,
        patience=1,
        max_rows=2,
        count_every=1,
    )
    tracker = StalenessTracker(module, staleness, share=0.5, freezes_rows=freezes_rows)
    size = ids.stride()
    parts = module.lookups(ids)
    for window in (1, 2):
        tracker.add_inputs(window * size, parts, size, torch.arange(min(size, 64)))
        tracker.num_steps = window * _WINDOW - 1
        tracker.begin_step(tracker.num_steps)
        module(ids).values().sum().backward()
        tracker.end_step((window + 1) * size)
    tracker.use_flags_of(2 * _WINDOW + LEAD)
    tracker.all_stale(parts, size)
    tracker.stale_rows()
    tracker.state_dict()
    tracker.close()
    [group], marks = module.groups(), RowMarks([_NUM_ROWS])
    marks.set_stale(np.array([0]), True)
    marks.is_freezing = freezes_rows
    group.before_update = marks.before_update
    module(ids).values().sum().backward()
    group.before_update = None


def _predict(module: HotColdEmbeddingBagCollection, ids: JaggedIds, num_dense: int) -> None:
    size = ids.stride()
    dense, labels = np.zeros((size, num_dense), np.float32), np.ones(size, np.float32)
    features = features_of(module.lookups(ids), dense, size, _BITS)
    weights, sums = (
        Weights(np.ones(2**_BITS, np.float32), np.ones(num_dense + 1, np.float32)) for _ in range(2)
    )
    learn(weights, sums, features, labels, labels, 0.05)
    scores = np.abs(labels - predict(weights, features))
    draw_systematically(keep_probabilities(scores, 0.5, 0.1), 0.5)
