"""`verify`: compares a step of a model with the same step of its accelerated copy.

Two correct runs in float32 drift apart by rounding, faster and faster. So every mini-batch is one
step from the model's present state: forward, gradients and one update.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recsys._support.sizes import counted
from recsys._support.untrusted import is_number, is_whole
from recsys.conversion.accelerate import accelerate
from recsys.conversion.exchange import holders_of
from recsys.embeddings.lookup.abstract_tables import AbstractTables
from recsys.embeddings.optimizer import shown_optimizer
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim import Optimizer

    from recsys.conversion.accelerated import Accelerated

__all__ = ["Difference", "Verification", "verify"]

_KEPT_PER_TENSOR = 5

_Numbers = dict[tuple[str, str], Tensor]  # by kind and name


@dataclass(frozen=True)
class Difference:
    """A wrong number; of each row, only the one with the largest error is listed.

    Attributes:
        step: Counted from 0.
        what: "loss", "row", "parameter", "buffer" or "state".
        name: Name of the table or parameter in the model, followed by the name of the state; "" for
            a loss.
        row: Index in the first dimension of the table, state or parameter; 0 for a scalar.
        expected: The number in plain PyTorch.
        got: The number in the accelerated model.
        error_over_tolerance: Above 1; infinite if one of the two is not a number.
    """

    step: int
    what: str
    name: str
    row: int = 0
    expected: float = 0.0
    got: float = 0.0
    error_over_tolerance: float = 0.0

    def __str__(self) -> str:
        place = f"step {self.step}, {self.what} {self.name}, row {self.row}"
        return f"{place}: expected {self.expected:g}, got {self.got:g}"


@dataclass
class Verification:
    """The result of `verify`; prints as a few lines.

    Attributes:
        num_steps: Steps compared, each from the same state.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        differences: The worst ones of every step and tensor.
        largest_errors: The largest error divided by its tolerance, by kind of number: "loss",
            "row", "parameter", "buffer" or "state".
        tiered: The steps at the budget compared with those that have all rows in fast memory; None
            without a budget.
    """

    num_steps: int
    rtol: float
    atol: float
    differences: list[Difference] = field(default_factory=list)
    largest_errors: dict[str, float] = field(default_factory=dict)
    tiered: Verification | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no difference."""
        return not self.differences and (self.tiered is None or self.tiered.ok)

    def __str__(self) -> str:
        verdict = "DIFFERS" if self.differences else "agrees"
        steps = counted(self.num_steps, "step")
        lines = [f"{verdict}: {steps}; rtol {self.rtol:g}, atol {self.atol:g}"]
        for kind, error in self.largest_errors.items():
            lines.append(f"  {kind}: largest error / tolerance {error:.3g}")
        worst = sorted(self.differences, key=lambda wrong: -wrong.error_over_tolerance)
        lines += [f"  {wrong}" for wrong in worst[:_KEPT_PER_TENSOR]]
        if self.tiered is not None:
            lines.append(f"on the budget, beside all rows in fast memory: {self.tiered}")
        return "\n".join(lines)

    def compare(self, step: int, expected: _Numbers, found: _Numbers) -> None:
        """Add what differs in a step; a missing tensor counts as one full of nan."""
        for (what, name), value in expected.items():
            self.largest_errors.setdefault(what, 0.0)
            got = found.get((what, name))
            if got is None or got.shape != value.shape:
                got = torch.full_like(value, float("nan"), dtype=torch.float64)
            got = got.to(value.device)  # with a budget, tables are on the host
            if not torch.equal(value, got):
                self._compare_rows(Difference(step, what, name), _rows(value), _rows(got))

    def _compare_rows(self, where: Difference, expected: Tensor, got: Tensor) -> None:
        rows = (expected != got).any(1).nonzero()[:, 0]
        wanted, actual = expected[rows].double(), got[rows].double()
        errors = (actual - wanted).abs() / (self.atol + self.rtol * wanted.abs())
        errors = errors.nan_to_num(nan=float("inf"))  # one of the two is no number
        errors.masked_fill_((actual == wanted) | (actual.isnan() & wanted.isnan()), 0)
        errors, columns = errors.max(1)
        largest = max(errors.tolist(), default=0.0)
        self.largest_errors[where.what] = max(self.largest_errors[where.what], largest)
        worst = errors.argsort(descending=True)[:_KEPT_PER_TENSOR]
        for number in worst[errors[worst] > 1].tolist():
            column = columns[number]
            numbers = float(wanted[number, column]), float(actual[number, column])
            self.differences.append(
                replace(
                    where,
                    row=int(rows[number]),
                    expected=numbers[0],
                    got=numbers[1],
                    error_over_tolerance=float(errors[number]),
                )
            )


