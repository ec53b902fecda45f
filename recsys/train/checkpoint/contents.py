"""What a checkpoint holds: the tables of a model, and everything else as a tree with arrays.

    tables        tables that recsys updates, and their state: large, most rows change seldom
    other arrays  the dense part, its optimizer's state, tables that torch updates: written whole
    tree          settings of optimizers, random states, the caller's state

Names of arrays: `model/KEY`, `optimizers/NUMBER/...`, `table-state/KEY/NAME`, `rows/KEY`.
"""

from __future__ import annotations

import random
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.update.changed_rows import rows_of
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.errors import CheckpointError, RecsysError
from recsys.train.checkpoint.blocks import row_ranges
from recsys.train.checkpoint.manifest import Array, Part, dtype_name
from recsys.train.checkpoint.tree import from_tree, to_tree
from recsys.train.run_files.saved_state import is_expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.embeddings.saved_tables import SavedTable
    from recsys.train.checkpoint.blocks import BlockBuilder

__all__ = [
    "Contents",
    "Small",
    "TableArrays",
    "add_arrays",
    "check_optimizer_state",
    "errors_of_state",
]

_LISTED_WORDS = 2**14  # a million rows: their numbers take 8 MiB
# Arrays of torch's optimizers that have one number for each number of the parameter.
_OF_PARAMETER = {
    "acc_delta",
    "ax",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "prev",
    "square_avg",
    "step_size",
    "sum",
}


class TableArrays(NamedTuple):
    """A table and the arrays that a checkpoint has of it.

    Attributes:
        table: Reads and writes its rows.
        names: For each array of the table ("weight", then its state): its name in the checkpoint.
    """

    table: SavedTable
    names: Mapping[str, str]

    def add_range(self, builder: BlockBuilder) -> Iterator[None]:
        """Add every row; yields after each range of rows.

        Raises:
            CheckpointError: the table's state was removed meanwhile.
        """
        try:
            for begin, end in row_ranges(self.table.num_rows, self._row_bytes()):
                tensors = {
                    name: self.table.read(own, begin, end) for own, name in self.names.items()
                }
                builder.add(tensors, [Part(name, begin, end) for name in tensors])
                yield
        except KeyError as error:
            raise CheckpointError(
                f"table {self.table.key!r}: {error} was removed from its state while every row was "
                "copied; the next checkpoint copies them again"
            ) from error

    def add_rows(self, builder: BlockBuilder, bits: NDArray[np.uint64]) -> None:
        """Add some rows with their numbers.

        Args:
            builder: Receives them.
            bits: One bit per row, as `ChangedRows.take` returns them.
        """
        numbers = f"rows/{self.table.key}"
        row_bytes = self._row_bytes() + 8
        for word in range(0, len(bits), _LISTED_WORDS):
            rows = rows_of(bits[word : word + _LISTED_WORDS]) + 64 * word
            for begin, end in row_ranges(len(rows), row_bytes):
                chosen = rows[begin:end]
                tensors = {name: self.table.gather(own, chosen) for own, name in self.names.items()}
                first, last = int(chosen[0]), int(chosen[-1])
                parts = [Part(name, first, last + 1, numbers) for name in tensors]
                builder.add({numbers: torch.from_numpy(chosen), **tensors}, parts)

    def arrays(self) -> dict[str, Array]:
        """The arrays by their names in the checkpoint."""
        state = {"weight": self.table.weight, **self.table.state()}
        with DisableTorchFunctionSubclass():  # internal read of the table
            return {name: _array_of(state[own], name) for own, name in self.names.items()}

    def _row_bytes(self) -> int:
        return sum(each.row_bytes for each in self.arrays().values())


class Small(NamedTuple):
    """Everything but the tables.

    Attributes:
        arrays: Tensors by their names in the checkpoint; not copies.
        tree: JSON values with references to these and to the tables' state.
    """

    arrays: dict[str, Tensor]
    tree: Any


