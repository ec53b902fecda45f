"""`recsys bench models`: models of plain PyTorch, before and after `recsys.accelerate`.

Two questions. How much sooner is the classic DLRM, which has 26 separate bags of Kaggle's sizes?
And is any ordinary model slower: few tables or many, one id per sample or several?

    provider     what a step does
    torch        the model as it was written
    recsys       the same model after `recsys.accelerate(model, optimizer=optimizer)`
    no_tables    the same model with constant vectors in place of what its tables give; they get a
                 gradient

A step is `zero_grad`, forward, loss, backward and the optimizer's step. Table time is a step's less
that of `no_tables`. Providers take turns in one process; ratios are those of the medians, rounds
drawn in pairs. Ids are skewed: `E * u**8` for a uniform u, so that few rows get most lookups.
"""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from recsys.accelerate import accelerate
from recsys.bench.harness import (
    Row,
    in_own_process,
    median_of_ratios,
    ratio,
    rows_by_provider,
    steps_of_turn,
    take_turns,
    timed,
)
from recsys.datasets.criteo_shape import KAGGLE_TABLE_SIZES
from recsys.errors import ConfigError
from recsys.machine import set_num_threads, tune_allocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["bench_models"]

_DIM, _NUM_DENSE = 16, 13
_MEAN_LENGTH = 8  # of jagged bags
_NUM_BATCHES = 64
_NUM_WARM_UP_ROUNDS = 4
_OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}

_Seconds = dict[str, list[float]]


class _Case(NamedTuple):
    """A model and what it is trained on.

    Attributes:
        kind: "classic" for the whole DLRM; "bags" for separate bags before one linear layer.
        optimizer: Of all parameters.
        batch_size: B.
        table_sizes: Rows of each table.
        is_jagged: Whether a bag has several ids.
    """

    kind: str
    optimizer: str
    batch_size: int
    table_sizes: Sequence[int]
    is_jagged: bool = False

    def __str__(self) -> str:
        found = f"model={self.kind},B={self.batch_size},D={_DIM},optimizer={self.optimizer}"
        if self.kind == "classic":
            return found
        return f"{found},T={len(self.table_sizes)},ids={'jagged' if self.is_jagged else 'one-hot'}"


class _Batch(NamedTuple):
    """Dense features (B, 13), ids and offsets of each table, labels (B,)."""

    dense: Tensor
    ids: Sequence[Tensor]
    offsets: Sequence[Tensor]
    labels: Tensor


def bench_models(
    batch_sizes: Sequence[int],
    optimizers: Sequence[str],
    *,
    num_rounds: int,
    max_rows: int = 1_000_000,
    table_counts: Sequence[int] = (1, 4, 26),
    small_batch_sizes: Sequence[int] = (128, 2048),
) -> list[Row]:
    """Measure every case.

    Args:
        batch_sizes: Of the classic model.
        optimizers: "sgd" or "adagrad".
        num_rounds: Rounds that count; in each every provider takes its turn.
        max_rows: Of a table of the classic model, which has Kaggle's if they are fewer; and of
            every table of the others.
        table_counts: How many tables they have.
        small_batch_sizes: Of the others.

    Raises:
        ConfigError: a batch size is below 1.
    """
    if min(batch_sizes) < 1:
        raise ConfigError(f"bench models: batch sizes must be at least 1, got {min(batch_sizes)}")
    set_num_threads(0)  # as the processes do, for the record of the run
    kaggle = tuple(min(size, max_rows) for size in KAGGLE_TABLE_SIZES)
    classic = [
        _Case("classic", optimizer, batch_size, kaggle)
        for batch_size, optimizer in product(batch_sizes, optimizers)
    ]
    others = [
        _Case("bags", optimizer, batch_size, (max_rows,) * count, is_jagged)
        for count, is_jagged, batch_size, optimizer in product(
            table_counts, (False, True), small_batch_sizes, optimizers
        )
    ]
    rows, pairs = [], []
    for case in [*classic, *others]:
        seconds = in_own_process(_measure, case, num_rounds)
        rows += _rows_of(case, seconds)
        if case in others:
            pairs.append((seconds["recsys"], seconds["torch"]))
    if pairs:
        rows.append(
            median_of_ratios(
                bench="models",
                case=f"model=bags,D={_DIM}",
                provider="recsys",
                metric="speed_over_torch",
                pairs=pairs,
            )
        )
    return rows


