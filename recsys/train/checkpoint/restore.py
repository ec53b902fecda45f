"""What a checkpoint holds, and how it is restored.

    tables   tables that recsys updates, and the optimizer's state of their rows; `SavedTables`
    state    the model's state dict without the tables, its optimizers, random states, and the
             state of the caller

Nothing is changed before all files have the right length and checksum, and the model is found to be
that of the checkpoint. One block is read at a time, and its rows go straight to their tables.

One process has all rows of the tables, and one of several a `Share` of them: it restores the rows
that it has. Everything else comes from the first process that saved. Random states come from the
same process, if as many processes have saved.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.files import read_together
from recsys._support.safetensors_dtypes import DTYPE_NAMES, DTYPES
from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.embeddings.saved_tables import SavedTable, SavedTables
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.errors import CheckpointError, RecsysError
from recsys.train.checkpoint.format import (
    Array,
    Rows,
    Table,
    read_blocks,
    read_checkpoint,
    read_state,
    whole_tables,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


__all__ = [
    "EVERYTHING",
    "Contents",
    "Share",
    "errors_of_state",
    "listed",
    "load_checkpoint",
    "restore",
]


def load_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    pipeline: Any = None,
    loader: Any = None,
    schedulers: Any = (),
    number: int | None = None,
) -> Any:
    """Restore what `save_checkpoint` saved, and the random states of Python, numpy and torch.

    Nothing is changed before every file is found to be whole. Tables are read in blocks. Budget,
    plan, tier and device may differ from those of the run that was saved. What was saved of a
    pipeline, a loader or schedulers and is not given here is not restored, with a warning.

    The `grad` of every parameter becomes None, because it belongs to the weights before. Torch's
    `load_state_dict` keeps it. Gradients of rows that no update has used are dropped, too.

    Args:
        folder: The folder of checkpoints.
        model: A model of the same shape.
        optimizers: Its optimizers, in the same order.
        pipeline: As for `save_checkpoint`; its state is ignored under another schedule.
        loader: As for `save_checkpoint`.
        schedulers: As for `save_checkpoint`.
        number: Number of the checkpoint; None for the newest complete one.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: there is none, it is damaged (then the message names another one), or it is
            of another model.
        ConfigError: the state of `pipeline` or `loader` is that of another one.
        WeightsError: the optimizer of the rows is another one.
    """
    folder = Path(folder)
    if (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder}: its checkpoints are in {folder / 'checkpoints'}")
    found = restore(folder, Contents(model, listed(optimizers)), number)
    model.zero_grad()  # those of tables that recsys updates are dropped already
    given = {"pipeline": pipeline, "loader": loader, "schedulers": schedulers}
    for name, value in given.items():
        targets = listed(value)
        if targets and len(targets) != len(found[name]):
            raise CheckpointError(
                f"{folder}: the checkpoint was saved with {len(found[name])} for {name}=, and "
                f"{len(targets)} were given; give as many"
            )
        with errors_of_state():
            for target, saved in zip(targets, found[name], strict=False):
                target.load_state_dict(saved)
    left_out = [
        f"{name}=" for name, value in given.items() if any(found[name]) and not listed(value)
    ]
    if left_out:
        warnings.warn(
            f"{folder}: not all of the checkpoint is restored; give {', '.join(left_out)} to "
            "load_checkpoint, or go on without",
            stacklevel=2,
        )
    return found["state"]


def restore(
    folder: Path,
    contents: Contents,
    number: int | None = None,
    require: Callable[[Any], object] = lambda state: None,
) -> Any:
    """Restore a model, its optimizers and the random states.

    Args:
        folder: The folder of checkpoints.
        contents: The model, built as for the run that was saved; budget, tier and device may
            differ.
        number: Number of the checkpoint; None for the newest complete one.
        require: Called with the result before anything is restored; may refuse it.

    Returns:
        The state that was given to `Checkpoints.save`, with what it adds.

    Raises:
        CheckpointError, WeightsError: as for `load_checkpoint`.
    """
    with read_together(folder), errors_of_state():
        manifest, pieces = read_checkpoint(folder, number)
        tables, deltas, share = whole_tables(manifest, pieces), manifest.deltas, contents.share
        of_random = saved = read_state(folder, deltas[0])
        require(saved["state"])
        if share.num_ranks == len(deltas):
            of_random = read_state(folder, deltas[share.rank])
        optimizers = contents.require_same(
            saved, tables, f"checkpoint {manifest.number}", is_shared=len(deltas) > 1
        )
        arrays = [
            (table, (name, (table.num_rows, *array.row_shape), DTYPES[array.dtype]))
            for table in contents.tables.tables
            for name, array in tables[table.key].arrays.items()
            if name != "weight"
        ]
        for table, array in arrays:
            table.require_state(*array)
        contents.tables.begin_restoring()
        made = {id(table.make_array(*array)) for table, array in arrays}
        for piece in pieces:
            for rows in read_blocks(folder, piece):
                contents.write(rows, tables[rows.key])
        contents.restore(saved, optimizers, made)
        _set_random_states(of_random["random"])
        return saved["state"]


class Share(NamedTuple):
    """What one process saves and restores: everything, or its share of several processes' rows.

    Attributes:
        rank: Its number.
        num_ranks: How many there are.
        layout: For each table, by its key in the model's `state_dict`: the first row of each
            process, and the row after its last one. Both are 0 for a process without rows of the
            table. A table that is not in it is this process's.
        gather: Returns what every process gave, by rank. A collective.
    """

    rank: int = 0
    num_ranks: int = 1
    layout: Mapping[str, list[tuple[int, int]]] = MappingProxyType({})
    gather: Callable[[Any], list[Any]] = lambda value: [value]


EVERYTHING = Share()


class Contents:
    """Reads and restores a model, its optimizers, the random states, and a caller's state.

    Args:
        model: The model.
        optimizers: Its optimizers, always in the same order. Those that recsys modules have made
            for their rows need not be among them.
        share: The rows of the model.

    Attributes:
        tables: The tables that recsys updates.
        share: As given.

    Raises:
        CheckpointError: an optimizer that the caller made updates rows, and is not given.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], share: Share = EVERYTHING
    ) -> None:
        self.tables = SavedTables(model)
        self._model, self._optimizers = model, list(optimizers)
        self.share = share
        for table in self.tables.tables:
            if not any(table.optimizer is known for known in self._optimizers):
                kind = type(table.optimizer)
                if not issubclass(kind, FusedOptimizer):
                    raise CheckpointError(
                        f"table {table.key!r} is updated in the step of a {kind.__name__} that is "
                        "not among optimizers=; give it, too"
                    )
                self._optimizers.append(table.optimizer)

    def _rows_of(self, table: SavedTable) -> tuple[int, int]:
        """The first row of a table that this process has, and the row after the last one."""
        return self.share.layout.get(table.key, [(0, table.num_rows)])[self.share.rank]

    def describe_tables(self) -> dict[str, Table]:
        """The arrays that each table has now; a table that was never updated has no state."""
        found = {}
        with DisableTorchFunctionSubclass():  # internal read of tables
            for table in self.tables.tables:
                arrays = {"weight": table.weight, **_state_arrays(table)}
                described = {
                    name: Array(DTYPE_NAMES[array.dtype], tuple(array.shape[1:]))
                    for name, array in arrays.items()
                }
                found[table.key] = Table(*self._rows_of(table), described)
        return found

    def state(self, of_caller: Any) -> dict[str, Any]:
        """Everything but tables, as it is now; tensors are not copied.

        Args:
            of_caller: The caller's state.

        Raises:
            CheckpointError: a value cannot be saved.
        """
        arrays = {
            id(array) for table in self.tables.tables for array in _state_arrays(table).values()
        }
        optimizers = [
            (_describe_optimizer(optimizer), optimizer.state_dict())
            for optimizer in self._optimizers
        ]
        return {
            "model": self._model_state(),
            "optimizers": _plain(optimizers, "optimizers", arrays),
            "random": _random_states(),
            "state": _plain(of_caller, "state"),
        }

    def require_same(
        self, saved: Mapping[str, Any], tables: Mapping[str, Table], at: str, *, is_shared: bool
    ) -> list[tuple[Optimizer, Any]]:
        """Check that a checkpoint is of this model and these optimizers, before it is restored.

        Args:
            saved: Its state.
            tables: Its tables, with the number of all rows as their end.
            at: The checkpoint's name.
            is_shared: Whether several processes saved it.

        Returns:
            Each optimizer with its state. Where several processes save or restore, their rows have
            optimizers of their own, which are left out: their settings are kept.

        Raises:
            CheckpointError: it is of others.
        """
        own = {key: _describe(key, value) for key, value in self._model_state().items()}
        found = {key: _describe(key, value) for key, value in saved["model"].items()}
        for key, table in self.describe_tables().items():
            num_rows = max([table.end, *(end for _, end in self.share.layout.get(key, ()))])
            own[key] = _describe_table(table._replace(end=num_rows))
        found |= {
            key: _describe_table(table)
            for key, table in tables.items()
            if self.share.num_ranks == 1 or key in own
        }
        described = [(_describe_optimizer(optimizer), optimizer) for optimizer in self._optimizers]
        states = saved["optimizers"]
        if is_shared or self.share.num_ranks > 1:
            of_rows = FusedOptimizer.__name__
            described = [entry for entry in described if not entry[0].startswith(of_rows)]
            states = [entry for entry in states if not entry[0].startswith(of_rows)]
        own |= {f"optimizer {index}": kind for index, (kind, _) in enumerate(described)}
        found |= {f"optimizer {index}": kind for index, (kind, _) in enumerate(states)}
        for key in sorted(own | found):
            if own.get(key) != found.get(key):
                raise CheckpointError(
                    f"{at} is of another model: {key} is {found.get(key, 'absent')} there and "
                    f"{own.get(key, 'absent')} in this model; build and accelerate the model as "
                    "for the run that was saved, and give the same optimizers, with their "
                    "parameters in the same order"
                )
        return [
            (optimizer, state) for (_, optimizer), (_, state) in zip(described, states, strict=True)
        ]

    def write(self, rows: Rows, saved: Table) -> None:
        """Write those rows of a block that this process has, of the arrays in `saved`."""
        for table in (candidate for candidate in self.tables.tables if candidate.key == rows.key):
            begin, end = self._rows_of(table)
            numbers, num_rows = rows.rows - begin, end - begin
            for name in rows.arrays.keys() & saved.arrays.keys():
                values = rows.arrays[name]
                if len(numbers) == 1:
                    first = int(numbers[0])
                    here = slice(max(-first, 0), min(num_rows - first, len(values)))
                    if here.start < here.stop:
                        table.write(name, first + here.start, values[here])
                else:
                    is_here = (numbers >= 0) & (numbers < num_rows)
                    table.scatter(name, numbers[is_here].numpy(), values[is_here])

    def restore(
        self,
        saved: Mapping[str, Any],
        optimizers: Sequence[tuple[Optimizer, Any]],
        arrays: Container[int],
    ) -> None:
        """Restore the model and its optimizers, after their tables.

        Args:
            saved: The state of a checkpoint.
            optimizers: As of `require_same`.
            arrays: The `id` of each array that was restored with the tables.
        """
        for optimizer, state in optimizers:
            for key, values in optimizer.state_dict()["state"].items():
                known = {name: value for name, value in values.items() if id(value) in arrays}
                if known:
                    state["state"][key] = state["state"].get(key, {}) | known
            optimizer.load_state_dict(state)
        self._model.load_state_dict(saved["model"], strict=False)

    def _model_state(self) -> dict[str, Any]:
        """The model's state dict without the tables; rows in slots stay where they are.

        Raises:
            CheckpointError: a value cannot be saved.
        """
        with DisableTorchFunctionSubclass():  # internal read of tables
            state = self._model.state_dict()
        tables = {id(table.weight) for table in self.tables.tables}
        parameters = self._model.named_parameters(remove_duplicate=False)
        keys = {key for key, parameter in parameters if id(parameter) in tables}
        return {
            key: _plain(value, f"model/{key}") for key, value in state.items() if key not in keys
        }


