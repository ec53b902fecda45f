"""What modules with tables have in common: their updater, copies, and the device they are on.

Devices differ in the kernels that work on rows (`kernel_choice`). `device=` builds a module on a
device, `.to()` moves it there and back.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from recsys._support.memory import empty_rows
from recsys._support.torch_compat import plain_grad
from recsys.embeddings.kernels.choice import kernels_on
from recsys.embeddings.lookup.abstract import pooling_of
from recsys.embeddings.rows.row_space import require_aligned
from recsys.embeddings.rows.table_parameter import make_plain
from recsys.embeddings.table import DATA_TYPES, data_type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.table import TableConfig
    from recsys.embeddings.tiers.ahead import Prefetched
    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.embeddings.update.row_updater import Places, RowUpdater

__all__ = [
    "AbstractTables",
    "check_input",
    "empty_tables",
    "require_beside",
    "require_rows",
    "slot_device",
    "table_device",
]

_JOINS = "_joins"  # in a pickle: the updater, the tables' places there, and their state


class AbstractTables(nn.Module, ABC):
    """A module with tables that kernels of recsys work on.

    Attributes:
        _updater: Updates the rows; None where gradients are left to an optimizer of torch's.
        _places: Of each table: its group, and its number there.
        _tables_then: The Parameters when an updater took them: they must not be replaced.
        _is_part: Whether this is a copy of a part of what one optimizer updates, not used yet.
    """

    _updater: RowUpdater | None = None
    _places: Places = ()
    _tables_then: Sequence[nn.Parameter] = ()
    _is_part = False

    @property
    def row_updater(self) -> RowUpdater | None:
        """What updates the rows; None where gradients are left to an optimizer of torch's."""
        return self._updater

    def tiers(self) -> list[Tiers]:
        """Where rows are kept that are not all resident; empty where they are."""
        updater = self.row_updater
        return [] if updater is None else updater.tiers()

    @abstractmethod
    def holders(self) -> list[nn.Module]:
        """The modules whose `weight`s are the tables."""

    def attach(self, updater: RowUpdater, places: Places) -> None:
        """Hand gradients to an updater's ledgers from now on; `accelerate` calls it.

        Args:
            updater: Updates the rows.
            places: Of each table: its group, and its number there.
        """
        self._updater, self._places, self._is_part = updater, places, False
        self._tables_then = [group.tables[number] for group, number in places]

    @abstractmethod
    def prefetch(self, *arguments: Any) -> Prefetched:
        """Have the rows fetched that `forward` of the same arguments will need."""

    def detach(self) -> None:
        """Leave gradients to torch again, as the module does that this one stands for."""
        self._updater, self._places, self._tables_then = None, (), ()

    def _table_groups(self) -> list[TableGroup]:
        """Those of its tables; each once."""
        return list(dict.fromkeys(group for group, _ in self._places))

    def _require_tables(self) -> None:
        """Refuse Parameters that have replaced those which an updater has.

        A table of the "meta" device may be replaced: it gets memory so.

        Raises:
            ValueError: one has been replaced.
        """
        updater = self._updater
        assert updater is not None
        for holder, (group, number) in zip(self.holders(), self._places, strict=True):
            table, known = holder._parameters.get("weight"), group.tables[number]
            if table is known:
                continue
            if known.is_meta and isinstance(table, nn.Parameter):
                updater.give_memory(group, number, table)
                continue
            raise ValueError(
                f"table {group.names[number]!r}: its Parameter was replaced, and the tables of a "
                "module are fixed while a recsys optimizer updates them; call "
                "recsys.restore(model) first, then exchange the Parameter and accelerate again "
                "(copy values in place to keep the Parameter: weight.data.copy_, load_state_dict "
                "without assign=True)"
            )
        self._tables_then = [group.tables[number] for group, number in self._places]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the module, its tables and their state, and their updater."""
        state = self.__dict__ | {"_updater": None, "_places": (), "_tables_then": ()}
        updater = self._updater
        if updater is not None and updater.goes_along:
            self._require_tables()
            state[_JOINS] = updater, self._places, updater.states_of(self._tables_then)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Bring the copy's tables to the copy of its updater, if there is one."""
        super().__setstate__({name: value for name, value in state.items() if name != _JOINS})  # type: ignore[no-untyped-call]
        for holder in self.holders():
            make_plain(cast("nn.Parameter", holder.weight))
        self.detach()
        if _JOINS in state:
            updater, places, states = state[_JOINS]
            self._is_part = True
            updater.join(self, places, states)

    def _warn_of_part(self) -> None:
        """Warn, once, that a part of a model was copied without what updates its rows."""
        self._is_part = False
        warnings.warn(
            f"{type(self).__name__}: this is a copy of a part of the tables that one recsys "
            "optimizer updates, so it is a module of plain tables, without an optimizer; give its "
            "weight to an optimizer, or copy the whole model",
            stacklevel=4,
        )

    def __prepare_scriptable__(self) -> None:
        """Refuse `torch.jit.script`, which would compile the Python around our kernels.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}; call recsys.restore on an "
            "accelerated model first, or load its state_dict into the module of torch or TorchRec"
        )

    def check_input(self) -> None:
        """Raise the first error in the input of lookups so far; waits for the device.

        On a CUDA device a lookup does not wait to know whether ids are rows: invalid ids raise on
        a later lookup or update, and no row is updated meanwhile. On the CPU they have raised
        already.

        Raises:
            IdOutOfRange: a value was no row of its table.
            MalformedBags: offsets did not make bags.
            ValueError: a weight was not a number.
        """
        for group in self._table_groups():
            if group.kernels.errors is not None:
                group.kernels.errors.check()

    def sync(self) -> None:
        """Write back every row that was updated; what is in files is whole then, on the disk.

        Of a model that was accelerated, all of its tables, whichever module is asked.

        Raises:
            OSError: the disk refuses.
        """
        if self.row_updater is not None:
            self.row_updater.sync()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module. Rows in fast memory are written back, and stay there."""
        with ExitStack() as stack:
            for tiers in self.tiers():
                stack.enter_context(tiers.only_read())
            return super().state_dict(*args, **kwargs)

    def settle(self) -> None:
        """Where rows are in two tiers, leave none under way, and no slot claimed.

        Claims of lookups to come are given up, and transfers waited for; gradients that no update
        has used, as an interrupted step leaves them, are forgotten.
        """
        for group in self._table_groups():
            if group.tiers is not None:
                group.forget()
                group.tiers.settle()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move what belongs to the tables, where `.to()`, `.cuda()` or `.half()` convert a module.

        Gradients collected go along as `grad` of the tables; the state of their optimizer follows
        in its next step. Of rows in two tiers, those in fast memory are on the device from then on;
        all wait in the host's memory, or in files, as before.

        Raises:
            ValueError: rows are in two tiers, and those in fast memory are in use, or `fn` is about
                their dtype.
        """
        groups = self._table_groups()
        for group in groups:
            group.open_ledger()
        if any(group.tiers is not None for group in groups):
            fn = self._move_tiers(fn)
        module: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for group in groups:
            group.forget_space()
        if self.row_updater is None:
            self.detach()  # finds tables that are other Parameters now, as `to_empty` makes them
        elif any(table.is_meta for table in self._tables_then):
            self._require_tables()
        return module

    def _move_tiers(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Do what `fn` means for slots; what it is to do with everything else."""
        weights = [table for group in self._table_groups() for table in group.tables]
        for dtype in {weight.dtype for weight in weights}:
            found = fn(torch.empty(0, dtype=dtype))
            if found.device.type not in ("cpu", "cuda") or found.dtype != dtype:
                raise ValueError(
                    f"rows in two tiers are looked up on the CPU or on CUDA, as {dtype}, and "
                    f"cannot be made {found.dtype} on '{found.device}'; build the module so, or "
                    "without budget="
                )
        updater = self.row_updater
        assert updater is not None
        updater.move_slots(found.device)
        # Gradients stay beside their tables; the list keeps them what they are.
        staying = [each for weight in weights for each in (weight, plain_grad(weight))]
        numbers = {id(each) for each in staying}

        def move(tensor: Tensor) -> Tensor:
            is_left = found.device.type != "cpu" and id(tensor) in numbers
            return tensor if is_left else fn(tensor)

        return move


