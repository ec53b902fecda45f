"""The files of a checkpoint.

    FOLDER/LAST                     name of the newest complete manifest
           00000012.json            a manifest: the pieces of a checkpoint, in order
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
optimizer's state. `KEY.rows`, (M,) int64 ascending, are the numbers of its rows. Without `KEY.rows`
the block has a range of rows, which `piece.json` names. `recsys export --since` writes the same
names.

Manifests and `piece.json` are a line of JSON, and a line with its CRC-32. `piece.json` has the
length and the CRC-32 of every other file.
"""

from __future__ import annotations

import json
import re
import zlib
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load as load_safetensors

from recsys._support.files import appearing_whole
from recsys._support.safetensors_dtypes import DTYPE_NAMES, DTYPES
from recsys._version import __version__
from recsys.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

__all__ = [
    "BLOCK_BYTES",
    "OWN_NAME",
    "PIECE_FILE",
    "PIECE_NAME",
    "ROWS",
    "STATE_FILE",
    "Array",
    "File",
    "Manifest",
    "Piece",
    "Rows",
    "Table",
    "array_name",
    "check_file",
    "is_finished",
    "last_number",
    "manifest_numbers",
    "newest",
    "piece_number",
    "read_blocks",
    "read_manifest",
    "read_piece",
    "read_state",
    "row_ranges",
    "safetensors_header",
    "set_newest",
    "write_checked",
]

BLOCK_BYTES = 16 * 2**20
STATE_FILE, PIECE_FILE = "state.pt", "piece.json"
ROWS = ".rows"
PIECE_NAME = re.compile(r"(full|delta)-([0-9]{8})(-[0-9]+)?")
OWN_NAME = re.compile(r"LOCK|(LAST|[0-9]{8}\.json)(\.partial)?")
_VERSION = 3
_MANIFEST_NAME = re.compile(r"[0-9]{8}\.json")
_READ_BYTES = 4 * 2**20


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
    """A file of a piece.

    Attributes:
        name: Its name in the piece's folder.
        num_bytes: Its length.
        crc32: CRC-32 of its content.
        rows: For each table in it: its key, the first row, and the row after the last one.
    """

    name: str
    num_bytes: int
    crc32: int
    rows: tuple[tuple[str, int, int], ...] = ()


class Piece(NamedTuple):
    """The files that one process wrote together.

    Attributes:
        name: The name of their folder.
        tables: The tables of the process, by key, also those of which no row is in this piece.
        files: Length and checksum of each.
    """

    name: str
    tables: dict[str, Table]
    files: tuple[File, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)


class Manifest(NamedTuple):
    """A checkpoint.

    Attributes:
        number: Checkpoints of a folder are numbered from 1.
        id: Sixteen random hexadecimal digits: tells checkpoints with equal numbers apart.
        before: The checkpoint that was saved before it, which is kept, too; 0 if there is none.
        since: Number and id of earlier checkpoints, oldest first, whose later changes are the
            deltas with higher numbers.
        pieces: Names of the pieces, in the order in which they are applied.
    """

    number: int
    id: str
    before: int
    since: tuple[tuple[int, str], ...]
    pieces: tuple[str, ...]

    @property
    def deltas(self) -> list[str]:
        """The pieces that were written at this checkpoint: one of each process, by rank."""
        return [name for name in self.pieces if name.startswith(f"delta-{self.number:08}")]


class Rows(NamedTuple):
    """Rows of a table in a block.

    Attributes:
        key: The table.
        begin: The first row.
        end: The row after the last one.
        rows: Their numbers, (M,) int64 ascending; None for all from `begin` to `end`.
        arrays: The rows of each array, (M, ...).
    """

    key: str
    begin: int
    end: int
    rows: Tensor | None
    arrays: dict[str, Tensor]


def row_ranges(num_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Divide rows into ranges of at most `BLOCK_BYTES`; a row is never divided."""
    count = max(1, BLOCK_BYTES // max(1, row_bytes))
    return [(begin, min(begin + count, num_rows)) for begin in range(0, num_rows, count)]


def is_finished(folder: Path, piece: str) -> bool:
    """Whether all files of a piece were written."""
    return (folder / piece / PIECE_FILE).is_file()


def array_name(key: str, array: str) -> str:
    """The name of an array of a table in a block."""
    return key if array == "weight" else f"{key}/{array}"


def piece_number(name: str) -> int:
    """The number of the checkpoint that a piece was written for."""
    return int(name.split("-")[1])


def manifest_numbers(folder: Path) -> list[int]:
    """Numbers of the checkpoints in a folder that have a manifest, ascending."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if _MANIFEST_NAME.fullmatch(path.name)]
    return sorted(int(name.removesuffix(".json")) for name in names)


def last_number(folder: Path) -> int:
    """The highest number in a folder, also of pieces that no manifest names; 0 if it is empty."""
    if not folder.is_dir():
        return 0
    names = [path.name for path in folder.iterdir() if PIECE_NAME.fullmatch(path.name)]
    return max([0, *map(piece_number, names), *manifest_numbers(folder)])


def newest(folder: Path) -> int | None:
    """Number of the newest complete checkpoint in a folder; None if there is none.

    Raises:
        CheckpointError: the file `LAST` is damaged.
    """
    file = folder / "LAST"
    try:
        with file.open("rb") as opened:
            name = opened.read(100).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        # A manifest is written after its pieces, so the checkpoint of each that exists is complete.
        return max(manifest_numbers(folder), default=None)
    if not _MANIFEST_NAME.fullmatch(name):
        raise CheckpointError(
            f"{file}: must be the name of a manifest such as 00000012.json, got {name!r}; "
            f"{_others(folder, None)}"
        )
    return int(name.removesuffix(".json"))


def set_newest(folder: Path, number: int) -> None:
    """Name the newest complete checkpoint; its files must be on the disk."""
    with appearing_whole(folder / "LAST") as partial:
        partial.write_text(f"{number:08}.json\n")


def write_checked(file: Path, content: Manifest | Piece) -> None:
    """Write a manifest or the list of a piece's files atomically.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    text = json.dumps({"version": _VERSION, "recsys": __version__, **content._asdict()})
    with appearing_whole(file) as partial:
        partial.write_text(f"{text}\n{zlib.crc32(text.encode())}\n")


def _read_checked(file: Path, hint: str) -> Any:
    """The content of a file that `write_checked` wrote.

    The version is compared first, since another one may have other lines.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    try:
        text, _, crc32 = file.read_text(encoding="utf-8").partition("\n")
        content = json.loads(text)
        if content["version"] != _VERSION:
            hint = (
                f"another recsys wrote this checkpoint ({content['recsys']}), and this is recsys "
                f"{__version__}; load it with that one, or train from the start"
            )
            raise ValueError(f"version must be {_VERSION}, got {content['version']}")  # noqa: TRY301
        if crc32 != f"{zlib.crc32(text.encode())}\n":
            raise ValueError("its checksum is missing or differs")  # noqa: TRY301
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); {hint}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: cannot be read ({type(error).__name__}: {str(error)[:500]}); {hint}"
        ) from error
    return content


