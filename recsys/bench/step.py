"""`recsys bench step`: one training step, compared with its parts and its floors.

    provider      what a step does
    recsys        the whole step: recsys dense path and embeddings
    torch         the whole step: recsys dense path, nn.EmbeddingBag and torch.optim
    fbgemm        the whole step: recsys dense path, FBGEMM's fused operators
    kernels       recsys dense path, and the two kernels of the embeddings with only autograd around
                  them (`bare_kernels`), on the same mini-batches at other times. The difference to
                  recsys is the time of Python code: that of the embeddings and of the model
    dense         recsys dense path alone: MLPs, interaction, loss, backward, update; the pooled
                  vectors are given, and get a gradient
    dense_eager   the same with TorchRec's modules in eager mode
    gemm_torch    only the matrix products of a dense step, by torch.mm and torch.bmm
    gemm_onednn   the same products, by oneDNN

Everything of one batch size runs in one process, and precisions take turns like providers. Each
provider has its own operands, and mini-batches are made in advance. Warm-up rounds are not counted.
A turn has as many untimed steps as timed ones, so that timed steps find the caches as in training.
Under bfloat16, forward and backward are autocast and the update is in float32, as in training.

The same code may be slower in one process than in another, by another share for each provider,
however often it is repeated. So the rounds are divided among several processes that run one after
the other. These are minutes apart, and the speed of a shared machine changes, so ratios are those
of rounds. Even within a round, turns of all providers are seconds apart, and the machine changes by
more than the few percent that a lookup adds to a dense part. So `recsys`, `kernels` and `dense`
measure their ratios in separate rounds of a few steps each, with more rounds at small batch sizes.

Kaggle's tables are 2 GiB. Every whole step has its own tables, except that `kernels` uses those of
`recsys`. Both precisions together take 13 GiB.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from recsys._support.machine import set_num_threads, tune_allocator
from recsys._support.torchrec_errors import cannot_import_torchrec
from recsys.bench.parts.bare_kernels import BareKernels, bags_of
from recsys.bench.parts.harness import (
    Row,
    ratio,
    rows_by_provider,
    steps_of_turn,
    take_turns,
    timed,
)
from recsys.bench.parts.products import Products
from recsys.bench.parts.worker import in_own_process
from recsys.config import TrainConfig, load_config
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.models.dlrm import DenseArch, OverArch
from recsys.models.interaction import InteractionArch
from recsys.train.parts.build import autocast, build_model, open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

    from recsys.batch import Batch
    from recsys.config import ModelConfig

__all__ = ["bench_step"]

# Every whole step has its own mini-batch, until they have this many samples; then they repeat.
_MAX_SAMPLES = 2**18
_NUM_WARM_UP_ROUNDS = 3
_WHOLE = ("recsys", "torch", "fbgemm")
_OVER_DENSE = (*_WHOLE, "kernels")
_CLOSE = ("recsys", "kernels", "dense")
_MAX_CLOSE_STEPS = 2  # timed steps of a turn in close rounds, and also untimed ones

# Seconds per step of every round, by (precision, provider).
_Seconds = dict[tuple[str, str], list[float]]


def bench_step(
    batch_sizes: Sequence[int],
    precisions: Sequence[str],
    *,
    num_rounds: int,
    num_processes: int = 1,
    table_sizes: Sequence[int] = (),
) -> Iterator[Row]:
    """Measure every provider in every case.

    Args:
        batch_sizes: B of the cases.
        precisions: "fp32" or "bf16".
        num_rounds: Rounds that count, over all processes; each provider takes one turn in each.
        num_processes: Processes among which the rounds of a batch size are divided.
        table_sizes: Rows per table; Kaggle's if empty.

    Raises:
        MissingDependency: TorchRec or FBGEMM is not installed, or does not fit this torch.
    """
    set_num_threads(0)  # as in the processes, for the environment in the record
    num_processes = min(num_processes, num_rounds)
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
    set_num_threads(0)
    tune_allocator()
    num_steps = steps_of_turn(batch_size)
    steps = {
        (precision, provider): step
        for precision in precisions
        for provider, step in {
            **_with_kernels(
                _whole_steps(batch_size, precision, table_sizes, num_rounds), batch_size, precision
            ),
            **_dense_steps(batch_size, precision),
            **_gemm_steps(batch_size, precision),
        }.items()
    }
    turns = {
        name: timed(step, num_before=num_steps, num_timed=num_steps) for name, step in steps.items()
    }
    among_all = take_turns(turns, num_rounds, num_warm_up_rounds=_NUM_WARM_UP_ROUNDS, seed=seed)
    num_steps = min(_MAX_CLOSE_STEPS, num_steps)
    among_close: _Seconds = {}
    for precision in precisions:
        names = [(precision, provider) for provider in _CLOSE]
        turns = {
            name: timed(steps[name], num_before=num_steps, num_timed=num_steps) for name in names
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
        dim = TrainConfig().model.embedding_dim
        case = f"B={batch_size},D={dim},optimizer=sgd,precision={precision}"
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
        for provider in _OVER_DENSE:
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
    of_turn = steps_of_turn(batch_size)
    of_close = min(_MAX_CLOSE_STEPS, of_turn) * _close_rounds(batch_size)
    num_steps = 2 * (of_turn + of_close) * (num_rounds + _NUM_WARM_UP_ROUNDS)
    num_batches = max(1, min(num_steps, _MAX_SAMPLES // batch_size))
    steps: dict[str, _WholeStep] = {}
    for embeddings in _WHOLE:
        config: TrainConfig = load_config(
            batch_size=batch_size,
            embeddings=embeddings,
            precision=precision,
            synthetic={
                "num_samples": max(14, 2 * batch_size * num_batches),
                "table_sizes": list(table_sizes),
            },
        )
        source = open_source(config)
        model, optimizers = build_model(config, source)
        batches = [
            source.read(np.arange(number * batch_size, (number + 1) * batch_size))
            for number in range(num_batches)
        ]
        for batch in batches:
            batch.sparse_features.offsets()  # made when first asked for; recsys never asks
        steps[embeddings] = _WholeStep(model, optimizers, batches, autocast(config))
    return steps


def _with_kernels(
    steps: dict[str, _WholeStep], batch_size: int, precision: str
) -> dict[str, Callable[[], None]]:
    """These steps, and one of the kernels on the tables and mini-batches of recsys."""
    ours, dense = steps["recsys"], _our_dense_step(batch_size, precision)
    return {**steps, "kernels": _KernelsStep(_collection_of(ours.model), ours.batches, dense)}


def _collection_of(model: nn.Module) -> HotColdEmbeddingBagCollection:
    [found] = [each for each in model.modules() if isinstance(each, HotColdEmbeddingBagCollection)]
    return found


class _WholeStep:
    """Trains on its mini-batches one after the other, and then again from the first."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        batches: list[Batch],
        autocast: torch.autocast,
    ) -> None:
        self.model, self.optimizers, self.batches = model, optimizers, batches
        self.autocast = autocast
        self.num_calls = 0

    def __call__(self) -> None:
        batch = self.batches[self.num_calls % len(self.batches)]
        self.num_calls += 1
        for optimizer in self.optimizers:  # first, as `TrainPipeline` does
            optimizer.zero_grad()
        with self.autocast:
            loss, _ = self.model(batch)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