class Contents:
    """Reads and restores a model, its optimizers, the random states, and a caller's state.

    Args:
        model: The model.
        optimizers: Its optimizers, always in the same order. Those that recsys modules have made
            for their rows need not be among them.

    Attributes:
        tables: The tables that recsys updates.

    Raises:
        CheckpointError: an optimizer that the caller made updates rows, and is not given.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.tables = SavedTables(model)
        self._model, self._optimizers = model, _with_row_optimizers(optimizers, self.tables)

    def table_arrays(self) -> list[TableArrays]:
        """The arrays that each table has now; a table that was never updated has no state."""
        found = []
        for table in self.tables.tables:
            names = {"weight": f"model/{table.key}"}
            for name, value in table.state().items():
                if isinstance(value, torch.Tensor) and value.dim():
                    names[name] = f"table-state/{table.key}/{name}"
            found.append(TableArrays(table, names))
        return found

    def small(self, state: Any) -> Small:
        """Everything but the tables, as it is now.

        Args:
            state: The caller's state.

        Raises:
            CheckpointError: a value cannot be saved.
        """
        arrays: dict[str, Tensor] = {}
        of_tables = self._names_of_states()

        def refer(name: str, tensor: Tensor) -> str:
            known = of_tables.get(id(tensor))
            if known is not None:
                return known
            name = name.encode("ascii", "backslashreplace").decode()  # as safetensors can hold it
            while name in arrays:  # {"a/b": ...} and {"a": {"b": ...}} have one name
                name += "~"
            _array_of(tensor, name)  # raises before anything is taken
            arrays[name] = tensor.detach()
            return name

        tree = {
            "optimizers": [
                {"kind": type(each).__name__, "state": each.state_dict()}
                for each in self._optimizers
            ],
            "random": _random_states(),
            "state": state,
        }
        encoded = {key: to_tree(each, key, refer) for key, each in tree.items()}
        encoded["extra"] = {}
        for key, value in self._model_state().items():
            if _is_tensor(key, value):
                _require_writable(value, f"model/{key}")
                arrays[f"model/{key}"] = value
            else:
                encoded["extra"][key] = to_tree(value, f"extra/{key}", refer)
        return Small(arrays, encoded)

    def model_tensors(self) -> dict[str, Tensor]:
        """The tensors of the model besides the tables, by their names in the checkpoint.

        Raises:
            CheckpointError: a tensor cannot be overwritten.
        """
        state = self._model_state().items()
        found = {f"model/{key}": value for key, value in state if _is_tensor(key, value)}
        for name, value in found.items():
            _require_writable(value, name)
        return found

    def restore_tree(
        self, tree: Any, array: Callable[[str], Tensor], *, only_dense: bool = False
    ) -> dict[str, Any]:
        """Restore optimizers and random states; the arrays of the model are restored already.

        Args:
            tree: As `small` made it.
            array: Returns an array by its name in the checkpoint.
            only_dense: Leave out recsys optimizers of rows. Their state is restored with the rows,
                and they keep their own settings.

        Returns:
            The caller's state, with the keys that `Checkpoints.save` gives it.

        Raises:
            CheckpointError: the tree is damaged, or of other optimizers.
        """
        with errors_of_state():
            own, saved = self._optimizers, tree["optimizers"]
            if only_dense:
                own = [each for each in own if not isinstance(each, FusedOptimizer)]
                saved = [each for each in saved if each["kind"] != FusedOptimizer.__name__]
            optimizers = [from_tree(each["state"], array) for each in saved]
            extra = {key: from_tree(each, array) for key, each in tree["extra"].items()}
            extra |= {key: array(f"model/{key}") for key in self._made_keys()}
            generators = from_tree(tree["random"], array)
            state: dict[str, Any] = from_tree(tree["state"], array)
            tables = {id(table.weight) for table in self.tables.tables}
            for optimizer, each in zip(own, optimizers, strict=True):
                check_optimizer_state(optimizer, each, tables)
            for optimizer, each in zip(own, optimizers, strict=True):
                optimizer.load_state_dict(each)
            if extra:
                self._model.load_state_dict(extra, strict=False)
            _set_random_states(generators)
        return state

    def require_tree(self, tree: Any) -> None:
        """Check what can be checked of a tree before anything is restored.

        Raises:
            CheckpointError: the tree is damaged, or of other optimizers or another model.
        """
        with errors_of_state():
            saved = [
                f"{each['kind']} with {len(each['state']['param_groups'])} param groups"
                for each in tree["optimizers"]
            ]
            extra = sorted(tree["extra"])
        own = [
            f"{type(each).__name__} with {len(each.param_groups)} param groups"
            for each in self._optimizers
        ]
        own_extra = sorted(
            key for key, value in self._model_state().items() if not _is_tensor(key, value)
        )
        if extra != own_extra:
            raise CheckpointError(
                f"the checkpoint has {extra[:5]} of modules with a state of their own, and this "
                f"model has {own_extra[:5]}; build the model as for the run that was saved"
            )
        if saved != own:
            raise CheckpointError(
                f"the checkpoint has optimizers {saved}, and {own} were given; give the same kinds "
                "with as many param groups, in the same order"
            )

    def _model_state(self) -> dict[str, Any]:
        """The model's state dict without the tables; rows in slots stay where they are."""
        with DisableTorchFunctionSubclass():
            state = self._model.state_dict()
        tables = {id(table.weight) for table in self.tables.tables}
        parameters = self._model.named_parameters(remove_duplicate=False)
        keys = {key for key, parameter in parameters if id(parameter) in tables}
        return {key: value for key, value in state.items() if key not in keys}

    def _made_keys(self) -> list[str]:
        """Keys of tensors that the model makes for its state dict.

        Writing to such a tensor changes no value of the model; `load_state_dict` does.
        """
        with DisableTorchFunctionSubclass():  # internal read of tables
            own = {
                each.untyped_storage().data_ptr()
                for each in (*self._model.parameters(), *self._model.buffers())
            }
        return [
            key
            for key, value in self._model_state().items()
            if _is_tensor(key, value) and value.untyped_storage().data_ptr() not in own
        ]

    def _names_of_states(self) -> dict[int, str]:
        """The names of the tables' state arrays, by the `id` of the array."""
        return {
            id(state[own]): name
            for each in self.table_arrays()
            for state in [each.table.state()]
            for own, name in each.names.items()
            if own != "weight"
        }


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