def verify(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Optimizer | Sequence[Optimizer] | Callable[[Iterator[nn.Parameter]], Optimizer],
    steps: int = 50,
    rtol: float | None = None,
    atol: float | None = None,
    budget: int | str | None = None,
    lazy_adam: bool = False,
) -> Verification:
    """Train one step of two copies of a model, one of them accelerated, and compare everything.

    Each batch is a step of its own from the model's present state, of copies that are made for it.
    The accelerated copy has all tables that recsys can take (`always=True` of `accelerate`).

    In float32 plain PyTorch adds the gradients of equal rows to the row one by one and rounds each
    time; recsys adds their sum. If a batch looks a row up hundreds of times, a number near 0 may
    therefore differ by more than `atol`. A run in float64 shows whether that is the only cause.

    A gradient that is zero but for rounding, such as that of a bias before a `BatchNorm`, makes a
    visible step in Adagrad and Adam, which divide it by its own size.

    The model, its optimizer and torch's random state do not change. Meanwhile two copies of the
    model and of the optimizer's state are in memory.

    Args:
        model: As for `recsys.accelerate`.
        batches: `verify` takes up to `steps` of them, and gives each to `loss` twice, or three
            times with a budget.
        loss: Maps the model and a batch to a scalar.
        optimizer: The model's optimizer, or several, or a function that maps `parameters()` to one.
        steps: The most steps to compare.
        rtol: Relative tolerance. Default: 1e-9 if all rows are float64, else 1e-5.
        atol: Absolute tolerance. Default: 1e-9 if all rows are float64, else 1e-7.
        budget: As for `recsys.accelerate`. If it is given, each step is also made at this budget,
            and must be equal to the last bit to that with all rows in fast memory.
        lazy_adam: As for `recsys.accelerate`. The plain copy then has `torch.optim.SparseAdam` for
            the tables, whose rule it is, with the settings and the state of Adam.

    Returns:
        What was compared, and what differs.

    Raises:
        BudgetTooSmall: the rows of a batch do not fit.
        NonFiniteGradient: a gradient of rows contains nan or inf, which plain PyTorch would accept.
        ConfigError: `steps` is not at least 1, `rtol` or `atol` is not finite or below 0, or
            `budget` is not a size.
        TypeError: `model` or `optimizer` has another type, or `loss` returns no tensor.
        ValueError: there are no batches, or `recsys.accelerate` refuses the model or the optimizer,
            or a parameter has an optimizer from `apply_optimizer_in_backward`, which copies lack.
    """
    _require_arguments(model, optimizer, steps, rtol, atol)
    is_double = all(table.dtype == torch.float64 for table in _tables_in(model))
    of_dtype = (1e-9, 1e-9) if is_double else (1e-5, 1e-7)
    rtol = of_dtype[0] if rtol is None else rtol
    atol = of_dtype[1] if atol is None else atol
    found = Verification(0, rtol, atol)
    exact = None if budget is None else Verification(0, 0.0, 0.0)
    devices = list({each.device for each in model.parameters() if each.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lazy_adam")  # its rule is what is compared
        for step, batch in enumerate(islice(batches, steps)):
            plain, ours = _Run(model, optimizer), _Run(model, optimizer)
            taken = accelerate(
                ours.model, optimizer=ours.optimizers, always=True, lazy_adam=lazy_adam
            )
            if lazy_adam:
                plain.use_sparse_adam(taken)
            expected = plain.numbers_after_step(loss, batch, devices)
            got = ours.numbers_after_step(loss, batch, devices)
            found.compare(step, expected, got)
            found.num_steps += 1
            del plain, expected  # never keep more than two copies
            if exact is not None:
                tiered = _Run(model, optimizer)
                accelerate(
                    tiered.model, optimizer=tiered.optimizers, budget=budget, lazy_adam=lazy_adam
                )
                at_budget = tiered.numbers_after_step(loss, batch, devices)
                tiered.sync()
                exact.compare(step, got, at_budget)
                exact.num_steps += 1
                del tiered, at_budget
            del ours, got
    if not found.num_steps:
        raise ValueError("batches must have at least one, got none: is the iterator used up?")
    found.tiered = exact
    return found


def _require_arguments(
    model: object, optimizer: object, steps: object, rtol: float | None, atol: float | None
) -> None:
    """Check arguments of `verify`, and that no parameter has an optimizer in backward."""
    if not is_whole(steps, 1):
        raise ConfigError(f"verify: steps must be an integer of at least 1, got {steps!r}")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (is_number(value) and value >= 0):
            raise ConfigError(
                f"verify: {name} must be a finite number of at least 0, or None, got {value!r}"
            )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not (callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer | list | tuple)):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, a list of several, or a function that maps "
            f"parameters() to one, got {shown_optimizer(optimizer)}"
        )
    for name, parameter in model.named_parameters():
        kinds = getattr(parameter, "_optimizer_classes", None)
        if kinds:
            raise ValueError(
                f"parameter {name!r} must have no optimizer in backward, and "
                f"apply_optimizer_in_backward has given it {kinds[0].__name__}, which copies of a "
                "model do not have; verify the model without it, and give that optimizer as "
                "optimizer=: recsys.accelerate translates both to the same formula"
            )


