"""One training step of the default model, compared with its dense part alone.

    provider      what a step does
    recsys        the whole step: recsys dense path and embeddings
    torch         the whole step: recsys dense path, nn.EmbeddingBag and torch.optim
    fbgemm        the whole step: recsys dense path, FBGEMM's fused operators
    dense         recsys dense path alone: MLPs, interaction, loss, backward, update; the pooled
                  vectors are given, and get a gradient
    dense_eager   the same with TorchRec's modules in eager mode

Everything of one batch size runs in one process, and precisions take turns like providers. Each
provider has its own operands, and mini-batches are made in advance. A turn has as many untimed
steps as timed ones, so that timed steps find the caches as in training. Under bfloat16, forward and
backward are autocast and the update is in float32, as in training.

The same code may be slower in one process than in another, by another share for each provider,
however often it is repeated. So the rounds are divided among several processes that run one after
the other. These are minutes apart, and the speed of a shared machine changes, so ratios are those
of rounds. Even within a round, turns of all providers are seconds apart, and the machine changes by
more than the few percent that a lookup adds to a dense part. So `recsys` and `dense` measure their
ratio in separate rounds of a few steps each, with more rounds at small batch sizes.

Kaggle's tables are 2 GiB. Every whole step has its own; both precisions together take 13 GiB. With
--against, tables have at most a million rows, and the cases are the batch sizes in float32, and
B=2048 with bfloat16 and with row-wise Adagrad.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from model import NUM_DENSE, build_model, kaggle_sizes, read_batch, samples
from torch import Tensor, nn
from turns import (
    Row,
    bench_arguments,
    compare_checkouts,
    in_own_process,
    prepare_process,
    ratio,
    rows_by_provider,
    show_rows,
    steps_of_turn,
    take_turns,
    timed,
)

from recsys.embeddings import SGD, RowWiseAdagrad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

    from recsys import Batch

# Every whole step has its own mini-batch, until they have this many samples; then they repeat.
_MAX_SAMPLES = 2**18
_NUM_WARM_UP_ROUNDS = 3
_WHOLE = ("recsys", "torch", "fbgemm")
_CLOSE = ("recsys", "dense")
_MAX_CLOSE_STEPS = 2  # timed steps of a turn in close rounds, and also untimed ones
_DIM, _NUM_SPARSE = 16, 26
_DENSE_ARCH, _OVER_ARCH = (512, 256, 64, _DIM), (512, 256, 1)
_MAX_ROWS, _TINY_ROWS = 1_000_000, 1000  # per table, with --against

# Seconds per step of every round, by (precision, provider).
_Seconds = dict[tuple[str, str], list[float]]


def bench_step(
    batch_sizes: Sequence[int],
    precisions: Sequence[str],
    *,
    num_rounds: int,
    num_processes: int,
    table_sizes: Sequence[int],
) -> Iterator[Row]:
    """Measure every provider in every case.

    Args:
        batch_sizes: B of the cases.
        precisions: "fp32" or "bf16".
        num_rounds: Rounds that count, over all processes; each provider takes one turn in each.
        num_processes: Processes among which the rounds of a batch size are divided.
        table_sizes: Rows per table; Kaggle's if empty.
    """
    shares = np.diff(np.arange(num_processes + 1) * num_rounds // num_processes).tolist()
    for batch_size in batch_sizes:
        both: tuple[_Seconds, _Seconds] = {}, {}
        for process, share in enumerate(shares):
            found = in_own_process(_measure, batch_size, precisions, share, table_sizes, process)
            for seconds, more in zip(both, found, strict=True):
                for name, spent in more.items():
                    seconds.setdefault(name, []).extend(spent)
        yield from _rows_of_batch_size(batch_size, precisions, *both, _close_rounds(batch_size))


def _measure(
    batch_size: int,
    precisions: Sequence[str],
    num_rounds: int,
    table_sizes: Sequence[int],
    seed: int,
) -> tuple[_Seconds, _Seconds]:
    """Seconds of all providers, and those of close rounds; `seed` is that of the orders."""
    prepare_process()
    num_steps = steps_of_turn(batch_size)
    steps: dict[tuple[str, str], Callable[[], None]] = {}
    for precision in precisions:
        whole = _whole_steps(batch_size, precision, table_sizes, num_rounds)
        dense = _dense_steps(batch_size, precision)
        steps |= {(precision, provider): step for provider, step in whole.items()}
        steps |= {(precision, provider): step for provider, step in dense.items()}
    turns = {
        name: timed(step, num_before=num_steps, num_timed=num_steps) for name, step in steps.items()
    }
    among_all = take_turns(turns, num_rounds, num_warm_up_rounds=_NUM_WARM_UP_ROUNDS, seed=seed)
    num_steps = min(_MAX_CLOSE_STEPS, num_steps)
    among_close: _Seconds = {}
    for precision in precisions:
        turns = {
            name: timed(steps[name], num_before=num_steps, num_timed=num_steps)
            for name in ((precision, provider) for provider in _CLOSE)
        }
        num_close = num_rounds * _close_rounds(batch_size)
        among_close |= take_turns(
            turns, num_close, num_warm_up_rounds=_NUM_WARM_UP_ROUNDS, seed=seed
        )
    return among_all, among_close


def _close_rounds(batch_size: int) -> int:
    """Close rounds per ordinary round."""
    return min(32, max(1, 4096 // batch_size))


def _rows_of_batch_size(
    batch_size: int,
    precisions: Sequence[str],
    seconds: _Seconds,
    close: _Seconds,
    num_per_block: int,
) -> list[Row]:
    """Rows from ordinary rounds, and from close rounds in blocks of `num_per_block`."""
    rows = []
    for precision in precisions:
        case = f"B={batch_size},D={_DIM},optimizer=sgd,precision={precision}"
        found = {provider: spent for (of, provider), spent in seconds.items() if of == precision}
        times = {provider: [1e3 * s for s in spent] for provider, spent in found.items()}
        rows += rows_by_provider("step", case, "time", "ms", times)
        # (provider, metric, values, baseline, rounds per block)
        ratios = [("dense", "speed_over_dense_eager", found["dense"], found["dense_eager"], 1)]
        if precision != "fp32" and "fp32" in precisions:
            ratios.append(("dense", "speed_over_fp32", found["dense"], seconds["fp32", "dense"], 1))
        ratios += [
            ("recsys", f"speed_over_{other}", found["recsys"], found[other], 1)
            for other in _WHOLE
            if other != "recsys"
        ]
        # `ratio` divides the baseline by the values: the step's time over the dense part's.
        for provider in _WHOLE:
            of, per_block = (close, num_per_block) if provider in _CLOSE else (seconds, 1)
            pair = of[precision, "dense"], of[precision, provider]
            ratios.append((provider, "time_over_dense", *pair, per_block))
        rows += [
            ratio(
                "step",
                case,
                provider,
                metric,
                values=values,
                baseline=baseline,
                is_by_round=True,
                num_per_block=per_block,
            )
            for provider, metric, values, baseline, per_block in ratios
        ]
    return rows


def _whole_steps(
    batch_size: int, precision: str, table_sizes: Sequence[int], num_rounds: int
) -> dict[str, _WholeStep]:
    """Whole training steps of the default model, by provider."""
    from recsys.config import load_config
    from recsys.train import build

    of_turn = steps_of_turn(batch_size)
    of_close = min(_MAX_CLOSE_STEPS, of_turn) * _close_rounds(batch_size)
    num_steps = 2 * (of_turn + of_close) * (num_rounds + _NUM_WARM_UP_ROUNDS)
    num_batches = max(1, min(num_steps, _MAX_SAMPLES // batch_size))
    steps: dict[str, _WholeStep] = {}
    for embeddings in _WHOLE:
        config = load_config(
            batch_size=batch_size,
            embeddings="recsys" if embeddings == "recsys" else "torch",
            precision=precision,
            synthetic={
                "num_samples": max(14, 2 * batch_size * num_batches),
                "table_sizes": list(table_sizes),
            },
        )
        source = build.open_source(config)
        model, optimizers = build.build_model(config, source)
        if embeddings == "fbgemm":
            from fbgemm import FbgemmEmbeddingBags

            arch: Any = model.model.sparse_arch
            tables = arch.embedding_bag_collection.embedding_bag_configs()
            fused = FbgemmEmbeddingBags(tables, "sgd", config.optimizer.lr)
            arch.embedding_bag_collection, optimizers[-1] = fused, fused.optimizer
        batches = [read_batch(source, batch_size, number) for number in range(num_batches)]
        for batch in batches:
            batch.sparse_features.offsets()  # made when first asked for; recsys never asks
        steps[embeddings] = _WholeStep(model, optimizers, batches, precision)
    return steps


class _WholeStep:
    """Trains on its mini-batches one after the other, and then again from the first."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        batches: Sequence[Batch],
        precision: str,
    ) -> None:
        self._model, self._optimizers, self._batches = model, optimizers, cycle(batches)
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    def __call__(self) -> None:
        batch = next(self._batches)
        for optimizer in self._optimizers:  # first, as `TrainPipeline` does
            optimizer.zero_grad()
        with self._autocast:
            loss, _ = self._model(batch)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()


