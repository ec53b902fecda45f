"""A folder of arrays on disk: the rows and the state of tables that may be larger than memory.

    FOLDER/arrays.json           the manifest: names, shapes, dtypes, and whether it is dirty
    FOLDER/lock                  locked while a process has the folder open
    FOLDER/t_cat_0.weight.bin    one array: its numbers, row after row, without a header

Files are allocated at full length when they are made, so a disk that is too small is an error then.
The first write marks the folder dirty; `sync` writes every byte to the disk and marks it clean. A
crash leaves the folder dirty: it may mix newer and older rows, so it is refused. `last_sync` says
when `sync` is called for a module.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from weakref import WeakSet

import torch

from recsys._support.files import appearing_whole, is_at
from recsys._support.memory import advise_random
from recsys.embeddings.tiers.cold.disk_room import no_room, require_disk
from recsys.embeddings.tiers.cold.folder_lock import lock_folder
from recsys.embeddings.tiers.cold.manifest import DTYPES, VERSION, Kind, read_manifest
from recsys.errors import ColdTierDirty, ColdTierError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

__all__ = ["ColdFiles", "FilesDeleted", "OpenArray"]


_OPEN: WeakSet[ColdFiles] = WeakSet()


@dataclass(frozen=True)
class OpenArray:
    """An array and its open file.

    Attributes:
        path: Path of the file.
        descriptor: Its file descriptor, open for reading and writing.
        tensor: The array, mapped into memory.
    """

    path: Path
    descriptor: int
    tensor: Tensor


class FilesDeleted(ColdTierError):
    """The folder of rows was deleted, or made anew, while they were in use."""


class ColdFiles:
    """The arrays of one folder, locked and open.

    New files, and folders made for them, are deleted with this object, unless `keep_files` was
    called: a module calls it when its construction has succeeded.

    Args:
        folder: Created if it does not exist. If it has tables, they must be exactly `tables`.
        tables: Shape and dtype of every table, by name.
        state_bytes: Bytes of the state arrays that these tables will have; new tables are not made
            on a disk that has no room for both.

    Attributes:
        folder: The folder.
        is_new: Whether the tables were just made; they are then zeros.
        is_dirty: Whether rows in the files may differ from those of the last `sync`.
        numbers: Further state of each table, such as its step count, as of the last `sync`.

    Raises:
        ColdTierDirty: a crash has left the folder dirty.
        ColdTierError: the folder cannot be written, is in use, has other tables or files of another
            length, or the disk has no room for the tables. Existing files do not change.
    """

    def __init__(
        self,
        folder: Path | str,
        tables: Mapping[str, tuple[Sequence[int], torch.dtype]],
        state_bytes: int = 0,
    ) -> None:
        self.folder = Path(folder).absolute()  # the process may change its working directory
        self._open: dict[tuple[str, str], OpenArray] = {}
        self._by_address: dict[int, OpenArray] = {}
        self._expects_lookups = self._is_kept = False
        self._process = os.getpid()
        # Protects the manifest: the transfer thread marks the folder dirty when it writes rows
        # back, while the main thread makes arrays.
        self._guard = threading.RLock()
        above = self.folder, *self.folder.parents
        self._made_folders = [each for each in above if not os.path.lexists(each)]
        self._kinds: dict[tuple[str, str], Kind] = {}
        self.is_new, self._lock = False, -1
        _OPEN.add(self)
        try:
            self._lock = lock_folder(self.folder)
            wanted = {(name, "weight"): Kind.of(*kind) for name, kind in tables.items()}
            found = self._read_manifest()
            self.is_new = found is None
            self.numbers: dict[str, dict[str, float]] = {}
            self.is_dirty = True
            if found is None:
                self._require_empty()
                self._make(wanted, state_bytes)
                self._write_manifest()
            else:
                self._kinds, self.numbers, self.is_dirty = found
                self._require(wanted)
                for key in self._kinds:
                    self._map(key)
        except BaseException:
            self.discard()
            raise

    def array(self, table: str, name: str = "weight") -> Tensor | None:
        """An array; None if there is none of this name.

        Args:
            table: Name of the table.
            name: "weight", or the name of a state array.
        """
        known = self._open.get((table, name))
        return None if known is None else known.tensor

    def begin_with(self, table: str, values: Tensor | None) -> Tensor:
        """The rows of a table, initialized if values are given.

        Args:
            table: Name of the table.
            values: Initial values; None to keep the rows in the file.

        Raises:
            ColdTierError: values are given, but the folder already has rows.
        """
        rows = self._open[table, "weight"].tensor
        if values is not None:
            if not self.is_new:
                raise ColdTierError(
                    f"{self.folder} already has rows of table {table!r}, so no initial values may "
                    "be given; leave them out, or choose another cold_path; a model to accelerate "
                    "has such values: load a checkpoint afterwards to continue from it"
                )
            rows.copy_(values)
        return rows

    def state_names(self, table: str) -> list[str]:
        """Names of a table's state arrays."""
        return [name for owner, name in self._open if owner == table and name != "weight"]

    def make(self, table: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make an array of zeros.

        Raises:
            ColdTierError: the disk has no room for it.
        """
        key = table, name
        with self._guard:
            self._require_present()
            self.mark_dirty()
            self._make({key: Kind.of(shape, dtype)})
            self._write_manifest()
        return self._open[key].tensor

    def keep(self, table: str, name: str, values: Tensor) -> Tensor:
        """Store values in an array, which is made if it does not exist.

        Raises:
            ColdTierError: the disk has no room, or the existing array has another shape or dtype.
        """
        known = self.array(table, name)
        if known is None:
            known = self.make(table, name, values.shape, values.dtype)
        elif (known.shape, known.dtype) != (values.shape, values.dtype):
            raise ColdTierError(
                f"{self.folder}: {name!r} of table {table!r} is "
                f"{_words(self._kinds[table, name])}, got "
                f"{_words(Kind.of(values.shape, values.dtype))}; load it into a new cold_path"
            )
        self.mark_dirty()
        return known.copy_(values)

    def drop(self, table: str, name: str) -> None:
        """Delete a state array that no transfer uses any more; arguments as for `array`.

        Raises:
            FilesDeleted: as for `sync`.
        """
        with self._guard:
            self._require_present()
            self.mark_dirty()
            self._forget((table, name))
            self._path_of((table, name)).unlink(missing_ok=True)

    def find(self, tensor: Tensor) -> OpenArray | None:
        """The array that a tensor maps; None if the tensor has other memory."""
        return self._by_address.get(tensor.data_ptr())

    def mark_dirty(self) -> None:
        """Mark the folder dirty; call it before rows in the files change.

        Raises:
            ColdTierError: as `require_owner`; or the mark cannot be written, as on a full disk, and
                rows must not change.
        """
        self.require_owner()
        with self._guard:
            if self.is_dirty:
                return
            if not self._are_present():  # rows can still be saved in a checkpoint; `sync` raises
                self.is_dirty = True
                return
            try:
                self._record(self.numbers, is_dirty=True)
            except OSError as error:
                raise ColdTierError(
                    error.errno or errno.EIO,
                    f"{self.folder}: {self._manifest.name} must say that the rows change before "
                    f"they do, and it cannot be written ({error.strerror or error}); free some "
                    "space there, or check the disk",
                ) from error

    @property
    def are_here(self) -> bool:
        """Whether this process opened the files, and their paths still lead to them."""
        return os.getpid() == self._process and self._are_present()

    def require_owner(self) -> None:
        """Check that this process opened the files: two that write rows would mix them.

        Raises:
            ColdTierError: it was forked from the process that did.
        """
        if os.getpid() != self._process:
            raise ColdTierError(
                f"{self.folder}: this process was forked from the one that opened the files, which "
                "alone may train on them and write them; evaluate under torch.no_grad() here, or "
                "build the model in this process, with a cold_path of its own"
            )

    def expect(self, *, lookups: bool) -> None:
        """Tell the system how the mapped tensors will be read.

        Args:
            lookups: True for reads of scattered rows, where read-ahead would load unneeded pages;
                False for reads from beginning to end.
        """
        if lookups != self._expects_lookups:
            self._expects_lookups = lookups
            for each in self._by_address.values():
                advise_random(each.tensor, is_random=lookups)

    def sync(self, numbers: Mapping[str, Mapping[str, float]]) -> None:
        """Write every byte to the disk, and mark the folder clean.

        Args:
            numbers: Further state of each table, such as its step count; stored in the manifest.

        Raises:
            ColdTierError: as `require_owner`.
            FilesDeleted: the files were deleted, or others have their names now.
            OSError: a write failed; the folder stays dirty.
        """
        self.require_owner()
        if self._lock < 0:
            return  # closed
        self._require_present()
        new_numbers = {table: dict(known) for table, known in numbers.items()}
        if not self.is_dirty and new_numbers == self.numbers:
            return  # a step that updates no row changes numbers alone
        for each in self._open.values():
            os.fsync(each.descriptor)
        with self._guard:
            self._record(new_numbers, is_dirty=False)

    def close(self) -> None:
        """Close the files and release the lock; tensors stay mapped while references exist."""
        for each in self._open.values():
            os.close(each.descriptor)
        self._open, self._by_address = {}, {}
        self.leave_lock()

    def keep_files(self) -> None:
        """Keep new files when this object is deleted."""
        self._is_kept = True

    def discard(self) -> None:
        """Close the files, and delete them, and folders made for them, if they are new."""
        if os.getpid() == self._process:  # not a forked process
            if self.is_new and self._are_present():
                for path in [*map(self._path_of, self._kinds), self._manifest]:
                    path.unlink(missing_ok=True)
            self._remove_folders()
        self.close()

    def __del__(self) -> None:
        if getattr(self, "is_new", False) and not self._is_kept and self._lock >= 0:
            self.discard()
        elif hasattr(self, "_lock"):
            self.close()

    def leave_lock(self) -> None:
        """Close the lock; one that a forked process closes stays with the other process."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove_folders(self) -> None:
        """Remove the folders that were made for the files, if they are empty but for our lock."""
        if self._made_folders and self._lock >= 0:
            (self.folder / "lock").unlink(missing_ok=True)
        for each in self._made_folders:
            with suppress(OSError):  # it has files of others
                each.rmdir()

    def _path_of(self, key: tuple[str, str]) -> Path:
        return self.folder / f"{quote('.'.join(key), safe='')}.bin"

    def _make(self, kinds: Mapping[tuple[str, str], Kind], later_bytes: int = 0) -> None:
        """Make files of zeros: all of them, or none; the disk needs room for later ones, too."""
        wanted = later_bytes + sum(kind.num_bytes for kind in kinds.values())
        # Checked before allocating, so that the attempt does not fill the disk for other programs.
        require_disk(self.folder, wanted)
        made: list[Path] = []
        try:
            for key, kind in kinds.items():
                path = self._path_of(key)
                self._forget(key)
                # Not overwritten: a tensor may still map the file, and a link leads to another one.
                path.unlink(missing_ok=True)
                with path.open("xb") as file:
                    made.append(path)
                    if kind.num_bytes:
                        os.posix_fallocate(file.fileno(), 0, kind.num_bytes)
        except OSError as error:
            for path in made:
                path.unlink(missing_ok=True)
            if error.errno == errno.ENAMETOOLONG:
                raise ColdTierError(
                    f"{self.folder}: table {key[0]!r} must have a name that fits in the name of a "
                    f"file, and {path.name!r} has {len(path.name)} characters; give the table a "
                    "shorter name"
                ) from error
            raise no_room(self.folder, wanted, error.errno or errno.EIO) from error
        self._kinds |= kinds
        for key in kinds:
            self._map(key)

    def _map(self, key: tuple[str, str]) -> None:
        path, kind = self._path_of(key), self._kinds[key]
        if path.is_symlink():  # recsys makes none; rows would be written to any file
            raise ColdTierError(
                f"{path}: must be a file of this folder, is a symbolic link; copy the file here, "
                "or choose another cold_path"
            )
        try:
            found = path.stat().st_size
        except OSError as error:
            raise ColdTierError(
                f"{path}: the file is missing ({error.strerror}); {_begin_anew(self.folder)}"
            ) from error
        if found != kind.num_bytes:
            raise ColdTierError(
                f"{path}: a {kind.dtype} array of shape {kind.shape} takes {kind.num_bytes} bytes, "
                f"the file has {found}; {_begin_anew(self.folder)}"
            )
        dtype = DTYPES[kind.dtype]
        try:
            if kind.num_bytes:
                flat = torch.from_file(str(path), shared=True, size=prod(kind.shape), dtype=dtype)
            else:
                flat = torch.empty(0, dtype=dtype, device="cpu")
            opened = OpenArray(path, os.open(path, os.O_RDWR), flat.view(kind.shape))
        except (OSError, RuntimeError) as error:
            raise ColdTierError(
                f"{path}: must be a file that can be mapped into memory, for reading and writing "
                f"({error}); change its permissions, or choose another cold_path"
            ) from error
        self._open[key] = opened
        if kind.num_bytes:
            self._by_address[flat.data_ptr()] = opened
            os.posix_fadvise(opened.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _forget(self, key: tuple[str, str]) -> None:
        """Close a state array, if it exists; no transfer uses it."""
        before = self._open.pop(key, None)
        if before is not None:
            os.close(before.descriptor)
            self._by_address.pop(before.tensor.data_ptr(), None)
            del self._kinds[key]

    def _require_empty(self) -> None:
        """Refuse a folder that has array files but no manifest."""
        unknown = sorted(self.folder.glob("*.bin"))
        if unknown:
            raise ColdTierError(
                f"{self.folder}: has {unknown[0].name} but no {self._manifest.name} that lists it; "
                "delete the files there, or choose another cold_path"
            )

    def _require(self, wanted: Mapping[tuple[str, str], Kind]) -> None:
        """Refuse a folder that is dirty, or has other tables."""
        known = {key: kind for key, kind in self._kinds.items() if key[1] == "weight"}
        for key in {**wanted, **known}:
            if wanted.get(key) != known.get(key):
                raise ColdTierError(
                    f"{self.folder}: table {key[0]!r} must be {_words(wanted.get(key))}, but is "
                    f"{_words(known.get(key))} there; choose another cold_path, or use the tables "
                    "that the folder was made for"
                )
        if self.is_dirty:
            raise ColdTierDirty(
                f"{self.folder}: the process that used it ended before all rows were written, so "
                f"it may mix newer and older rows; {_begin_anew(self.folder)}"
            )

    @property
    def _manifest(self) -> Path:
        return self.folder / "arrays.json"

    def _require_present(self) -> None:
        """Check that the paths still lead to the open files: another module may use them now.

        Raises:
            FilesDeleted: otherwise.
        """
        if not (self._manifest.exists() and self._are_present()):
            raise FilesDeleted(
                f"{self.folder}: the files of this module were deleted, so its rows are lost when "
                "the process ends; save a checkpoint, and build the module in a new cold_path"
            )

    def _are_present(self) -> bool:
        return all(is_at(each.descriptor, each.path) for each in self._open.values())

    def _record(self, numbers: dict[str, dict[str, float]], *, is_dirty: bool) -> None:
        before = self.numbers, self.is_dirty
        self.numbers, self.is_dirty = numbers, is_dirty
        try:
            self._write_manifest()
        except BaseException:
            self.numbers, self.is_dirty = before
            raise

    def _write_manifest(self) -> None:
        """Replace the manifest atomically: readers see the whole old one or the whole new one."""
        arrays = [
            {"table": key[0], "name": key[1], **asdict(kind)} for key, kind in self._kinds.items()
        ]
        content = {
            "version": VERSION,
            "is_dirty": self.is_dirty,
            "arrays": arrays,
            "numbers": self.numbers,
        }
        with appearing_whole(self._manifest) as partial:
            partial.write_text(json.dumps(content, indent=1))

    def _read_manifest(self) -> tuple[dict[Any, Kind], dict[str, Any], bool] | None:
        try:
            return read_manifest(self._manifest)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ColdTierError(
                f"{self._manifest}: cannot be read ({error}); {_begin_anew(self.folder)}"
            ) from error


def _leave_locks() -> None:
    for each in _OPEN:
        each.leave_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


def _words(kind: Kind | None) -> str:
    return "absent" if kind is None else f"{kind.dtype} of shape {kind.shape}"


def _begin_anew(folder: Path) -> str:
    return (
        f"delete {folder}, build the module again and load a checkpoint (load_state_dict), or "
        "train from the start"
    )
