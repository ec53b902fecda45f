"""The files of a checkpoint.

    FOLDER/00000012.json            a manifest: the pieces of a checkpoint, in order
           full-00000010/           a piece: every row of every table
           delta-00000012/          a piece: the rows changed since the checkpoint before it
               block-00000.safetensors    rows of tables
               state.pt                   everything but tables, as `torch.save` writes it
               piece.json                 the files of this piece; written after them

Of several processes, each writes pieces of its own: delta-00000012 is that of the first one, and
delta-00000012-1 that of the second. Rows have the numbers that they have in the whole table, so any
number of processes can read them. Rows that no piece has are zeros: optimizer state of rows that
were never updated.

In a block, `KEY` is the weight of the table with this key, and `KEY/NAME` an array of its
optimizer's state. `KEY.rows`, (M,) int64 ascending, are the numbers of its rows; one number alone
is that of the first of consecutive rows. `recsys export --since` writes the same names.

Manifests and `piece.json` are a line of JSON, and a line with its CRC-32. `piece.json` has the
length and the CRC-32 of every other file.

Files get their names in this order, each on the disk before the next: blocks, `piece.json`, the
manifest. Only then are files deleted that neither this checkpoint nor the one before it needs. So a
crash at any moment leaves the newest complete checkpoint readable: the last manifest.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file

from recsys._support.files import appearing_whole, flush_to_disk, lock_if_free
from recsys._support.safetensors_dtypes import DTYPE_NAMES, DTYPES
from recsys._support.sizes import format_bytes
from recsys._version import __version__
from recsys.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = [
    "BLOCK_BYTES",
    "PIECE_FILE",
    "ROWS",
    "Array",
    "Manifest",
    "Piece",
    "PieceWriter",
    "Rows",
    "Table",
    "array_name",
    "commit",
    "last_number",
    "manifest_numbers",
    "newest",
    "piece_number",
    "read_blocks",
    "read_checkpoint",
    "read_manifest",
    "read_piece",
    "read_state",
    "remove_unneeded",
    "require_space",
    "safetensors_header",
    "whole_tables",
]

BLOCK_BYTES = 16 * 2**20
_STATE_FILE, PIECE_FILE = "state.pt", "piece.json"
ROWS = ".rows"
_PIECE_NAME = re.compile(r"(full|delta)-([0-9]{8})(-[0-9]+)?")
_PARTIAL_NAME = re.compile(r"[0-9]{8}\.json\.partial")
_VERSION = 4
_READ_BYTES = 4 * 2**20
_MANIFEST_NAME = re.compile(r"[0-9]{8}\.json")


class Array(NamedTuple):
    """The rows of an array of a table.

    Attributes:
        dtype: A key of `DTYPES`.
        row_shape: The shape of a row.
    """

    dtype: str
    row_shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return prod(self.row_shape) * DTYPES[self.dtype].itemsize


class Table(NamedTuple):
    """The rows of a table that one process has.

    Attributes:
        begin: Number of the first row in the whole table.
        end: Number of the row after the last one.
        arrays: "weight", then the arrays of the optimizer's state by their names there.
    """

    begin: int
    end: int
    arrays: dict[str, Array]


class File(NamedTuple):
    """A file of a piece: its name, its length and the CRC-32 of its content."""

    name: str
    num_bytes: int
    crc32: int


class Piece(NamedTuple):
    """The files that one process wrote together.

    Attributes:
        name: The name of their folder.
        tables: The tables of the process, by key, also those of which no row is in this piece.
        files: Length and checksum of each.
    """

    name: str
    tables: dict[str, Table]
    files: list[File]


class Manifest(NamedTuple):
    """A checkpoint.

    Attributes:
        number: Checkpoints of a folder are numbered from 1.
        id: Sixteen random hexadecimal digits: tells checkpoints with equal numbers apart.
        before: The checkpoint that was saved before it, which is kept, too; 0 if there is none.
        since: Number and id of earlier checkpoints, oldest first, whose later changes are the
            deltas with higher numbers.
        pieces: Bytes of each piece by its name, in the order in which they are applied.
    """

    number: int
    id: str
    before: int
    since: list[tuple[int, str]]
    pieces: dict[str, int]

    @property
    def deltas(self) -> list[str]:
        """The pieces that were written at this checkpoint: one of each process, by rank."""
        return [name for name in self.pieces if name.startswith(f"delta-{self.number:08}")]

    @property
    def has_large_deltas(self) -> bool:
        """Whether a new full piece saves space, and time when the run is continued."""
        of_full = sum(size for name, size in self.pieces.items() if name.startswith("full"))
        return sum(self.pieces.values()) - of_full > max(of_full, BLOCK_BYTES)


class Rows(NamedTuple):
    """Rows of a table in a block.

    Attributes:
        key: The table.
        rows: Their numbers, (M,) int64 ascending; one alone is the first of consecutive rows.
        arrays: The rows of each array, (M, ...).
    """

    key: str
    rows: Tensor
    arrays: dict[str, Tensor]


def array_name(key: str, array: str) -> str:
    """The name of an array of a table in a block."""
    return key if array == "weight" else f"{key}/{array}"


def piece_number(name: str) -> int:
    """The number of the checkpoint that a piece was written for."""
    return int(name.split("-")[1])


def manifest_numbers(folder: Path) -> list[int]:
    """Numbers of the checkpoints in a folder that have a manifest, ascending."""
    return sorted(
        int(path.stem) for path in folder.glob("*.json") if _MANIFEST_NAME.fullmatch(path.name)
    )


def last_number(folder: Path) -> int:
    """The highest number in a folder, also of pieces that no manifest names; 0 if it is empty."""
    names = [path.name for path in folder.glob("*-*") if _PIECE_NAME.fullmatch(path.name)]
    return max([0, *map(piece_number, names), *manifest_numbers(folder)])


def newest(folder: Path) -> int | None:
    """Number of the newest complete checkpoint in a folder; None if there is none.

    A manifest is written after its pieces, so the checkpoint of each that exists is complete.
    """
    return max(manifest_numbers(folder), default=None)


def _write_checked(file: Path, content: Manifest | Piece) -> None:
    """Write a manifest or the list of a piece's files atomically."""
    text = json.dumps({"version": _VERSION, "recsys": __version__, **content._asdict()})
    with appearing_whole(file) as partial:
        partial.write_text(f"{text}\n{zlib.crc32(text.encode())}\n")