def read_manifest(folder: Path, number: int | None = None) -> Manifest:
    """Read a manifest.

    Args:
        folder: The folder of checkpoints.
        number: Number of the checkpoint; None for the newest complete one.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another version.
    """
    number = newest(folder) if number is None else number
    if number is None:
        raise CheckpointError(
            f"{folder}: has no complete checkpoint (no file LAST); train until one is written"
        )
    content = _read_checked(folder / f"{number:08}.json", _others(folder, number))
    since = tuple((earlier, name) for earlier, name in content["since"])
    return Manifest(number, content["id"], content["before"], since, tuple(content["pieces"]))


def read_piece(folder: Path, name: str) -> Piece:
    """Read the list of a piece's files.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    content = _read_checked(folder / name / PIECE_FILE, "the checkpoint is not complete")
    tables = {
        key: Table(begin, end, {array: Array(*each) for array, each in arrays.items()})
        for key, (begin, end, arrays) in content["tables"].items()
    }
    files = tuple(File(*each) for each in content["files"])
    return Piece(name, tables, files)


def _others(folder: Path, number: int | None) -> str:
    """The hint of an error: which other checkpoints there are."""
    others = [str(each) for each in manifest_numbers(folder) if each != number]
    if not others:
        return "there is no other one; train from the start, or copy one here from elsewhere"
    return f"load another by its number, {' or '.join(others)} (--checkpoint {others[-1]})"


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

    Raises:
        CheckpointError: the file cannot hold a dtype.
    """
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{name}: a safetensors file holds {sorted(map(str, DTYPE_NAMES))}, got {dtype}; "
                "convert it"
            )
        begins[name], end = end, end + prod(shape) * dtype.itemsize
        offsets = [begins[name], end]
        content[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def check_file(folder: Path, piece: str, file: File) -> None:
    """Check the length and the checksum of a file.

    Raises:
        CheckpointError: it is missing, cut off or changed.
    """
    for _ in _content_of(folder / piece / file.name, file, _READ_BYTES):
        pass


def read_blocks(folder: Path, piece: Piece) -> Iterator[Rows]:
    """The rows of a piece, block by block.

    Raises:
        CheckpointError: a file is missing, cut off or changed.
    """
    for file in piece.files:
        if not file.rows:
            continue
        content = b"".join(_content_of(folder / piece.name / file.name, file, file.num_bytes))
        tensors: dict[str, Tensor] = load_safetensors(content)
        for key, begin, end in file.rows:
            arrays = {
                name: tensors[array_name(key, name)]
                for name in piece.tables[key].arrays
                if array_name(key, name) in tensors
            }
            yield Rows(key, begin, end, tensors.get(key + ROWS), arrays)


def read_state(folder: Path, piece: str, *, is_mapped: bool = False) -> dict[str, Any]:
    """Everything but tables, on the CPU.

    Args:
        folder: The folder of checkpoints.
        piece: Name of the piece.
        is_mapped: Read tensors from the file when they are used; it must stay meanwhile.

    Raises:
        CheckpointError: the file cannot be read.
    """
    file = folder / piece / STATE_FILE
    try:
        state: dict[str, Any] = torch.load(
            file, map_location="cpu", weights_only=True, mmap=is_mapped
        )
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    return state


def _content_of(path: Path, file: File, num_bytes: int) -> Iterator[bytes]:
    """The content of a file, so many bytes at a time; its length is checked first.

    Raises:
        CheckpointError: as for `check_file`.
    """
    crc32 = 0
    try:
        found = path.stat().st_size
        if found != file.num_bytes:
            raise CheckpointError(f"{path}: must have {file.num_bytes} bytes, has {found}")
        with path.open("rb") as opened:
            while content := opened.read(num_bytes):
                crc32 = zlib.crc32(content, crc32)
                yield content
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if crc32 != file.crc32:
        raise CheckpointError(f"{path}: is damaged: its checksum differs")
