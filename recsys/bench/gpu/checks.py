"""The correctness that `recsys bench gpu` checks before it measures anything.

    verify      training at two budgets equals training with every row resident, to the last bit
                (`recsys verify`), for each row optimizer
    one step    each step from the same state equals that of nn.EmbeddingBag and torch.optim, within
                rounding; and at a budget the resident run, to the last bit (`recsys.verify`)

A check that fails, or raises, is recorded; the others still run.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.bench.gpu.record import describe_error
from recsys.config import ModelConfig, OptimizerConfig, SyntheticConfig, TrainConfig
from recsys.conversion.verify import verify
from recsys.train.verify_tiers import format_verification, verify_budgets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Check", "run_checks"]

_BUDGETS = ("floor", "half")
_DIM, _BATCH_SIZE = 32, 256


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        name: What was checked.
        status: "passed" or "failed".
        reason: What differs, or the error; empty if it passed.
    """

    name: str
    status: str
    reason: str = ""


def run_checks(device: str, *, is_quick: bool) -> Iterator[Check]:
    """Make all checks, one after the other.

    Args:
        device: "cuda" or "cpu".
        is_quick: Whether to train for a few steps only.
    """
    num_steps = 3 if is_quick else 20
    optimizers = ("sgd", "rowwise_adagrad") if is_quick else tuple(_RATES)
    for name in optimizers:
        yield _checked(f"verify,optimizer={name}", partial(_verify, device, name, num_steps))
    for name in _PLAIN_OPTIMIZERS:
        yield _checked(f"one_step,optimizer={name}", partial(_one_step, device, name, num_steps))


_RATES = {
    "sgd": 0.1,
    "rowwise_adagrad": 0.01,
    "adagrad": 0.01,
    "adam": 0.001,
    "partial_rowwise_adam": 0.001,
}
_PLAIN_OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def _checked(name: str, find_fault: Callable[[], str]) -> Check:
    """Make a check that returns what is wrong, or nothing."""
    try:
        with warnings.catch_warnings():
            # torch's Adagrad makes sparse tensors without saying whether to check them.
            warnings.filterwarnings("ignore", "Sparse invariant checks")
            fault = find_fault()
    except Exception as error:  # a fault like any other; the remaining checks run
        fault = describe_error(error)
    return Check(name, "failed" if fault else "passed", fault)


def _verify(device: str, optimizer: str, num_steps: int) -> str:
    """Compare runs at two budgets with the resident run; returns what differs."""
    config = TrainConfig(
        data="synthetic:criteo-kaggle",
        device=device,
        batch_size=_BATCH_SIZE,
        model=ModelConfig(embedding_dim=_DIM, dense_arch=(64, _DIM), over_arch=(64, 1)),
        optimizer=OptimizerConfig(name=optimizer, lr=_RATES[optimizer]),
        synthetic=SyntheticConfig(
            num_samples=2 * _BATCH_SIZE * num_steps, table_sizes=(5000, 3, 2000, 40, 1, 3000)
        ),
    )
    found = verify_budgets(config, _BUDGETS, num_steps)
    return "" if all(each.ok for each in found) else format_verification(found)


class _Towers(nn.Module):
    """Bags as a model of plain PyTorch has them, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, _DIM, mode="sum", sparse=True) for size in (3000, 1000, 7)
        )
        self.dense = nn.Linear(3 * _DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """The sum over a bag of each table, (T, B, 2) ids to (B, 1)."""
        pooled = [bag(of_table) for bag, of_table in zip(self.bags, ids, strict=True)]
        return cast("Tensor", self.dense(torch.cat(pooled, dim=1)))


def _one_step(device: str, optimizer: str, num_steps: int) -> str:
    """Compare steps with those of plain PyTorch; returns what differs."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _Towers().to(device)
    sizes = torch.tensor([3000, 1000, 7]).view(3, 1, 1)
    batches = [
        (torch.rand(3, 64, 2, generator=generator, dtype=torch.float64) * sizes).long().to(device)
        for _ in range(num_steps)
    ]
    found = verify(
        model,
        batches,
        loss=lambda trained, ids: functional.softplus(trained(ids)).mean(),
        optimizer=partial(_PLAIN_OPTIMIZERS[optimizer], lr=0.1),
        steps=num_steps,
        budget=2**18,  # half of the rows
    )
    return "" if found.ok else str(found)