def _with_row_optimizers(optimizers: Sequence[Optimizer], tables: SavedTables) -> list[Optimizer]:
    """The given optimizers, and those that recsys modules have made for their rows."""
    found = list(optimizers)
    for table in tables.tables:
        optimizer = table.optimizer
        if any(each is optimizer for each in found):
            continue
        if not isinstance(optimizer, FusedOptimizer):
            raise CheckpointError(
                f"table {table.key!r} is updated in the step of a {type(optimizer).__name__} that "
                "is not among optimizers=; give it, too"
            )
        found.append(optimizer)
    return found


def check_optimizer_state(optimizer: Optimizer, state: Any, tables: Collection[int]) -> None:
    """Check the shapes in a state before an optimizer takes it.

    torch accepts any shapes. If an array is too small, a fused kernel then writes out of bounds.

    Args:
        optimizer: Will take it.
        state: As `optimizer.state_dict()` returns it.
        tables: The `id` of parameters whose state is checked elsewhere.

    Raises:
        ValueError, KeyError: it is not a state of this optimizer.
    """
    parameters: dict[Any, Tensor] = {}
    for group, each in zip(optimizer.param_groups, state["param_groups"], strict=True):
        parameters.update(zip(each["params"], group["params"], strict=True))
    for key, values in state["state"].items():
        parameter = parameters[key]
        for name, value in values.items():
            if id(parameter) in tables or name not in _OF_PARAMETER or value is None:
                continue
            # Known from the start is the state of TorchRec's RowWiseAdagrad, (E, 1).
            known = optimizer.state.get(parameter, {}).get(name)
            shape = (known if isinstance(known, torch.Tensor) else parameter).shape
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                raise ValueError(f"{name} of parameter {key} must have shape {tuple(shape)}")


def add_arrays(builder: BlockBuilder, arrays: Mapping[str, Tensor]) -> dict[str, Array]:
    """Add copies of whole arrays, in ranges of rows.

    Returns:
        Their descriptions.
    """
    described = {}
    for name, tensor in arrays.items():
        array = described[name] = _array_of(tensor, name)
        rows = tensor if tensor.dim() else tensor.reshape(1)
        for begin, end in row_ranges(array.num_rows, array.row_bytes):
            copy = rows[begin:end].to("cpu", copy=True)
            builder.add({name: copy}, [Part(name, begin, end)])
    return described


def _is_tensor(key: str, value: Any) -> bool:
    """Whether an entry of a model's state is a tensor that can be restored in place."""
    # `get_extra_state` may return a new tensor each time.
    return isinstance(value, torch.Tensor) and not key.endswith("_extra_state")


def _require_writable(tensor: Tensor, name: str) -> None:
    """Check that a checkpoint can hold a tensor of the model, and be restored into it.

    Raises:
        CheckpointError: it cannot.
    """
    _array_of(tensor, name)
    if is_expanded(tensor):
        raise CheckpointError(
            f"{name}: is expanded, so several of its values are one in memory and it cannot be "
            "restored; hold its clone()"
        )


def _array_of(tensor: Tensor, name: str) -> Array:
    """Describe a tensor; reads none of its numbers.

    The writing thread calls it, too. So it may use only attributes that a table in two tiers gives
    without writing rows back.

    Raises:
        CheckpointError: a checkpoint cannot hold it.
    """
    fault = ""
    if is_lazy(tensor):
        fault = "has no shape yet; run the model once before"
    elif tensor.is_meta:
        fault = "is on the 'meta' device and has no values; give it memory before"
    elif tensor.layout is not torch.strided:
        fault = f"must be a dense tensor, got {tensor.layout} in {tensor.dtype}; convert it"
    if fault:
        raise CheckpointError(f"{name}: {fault}")
    return Array(dtype_name(tensor.dtype, name), tuple(tensor.shape))


def _random_states() -> dict[str, Any]:
    """The states of the random generators that a training loop may use."""
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    legacy["state"]["key"] = legacy["state"]["key"].tolist()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": legacy,
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
    legacy = states["numpy"]
    key = np.array(legacy["state"]["key"], np.uint32)
    np.random.set_state(legacy | {"state": legacy["state"] | {"key": key}})  # noqa: NPY002
