"""`verify`: a model beside its accelerated self, step by step, on the user's own data.

In float32 two runs that are both right drift apart by rounding, ever faster; so every step begins
from the same state, and what one step changes is compared. In float64 the whole run is. With a
budget there are two runs more, with all rows in fast memory and with those that fit: the whole runs
must be the same to the last bit.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recsys.accelerate import accelerate
from recsys.embeddings.device_tables import AbstractTables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim import Optimizer

    from recsys.accelerate import Accelerated

__all__ = ["Comparison", "Difference", "Verification", "verify"]

_KEPT_PER_TENSOR = 20
_BLOCK = 1 << 22  # numbers compared at once


@dataclass(frozen=True)
class Difference:
    """A number that is not what it should be: of a row, the one that is farthest off.

    Attributes:
        step: From 0.
        what: "loss", "row", "parameter", "buffer" or "state".
        name: The table's or parameter's in the model, with the state's behind it; "" of a loss.
        row: Of a table, its state, or a parameter's first dimension; None of a single number.
        expected: What plain PyTorch has.
        got: What the accelerated model has.
        error_over_tolerance: Above 1; infinite where one of the two is not a number.
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
    """What became of one kind of number.

    Attributes:
        num_values: How many were compared.
        num_different: Of their rows, how many differ.
        largest_error: The largest error found, over its tolerance.
    """

    num_values: int = 0
    num_different: int = 0
    largest_error: float = 0.0


