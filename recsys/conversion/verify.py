"""`verify`: compares a model with its accelerated copy, step by step, on the user's own data.

In float32 two correct runs drift apart by rounding, faster and faster. So every step begins from
the same state, and `verify` compares what this one step changes. In float64 it compares whole runs.
With a budget it makes two more runs, one with all rows in fast memory and one at the budget. Those
must be equal to the last bit.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recsys._support.arguments import is_number, is_whole
from recsys._support.counted import counted
from recsys.conversion.accelerate import accelerate
from recsys.embeddings.lookup.abstract_tables import AbstractTables
from recsys.embeddings.optimizer import shown_optimizer
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim import Optimizer

    from recsys.conversion.accelerate import Accelerated

__all__ = ["Comparison", "Difference", "Verification", "verify"]

_KEPT_PER_TENSOR = 20
_BLOCK = 1 << 22  # numbers compared at once


@dataclass(frozen=True)
class Difference:
    """A wrong number; of each row, only the one with the largest error is listed.

    Attributes:
        step: Counted from 0.
        what: "loss", "row", "parameter", "buffer" or "state".
        name: Name of the table or parameter in the model, followed by the name of the state; "" for
            a loss.
        row: Index in the first dimension of the table, state or parameter; None for a scalar.
        expected: The number in plain PyTorch.
        got: The number in the accelerated model.
        error_over_tolerance: Above 1; infinite if one of the two is not a number.
    """

    step: int
    what: str
    name: str
    row: int | None
    expected: float
    got: float
    error_over_tolerance: float


@dataclass
class Comparison:
    """Result for one kind of number.

    Attributes:
        num_values: Numbers that were compared.
        num_different: Rows with a number that differs.
        largest_error: The largest error divided by its tolerance.
    """

    num_values: int = 0
    num_different: int = 0
    largest_error: float = 0.0


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; prints as a table.

    Attributes:
        differences: The worst ones of every step and tensor.
        comparisons: By kind of number.
        num_steps: Steps compared.
        num_samples: Samples compared; None if it cannot be read from the batches.
        is_whole_run: True if both runs went on independently; False if each step began from the
            same state.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        notes: Known reasons to differ: see `recsys.conversion.accelerate.Replacement`.
        tiers: A sentence that says where the rows of `tiered` were.
        tiered: The run at the budget compared with all rows in fast memory; None without a budget.
    """

    differences: list[Difference]
    comparisons: dict[str, Comparison]
    num_steps: int
    num_samples: int | None
    is_whole_run: bool
    rtol: float
    atol: float
    notes: Sequence[str] = ()
    tiers: str = ""
    tiered: Verification | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no difference."""
        return not self.differences and (self.tiered is None or self.tiered.ok)

    def __str__(self) -> str:
        import pandas as pd  # takes as long as a step or two

        samples = "" if self.num_samples is None else f", {self.num_samples:,} samples"
        compared = "as one run" if self.is_whole_run else "each from the same state"
        verdict = "DIFFERS" if self.differences else "agrees"
        tolerance = f"rtol {self.rtol:g}, atol {self.atol:g}"
        if not self.rtol and not self.atol:
            tolerance = "to the last bit"
        lines = [
            f"{verdict}: {counted(self.num_steps, 'step')}{samples}, {compared}; {tolerance}",
            pd.DataFrame(
                {
                    "compared": [each.num_values for each in self.comparisons.values()],
                    "different": [each.num_different for each in self.comparisons.values()],
                    "largest error / tolerance": [
                        each.largest_error for each in self.comparisons.values()
                    ],
                },
                index=list(self.comparisons),
            ).to_string(float_format="{:.3g}".format),
            *self.notes,
        ]
        if self.differences:
            worst = sorted(self.differences, key=lambda each: -each.error_over_tolerance)
            table = pd.DataFrame([vars(each) for each in worst[:_KEPT_PER_TENSOR]])
            lines += ["the worst:", table.astype({"row": "Int64"}).to_string(index=False)]
        if self.tiered is not None:
            lines += ["", f"compared with all rows in fast memory: {self.tiers}", str(self.tiered)]
        return "\n".join(lines)


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
    """Train two copies of a model, one of them accelerated, and compare everything.

    In float32 plain PyTorch adds the gradients of equal rows to the row one by one and rounds each
    time; recsys adds their sum. If a batch looks a row up hundreds of times, a number near 0 may
    therefore differ by more than `atol`. A run in float64 shows whether that is the only cause.

    A gradient that is zero but for rounding, such as that of a bias before a `BatchNorm`, makes a
    visible step in Adagrad and Adam, which divide it by its own size. In float64, where whole runs
    are compared, such a parameter may differ by some 1e-8.

    With `scale_grad_by_freq` on the CPU, the two differ where torch divides a row's gradient by the
    count of another row. `notes` of the result says so.

    The model, its optimizer and torch's random state do not change. Meanwhile two copies of the
    model and of the optimizer's state are in memory.

    Args:
        model: As for `recsys.accelerate`.
        batches: `verify` takes up to `steps` of them, and gives each to `loss` twice.
        loss: Maps the model and a batch to a scalar.
        optimizer: The model's optimizer, or several, or a function that maps `parameters()` to one.
        steps: The most steps to compare.
        rtol: Relative tolerance. Default: 1e-9 if all rows are float64 (then whole runs are
            compared), else 1e-5.
        atol: Absolute tolerance. Default: 1e-9 if all rows are float64, else 1e-7.
        budget: As for `recsys.accelerate`. If it is given, a run at this budget is compared with
            one that has all rows in fast memory, and all batches are kept in memory.
        lazy_adam: As for `recsys.accelerate`. Plain Adam updates rows that are not looked up, so
            the two differ; `notes` says how.

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
    devices = list({each.device for each in model.parameters() if each.device.type == "cuda"})
    batches = islice(batches, steps)
    if budget is not None:
        batches = list(batches)
    with torch.random.fork_rng(devices=devices):
        plain, ours = _Run(model, optimizer), _Run(model, optimizer)
        verdict = _compare_each_step(
            plain, ours, batches, loss, devices, rtol, atol, lazy_adam=lazy_adam
        )
    if budget is None:
        return verdict
    del plain, ours  # never keep more than two copies
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lazy_adam")
        resident, tiered = _Run(model, optimizer), _Run(model, optimizer)
        resident.accelerate(lazy_adam=lazy_adam)
        tiers = tiered.accelerate(lazy_adam=lazy_adam, budget=budget).tiers
        exact = _compare_to_the_last_bit(resident, tiered, batches, loss, devices)
    whole = Verification(
        exact.differences, exact.comparisons, verdict.num_steps, verdict.num_samples, True, 0.0, 0.0
    )
    return replace(verdict, tiers=tiers, tiered=whole)


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
    _refuse_optimizers_in_backward(model)


