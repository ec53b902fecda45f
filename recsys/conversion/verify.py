"""`verify`: compares a step of a model with the same step of its accelerated copy.

Two correct runs in float32 drift apart by rounding, faster and faster. So every mini-batch is one
step from the model's present state: forward, gradients and one update.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing import assert_close

from recsys._support.sizes import counted
from recsys.conversion.accelerate import accelerate, restore
from recsys.conversion.choice import require_module
from recsys.embeddings.optimizer import shown_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Difference", "Verification", "verify"]

_SHOWN = 5

_Numbers = dict[tuple[str, str], Tensor]  # by kind and name


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    Attributes:
        step: Counted from 0.
        what: "loss", "row", "parameter", "buffer" or "state"; after "budget", if the step at the
            budget differs from that with all rows in fast memory.
        name: Name of the table or parameter in the model, followed by the name of the state; "" for
            a loss.
        error: How many numbers differ, the largest differences, and where, as
            `torch.testing.assert_close` says it.
    """

    step: int
    what: str
    name: str
    error: str


@dataclass
class Verification:
    """The result of `verify`; prints as a few lines.

    Attributes:
        num_steps: Steps compared, each from the same state.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        differences: One for each step and tensor that differs.
    """

    num_steps: int
    rtol: float
    atol: float
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is no difference."""
        return not self.differences

    def __str__(self) -> str:
        verdict = "DIFFERS" if self.differences else "agrees"
        lines = [
            f"{verdict}: {counted(self.num_steps, 'step')}; rtol {self.rtol:g}, atol {self.atol:g}"
        ]
        lines += [f"step {d.step}, {d.what} {d.name}: {d.error}" for d in self.differences[:_SHOWN]]
        return "\n".join(lines)

    def compare(
        self, expected: _Numbers, found: _Numbers, rtol: float, atol: float, said: str = ""
    ) -> None:
        """Add what differs in a step; a missing tensor counts as one full of nan."""
        for (what, name), number in expected.items():
            got = found.get((what, name), torch.tensor(torch.nan)).expand_as(number)
            try:  # with a budget, tables are on the host
                assert_close(
                    got,
                    number,
                    rtol=rtol,
                    atol=atol,
                    equal_nan=True,
                    check_device=False,
                    check_dtype=False,
                )
            except AssertionError as error:
                self.differences.append(Difference(self.num_steps, said + what, name, str(error)))


def verify(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Optimizer | Sequence[Optimizer],
    steps: int = 50,
    rtol: float | None = None,
    atol: float | None = None,
    budget: int | str | None = None,
) -> Verification:
    """Train one step of two copies of a model, one of them accelerated, and compare everything.

    Each batch is a step of its own from the model's present state, of copies that are made for it.
    The accelerated copy has all tables that recsys can take (`always=True` of `accelerate`).

    In float32 plain PyTorch adds the gradients of equal rows to the row one by one and rounds each
    time; recsys adds their sum. If a batch looks a row up hundreds of times, a number near 0 may
    therefore differ by more than `atol`. A run in float64 shows whether that is the only cause.

    A gradient that is zero but for rounding, such as that of a bias before a `BatchNorm`, makes a
    visible step in Adagrad and Adam, which divide it by its own size.

    Copies have no optimizer from `apply_optimizer_in_backward`: give it as `optimizer`, which
    `recsys.accelerate` translates to the same formula.

    The model, its optimizer and torch's random state do not change. Meanwhile two copies of the
    model and of the optimizer's state are in memory, and three with a budget.

    Args:
        model: As for `recsys.accelerate`.
        batches: `verify` takes up to `steps` of them, and gives each to `loss` twice, or three
            times with a budget.
        loss: Maps the model and a batch to a scalar.
        optimizer: The model's optimizer, or several.
            To compare `lazy_adam=True`, give `torch.optim.SparseAdam` for the tables, whose rule it
            is.
        steps: The most steps to compare.
        rtol: Relative tolerance. Default: 1e-9 if all rows are float64, else 1e-5.
        atol: Absolute tolerance. Default: 1e-9 if all rows are float64, else 1e-7.
        budget: As for `recsys.accelerate`. If it is given, each step is also made at this budget,
            and must be equal to the last bit to that with all rows in fast memory.

    Returns:
        What was compared, and what differs.

    Raises:
        BudgetTooSmall: the budget is below the least one.
        NonFiniteGradient: a gradient of rows contains nan or inf, which plain PyTorch would accept.
        TypeError: `model` or `optimizer` has another type.
        ValueError: there are no batches, or `recsys.accelerate` refuses the model or the optimizer.
    """
    require_module(model)
    if not isinstance(optimizer, Optimizer | list | tuple):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, or a list of several, got "
            f"{shown_optimizer(optimizer)}"
        )
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else optimizer
    is_double = all(table.dtype == torch.float64 for table in _tables_in(model))
    of_dtype = (1e-9, 1e-9) if is_double else (1e-5, 1e-7)
    rtol = of_dtype[0] if rtol is None else rtol
    atol = of_dtype[1] if atol is None else atol
    found = Verification(0, rtol, atol)
    for batch in islice(batches, steps):
        run = model, optimizers, loss, batch
        resident = _numbers_after_step(*run, {"always": True})
        found.compare(_numbers_after_step(*run, None), resident, rtol, atol)
        if budget is not None:
            tiered = _numbers_after_step(*run, {"budget": budget})
            found.compare(resident, tiered, 0.0, 0.0, "budget ")
        found.num_steps += 1
    if not found.num_steps:
        raise ValueError("batches must have at least one, got none: is the iterator used up?")
    return found


def _tables_in(model: nn.Module) -> set[Tensor]:
    is_table = (nn.EmbeddingBag, nn.Embedding)
    return {module.weight for module in model.modules() if isinstance(module, is_table)}


def _numbers_after_step(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loss: Any,
    batch: Any,
    taken: dict[str, Any] | None,
) -> _Numbers:
    """Train one step of a copy; returns the loss and everything that a step may change.

    Args:
        model: As for `verify`.
        optimizers: As for `verify`.
        loss: As for `verify`.
        batch: The batch.
        taken: Options of `accelerate`; None for plain PyTorch.
    """
    # In one call, or the copied optimizers would update the original's parameters.
    model, optimizers = copy.deepcopy((model, optimizers))
    tables = _tables_in(model)
    devices = list({parameter.device for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=devices):
        if taken is not None:
            accelerate(model, optimizer=optimizers, **taken)
        for one in optimizers:
            one.zero_grad()
        value = loss(model, batch)
        value.backward()
    for one in optimizers:
        one.step()
    if taken is not None:
        restore(model)  # writes rows and state back
    found = {("loss", ""): value.detach()}
    for name, parameter in model.named_parameters():
        found["row" if parameter in tables else "parameter", name] = parameter.detach()
        for state in (one.state[parameter] for one in optimizers if parameter in one.state):
            for key, number in state.items():
                if number is not None:
                    found["state", f"{name} {key}"] = torch.as_tensor(number).detach()
    return found | {("buffer", name): buffer for name, buffer in model.named_buffers()}