@dataclass(frozen=True)
class Verification:
    """What `verify` found; printed, a table.

    Attributes:
        differences: The worst of every step and tensor.
        comparisons: By kind of number.
        num_steps: Steps compared.
        num_samples: Samples compared; None where the batches do not tell.
        is_whole_run: Whether the two ran on their own, or each step began from the same state.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        notes: Known reasons to differ: see `recsys.accelerate.Replacement`.
        tiers: Where rows were in `tiered`, in words.
        tiered: With a budget: a run at it beside one with all rows in fast memory; else None.
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
        """Whether everything agrees."""
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
            f"{verdict}: {self.num_steps} steps{samples}, {compared}; {tolerance}",
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
            lines += ["", f"beside all rows in fast memory: {self.tiers}", str(self.tiered)]
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
    """Train two copies of a model, one accelerated, and compare all they have.

    In float32 plain PyTorch adds the gradients of equal rows to the row one by one, and rounds each
    time; we add their sum. Of a row that a batch has hundreds of times, a number near 0 may differ
    by more than `atol`. Whether that is all, float64 tells.

    Of a bag with `scale_grad_by_freq` on the CPU, the two differ where torch divides a row's
    gradient by the count of another row; `notes` of what is returned says so.

    The model, its optimizer and torch's random numbers stay as they are. Two copies of the model
    and of the optimizer's state are in memory meanwhile.

    Args:
        model: As it is given to `recsys.accelerate`.
        batches: As many as there are up to `steps`; each is given to `loss` twice.
        loss: From the model and a batch to a scalar.
        optimizer: The model's; several where its parts have one each; or what makes one, given
            `parameters()`.
        steps: At most.
        rtol: Relative tolerance: 1e-5 unless given, and 1e-9 where all rows are float64, of which
            the whole run is compared.
        atol: Absolute tolerance: 1e-7 unless given; 1e-9 there.
        budget: As for `recsys.accelerate`. A run at it is compared with one with all rows in fast
            memory; then the batches are in memory, too.
        lazy_adam: As for `recsys.accelerate`. Plain Adam moves rows that are not looked up, so the
            two differ; `notes` says how.

    Returns:
        What was compared, and what differs.

    Raises:
        BudgetTooSmall: the rows of a batch do not fit.
        NonFiniteGradient: a gradient of rows has nan or inf in it, which plain PyTorch would take.
        ValueError: there are no batches, or `recsys.accelerate` refuses model or optimizer, or
            `apply_optimizer_in_backward` has marked a parameter: a copy has no marks.
    """
    _require_no_marks(model)
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    samples: list[int | None] = []
    batches = islice(batches, steps)
    if budget is not None:
        batches = list(batches)
    with torch.random.fork_rng(devices=list(devices)):
        plain, ours = _Run(model, optimizer), _Run(model, optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lazy_adam")  # it is among the notes
            notes = ours.accelerate(lazy_adam=lazy_adam).notes
        is_whole_run = all(table.dtype == torch.float64 for table in ours.tables)
        judge = _Judge(
            rtol=rtol if rtol is not None else 1e-9 if is_whole_run else 1e-5,
            atol=atol if atol is not None else 1e-9 if is_whole_run else 1e-7,
        )
        for step, batch in enumerate(batches):
            with torch.random.fork_rng(devices=list(devices)):
                expected = plain.step(loss, batch)
            got = ours.step(loss, batch)
            judge.compare(step, "loss", "", expected, got)
            found = ours.numbers()
            for (what, name), value in plain.numbers().items():
                judge.compare(step, what, name, value, found.get((what, name)))
            if not is_whole_run:
                ours.continue_from(plain)
            samples.append(_num_samples(batch))
    if not samples:
        raise ValueError("batches must have at least one, got none: is the iterator used up?")
    known = [each for each in samples if each is not None]
    num_samples = sum(known) if len(known) == len(samples) else None
    verdict = Verification(
        judge.differences,
        judge.comparisons,
        len(samples),
        num_samples,
        is_whole_run,
        judge.rtol,
        judge.atol,
        notes,
    )
    if budget is None:
        return verdict
    del plain, ours, found  # there are never more than two copies
    with torch.random.fork_rng(devices=list(devices)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lazy_adam")
        resident, tiered = _Run(model, optimizer), _Run(model, optimizer)
        resident.accelerate(lazy_adam=lazy_adam)
        tiers = tiered.accelerate(lazy_adam=lazy_adam, budget=budget).tiers
        judge = _compare_to_the_last_bit(resident, tiered, batches, loss, list(devices))
    whole = Verification(
        judge.differences, judge.comparisons, len(samples), num_samples, True, 0.0, 0.0
    )
    return replace(verdict, tiers=tiers, tiered=whole)


def _compare_to_the_last_bit(
    expected: _Run,
    got: _Run,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    devices: list[torch.device],
) -> _Judge:
    """Train both on their own; losses of every step, and all else at the end, must be the same."""
    judge = _Judge(rtol=0.0, atol=0.0)
    for step, batch in enumerate(batches):
        with torch.random.fork_rng(devices=devices):
            value = expected.step(loss, batch)
        judge.compare(step, "loss", "", value, got.step(loss, batch))
    got.sync()
    found = got.numbers()
    for (what, name), value in expected.numbers().items():
        judge.compare(step, what, name, value, found.get((what, name)))
    return judge


def _require_no_marks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kinds = getattr(parameter, "_optimizer_classes", None)
        if kinds:
            raise ValueError(
                f"parameter {name!r} must have no optimizer of its own, and "
                f"apply_optimizer_in_backward has given it {kinds[0].__name__}, which copies of a "
                "model do not have; verify the model without it, and give that optimizer as "
                "optimizer=: recsys.accelerate reads the same formula from both"
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
            # In one go, or the copied optimizers would move the original's parameters.
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
        """Bring tables and state up to date, where rows are in slots."""
        for each in self.model.modules():
            if isinstance(each, AbstractTables):
                each.sync()

    def step(self, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        value = loss(self.model, batch)
        if value.numel() != 1:
            raise ValueError(f"loss must return a scalar, got shape {tuple(value.shape)}")
        value.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        return value.detach()

    def numbers(self) -> dict[tuple[str, str], Tensor]:
        """All that a step may change, by kind and name."""
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
        """Take over all that a step may change."""
        for mine, value in zip(
            (*self.model.parameters(), *self.model.buffers()),
            (*other.model.parameters(), *other.model.buffers()),
            strict=True,
        ):
            _take(mine, value)
        for mine, value in zip(self.model.parameters(), other.model.parameters(), strict=True):
            state = self._state_of(mine)
            for key, number in other._state_of(value).items():
                if isinstance(number, Tensor) and isinstance(state.get(key), Tensor):
                    _take(state[key], number)
                else:
                    state[key] = copy.deepcopy(number)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                state: dict[str, Any] = optimizer.state[parameter]
                return state
        return {}


@dataclass
class _Judge:
    rtol: float
    atol: float
    differences: list[Difference] = field(default_factory=list)
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    def compare(
        self, step: int, what: str, name: str, expected: Tensor, got: Tensor | None
    ) -> None:
        """Compare row by row; a tensor that is not there is one of what is not a number."""
        comparison = self.comparisons.setdefault(what, Comparison())
        comparison.num_values += expected.numel()
        if got is None or got.shape != expected.shape:
            got = torch.full_like(expected, float("nan"), dtype=torch.float64)
        if torch.equal(expected, got):
            return
        all_expected, all_got = _rows(expected), _rows(got)
        found = []
        size = max(1, _BLOCK // max(1, all_expected.shape[1]))
        for begin in range(0, len(all_expected), size):
            theirs, mine = (each[begin : begin + size].double() for each in (all_expected, all_got))
            errors, columns = self._errors(theirs, mine).max(1)
            comparison.largest_error = max(comparison.largest_error, float(errors.max()))
            for row in (errors > 1).nonzero()[:, 0].tolist():
                column = columns[row]
                found.append(
                    Difference(
                        step,
                        what,
                        name,
                        begin + row if expected.dim() else None,
                        float(theirs[row, column]),
                        float(mine[row, column]),
                        float(errors[row]),
                    )
                )
        comparison.num_different += len(found)
        found.sort(key=lambda each: -each.error_over_tolerance)
        self.differences += found[:_KEPT_PER_TENSOR]

    def _errors(self, expected: Tensor, got: Tensor) -> Tensor:
        """Over the tolerance; infinite where one of the two alone is not finite."""
        errors = (got - expected).abs() / (self.atol + self.rtol * expected.abs())
        errors = errors.nan_to_num(nan=float("inf"))
        is_same = (got == expected) | (got.isnan() & expected.isnan())
        return errors.masked_fill(is_same, 0)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor) if tensor.dim() else 1, -1)


def _take(mine: Tensor, value: Tensor) -> None:
    # Most rows are the same, and reading is cheaper than writing.
    if not torch.equal(mine, value):
        mine.copy_(value)


def _num_samples(batch: Any) -> int | None:
    """Of a batch that is a tensor, has labels, or consists of such."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    labels = getattr(batch, "labels", None)
    if isinstance(labels, Tensor):
        return len(labels)
    parts = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(parts, list | tuple | type({}.values())):
        return None
    return next((found for each in parts if (found := _num_samples(each)) is not None), None)