class _DenseStep:
    """Trains the dense part of the default model on given pooled vectors."""

    def __init__(
        self,
        dense_arch: nn.Module,
        inter_arch: nn.Module,
        over_arch: nn.Module,
        batch_size: int,
        precision: str,
    ) -> None:
        self._archs = dense_arch, inter_arch, over_arch
        self._dense = torch.rand(batch_size, NUM_DENSE)
        self._pooled = torch.randn(batch_size, _NUM_SPARSE, _DIM, requires_grad=True)
        self._labels = (torch.rand(batch_size) < 0.25).float()
        parameters = [*dense_arch.parameters(), *over_arch.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=0.1)
        self._loss_fn = nn.BCEWithLogitsLoss()
        self._is_bf16 = precision == "bf16"

    def __call__(self) -> None:
        dense_arch, inter_arch, over_arch = self._archs
        self._pooled.grad = None
        self._optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._is_bf16):
            logits: Tensor = over_arch(inter_arch(dense_arch(self._dense), self._pooled))
            loss = self._loss_fn(logits.squeeze(-1).float(), self._labels)
        loss.backward()
        self._optimizer.step()


def _dense_steps(batch_size: int, precision: str) -> dict[str, _DenseStep]:
    """Dense steps of the default model: of recsys, and of TorchRec's modules in eager mode."""
    from torchrec.models import dlrm as torchrec_dlrm

    from recsys.models.dlrm import DenseArch, OverArch
    from recsys.models.interaction import InteractionArch

    num_vectors = _NUM_SPARSE + 1
    over_in = _DIM + num_vectors * (num_vectors - 1) // 2
    ours = (
        DenseArch(NUM_DENSE, _DENSE_ARCH),
        InteractionArch(_NUM_SPARSE),
        OverArch(over_in, _OVER_ARCH),
    )
    eager = (
        torchrec_dlrm.DenseArch(NUM_DENSE, list(_DENSE_ARCH)),
        torchrec_dlrm.InteractionArch(_NUM_SPARSE),
        torchrec_dlrm.OverArch(over_in, list(_OVER_ARCH)),
    )
    return {
        "dense": _DenseStep(*ours, batch_size, precision),
        "dense_eager": _DenseStep(*eager, batch_size, precision),
    }