def _tables_in(model: nn.Module) -> set[Tensor]:
    is_table = (nn.EmbeddingBag, nn.Embedding)
    return {module.weight for module in model.modules() if isinstance(module, is_table)}


class _Run:
    """A copy of the model and its optimizers."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = [optimizer]
        if callable(optimizer):
            self.model = copy.deepcopy(model)
            made = optimizer(self.model.parameters())
            self.optimizers = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        else:
            # In one call, or the copied optimizers would update the original's parameters.
            self.model, self.optimizers = copy.deepcopy((model, list(optimizer)))
        self.tables = _tables_in(self.model)

    def use_sparse_adam(self, taken: Accelerated) -> None:
        """Give the tables that were accelerated to SparseAdam where Adam has them."""
        replaced = [self.model.get_submodule(each.names[0]) for each in taken.replacements]
        holders = list(chain.from_iterable(map(holders_of, replaced)))
        tables = {holder.weight for holder in holders}
        for adam in [each for each in self.optimizers if isinstance(each, torch.optim.Adam)]:
            for group in adam.param_groups:
                rows = [each for each in group["params"] if each in tables]
                if not rows:
                    continue
                group["params"] = [each for each in group["params"] if each not in tables]
                settings = float(group["lr"]), group["betas"], group["eps"]
                sparse = torch.optim.SparseAdam(rows, *settings)
                for holder in holders:
                    if any(holder.weight is table for table in rows):
                        holder.__dict__["sparse"] = True
                for table in rows:
                    if table in adam.state:
                        state = adam.state.pop(table)
                        sparse.state[table] = state | {"step": int(state["step"])}
                self.optimizers.append(sparse)

    def sync(self) -> None:
        """Write rows and state in slots back to the tables."""
        for each in self.model.modules():
            if isinstance(each, AbstractTables):
                each.sync()

    def numbers_after_step(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        devices: Sequence[torch.device],
    ) -> _Numbers:
        """Train one step; returns the loss and everything that a step may change."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with torch.random.fork_rng(devices=devices):
            value = loss(self.model, batch)
            if not isinstance(value, Tensor):
                raise TypeError(f"loss must return a tensor, got {type(value).__name__}")
            if value.numel() != 1:
                raise ValueError(f"loss must return a scalar, got shape {tuple(value.shape)}")
            value.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        found = {("loss", ""): value.detach()}
        for name, parameter in self.model.named_parameters():
            kind = "row" if parameter in self.tables else "parameter"
            found[kind, name] = parameter.detach()
            states = [each.state[parameter] for each in self.optimizers if parameter in each.state]
            for key, number in (states[0] if states else {}).items():
                if number is not None:
                    found["state", f"{name} {key}"] = torch.as_tensor(number).detach()
        found |= {("buffer", name): buffer for name, buffer in self.model.named_buffers()}
        return found


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor) if tensor.dim() else 1, -1)
