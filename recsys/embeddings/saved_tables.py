"""The tables of a model that recsys updates, as checkpoints see them: rows and state in blocks.

    track           begin to record which rows are changed
    flush           write updated rows in slots back to the cold store; they stay in their slots
    take_changed    which rows were changed since the last call
    read, gather    copy rows from the tables or the cold store, also in another thread
    restoring       a context in which rows and state are overwritten by `write` and `scatter`

Tables in files are read and written by the system's file calls. Reading them through the memory map
would make the whole table count as memory of the process. Letters: E rows of a table, M rows.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.memory import empty_rows, lasting_tensors
from recsys._support.torch_compat import DisableTorchFunctionSubclass, version_of
from recsys.embeddings.lookup.abstract_tables import AbstractTables
from recsys.embeddings.rows.row_space import compute_dtype
from recsys.embeddings.tiers.cold.file_store import (
    NUM_THREADS,
    move_rows,
    read_range,
    write_range,
)
from recsys.embeddings.update.changed_rows import ChangedRows
from recsys.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles, OpenArray
    from recsys.embeddings.update.group_updater import GroupUpdater
    from recsys.embeddings.update.row_updater import RowUpdater

    _States = dict[str, tuple[Tensor, int]]  # arrays of a table's state, with their versions

__all__ = ["SavedTable", "SavedTables"]

_CLEARED_BYTES = 16 * 2**20  # zeros are written to files in blocks of this size


class SavedTable:
    """One table and its optimizer state: read and written in blocks.

    An array is "weight" or an array of the state, by its name in the state. A reader in another
    thread, while rows are updated, may see a row that is partly updated. `ChangedRows` records it.

    Args:
        key: The table's key in the model's `state_dict`.
        updater: Has the table's optimizer.
        group: The table's group.
        number: The table's number in the group.
        threads: For reads and writes of scattered rows in files.

    Attributes:
        key: As given.
        weight: The Parameter.
        optimizer: Has the state.
    """

    def __init__(
        self,
        key: str,
        updater: RowUpdater,
        group: GroupUpdater,
        number: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        self.key, self.weight = key, group.group.tables[number]
        self.optimizer = updater.optimizer
        self._updater, self._group, self._number, self._threads = updater, group, number, threads

    @property
    def num_rows(self) -> int:
        """E."""
        return len(self.weight)

    def state(self) -> dict[str, Any]:
        """The optimizer's own state of the table, not a copy; empty if it was never updated."""
        state: dict[str, Any] = self.optimizer.state.get(self.weight, {})
        return state

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Copy consecutive rows to the host.

        Args:
            name: Name of the array.
            begin: The first row.
            end: The row after the last one.

        Shape:
            result (end - begin, *columns), dtype of the array.

        Raises:
            ColdTierError: the file cannot be read.
        """
        with DisableTorchFunctionSubclass():  # internal read of the table
            array = self._array(name)
            opened = self._file_of(array)
            if opened is None:
                return array.detach()[begin:end].to("cpu", copy=True)
            rows = torch.empty((end - begin, *array.shape[1:]), dtype=array.dtype, device="cpu")
            read_range(opened, begin, _bytes_of(rows))
            return rows

    def gather(self, name: str, rows: NDArray[np.int64]) -> Tensor:
        """Copy some rows to the host.

        Args:
            name: Name of the array.
            rows: Row numbers, (M,) ascending.

        Shape:
            result (M, *columns), dtype of the array.

        Raises:
            ColdTierError: the file cannot be read, or another process has opened it.
        """
        with DisableTorchFunctionSubclass():  # internal read of the table
            array = self._array(name)
            opened = self._file_of(array)
            if opened is None:
                return array.detach().index_select(0, torch.from_numpy(rows).to(array.device)).cpu()
            found = torch.empty((len(rows), *array.shape[1:]), dtype=array.dtype, device="cpu")
            self._move(opened, rows, found, is_fetch=True)
            return found

    def write(self, name: str, begin: int, values: Tensor) -> None:
        """Overwrite consecutive rows; only while `SavedTables.restoring`.

        Args:
            name: Name of the array.
            begin: The first row.
            values: The rows, (M, *columns), on the host.

        Raises:
            ColdTierError: the file cannot be written.
            WeightsError: the array has no such rows, or rows of another size or dtype.
        """
        with DisableTorchFunctionSubclass():  # internal write to the table
            array = self._array(name)
            end = begin + len(values)
            self._require_fit(name, array, values, begin, end)
            opened = self._file_of(array)
            if opened is None:
                array.detach()[begin:end].copy_(values.view(-1, *array.shape[1:]))
            else:
                write_range(opened, begin, _bytes_of(values))

    def scatter(self, name: str, rows: NDArray[np.int64], values: Tensor) -> None:
        """Overwrite some rows; only while `SavedTables.restoring`.

        Args:
            name: Name of the array.
            rows: Row numbers, (M,) ascending.
            values: The rows, (M, *columns), on the host.

        Raises:
            ColdTierError: the file cannot be written.
            WeightsError: the array has no such rows, or rows of another size or dtype.
        """
        if not len(rows):
            return
        with DisableTorchFunctionSubclass():  # internal write to the table
            array = self._array(name)
            if len(rows) != len(values):
                raise WeightsError(
                    f"table {self.key!r}: {name}: there are {len(rows)} row numbers, got "
                    f"{len(values)} rows; give a number for each row"
                )
            self._require_fit(name, array, values, int(rows.min()), int(rows.max()) + 1)
            opened = self._file_of(array)
            if opened is None:
                numbers = torch.from_numpy(rows).to(array.device)
                of_rows = values.view(-1, *array.shape[1:]).to(array.device)
                array.detach().index_put_((numbers,), of_rows)
            else:
                self._move(opened, rows, values, is_fetch=False)

    @lasting_tensors()
    def make_array(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A state array of zeros, in the optimizer's state; in a file if the table is in one.

        An array that exists already is set to zeros. Only while `SavedTables.restoring`.

        Args:
            name: Name of the array.
            shape: Its shape, (E,) or (E, size).
            dtype: Its dtype.

        Raises:
            ColdTierError: the disk has no room.
            WeightsError: the table's optimizer has no such array.
        """
        with DisableTorchFunctionSubclass():  # internal read of the table
            self.require_state(name, tuple(shape), dtype)
            state, files = self._updater.optimizer.state[self.weight], self._files()
            own_name = "" if files is None else self._group.state.name_in_files(self._number)
            found: Tensor | None = state.get(name)
            if found is not None:
                self._clear(found)
            elif files is not None:
                found = files.make(own_name, name, shape, dtype)
            else:
                found = empty_rows(*shape, dtype=dtype, device=self.weight.device).zero_()
            state[name] = found
            return found

    def require_state(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check the description of a state array before it is made.

        Raises:
            WeightsError: the table's optimizer has no such array.
        """
        sizes = self._group.settings.state_sizes
        wanted = compute_dtype(self.weight.dtype)
        found = shape[:1], torch.Size(shape[1:]).numel(), dtype
        if name not in sizes or found != ((self.num_rows,), sizes[name], wanted):
            raise WeightsError(
                f"table {self.key!r}: its optimizer has state arrays {sorted(sizes)} of "
                f"{self.num_rows} rows of {sorted(sizes.values())} numbers in {wanted}, got "
                f"{name!r} of shape {shape} in {dtype}; load the state of the same optimizer"
            )

    def _clear(self, array: Tensor) -> None:
        """Set an array to zeros."""
        opened = self._file_of(array)
        if opened is None:
            array.detach().zero_()
            return
        step = max(1, _CLEARED_BYTES // max(1, array[:1].nbytes))
        for begin in range(0, len(array), step):
            size = min(step, len(array) - begin)
            write_range(opened, begin, _bytes_of(array.new_zeros(size, *array.shape[1:])))

    def _array(self, name: str) -> Tensor:
        found: Tensor = self.weight if name == "weight" else self.state()[name]
        return found

    def _files(self) -> ColdFiles | None:
        tiers = self._group.group.tiers
        return None if tiers is None else tiers.files

    def _file_of(self, array: Tensor) -> OpenArray | None:
        files = self._files()
        return None if files is None else files.find(array)

    def _move(
        self, opened: OpenArray, rows: NDArray[np.int64], values: Tensor, *, is_fetch: bool
    ) -> None:
        """Move scattered rows between a file and host memory."""
        files = self._files()
        assert files is not None
        files.require_owner()  # a forked process does not have the threads
        move_rows(
            self._threads,
            [opened],
            np.array([0, self.num_rows], np.uint64),
            rows.astype(np.int32),
            np.arange(len(rows), dtype=np.int32),
            _bytes_of(values),
            is_fetch=is_fetch,
        )

    def _require_fit(self, name: str, array: Tensor, values: Tensor, begin: int, end: int) -> None:
        """Check rows before they are written.

        Raises:
            WeightsError: the array has no such rows, or rows of another size or dtype.
        """
        place = f"table {self.key!r}: {name}"
        if begin < 0 or end > len(array):
            raise WeightsError(
                f"{place} has rows 0 to {len(array) - 1}, got rows {begin} to {end - 1}; load rows "
                "of the same table"
            )
        if (values.dtype, values.shape[1:].numel()) != (array.dtype, array.shape[1:].numel()):
            raise WeightsError(
                f"{place} has rows of shape {tuple(array.shape[1:])} in {array.dtype}, got "
                f"{tuple(values.shape[1:])} in {values.dtype}; load rows of the same table"
            )


class SavedTables:
    """All tables of a model that recsys updates.

    Args:
        model: The model. Tables that modules share are listed once.

    Attributes:
        tables: The tables, in the order of the model's `state_dict`.

    Raises:
        ConfigError: the model is a part of a larger one, or a table has no memory yet.
    """

    def __init__(self, model: nn.Module) -> None:
        keys: dict[int, str] = {}
        for key, parameter in model.named_parameters(remove_duplicate=False):
            keys.setdefault(id(parameter), key)
        modules = [module for module in model.modules() if isinstance(module, AbstractTables)]
        updaters = dict.fromkeys(module.row_updater for module in modules)
        self._updaters = [updater for updater in updaters if updater is not None]
        self._groups: list[TableGroup] = []
        self._records: list[ChangedRows] = []
        self._known_states: list[_States] = []
        threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="recsys-saved-tables")
        found: dict[int, tuple[SavedTable, int, int]] = {}
        for updater in self._updaters:
            for each in updater.groups:
                for number, weight in enumerate(each.group.tables):
                    _require_whole(each.group.names[number], weight, keys)
                    table = SavedTable(keys[id(weight)], updater, each, number, threads)
                    found[id(weight)] = table, len(self._groups), number
                self._groups.append(each.group)
        in_order = [found[weight] for weight in keys if weight in found]
        self.tables = [table for table, _, _ in in_order]
        # For each table: the number of its group, and its number in the group.
        self._places = [(group, number) for _, group, number in in_order]

    @property
    def tracked_bytes(self) -> int:
        """Bytes of the record of changed rows."""
        return sum(record.num_bytes for record in self._records)

    def flush(self) -> None:
        """Write updated rows in slots back to the cold store; slots keep their rows.

        Raises:
            ConflictingWrite: tables or their state were written to while slots held updated rows.
            TiersFailed: a transfer has failed.
        """
        with DisableTorchFunctionSubclass():  # internal read of tables
            for group in self._groups:
                if group.tiers is not None:
                    group.tiers.complete_cold_store(group.space())

    def track(self) -> None:
        """Write updated rows back, then begin to record which rows are changed.

        A record of the same tables that another object has begun ends.

        Raises:
            ConflictingWrite: as for `flush`.
            TiersFailed: as for `flush`.
        """
        self.flush()
        self._records = [
            ChangedRows(group.tables, are_tiered=group.tiers is not None) for group in self._groups
        ]
        for group, record in zip(self._groups, self._records, strict=True):
            group.record_changes(record)
        self._known_states = [_arrays_of(table.state()) for table in self.tables]

    def stop_tracking(self) -> None:
        """End the record of changed rows."""
        for group, record in zip(self._groups, self._records, strict=False):
            if group.changed_rows is record:
                group.record_changes(None)
        self._records = []

    def take_changed(self) -> list[NDArray[np.uint64]]:
        """Take the record of changed rows, and begin a new one; call `flush` before.

        Returns:
            The bits of each table, in the order of `tables`; see `ChangedRows.take`.

        Raises:
            ConfigError: changes are not recorded, or another object has begun a record of the same
                tables, or a table has another number of rows than when the record began.
        """
        self._require_records()
        states = [_arrays_of(table.state()) for table in self.tables]
        for place, known, now in zip(self._places, self._known_states, states, strict=True):
            if _is_written(known, now, self._records[place[0]]):
                self._records[place[0]].mark_table(place[1])
        self._known_states = states
        bits = [record.take() for record in self._records]
        return [bits[group][number] for group, number in self._places]

    def put_back(self, bits: Sequence[NDArray[np.uint64]]) -> None:
        """Mark rows as changed again, because they were not saved.

        Args:
            bits: The result of `take_changed`.
        """
        for (group, number), of_table in zip(self._places, bits, strict=True):
            self._records[group].put_back(number, of_table)

    def mark_all(self) -> None:
        """Mark every row of every table as changed, because a call of `take_changed` was ended."""
        for record in self._records:
            record.mark_all()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """A context in which rows and state are overwritten.

        Drops gradients that no update has used, and all rows in slots. Afterwards lookups fetch
        rows again, and updates use the new state. After an error in the context, tables may have
        rows of both kinds.

        Raises:
            ConflictingWrite: lookups hold slots.
            TiersFailed: a transfer has failed.
        """
        with DisableTorchFunctionSubclass():  # internal write to tables
            for group in self._groups:
                group.forget()
                if group.tiers is not None:
                    group.tiers.forget_slots()
        yield
        for updater in self._updaters:
            updater.reload_state()
        with DisableTorchFunctionSubclass():  # internal read of tables
            for group in self._groups:
                if group.tiers is not None:  # no later lookup marks every row as changed
                    group.tiers.reload_if_tables_changed(group.space())

    def _require_records(self) -> None:
        """Check that the record is complete.

        Raises:
            ConfigError: it is not.
        """
        if len(self._records) != len(self._groups):
            raise ConfigError("changes of rows are not recorded; call track() first")
        for group, record in zip(self._groups, self._records, strict=True):
            if group.changed_rows is not record:
                raise ConfigError(
                    f"tables {group.names}: another object records their changes since; save "
                    "checkpoints of a model by one object at a time"
                )
            for name, table, size in zip(group.names, group.tables, record.sizes, strict=True):
                if len(table) != size:
                    raise ConfigError(
                        f"table {name!r}: has {len(table)} rows, and had {size} when the record of "
                        "its changes began; begin a new folder of checkpoints"
                    )


def _require_whole(name: str, weight: nn.Parameter, keys: Mapping[int, str]) -> None:
    """Check that a table can be saved as a part of the model.

    Raises:
        ConfigError: it cannot.
    """
    if id(weight) not in keys:
        raise ConfigError(
            f"table {name!r}: its optimizer updates tables of this model too, but the table is not "
            "in this model; save the whole model"
        )
    if weight.is_meta:
        raise ConfigError(
            f"table {name!r}: is on the 'meta' device and has no rows yet; give it memory by "
            "module.to_empty(device='cpu') first"
        )


def _arrays_of(state: Mapping[str, Any]) -> _States:
    """The arrays of a table's state by name, with their versions."""
    return {
        name: (value, version_of(value))
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }


def _is_written(known: _States, now: _States, record: ChangedRows) -> bool:
    """Whether a table's state was changed by something else than updates."""
    for name, (array, version) in now.items():
        if name in known:
            before, version_before = known[name]
            if array is not before or version != version_before:
                return True
        elif not record.is_new_state(array):
            return True
    return not known.keys() <= now.keys()


def _bytes_of(rows: Tensor) -> NDArray[np.uint8]:
    """The memory of rows on the host, (M, bytes per row)."""
    row_bytes = rows.dtype.itemsize * rows.shape[1:].numel()
    found: NDArray[np.uint8] = rows.contiguous().view(-1).view(torch.uint8).numpy()
    return found.reshape(len(rows), row_bytes)