def listed(value: Any) -> list[Any]:
    """No value, one or several, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


@contextmanager
def errors_of_state(place: str = "the checkpoint") -> Iterator[None]:
    """Name the error of a state that an object refuses.

    Args:
        place: Where the state is from.

    Raises:
        CheckpointError: instead of an error of another class.
    """
    try:
        yield
    except RecsysError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        IndexError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"the state of {place} does not fit these objects "
            f"({type(error).__name__}: {str(error)[:200]}); build them as for the run that was "
            "saved"
        ) from error


def _plain(value: Any, name: str, left_out: Container[int] = ()) -> Any:
    """A state of values that `torch.load` reads without running code; tensors are not copied.

    Args:
        value: The state.
        name: Its name, for errors.
        left_out: The `id` of values of dictionaries that are left out.

    Raises:
        CheckpointError: a value is of another type.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
        is_view = value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes
        return value.clone() if is_view else value  # torch.save writes all of its memory
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        kept = {
            _plain(key, name): _plain(item, f"{name}/{key}", left_out)
            for key, item in value.items()
            if id(item) not in left_out
        }
        # Such as the milestones of `MultiStepLR`.
        return Counter(kept) if isinstance(value, Counter) else kept
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{name}/{index}", left_out) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    raise CheckpointError(
        f"{name}: a checkpoint holds numbers, texts, tensors, and lists and dictionaries of them, "
        f"got {type(value).__name__}; convert it"
    )


