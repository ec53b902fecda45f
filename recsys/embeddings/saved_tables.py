"""The tables of a model that recsys updates, as checkpoints see them: rows and state in blocks.

    track           begin to record which rows are changed
    flush           write changed rows in slots back; they stay in their slots
    take_changed    which rows were changed since the last call
    read, gather    copy rows, also in another thread
    begin_restoring  before `write` and `scatter` overwrite rows and state

Letters: E rows of a table, M rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from recsys._support.memory import lasting_tensors
from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.embeddings.rows.grads import drop_grads
from recsys.embeddings.tables_module import TableModule
from recsys.embeddings.tiers.write_back import write_back
from recsys.embeddings.update.changed_rows import ChangedRows
from recsys.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.embeddings.update.update_rows import TableUpdate

__all__ = ["SavedTable", "SavedTables"]

_CLEARED_BYTES = 16 * 2**20  # arrays are set to zeros in blocks of this size


class SavedTable:
    """One table and its optimizer state: read and written in blocks.

    An array is "weight" or an array of the state, by its name there. A reader in another thread may
    see a row that is updated partly; `SavedTables.take_changed` has it.

    Args:
        key: The table's key in the model's `state_dict`.
        update: Updates its group.
        number: Its number in the group.

    Attributes:
        key: As given.
        update: As given.
        number: As given.
        weight: The Parameter.
        optimizer: Has the state.
    """

    def __init__(self, key: str, update: TableUpdate, number: int) -> None:
        self.key, self.weight, self.optimizer = key, update.group.tables[number], update.optimizer
        self.update, self.number = update, number

    @property
    def num_rows(self) -> int:
        """E."""
        return len(self.weight)

    def state(self) -> dict[str, Any]:
        """The optimizer's own state of the table, not a copy; empty if it was never updated."""
        state: dict[str, Any] = self.optimizer.state.get(self.weight, {})
        return state

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Copy consecutive rows, without taking a file's pages into memory of the process.

        Args:
            name: Name of the array.
            begin: The first row.
            end: The row after the last one.

        Shape:
            result (end - begin, *columns), dtype of the array.

        Raises:
            ColdTierError: the disk cannot read the file.
        """
        array = self._array(name)
        rows = torch.empty((end - begin, *array.shape[1:]), dtype=array.dtype, device="cpu")
        if not self._move_range(array, begin, rows, is_read=True):
            # By numpy, on this thread alone; `gather` is called by the training thread. torch has
            # a team of OpenMP threads for each thread of Python that copies. If all teams together
            # have more threads than there are cores, OpenMP lets those that wait sleep at once,
            # also those of training, which is slower from then on.
            rows.view(torch.uint8).numpy()[...] = array[begin:end].cpu().view(torch.uint8).numpy()
        return rows

    def gather(self, name: str, rows: NDArray[Any]) -> Tensor:
        """Copy some rows.

        Args:
            name: Name of the array.
            rows: Row numbers, (M,) ascending.

        Shape:
            result (M, *columns), dtype of the array.
        """
        array = self._array(name)
        return array[torch.from_numpy(rows).to(array.device)].cpu()

    def write(self, name: str, begin: int, values: Tensor) -> None:
        """Overwrite consecutive rows; only after `begin_restoring`.

        Args:
            name: Name of the array.
            begin: The first row.
            values: The rows, (M, *columns).

        Raises:
            ColdTierError: the disk cannot write the file.
            WeightsError: the array has no such rows, or rows of another size or dtype.
        """
        array, end = self._array(name), begin + len(values)
        self._require_fit(name, array, values, begin, end)
        if self._move_range(array, begin, values.contiguous(), is_read=False):
            increment_version(array)
        else:
            array[begin:end] = values.view(-1, *array.shape[1:])

    def scatter(self, name: str, rows: NDArray[Any], values: Tensor) -> None:
        """Overwrite some rows; only after `begin_restoring`.

        Args:
            name: Name of the array.
            rows: Row numbers, (M,) ascending.
            values: The rows, (M, *columns).

        Raises:
            WeightsError: the array has no such rows, or rows of another size or dtype.
        """
        array = self._array(name)
        if len(rows):
            self._require_fit(name, array, values, int(rows.min()), int(rows.max()) + 1)
            of_rows = values.view(-1, *array.shape[1:]).to(array.device)
            array[torch.from_numpy(rows).to(array.device)] = of_rows

    @lasting_tensors()
    def make_array(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A state array of zeros, in the optimizer's state; only after `begin_restoring`.

        An array that exists already is set to zeros.

        Args:
            name: Name of the array.
            shape: Its shape, (E,) or (E, size).
            dtype: Its dtype.

        Raises:
            ColdTierError: the disk has no room.
            WeightsError: the table's optimizer has no such array.
        """
        self.require_state(name, tuple(shape), dtype)
        state = self.optimizer.state[self.weight]
        if name not in state:
            state[name] = self.update.new_array(self.number, name, tuple(shape[1:]))
        found: Tensor = state[name]
        step = max(1, _CLEARED_BYTES // max(1, found[:1].nbytes))
        for begin in range(0, len(found), step):
            self.write(name, begin, torch.zeros_like(found[begin : begin + step]))
        return found

    def require_state(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check the description of a state array before it is made.

        Raises:
            WeightsError: the table's optimizer has no such array.
        """
        sizes, wanted = self.update.state_sizes(), self.update.group.compute_dtype
        found = shape[:1], torch.Size(shape[1:]).numel(), dtype
        if name not in sizes or found != ((self.num_rows,), sizes[name], wanted):
            raise WeightsError(
                f"table {self.key!r}: its optimizer has state arrays {sorted(sizes)} of "
                f"{self.num_rows} rows of {sorted(sizes.values())} numbers in {wanted}, got "
                f"{name!r} of shape {shape} in {dtype}; load the state of the same optimizer"
            )

    def _array(self, name: str) -> Tensor:
        with DisableTorchFunctionSubclass():  # internal use of the table
            found: Tensor = self.weight if name == "weight" else self.state()[name]
            return found.detach()

    def _move_range(self, array: Tensor, begin: int, rows: Tensor, *, is_read: bool) -> bool:
        files = self.update.group.files
        return files is not None and files.move_range(array, begin, rows, is_read=is_read)

    def _require_fit(self, name: str, array: Tensor, values: Tensor, begin: int, end: int) -> None:
        """Check rows before they are written.

        Raises:
            WeightsError: the array has no such rows, or rows of another size or dtype.
        """
        location = f"table {self.key!r}: {name}"
        if begin < 0 or end > len(array):
            raise WeightsError(
                f"{location} has rows 0 to {len(array) - 1}, got rows {begin} to {end - 1}; load "
                "rows of the same table"
            )
        if (values.dtype, values.shape[1:].numel()) != (array.dtype, array.shape[1:].numel()):
            raise WeightsError(
                f"{location} has rows of shape {tuple(array.shape[1:])} in {array.dtype}, got "
                f"{tuple(values.shape[1:])} in {values.dtype}; load rows of the same table"
            )


class SavedTables:
    """All tables of a model that recsys updates.

    Args:
        model: The model. Tables that modules share are listed once.

    Attributes:
        tables: The tables, in the order of the model's `state_dict`.

    Raises:
        ConfigError: the model is a part of a larger one.
    """

    def __init__(self, model: nn.Module) -> None:
        keys: dict[nn.Parameter, str] = {}
        for key, weight in model.named_parameters(remove_duplicate=False):
            keys.setdefault(weight, key)
        modules = [module for module in model.modules() if isinstance(module, TableModule)]
        self._updates = list(
            dict.fromkeys(update for module in modules for update in module.updates())
        )
        self._records: dict[TableUpdate, ChangedRows] = {}
        locations = {}
        for update in self._updates:
            for number, weight in enumerate(update.group.tables):
                if weight not in keys:
                    raise ConfigError(
                        f"table {update.group.names[number]!r}: its optimizer updates tables of "
                        "this model too, but the table is not in this model; save the whole model"
                    )
                if number not in update.group.released:
                    locations[weight] = update, number
        self.tables = [
            SavedTable(key, *locations[weight])
            for weight, key in keys.items()
            if weight in locations
        ]

    @property
    def tracked_bytes(self) -> int:
        """Bytes of the record of changed rows."""
        return sum(record.bits.nbytes for record in self._records.values())

    def flush(self) -> None:
        """Write changed rows in slots back to the tables; slots keep their rows.

        Raises:
            ConflictingWrite: tables were written to while slots had newer rows.
            TiersFailed: a transfer has failed.
        """
        for update in self._updates:
            write_back(update.group)

    def track(self) -> None:
        """Write changed rows back, then begin to record which rows are changed.

        A record of the same tables that another object has begun ends.

        Raises:
            ConflictingWrite: as for `flush`.
            TiersFailed: as for `flush`.
        """
        self.flush()
        for update in self._updates:  # arrays that were loaded are not changes
            update.read_state()
        self._records = {update: ChangedRows(update.group) for update in self._updates}
        for update, record in self._records.items():
            update.changed = record

    def stop_tracking(self) -> None:
        """End the record of changed rows."""
        for update, record in self._records.items():
            if update.changed is record:
                update.changed = None
        self._records = {}

    def take_changed(self) -> list[NDArray[Any]]:
        """Take the record of changed rows, and begin a new one; call `flush` before.

        Returns:
            The bits of each table, in the order of `tables`; see `ChangedRows.take`.

        Raises:
            ConfigError: changes are not recorded, or another object records them.
            RuntimeError: a table has another number of rows now.
        """
        if {update: update.changed for update in self._updates} != self._records:
            raise ConfigError(
                "changes of rows are not recorded by this object; call track() first, and save "
                "checkpoints of a model by one object at a time"
            )
        for update in self._updates:
            update.read_state()
        bits = {update: record.take() for update, record in self._records.items()}
        return [bits[table.update][table.number] for table in self.tables]

    def put_back(self, bits: Sequence[NDArray[Any]]) -> None:
        """Mark rows as changed again, because they were not saved.

        Args:
            bits: The result of `take_changed`.
        """
        for table, of_table in zip(self.tables, bits, strict=True):
            self._records[table.update].put_back(table.number, of_table)

    def begin_restoring(self) -> None:
        """Called before rows and state are overwritten.

        Drops gradients that no update has used, and all rows in slots.

        Raises:
            ColdTierError: rows are in files, and this process was forked from the one with them.
            TiersFailed: a transfer has failed.
        """
        for update in self._updates:
            group = update.group
            if group.files is not None:
                group.files.require_owner()
            drop_grads(group)
            if group.fetcher is not None:
                group.fetcher.empty_slots(is_written_back=False)
