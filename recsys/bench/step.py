"""`recsys bench step`: one training step, beside its parts and its floors.

    provider      what a step does
    torch         the whole step: our dense path, nn.EmbeddingBag and torch.optim
    fbgemm        the whole step: our dense path, FBGEMM's fused operators
    dense         our dense path alone: MLPs, interaction, loss, backward, update; pooled vectors
                  are given, and get a gradient
    dense_eager   the same with TorchRec's modules, as anybody runs them
    gemm_torch    the matrix products of a dense step and nothing else, by torch.mm and torch.bmm
    gemm_onednn   the same products, by oneDNN

Everything runs in one process and takes turns, in an order that rotates from round to round, after
warm-up rounds that are not counted. Mini-batches are made beforehand.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from recsys.bench.harness import Row, ratio, rows_by_provider, take_turns, timed
from recsys.build import build_model, open_source
from recsys.config import TrainConfig, load_config
from recsys.errors import MissingDependency
from recsys.machine import set_num_threads, tune_allocator
from recsys.models.linear import onednn_product

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from recsys.batch import Batch

__all__ = ["bench_step"]

_NUM_BATCHES = 8


def bench_step(
    batch_sizes: Sequence[int],
    precisions: Sequence[str],
    *,
    num_rounds: int,
    table_sizes: Sequence[int] = (),
) -> list[Row]:
    """Measure every provider in every case.

    Args:
        batch_sizes: Each makes a case with each precision.
        precisions: "fp32" or "bf16".
        num_rounds: Rounds that count; each provider makes one step in each.
        table_sizes: Rows per table; Kaggle's where empty.

    Raises:
        MissingDependency: TorchRec or FBGEMM is not installed.
    """
    set_num_threads(0)
    tune_allocator()
    rows = []
    for batch_size in batch_sizes:
        steps = _whole_steps(batch_size, table_sizes)
        for precision in precisions:
            case = f"B={batch_size},D=16,optimizer=sgd,precision={precision}"
            every = {**steps, **_dense_steps(batch_size), **_gemm_steps(batch_size, precision)}
            within = partial(torch.autocast, "cpu", torch.bfloat16, enabled=precision == "bf16")
            seconds = take_turns(
                {name: timed(step, within) for name, step in every.items()}, num_rounds
            )
            milliseconds = {name: [1e3 * s for s in spent] for name, spent in seconds.items()}
            rows += rows_by_provider(
                bench="step", case=case, metric="time", unit="ms", values=milliseconds
            )
            rows.append(
                ratio(
                    bench="step",
                    case=case,
                    provider="dense",
                    metric="speed_over_dense_eager",
                    values=seconds["dense"],
                    baseline=seconds["dense_eager"],
                )
            )
    return rows


def _whole_steps(batch_size: int, table_sizes: Sequence[int]) -> dict[str, Callable[[], None]]:
    """Steps of the main job, by embeddings."""
    steps: dict[str, Callable[[], None]] = {}
    for embeddings in ("torch", "fbgemm"):
        config: TrainConfig = load_config(
            batch_size=batch_size,
            embeddings=embeddings,
            synthetic={
                "num_samples": max(14, 2 * batch_size * _NUM_BATCHES),
                "table_sizes": list(table_sizes),
            },
        )
        source = open_source(config)
        model, optimizers = build_model(config, source)
        batches = [
            source.read(np.arange(number * batch_size, (number + 1) * batch_size))
            for number in range(_NUM_BATCHES)
        ]
        steps[embeddings] = _WholeStep(model, optimizers, batches)
    return steps


class _WholeStep:
    """Trains on one mini-batch after the other, round and round."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], batches: list[Batch]) -> None:
        self.model, self.optimizers, self.batches = model, optimizers, batches
        self.num_calls = 0

    def __call__(self) -> None:
        batch = self.batches[self.num_calls % len(self.batches)]
        self.num_calls += 1
        loss, _ = self.model(batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


def _dense_steps(batch_size: int) -> dict[str, Callable[[], None]]:
    """Dense steps of the default model: ours, and TorchRec's modules in eager mode."""
    from recsys.models.dlrm import DenseArch, OverArch
    from recsys.models.interaction import InteractionArch

    try:
        from torchrec.models import dlrm as torchrec_dlrm
    except ImportError as error:
        raise MissingDependency(
            "bench step measures TorchRec's modules too; install recsys[torchrec]"
        ) from error
    model = TrainConfig().model
    dense = torch.rand(batch_size, 13)
    pooled = torch.randn(batch_size, 26, model.embedding_dim, requires_grad=True)
    labels = (torch.rand(batch_size) < 0.25).float()
    over_in = model.embedding_dim + 27 * 26 // 2

    def make(
        dense_arch: nn.Module, inter_arch: nn.Module, over_arch: nn.Module
    ) -> Callable[[], None]:
        optimizer = torch.optim.SGD([*dense_arch.parameters(), *over_arch.parameters()], lr=0.1)
        loss_fn = nn.BCEWithLogitsLoss()

        def step() -> None:
            pooled.grad = None
            logits = over_arch(inter_arch(dense_arch(dense), pooled)).squeeze(-1)
            loss = loss_fn(logits.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    return {
        "dense": make(
            DenseArch(13, model.dense_arch), InteractionArch(26), OverArch(over_in, model.over_arch)
        ),
        "dense_eager": make(
            torchrec_dlrm.DenseArch(13, list(model.dense_arch)),
            torchrec_dlrm.InteractionArch(26),
            torchrec_dlrm.OverArch(over_in, list(model.over_arch)),
        ),
    }


def _gemm_steps(batch_size: int, precision: str) -> dict[str, Callable[[], None]]:
    """The matrix products of a dense step, by either library, into memory that is there already."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = TrainConfig().model
    bottom, top = [13, *model.dense_arch], [367, *model.over_arch]
    layers: list[tuple[Tensor, Tensor, Tensor]] = []
    for sizes in (bottom, top):
        for num_inputs, num_outputs in pairwise(sizes):
            shapes = (batch_size, num_inputs), (num_outputs, num_inputs), (batch_size, num_outputs)
            inputs, weight, outputs = (torch.randn(shape, dtype=dtype) for shape in shapes)
            layers.append((inputs, weight, outputs))
    vectors = torch.randn(batch_size, 27, model.embedding_dim, dtype=dtype)
    products = torch.empty(batch_size, 27, 27, dtype=dtype)
    of_vectors = torch.empty_like(vectors)

    def interaction() -> None:
        torch.bmm(vectors, vectors.transpose(1, 2), out=products)
        torch.bmm(products, vectors, out=of_vectors)

    results = [
        (torch.empty_like(outputs), torch.empty_like(inputs), torch.empty_like(weight))
        for inputs, weight, outputs in layers
    ]

    def by_torch() -> None:
        for number, ((inputs, weight, outputs), (out, of_inputs, of_weight)) in enumerate(
            zip(layers, results, strict=True)
        ):
            torch.mm(inputs, weight.t(), out=out)
            if number:  # the dense features need no gradient
                torch.mm(outputs, weight, out=of_inputs)
            torch.mm(outputs.t(), inputs, out=of_weight)
        interaction()

    def by_onednn() -> None:
        for number, (inputs, weight, outputs) in enumerate(layers):
            onednn_product(inputs, weight)
            if number:
                onednn_product(outputs, weight.t())
            if inputs.shape[1] < outputs.shape[1]:
                onednn_product(inputs.t(), outputs.t())
            else:
                onednn_product(outputs.t(), inputs.t())
        interaction()

    return {"gemm_torch": _without_grad(by_torch), "gemm_onednn": _without_grad(by_onednn)}


def _without_grad(function: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            function()

    return run