def _state_arrays(table: SavedTable) -> dict[str, Tensor]:
    """The arrays of a table's optimizer state, with a row for each of its rows."""
    state = table.state().items()
    return {name: value for name, value in state if isinstance(value, torch.Tensor) and value.dim()}


def _describe(key: str, value: Any) -> str:
    if key.endswith("_extra_state") or not isinstance(value, torch.Tensor):
        return "a state of a module's own"
    return f"{value.dtype} of shape {tuple(value.shape)}"


def _describe_table(table: Table) -> str:
    weight = table.arrays["weight"]
    return f"a table that recsys updates, {weight.dtype} {(table.end, *weight.row_shape)}"


def _describe_optimizer(optimizer: Optimizer) -> str:
    """Its kind and the shapes of its parameters.

    An optimizer accepts a state of another shape, and its kernel may then write out of bounds.
    """
    kind = type(optimizer).__name__
    shapes = [
        " ".join("x".join(map(str, parameter.shape)) or "1" for parameter in group["params"])
        for group in optimizer.param_groups
    ]
    return f"{kind} with {len(shapes)} param groups ({'; '.join(shapes)})"


def _random_states() -> dict[str, Any]:
    """The states of the random generators that a training loop may use."""
    legacy: Any = np.random.get_state()  # noqa: NPY002
    kind, key, *rest = legacy
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, key.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    """Set states as `_random_states` returns them."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        with suppress(IndexError):  # saved on a machine with more devices
            torch.cuda.set_rng_state_all(states["cuda"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