def _rows_of(case: _Case, seconds: _Seconds) -> list[Row]:
    bench, name = "models", str(case)
    rows = rows_by_provider(
        bench=bench,
        case=name,
        metric="time",
        unit="ms",
        values={provider: [1e3 * each for each in spent] for provider, spent in seconds.items()},
    )
    ours, theirs = seconds["recsys"], seconds["torch"]
    rows.append(
        ratio(
            bench=bench,
            case=name,
            provider="recsys",
            metric="speed_over_torch",
            values=ours,
            baseline=theirs,
        )
    )
    if case.kind == "classic":
        without = seconds["no_tables"]
        of_tables = [
            [step - rest for step, rest in zip(each, without, strict=True)]
            for each in (theirs, ours)
        ]
        # `ratio` divides the second times by the first.
        rows.append(
            ratio(
                bench=bench,
                case=name,
                provider="recsys",
                metric="table_time_over_torch",
                values=of_tables[0],
                baseline=of_tables[1],
            )
        )
    return rows


def _measure(case: _Case, num_rounds: int) -> _Seconds:
    """The seconds of a step in every round, by provider."""
    set_num_threads(0)
    tune_allocator()
    torch.manual_seed(0)
    batches = [_make_batch(case, seed) for seed in range(_NUM_BATCHES)]
    models: dict[str, nn.Module] = {}
    if case.kind == "classic":
        models["torch"] = _Classic(case.table_sizes)
        models["no_tables"] = _without_tables(len(case.table_sizes), case.batch_size)
    else:
        models["torch"] = _Bags(case.table_sizes)
    models["recsys"] = copy.deepcopy(models["torch"])
    steps = {}
    for provider, model in models.items():
        optimizer = _OPTIMIZERS[case.optimizer](model.parameters(), lr=0.01)
        if provider == "recsys":
            accelerate(model, optimizer=optimizer)
        steps[provider] = _step(model, optimizer, batches)
    num_steps = steps_of_turn(case.batch_size)
    turns = {
        provider: timed(step, num_before=num_steps, num_timed=num_steps)
        for provider, step in steps.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # of torch's Adagrad
        return take_turns(turns, num_rounds, num_warm_up_rounds=_NUM_WARM_UP_ROUNDS)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[_Batch]
) -> Callable[[], None]:
    number = 0

    def step() -> None:
        nonlocal number
        batch = batches[number % len(batches)]
        number += 1
        optimizer.zero_grad()
        logits = model(batch.dense, batch.ids, batch.offsets)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _make_batch(case: _Case, seed: int) -> _Batch:
    generator = torch.Generator().manual_seed(seed)
    size = case.batch_size
    ids, offsets = [], []
    for num_rows in case.table_sizes:
        lengths = torch.ones(size, dtype=torch.int64)
        if case.is_jagged:
            lengths = torch.randint(1, 2 * _MEAN_LENGTH, (size,), generator=generator)
        drawn = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64)
        ids.append((num_rows * drawn**8).long())
        offsets.append(lengths.cumsum(0) - lengths)
    labels = (torch.rand(size, generator=generator) < 0.25).float()
    return _Batch(torch.rand(size, _NUM_DENSE, generator=generator), ids, offsets, labels)


class _Constant(nn.Module):
    """In place of a bag: the same vectors for every mini-batch, which get a gradient."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.vectors = torch.randn(batch_size, _DIM)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.vectors.detach().requires_grad_()


class _Classic(nn.Module):
    """The DLRM of Naumov et al. (2019) as it is mostly written: a bag for each feature."""

    pairs: Tensor

    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        self.bags = _make_bags(table_sizes)
        num_vectors = len(table_sizes) + 1
        self.bottom = _mlp(_NUM_DENSE, 512, 256, 64, _DIM)
        self.top = _mlp(_DIM + num_vectors * (num_vectors - 1) // 2, 512, 256, 1)[:-1]
        self.register_buffer("pairs", torch.tril_indices(num_vectors, num_vectors, -1))

    def forward(self, dense: Tensor, ids: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        dense = self.bottom(dense)
        pooled = [bag(*each) for bag, *each in zip(self.bags, ids, offsets, strict=True)]
        vectors = torch.cat([dense, *pooled], dim=1).view(len(dense), -1, _DIM)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([dense, pairs], dim=1))
        return logits.squeeze(1)


def _without_tables(num_tables: int, batch_size: int) -> nn.Module:
    model = _Classic([1] * num_tables)
    model.bags = nn.ModuleList(_Constant(batch_size) for _ in range(num_tables))
    return model


class _Bags(nn.Module):
    """Bags before one linear layer: hardly anything but tables."""

    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        self.bags = _make_bags(table_sizes)
        self.top = nn.Linear(_DIM * len(table_sizes), 1)

    def forward(self, dense: Tensor, ids: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        pooled = [bag(*each) for bag, *each in zip(self.bags, ids, offsets, strict=True)]
        logits: Tensor = self.top(torch.cat(pooled, dim=1))
        return logits.squeeze(1)


def _make_bags(table_sizes: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(
        nn.EmbeddingBag(size, _DIM, mode="sum", sparse=True) for size in table_sizes
    )


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)