class _DenseStep:
    """Trains the dense part of the default model on given pooled vectors.

    Attributes:
        pooled: The pooled vectors, (B, 26, D); a step sets their gradient.
    """

    def __init__(
        self,
        dense_arch: nn.Module,
        inter_arch: nn.Module,
        over_arch: nn.Module,
        batch_size: int,
        precision: str,
    ) -> None:
        self._archs = dense_arch, inter_arch, over_arch
        self._dense = torch.rand(batch_size, 13)
        dim = TrainConfig().model.embedding_dim
        self.pooled = torch.randn(batch_size, 26, dim, requires_grad=True)
        self._labels = (torch.rand(batch_size) < 0.25).float()
        parameters = [*dense_arch.parameters(), *over_arch.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=0.1)
        self._loss_fn = nn.BCEWithLogitsLoss()
        self._is_bf16 = precision == "bf16"

    def __call__(self) -> None:
        self.pooled.grad = None
        self.step(self.pooled)

    def step(self, pooled: Tensor) -> None:
        """Make a step with any pooled vectors (B, 26, D)."""
        dense_arch, inter_arch, over_arch = self._archs
        self._optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._is_bf16):
            logits = over_arch(inter_arch(dense_arch(self._dense), pooled)).squeeze(-1)
            loss = self._loss_fn(logits.float(), self._labels)
        loss.backward()
        self._optimizer.step()


class _KernelsStep:
    """A dense step between the lookup kernel and the update kernel, on a collection's tables.

    All tables must have one dim and one-hot features, so that one call of each kernel is enough.
    """

    def __init__(
        self, embeddings: HotColdEmbeddingBagCollection, batches: list[Batch], dense: _DenseStep
    ) -> None:
        self._kernels = BareKernels(embeddings, batches[0].sparse_features)
        self._bags = [bags_of(batch.sparse_features) for batch in batches]
        self._dense = dense
        # Half a cycle away from `recsys` on the same tables, whose last rows are in the caches.
        self._next_batch = len(batches) // 2

    def __call__(self) -> None:
        bags = self._bags[self._next_batch % len(self._bags)]
        self._next_batch += 1
        self._dense.step(self._kernels.look_up(bags).view(self._dense.pooled.shape))
        self._kernels.update()


def _dense_steps(batch_size: int, precision: str) -> dict[str, Callable[[], None]]:
    """Dense steps of the default model: of recsys, and of TorchRec's modules in eager mode."""
    try:
        from torchrec.models import dlrm as torchrec_dlrm
    except (ImportError, OSError) as error:
        raise cannot_import_torchrec("bench step", error) from error
    model = TrainConfig().model
    over_in = _over_in(model)
    eager = _DenseStep(
        torchrec_dlrm.DenseArch(13, list(model.dense_arch)),
        torchrec_dlrm.InteractionArch(26),
        torchrec_dlrm.OverArch(over_in, list(model.over_arch)),
        batch_size,
        precision,
    )
    return {"dense": _our_dense_step(batch_size, precision), "dense_eager": eager}


def _our_dense_step(batch_size: int, precision: str) -> _DenseStep:
    model = TrainConfig().model
    return _DenseStep(
        DenseArch(13, model.dense_arch),
        InteractionArch(26),
        OverArch(_over_in(model), model.over_arch),
        batch_size,
        precision,
    )


def _over_in(model: ModelConfig) -> int:
    """Input size of the over arch: the dense vector and a product of each pair of 27 vectors."""
    return model.embedding_dim + 27 * 26 // 2


def _gemm_steps(batch_size: int, precision: str) -> dict[str, Callable[[], None]]:
    """Only the matrix products of a dense step, by either library."""
    model = TrainConfig().model
    make = partial(Products, batch_size, model.dense_arch, model.over_arch, 26, precision)
    return {"gemm_torch": make().by_torch, "gemm_onednn": make().by_onednn}
