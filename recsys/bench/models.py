"""`recsys bench models`: models of plain PyTorch, before and after `recsys.accelerate`.

It answers two questions. How much faster are the classic DLRM, which has 26 separate bags of
Kaggle's sizes, and TBSM, which looks up all steps of a history? Is any ordinary model slower, with
few or many tables, one or several ids a sample?

    provider     what a step does
    torch        the model as it was written
    recsys       the same model after `recsys.accelerate(model, optimizer=optimizer)`
    in_slots     the same with a budget, if a share of the bytes of rows and state is given
    no_tables    the same model with constant vectors instead of lookups; they get a gradient

A step is `zero_grad`, forward, loss, backward and the optimizer's step. In evaluation it is a
forward without gradients, after a few steps of training. Table time is the time of a
step minus that of `no_tables`. Providers take turns in one process. Ratios are ratios of medians,
with intervals for which rounds are drawn in pairs. The time of a plain step with dense gradients
grows with the tables, so such models have fewer rounds and one warm-up round.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from recsys._support.machine import set_num_threads, tune_allocator
from recsys.bench.parts.harness import (
    Row,
    median_of_ratios,
    ratio,
    rows_by_provider,
    steps_of_turn,
    take_turns,
    timed,
)
from recsys.bench.parts.plain_models import (
    DIM,
    SHALLOW_KINDS,
    TAOBAO_TABLE_SIZES,
    WHOLE_KINDS,
    TableBatch,
    make_batch,
    make_model,
    make_without_tables,
)
from recsys.bench.parts.worker import in_own_process
from recsys.conversion.accelerate import accelerate
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.errors import BudgetTooSmall, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

__all__ = ["ALL_KINDS", "bench_models"]

ALL_KINDS = (*WHOLE_KINDS, *SHALLOW_KINDS)

_NUM_BATCHES = 64
_FEWEST_ROUNDS = 6
_NUM_WARM_UP_ROUNDS = 4
_NUM_STEPS_BEFORE = 4  # untimed steps of a turn, which restore the provider's own cache contents
_OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}

_Seconds = dict[str, list[float]]


class _Case(NamedTuple):
    """A model and its training data.

    Attributes:
        kind: As for `make_model`.
        optimizer: Name of the optimizer of all parameters.
        batch_size: B.
        table_sizes: Rows of each table.
        is_jagged: Whether a sample has several ids per table.
        share: The budget's share of the bytes of rows and state; 0 for none.
        is_evaluation: Whether a step is a forward without gradients.
        device: Where the model and its mini-batches are.
    """

    kind: str
    optimizer: str
    batch_size: int
    table_sizes: Sequence[int]
    is_jagged: bool = False
    share: float = 0.0
    is_evaluation: bool = False
    device: str = "cpu"

    @property
    def has_dense_gradients(self) -> bool:
        """Whether a plain step writes whole tables."""
        return self.kind in ("collection", "dense-embeddings") and not self.is_evaluation

    @property
    def budget(self) -> int:
        """The budget in bytes."""
        num_arrays = 1 + (self.optimizer == "adagrad")
        return int(self.share * sum(self.table_sizes) * DIM * 4 * num_arrays)

    def __str__(self) -> str:
        found = f"model={self.kind},B={self.batch_size},D={DIM},optimizer={self.optimizer}"
        if self.is_evaluation:
            found += ",pass=evaluation"
        if self.device != "cpu":
            found += f",device={self.device}"
        if self.kind == "classic":
            return found
        ids = "steps" if self.kind == "tbsm" else "jagged" if self.is_jagged else "one-hot"
        return f"{found},T={len(self.table_sizes)},ids={ids}"


def bench_models(
    batch_sizes: Sequence[int],
    optimizers: Sequence[str],
    *,
    num_rounds: int,
    kinds: Collection[str] = ALL_KINDS,
    max_rows: int = 1_000_000,
    table_counts: Sequence[int] = (1, 4, 26),
    small_batch_sizes: Sequence[int] = (128, 2048),
    sequence_batch_sizes: Sequence[int] = (256, 2048),
    share: float = 0.0,
    is_evaluation: bool = False,
    device: str = "cpu",
) -> Iterator[Row]:
    """Measure every case.

    Args:
        batch_sizes: B of the classic model.
        optimizers: "sgd" or "adagrad".
        num_rounds: Rounds that count; each provider takes one turn in each.
        kinds: Kinds from `ALL_KINDS`.
        max_rows: Rows of every table of `SHALLOW_KINDS`; also caps the sizes of the other models.
        table_counts: Numbers of tables of `SHALLOW_KINDS`.
        small_batch_sizes: B of `SHALLOW_KINDS`.
        sequence_batch_sizes: B of TBSM; upstream's is 256.
        share: The budget of `in_slots`, as a share of the bytes of rows and state; 0 leaves it out.
        is_evaluation: Whether evaluation is measured in place of training.
        device: "cpu" or "cuda", where models and mini-batches are.

    Raises:
        BudgetTooSmall: the share does not hold the rows of a mini-batch.
        ConfigError: the share is not between 0 and 1, or PyTorch sees no such device.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"bench models: share must be at least 0 and below 1, got {share}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench models: PyTorch sees no CUDA device; leave --device out")
    set_num_threads(0)  # as the processes do, for the record of the run
    of_whole = {
        "classic": (batch_sizes, KAGGLE_TABLE_SIZES),
        "tbsm": (sequence_batch_sizes, TAOBAO_TABLE_SIZES),
    }
    case_of = partial(_Case, share=share, is_evaluation=is_evaluation, device=device)
    whole = [
        case_of(kind, optimizer, batch_size, tuple(min(size, max_rows) for size in table_sizes))
        for kind, (sizes, table_sizes) in of_whole.items()
        if kind in kinds
        for batch_size, optimizer in product(sizes, optimizers)
    ]
    others = [
        case_of(kind, optimizer, batch_size, (max_rows,) * count, is_jagged)
        for kind, count, is_jagged, batch_size, optimizer in product(
            SHALLOW_KINDS, table_counts, (False, True), small_batch_sizes, optimizers
        )
        if kind in kinds
    ]
    pairs: dict[str, list[tuple[list[float], list[float]]]] = {}
    for case in [*whole, *others]:
        rounds = num_rounds
        if case.has_dense_gradients:
            rounds = max(_FEWEST_ROUNDS, num_rounds // 5)
        try:
            seconds = in_own_process(_measure, case, rounds)
        except BudgetTooSmall as error:
            raise BudgetTooSmall(
                f"bench models: {case}: a share of {share} of its tables is too small ({error}); "
                "raise the share, or measure smaller mini-batches, or larger tables than --quick"
            ) from None
        yield from _rows_of(case, seconds)
        if case in others:
            pairs.setdefault(case.kind, []).append((seconds["recsys"], seconds["torch"]))
    for kind, of_kind in pairs.items():
        yield median_of_ratios(
            "models", f"model={kind},D={DIM}", "recsys", "speed_over_torch", pairs=of_kind
        )


def _rows_of(case: _Case, seconds: _Seconds) -> list[Row]:
    ratio_of = partial(ratio, "models", str(case))
    times = {provider: [1e3 * each for each in spent] for provider, spent in seconds.items()}
    rows = rows_by_provider("models", str(case), "time", "ms", times)
    ours, plain = seconds["recsys"], seconds["torch"]
    for provider in ("recsys", *(["in_slots"] if case.share else [])):
        values = seconds[provider]
        rows.append(ratio_of(provider, "speed_over_torch", values=values, baseline=plain))
    if case.kind in WHOLE_KINDS:
        without = seconds["no_tables"]
        plain_tables, our_tables = (
            [step - rest for step, rest in zip(each, without, strict=True)]
            for each in (plain, ours)
        )
        # `ratio` divides the baseline by the values.
        metric = "table_time_over_torch"
        rows.append(ratio_of("recsys", metric, values=plain_tables, baseline=our_tables))
    return rows


def _measure(case: _Case, num_rounds: int) -> _Seconds:
    """Seconds per step, by provider and round."""
    set_num_threads(0)
    tune_allocator()
    torch.manual_seed(0)
    batches = [
        make_batch(
            case.kind,
            case.table_sizes,
            case.batch_size,
            is_jagged=case.is_jagged,
            seed=seed,
            device=case.device,
        )
        for seed in range(_NUM_BATCHES)
    ]
    models: dict[str, nn.Module] = {
        "torch": make_model(case.kind, case.table_sizes).to(case.device)
    }
    if case.kind in WHOLE_KINDS:
        models["no_tables"] = make_without_tables(
            case.kind, len(case.table_sizes), case.batch_size, case.device
        )
    models["recsys"] = copy.deepcopy(models["torch"])
    if case.share:
        models["in_slots"] = copy.deepcopy(models["torch"])
    steps = {}
    for provider, model in models.items():
        optimizer = _OPTIMIZERS[case.optimizer](model.parameters(), lr=0.01)
        if provider in ("recsys", "in_slots"):
            budget = case.budget if provider == "in_slots" else None
            accelerate(model, optimizer=optimizer, budget=budget)
        step = _step(model, optimizer, batches)
        if case.is_evaluation:
            for _ in range(_NUM_STEPS_BEFORE):
                step()
            step = _evaluation(model, batches)
        steps[provider] = step
    if case.has_dense_gradients:
        num_before, num_timed, num_warm_up_rounds = 1, 1, 1
    else:
        num_timed = steps_of_turn(case.batch_size)
        num_before, num_warm_up_rounds = min(num_timed, _NUM_STEPS_BEFORE), _NUM_WARM_UP_ROUNDS
    turns = {
        provider: timed(step, num_before=num_before, num_timed=num_timed, device=case.device)
        for provider, step in steps.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # of torch's Adagrad
        return take_turns(turns, num_rounds, num_warm_up_rounds=num_warm_up_rounds)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[TableBatch]
) -> Callable[[], None]:
    following = cycle(batches)

    def step() -> None:
        batch = next(following)
        optimizer.zero_grad()
        logits = model(batch.dense, batch.inputs)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _evaluation(model: nn.Module, batches: Sequence[TableBatch]) -> Callable[[], None]:
    model.eval()
    following = cycle(batches)

    def step() -> None:
        batch = next(following)
        with torch.no_grad():
            model(batch.dense, batch.inputs)

    return step
