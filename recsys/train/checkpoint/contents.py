"""What a checkpoint holds: the tables of a model, and everything else as one state.

    tables   tables that recsys updates, and the optimizer's state of their rows; `SavedTables`
    state    the model's state dict without the tables, its optimizers, random states, and the
             state of the caller

One process has all rows of the tables, and one of several a `Share` of them.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from recsys._support.safetensors_dtypes import DTYPE_NAMES
from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.errors import CheckpointError, RecsysError
from recsys.train.checkpoint.format import Array, Table
from recsys.train.saved_state import is_expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.embeddings.saved_tables import SavedTable

__all__ = ["Contents", "Layout", "Share", "errors_of_state", "listed"]

# For each table, by its key in the model's `state_dict`: the first row of each process, and the row
# after its last one. Both are 0 for a process without rows of the table.
Layout = dict[str, list[tuple[int, int]]]
_OF_ROWS = FusedOptimizer.__name__
_MOST_INT = 2**2000  # `torch.load` reads no larger one


class Share(NamedTuple):
    """What one of several processes saves and restores.

    Attributes:
        rank: Its number.
        num_ranks: How many there are.
        layout: Which rows each has.
        gather: Returns what every process gave, by rank. A collective.
        numbers_after: Checkpoints get higher numbers than this one, the same for all.
    """

    rank: int
    num_ranks: int
    layout: Layout
    gather: Callable[[Any], list[Any]]
    numbers_after: int


class Contents:
    """Reads and restores a model, its optimizers, the random states, and a caller's state.

    Args:
        model: The model.
        optimizers: Its optimizers, always in the same order. Those that recsys modules have made
            for their rows need not be among them.
        share: The rows of the model; None if it has all.

    Attributes:
        tables: The tables that recsys updates.
        share: As given.

    Raises:
        CheckpointError: an optimizer that the caller made updates rows, and is not given.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], share: Share | None = None
    ) -> None:
        self.tables = SavedTables(model)
        self._model, self._optimizers = model, list(optimizers)
        self.share = share
        for table in self.tables.tables:
            if any(table.optimizer is each for each in self._optimizers):
                continue
            if not isinstance(table.optimizer, FusedOptimizer):
                raise CheckpointError(
                    f"table {table.key!r} is updated in the step of a "
                    f"{type(table.optimizer).__name__} that is not among optimizers=; give it, too"
                )
            self._optimizers.append(table.optimizer)

    def rows_of(self, table: SavedTable) -> tuple[int, int]:
        """The first row of a table that this process has, and the row after the last one."""
        if self.share is None:
            return 0, table.num_rows
        return self.share.layout[table.key][self.share.rank]

    def describe_tables(self) -> dict[str, Table]:
        """The arrays that each table has now; a table that was never updated has no state."""
        found = {}
        with DisableTorchFunctionSubclass():  # internal read of tables, in the writing thread too
            for table in self.tables.tables:
                arrays = {"weight": table.weight, **_state_arrays(table)}
                described = {
                    name: Array(DTYPE_NAMES[each.dtype], tuple(each.shape[1:]))
                    for name, each in arrays.items()
                }
                found[table.key] = Table(*self.rows_of(table), described)
        return found

    def state(self, of_caller: Any) -> dict[str, Any]:
        """Everything but tables, as it is now; tensors are not copied.

        Args:
            of_caller: The caller's state.

        Raises:
            CheckpointError: a value cannot be saved.
        """
        arrays = {
            id(each) for table in self.tables.tables for each in _state_arrays(table).values()
        }
        optimizers = [each.state_dict() for each in self._optimizers]
        return {
            "model": self._model_state(),
            "kinds": [_describe_optimizer(each) for each in self._optimizers],
            "optimizers": _plain(optimizers, "optimizers", arrays),
            "random": _random_states(),
            "state": _plain(of_caller, "state"),
        }

    def require_same(
        self, saved: Mapping[str, Any], tables: Mapping[str, Table], at: str, *, is_shared: bool
    ) -> None:
        """Check that a checkpoint is of this model and these optimizers, before it is restored.

        Args:
            saved: Its state.
            tables: Its tables, with the number of all rows as their end.
            at: The checkpoint's name.
            is_shared: Whether several processes saved it, or restore it. Their rows have optimizers
                of their own, whose settings are kept.

        Raises:
            CheckpointError: it is of others.
        """
        own = {key: _describe(key, value) for key, value in self._model_state().items()}
        found = {key: _describe(key, value) for key, value in saved["model"].items()}
        own |= {
            key: _describe_table(each, self._num_rows(key, each.end))
            for key, each in self.describe_tables().items()
        }
        found |= {
            key: _describe_table(each, each.end)
            for key, each in tables.items()
            if self.share is None or key in own
        }
        for key in sorted(own | found):
            if own.get(key) != found.get(key):
                raise CheckpointError(
                    f"{at} is of another model: {key} is {found.get(key, 'absent')} there and "
                    f"{own.get(key, 'absent')} in this model; build and accelerate the model as "
                    "for the run that was saved"
                )
        kinds = [_describe_optimizer(each) for each in _of_dense(self._optimizers, is_shared)]
        of_saved = [
            kind for kind in saved["kinds"] if not (is_shared and kind.startswith(_OF_ROWS))
        ]
        if kinds != of_saved:
            raise CheckpointError(
                f"{at} has optimizers {of_saved}, and {kinds} were given; give the same ones, with "
                "their parameters in the same order"
            )

    def restore(
        self,
        saved: Mapping[str, Any],
        arrays: Container[int],
        random_states: Any,
        *,
        is_shared: bool,
    ) -> Any:
        """Restore everything but tables, which are restored already.

        Args:
            saved: The state of a checkpoint.
            arrays: The `id` of each array that was restored with the tables.
            random_states: The random states.
            is_shared: As for `require_same`.

        Returns:
            The caller's state.
        """
        states = [
            state
            for state, kind in zip(saved["optimizers"], saved["kinds"], strict=True)
            if not (is_shared and kind.startswith(_OF_ROWS))
        ]
        for optimizer, state in zip(_of_dense(self._optimizers, is_shared), states, strict=True):
            for key, values in optimizer.state_dict()["state"].items():
                known = {name: each for name, each in values.items() if id(each) in arrays}
                if known:
                    state["state"][key] = state["state"].get(key, {}) | known
            optimizer.load_state_dict(state)
        self._model.load_state_dict(saved["model"], strict=False)
        _set_random_states(random_states)
        return saved["state"]

    def _model_state(self) -> dict[str, Any]:
        """The model's state dict without the tables; rows in slots stay where they are.

        Raises:
            CheckpointError: a value cannot be saved, or not be overwritten.
        """
        with DisableTorchFunctionSubclass():  # internal read of tables
            state = self._model.state_dict()
        tables = {id(table.weight) for table in self.tables.tables}
        parameters = self._model.named_parameters(remove_duplicate=False)
        keys = {key for key, parameter in parameters if id(parameter) in tables}
        found = {}
        for key, value in state.items():
            if key in keys:
                continue
            found[key] = _plain(value, f"model/{key}")
            if isinstance(value, torch.Tensor) and is_expanded(value):
                raise CheckpointError(
                    f"model/{key}: is expanded, so several of its values are one in memory and it "
                    "cannot be restored; hold its clone()"
                )
        return found

    def _num_rows(self, key: str, own: int) -> int:
        """Rows of a whole table, of which this process may have a part."""
        return own if self.share is None else max(end for _, end in self.share.layout[key])


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
        if is_lazy(value) or value.is_meta:
            raise CheckpointError(
                f"{name}: has no values or no shape yet; give it memory, or run the model once"
            )
        value = value.detach()
        is_view = value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes
        return value.clone() if is_view else value  # torch.save writes all of its memory
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        kept = {
            _plain(key, name): _plain(each, f"{name}/{key}", left_out)
            for key, each in value.items()
            if id(each) not in left_out
        }
        # Such as the milestones of `MultiStepLR`.
        return Counter(kept) if isinstance(value, Counter) else kept
    if isinstance(value, list | tuple):
        items = [_plain(each, f"{name}/{place}", left_out) for place, each in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int) and abs(value) < _MOST_INT:
        return int(value)
    raise CheckpointError(
        f"{name}: a checkpoint holds numbers, texts, tensors, and lists and dictionaries of them, "
        f"got {type(value).__name__}; convert it"
    )


def _of_dense(optimizers: Sequence[Optimizer], is_shared: bool) -> list[Optimizer]:
    """The optimizers whose state is restored from a checkpoint."""
    return [each for each in optimizers if not (is_shared and isinstance(each, FusedOptimizer))]


def _state_arrays(table: SavedTable) -> dict[str, Tensor]:
    """The arrays of a table's optimizer state, with a row for each of its rows."""
    state = table.state().items()
    return {name: each for name, each in state if isinstance(each, torch.Tensor) and each.dim()}


def _describe(key: str, value: Any) -> str:
    if key.endswith("_extra_state") or not isinstance(value, torch.Tensor):
        return "a state of a module's own"
    return f"{value.dtype} of shape {tuple(value.shape)}"


def _describe_table(table: Table, num_rows: int) -> str:
    weight = table.arrays["weight"]
    return f"a table that recsys updates, {weight.dtype} {(num_rows, *weight.row_shape)}"


def _describe_optimizer(optimizer: Optimizer) -> str:
    """Its kind and the shapes of its parameters.

    An optimizer accepts a state of another shape, and its kernel may then write out of bounds.
    """
    kind = type(optimizer).__name__
    shapes = [
        " ".join("x".join(map(str, each.shape)) or "1" for each in group["params"])
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