def check_input(model: nn.Module) -> None:
    """Call `check_input` of every module of recsys in a model.

    Raises:
        IdOutOfRange: as there.
        MalformedBags: as there.
        ValueError: as there.
    """
    for module in model.modules():
        if isinstance(module, AbstractTables):
            module.check_input()


def empty_tables(tables: Sequence[TableConfig], device: torch.device | str | None) -> list[Tensor]:
    """Memory for tables; on a device in one piece for those that will be looked up together.

    Args:
        tables: Of a collection.
        device: As for `torch.empty`.
    """
    found = torch.get_default_device() if device is None else torch.device(device)
    dtypes = [DATA_TYPES[data_type_of(table)] for table in tables]
    if kernels_on(found).errors is None:
        return [
            empty_rows(table.num_embeddings, table.embedding_dim, dtype=dtype, device=found)
            for table, dtype in zip(tables, dtypes, strict=True)
        ]
    together: dict[tuple[int, str, torch.dtype], list[int]] = {}
    for number, (table, dtype) in enumerate(zip(tables, dtypes, strict=True)):
        kind = table.embedding_dim, pooling_of(table), dtype
        together.setdefault(kind, []).append(number)
    rows: dict[int, Tensor] = {}
    for (dim, _, dtype), numbers in together.items():
        sizes = [tables[number].num_embeddings for number in numbers]
        piece = torch.empty(sum(sizes), dim, dtype=dtype, device=found)
        rows.update(zip(numbers, torch.split(piece, sizes), strict=True))
    return [rows[number] for number in range(len(tables))]


def table_device(device: torch.device | str | None, *, has_budget: bool) -> torch.device | None:
    """Where tables get their memory: with a budget that of the host, where all rows wait."""
    slots = slot_device(device)
    if slots is None:
        return None if device is None else torch.device(device)
    return torch.device("cpu") if has_budget else slots


def slot_device(device: torch.device | str | None) -> torch.device | None:
    """Where slots are, if not beside the tables."""
    found = torch.get_default_device() if device is None else torch.device(device)
    return found if found.type == "cuda" else None


def require_beside(values: Tensor, device: torch.device) -> None:
    """Check that ids are where rows are looked up.

    Raises:
        ValueError: they are not.
    """
    if values.device != device:
        raise ValueError(
            f"ids must be on the device where rows are looked up, {device}, got {values.device}; "
            f"move them by .to('{device}')"
        )


def require_rows(name: str, weight: Tensor) -> None:
    """Check that kernels can work on the rows of a table.

    Raises:
        ValueError: they cannot.
    """
    if weight.dtype not in DATA_TYPES.values() or weight.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"table {name!r}: rows must be float32, bfloat16 or float16 on the CPU or on CUDA, got "
            f"{weight.dtype} on {weight.device}; convert them by .float() and .cpu(), or leave the "
            "table to TorchRec"
        )
    require_aligned(f"table {name!r}: ", weight)