def _compare_each_step(
    plain: _Run,
    ours: _Run,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    devices: list[torch.device],
    rtol: float | None,
    atol: float | None,
    *,
    lazy_adam: bool,
) -> Verification:
    """Accelerate one of two runs, and compare what each step changes; whole runs in float64."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lazy_adam")  # the notes say it
        notes = ours.accelerate(lazy_adam=lazy_adam).notes
    is_whole_run = all(table.dtype == torch.float64 for table in ours.tables)
    comparer = _Comparer(
        rtol=rtol if rtol is not None else 1e-9 if is_whole_run else 1e-5,
        atol=atol if atol is not None else 1e-9 if is_whole_run else 1e-7,
    )
    samples: list[int | None] = []
    for step, batch in enumerate(batches):
        with torch.random.fork_rng(devices=devices):
            expected = plain.step(loss, batch)
        got = ours.step(loss, batch)
        comparer.compare(step, "loss", "", expected, got)
        comparer.compare_all(step, plain, ours)
        if not is_whole_run:
            ours.continue_from(plain)
        samples.append(_num_samples(batch))
    if not samples:
        raise ValueError("batches must have at least one, got none: is the iterator used up?")
    known = [each for each in samples if each is not None]
    return Verification(
        comparer.differences,
        comparer.comparisons,
        len(samples),
        sum(known) if len(known) == len(samples) else None,
        is_whole_run,
        comparer.rtol,
        comparer.atol,
        notes,
    )


def _compare_to_the_last_bit(
    expected: _Run,
    got: _Run,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    devices: list[torch.device],
) -> _Comparer:
    """Train both independently; compare the loss of every step, and everything else at the end."""
    comparer = _Comparer(rtol=0.0, atol=0.0)
    for step, batch in enumerate(batches):
        with torch.random.fork_rng(devices=devices):
            value = expected.step(loss, batch)
        comparer.compare(step, "loss", "", value, got.step(loss, batch))
    got.sync()
    comparer.compare_all(step, expected, got)
    return comparer


def _refuse_optimizers_in_backward(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kinds = getattr(parameter, "_optimizer_classes", None)
        if kinds:
            raise ValueError(
                f"parameter {name!r} must have no optimizer in backward, and "
                f"apply_optimizer_in_backward has given it {kinds[0].__name__}, which copies of a "
                "model do not have; verify the model without it, and give that optimizer as "
                "optimizer=: recsys.accelerate translates both to the same formula"
            )


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
        self.tables = [
            each.weight
            for each in self.model.modules()
            if isinstance(each, nn.EmbeddingBag | nn.Embedding)
        ]

    def accelerate(self, *, lazy_adam: bool, budget: int | str | None = None) -> Accelerated:
        optimizers = self.optimizers
        return accelerate(self.model, optimizer=optimizers, lazy_adam=lazy_adam, budget=budget)

    def sync(self) -> None:
        """Write rows and state in slots back to the tables."""
        for each in self.model.modules():
            if isinstance(each, AbstractTables):
                each.sync()

    def step(self, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        value = loss(self.model, batch)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss must return a tensor, got {type(value).__name__}")
        if value.numel() != 1:
            raise ValueError(f"loss must return a scalar, got shape {tuple(value.shape)}")
        value.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        return value.detach()

    def numbers(self) -> dict[tuple[str, str], Tensor]:
        """Everything that a step may change, by kind and name."""
        tables = {id(table) for table in self.tables}
        found: dict[tuple[str, str], Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found["row" if id(parameter) in tables else "parameter", name] = parameter.detach()
            for key, value in self._state_of(parameter).items():
                if value is not None:
                    found["state", f"{name} {key}"] = torch.as_tensor(value).detach()
        found |= {("buffer", name): buffer for name, buffer in self.model.named_buffers()}
        return found

    @torch.no_grad()
    def continue_from(self, other: _Run) -> None:
        """Copy everything that a step may change from the other run."""
        for mine, value in zip(
            (*self.model.parameters(), *self.model.buffers()),
            (*other.model.parameters(), *other.model.buffers()),
            strict=True,
        ):
            _copy_if_different(mine, value)
        for mine, value in zip(self.model.parameters(), other.model.parameters(), strict=True):
            state = self._state_of(mine)
            for key, number in other._state_of(value).items():
                if isinstance(number, Tensor) and isinstance(state.get(key), Tensor):
                    _copy_if_different(state[key], number)
                else:
                    state[key] = copy.deepcopy(number)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                state: dict[str, Any] = optimizer.state[parameter]
                return state
        return {}


@dataclass
class _Comparer:
    rtol: float
    atol: float
    differences: list[Difference] = field(default_factory=list)
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    def compare_all(self, step: int, expected: _Run, got: _Run) -> None:
        """Compare everything that a step may change."""
        found = got.numbers()
        for (what, name), value in expected.numbers().items():
            self.compare(step, what, name, value, found.get((what, name)))

    def compare(
        self, step: int, what: str, name: str, expected: Tensor, got: Tensor | None
    ) -> None:
        """Compare row by row; a missing tensor counts as one full of nan."""
        comparison = self.comparisons.setdefault(what, Comparison())
        comparison.num_values += expected.numel()
        if got is None or got.shape != expected.shape:
            got = torch.full_like(expected, float("nan"), dtype=torch.float64)
        got = got.to(expected.device)  # with a budget, tables are on the host
        if torch.equal(expected, got):
            return
        all_expected, all_got = _rows(expected), _rows(got)
        found = []
        size = max(1, _BLOCK // max(1, all_expected.shape[1]))
        for begin in range(0, len(all_expected), size):
            block = slice(begin, begin + size)
            wanted, actual = all_expected[block].double(), all_got[block].double()
            errors, columns = self._errors(wanted, actual).max(1)
            comparison.largest_error = max(comparison.largest_error, float(errors.max()))
            for row in (errors > 1).nonzero()[:, 0].tolist():
                column = columns[row]
                found.append(
                    Difference(
                        step,
                        what,
                        name,
                        begin + row if expected.dim() else None,
                        float(wanted[row, column]),
                        float(actual[row, column]),
                        float(errors[row]),
                    )
                )
        comparison.num_different += len(found)
        found.sort(key=lambda each: -each.error_over_tolerance)
        self.differences += found[:_KEPT_PER_TENSOR]

    def _errors(self, expected: Tensor, got: Tensor) -> Tensor:
        """Errors divided by the tolerance; infinite where only one of the two is finite."""
        errors = (got - expected).abs() / (self.atol + self.rtol * expected.abs())
        errors = errors.nan_to_num(nan=float("inf"))
        is_same = (got == expected) | (got.isnan() & expected.isnan())
        return errors.masked_fill(is_same, 0)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor) if tensor.dim() else 1, -1)


def _copy_if_different(target: Tensor, value: Tensor) -> None:
    # Most tensors are equal, and comparing is cheaper than writing.
    if not torch.equal(target, value):
        target.copy_(value)


def _num_samples(batch: Any) -> int | None:
    """Samples of a batch that is a tensor, has labels, or contains such a value; else None.

    A tensor of three or more dimensions may have its samples in any of them.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() in (1, 2) else None
    labels = getattr(batch, "labels", None)
    if isinstance(labels, Tensor):
        return len(labels)
    parts = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(parts, list | tuple | type({}.values())):
        return None
    return next((found for each in parts if (found := _num_samples(each)) is not None), None)