class _Case(NamedTuple):
    """A case of --against."""

    batch_size: int
    optimizer: str = "sgd"
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"B={self.batch_size},D={_DIM},optimizer={self.optimizer},precision={self.precision}"


_CASES = (
    _Case(128),
    _Case(2048),
    _Case(16384),
    _Case(2048, precision="bf16"),
    _Case(2048, optimizer="rowwise_adagrad"),
)


def make_turn(case: _Case, is_tiny: bool) -> Callable[[], float]:
    """A turn of --against."""
    sizes = kaggle_sizes(_TINY_ROWS if is_tiny else _MAX_ROWS)
    num_batches = max(4, _MAX_SAMPLES // 2 // case.batch_size)
    source = samples(num_batches * case.batch_size, sizes)
    batches = [read_batch(source, case.batch_size, number) for number in range(num_batches)]
    formula = SGD(lr=0.1) if case.optimizer == "sgd" else RowWiseAdagrad(lr=0.01)
    model, optimizers = build_model(source, _DIM, formula, lr=0.1)
    step = _WholeStep(model, optimizers, batches, case.precision)
    num_steps = 2 * steps_of_turn(case.batch_size)
    return timed(step, num_before=num_steps // 2, num_timed=num_steps)


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__, has_against=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048, 16384])
    options = parser.parse_args()
    if options.against is not None:
        rows = compare_checkouts("step", make_turn, _CASES, options)
    else:
        rows = bench_step(
            options.batch_sizes,
            ("fp32", "bf16"),
            num_rounds=3 if options.quick else 60,
            num_processes=1 if options.quick else 4,
            table_sizes=[_TINY_ROWS] * _NUM_SPARSE if options.quick else (),
        )
    show_rows(rows, options)


if __name__ == "__main__":
    main()