def _read_checked(file: Path) -> Any:
    """The content of a file that `_write_checked` wrote.

    The version is compared first, since another one may have other lines.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    try:
        text, _, crc32 = file.read_text(encoding="utf-8").partition("\n")
        content = json.loads(text)
        version, writer = content["version"], content["recsys"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:500]}"
        raise CheckpointError(f"{file}: cannot be read ({reason})") from error
    if version != _VERSION:
        raise CheckpointError(
            f"{file}: version must be {_VERSION}, got {version}: another recsys wrote this "
            f"checkpoint ({writer}), and this is recsys {__version__}; load it with that one"
        )
    if crc32 != f"{zlib.crc32(text.encode())}\n":
        raise CheckpointError(f"{file}: is damaged: its checksum is missing or differs")
    return content


def read_manifest(folder: Path, number: int) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another version.
    """
    content = _read_checked(folder / f"{number:08}.json")
    since = [(earlier, name) for earlier, name in content["since"]]
    return Manifest(number, content["id"], content["before"], since, content["pieces"])


def read_piece(folder: Path, name: str) -> Piece:
    """Read the list of a piece's files.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    content = _read_checked(folder / name / PIECE_FILE)
    tables = {
        key: Table(begin, end, {name: Array(*array) for name, array in arrays.items()})
        for key, (begin, end, arrays) in content["tables"].items()
    }
    return Piece(name, tables, [File(*file) for file in content["files"]])


def read_checkpoint(folder: Path, number: int | None = None) -> tuple[Manifest, list[Piece]]:
    """Read a manifest and its pieces, and check the length and the checksum of every file.

    Args:
        folder: The folder of checkpoints.
        number: Number of the checkpoint; None for the newest complete one.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version. The message names
            another one, if there is one.
    """
    number = newest(folder) if number is None else number
    if number is None:
        raise CheckpointError(f"{folder}: has no complete checkpoint; train from the start")
    try:
        manifest = read_manifest(folder, number)
        pieces = [read_piece(folder, name) for name in manifest.pieces]
        for piece in pieces:
            for file in piece.files:
                path = folder / piece.name / file.name
                is_needed = file.name != _STATE_FILE or piece.name in manifest.deltas
                if is_needed and (found := _described(path)) != file:
                    raise CheckpointError(  # noqa: TRY301  # gets the hint below
                        f"{path}: is damaged: its {found.num_bytes} bytes have the CRC-32 "
                        f"{found.crc32}, and {file.num_bytes} with {file.crc32} were written"
                    )
    except (CheckpointError, OSError) as error:
        others = [other for other in manifest_numbers(folder) if other != number]
        hint = (
            f"load checkpoint {others[-1]} by its number (--checkpoint {others[-1]})"
            if others
            else "train from the start: this folder has no other checkpoint"
        )
        raise CheckpointError(f"{error}; {hint}") from error
    return manifest, pieces


def _described(path: Path) -> File:
    """The length and the checksum of a file."""
    crc32 = num_bytes = 0
    with path.open("rb") as opened:
        while content := opened.read(_READ_BYTES):
            crc32 = zlib.crc32(content, crc32)
            num_bytes += len(content)
    return File(path.name, num_bytes, crc32)


def whole_tables(manifest: Manifest, pieces: Sequence[Piece]) -> dict[str, Table]:
    """The tables of a checkpoint, of all processes, with the number of all rows as their end."""
    found: dict[str, Table] = {}
    for piece in pieces:
        if piece.name in manifest.deltas:
            for key, table in piece.tables.items():
                known = found.get(key, table)
                end, arrays = max(known.end, table.end), known.arrays | table.arrays
                found[key] = Table(0, end, arrays)
    return found


def safetensors_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and where each tensor begins in the file.

    Our own, because `safetensors.torch.save` copies all tensors while it holds the interpreter's
    lock, so that training would wait.

    Args:
        tensors: Dtype and shape of each tensor, by name, in the order of their data.
        metadata: Further texts.
    """
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begins[name], end = end, end + prod(shape) * dtype.itemsize
        offsets = [begins[name], end]
        content[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def read_blocks(folder: Path, piece: Piece) -> Iterator[Rows]:
    """The rows of a piece, block by block; `read_checkpoint` has checked its files."""
    for file in piece.files:
        if file.name != _STATE_FILE:
            tensors = load_file(folder / piece.name / file.name)
            for key in piece.tables.keys() & tensors.keys():
                arrays = {
                    name: tensors[array_name(key, name)]
                    for name in piece.tables[key].arrays
                    if array_name(key, name) in tensors
                }
                yield Rows(key, tensors[key + ROWS], arrays)


def read_state(folder: Path, piece: str, *, is_mapped: bool = False) -> dict[str, Any]:
    """Everything but tables, on the CPU.

    Args:
        folder: The folder of checkpoints.
        piece: Name of the piece.
        is_mapped: Read tensors from the file when they are used; it must stay meanwhile.

    Raises:
        CheckpointError: the file cannot be read.
    """
    file = folder / piece / _STATE_FILE
    try:
        state: dict[str, Any] = torch.load(
            file, map_location="cpu", weights_only=True, mmap=is_mapped
        )
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    return state


class PieceWriter:
    """Writes one piece; the first error ends it and removes its files.

    Args:
        folder: The folder of checkpoints.
        name: Name of the piece.
        tables: As in `Piece`.

    Attributes:
        path: The folder of the piece.
        tables: As given.
        error: What ended it; None while all is well.
    """

    def __init__(self, folder: Path, name: str, tables: dict[str, Table]) -> None:
        self.path, self.tables = folder / name, tables
        self.error: Exception | None = None
        self._files: list[File] = []

    def run(self, step: Callable[..., None], *given: Any) -> None:
        """Do one step of writing, unless an earlier one has failed."""
        if self.error is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            step(*given)
        except Exception as error:  # the thread goes on, and training is told
            self.error = error
            self.remove()

    def write_rows(self, tensors: Mapping[str, Tensor]) -> None:
        """Write a block, straight from the memory of CPU tensors, and flush it to the disk."""
        path = self.path / f"block-{len(self._files):05}.safetensors"
        header, _ = safetensors_header(
            {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        )
        flat = (tensor.contiguous().view(-1) for tensor in tensors.values())
        contents: list[Any] = [header, *(values.view(torch.uint8).numpy() for values in flat)]
        crc32 = 0
        with path.open("wb") as file:
            for content in contents:
                file.write(content)
                crc32 = zlib.crc32(content, crc32)
            file.flush()
            os.fsync(file.fileno())
            # Written pages that leave the system's cache at once are used again for the next
            # block: that takes half of the processor time of writing.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._files.append(File(path.name, file.tell(), crc32))

    def write_state(self, state: dict[str, Any]) -> None:
        """Write everything but tables: in the training thread, because it is not copied."""
        with (self.path / _STATE_FILE).open("wb") as file:
            torch.save(state, file)

    def finish(self) -> None:
        """Flush everything to the disk, and write `piece.json`."""
        state = self.path / _STATE_FILE
        if state.exists():
            flush_to_disk(state)
            self._files.append(_described(state))
        _write_checked(self.path / PIECE_FILE, Piece(self.path.name, self.tables, self._files))
        flush_to_disk(self.path.parent)

    def remove(self) -> None:
        """Remove the files that were written so far."""
        shutil.rmtree(self.path, ignore_errors=True)


def commit(folder: Path, manifest: Manifest) -> None:
    """Write a manifest whose pieces are on the disk: now it is the newest one.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    file = folder / f"{manifest.number:08}.json"
    try:
        _write_checked(file, manifest)
    except OSError:
        if not file.is_file():  # else only flushing its name has failed
            raise


def remove_unneeded(folder: Path, *, unfinished: bool = False) -> None:
    """Delete everything that neither the newest checkpoint nor the one before it needs.

    Files that cannot be deleted stay, and all stay while another process reads the folder.

    Args:
        folder: The folder of checkpoints.
        unfinished: Also delete pieces that are newer, which a process that was killed has left.
    """
    with suppress(OSError, CheckpointError), lock_if_free(folder) as is_locked:
        if not is_locked:  # the next checkpoint deletes them
            return
        last = newest(folder) or 0
        kept = [read_manifest(folder, last)] if last else []
        if kept and kept[0].before in manifest_numbers(folder):
            kept.append(read_manifest(folder, kept[0].before))
        numbers = {manifest.number for manifest in kept}
        needed = {name for manifest in kept for name in manifest.pieces}
        for number in manifest_numbers(folder):
            if number not in numbers:
                (folder / f"{number:08}.json").unlink(missing_ok=True)
        for path in folder.iterdir():
            if _PIECE_NAME.fullmatch(path.name):
                if path.name not in needed and (unfinished or piece_number(path.name) <= last):
                    shutil.rmtree(path, ignore_errors=True)
            elif _PARTIAL_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin a piece that the disk has no room for.

    Raises:
        OSError: there is too little space.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"{folder}: {format_bytes(num_bytes)} are needed, and {format_bytes(free)} are free "
            f"({os.strerror(errno.ENOSPC)})",
        )
