"""The manifest of a checkpoint: which arrays it has, and which files their rows are in.

    FOLDER/LAST                    name of the newest complete manifest
           00000012.json           a manifest; the one before is kept, too
           full-00000010/          a piece: block files with every row of every table
           delta-00000012/         a piece: the rows updated since the checkpoint before

A checkpoint is the pieces that its manifest names, applied in order. Each block file is a
safetensors file. The manifest has its length, its checksum and its parts: a range of an array's
rows, or some rows of a table with their numbers. Rows that no piece has are zeros: the optimizer's
state of rows that were never updated. One file may hold any range of rows, so several processes
can write one checkpoint, and another number of processes can read it.

A manifest may come from a stranger. So every value is checked, and file names stay in the folder.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from recsys._support.files import appearing_whole
from recsys._support.safetensors_dtypes import DTYPE_NAMES, DTYPES
from recsys._support.untrusted import is_text
from recsys._version import __version__
from recsys.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

__all__ = [
    "MOST_ROW_BYTES",
    "OWN_FILE_NAME",
    "PIECE_NAME",
    "Array",
    "Block",
    "Manifest",
    "Part",
    "Piece",
    "changed_name",
    "dtype_name",
    "last_number",
    "manifest_numbers",
    "newest",
    "read_manifest",
    "require_own",
    "set_newest",
    "write_manifest",
]

_FORMAT, _VERSION = "recsys-checkpoint", 1
_MAX_MANIFEST_BYTES, _MOST_DIMENSIONS = 256 * 2**20, 64
MAX_BLOCK_BYTES = 2**30
MOST_ROW_BYTES = MAX_BLOCK_BYTES - 2**26  # a block has a header, too
PIECE_NAME = re.compile(r"(full|delta)-[0-9]{8}")
_BLOCK_NAME = re.compile(r"block-[0-9]{5,9}\.safetensors")
_MANIFEST_NAME = re.compile(r"[0-9]{8}\.json")
OWN_FILE_NAME = re.compile(r"LOCK|(LAST|[0-9]{8}\.json)(\.partial)?")
_ID = re.compile(r"[0-9a-f]{16}")


def dtype_name(dtype: torch.dtype, place: str) -> str:
    """The name of a dtype in a block file.

    Raises:
        CheckpointError: checkpoints cannot hold this dtype.
    """
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{place}: a checkpoint holds tensors of {sorted(map(str, DTYPE_NAMES))}, got {dtype}; "
            "convert it"
        )
    return DTYPE_NAMES[dtype]


@dataclass(frozen=True)
class Array:
    """An array of a checkpoint.

    Attributes:
        dtype: A key of `DTYPES`.
        shape: The shape; the first dimension counts rows. A single number has the shape ().
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows; 1 for a single number."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class Part:
    """Rows of one array in a block: a range, or some rows with their numbers.

    Attributes:
        array: Name of the array, and of the tensor in the block.
        begin: The first row of the range.
        end: The row after the last one.
        rows: Name of the tensor with the row numbers, (M,) int64 ascending, all in the range; ""
            if the part is the whole range.
    """

    array: str
    begin: int
    end: int
    rows: str = ""


@dataclass(frozen=True)
class Block:
    """A block file.

    Attributes:
        file: Its name in the piece's folder.
        num_bytes: Its length.
        crc32: CRC-32 of its content.
        parts: What it holds.
    """

    file: str
    num_bytes: int
    crc32: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Piece:
    """Some blocks that were written together.

    Attributes:
        folder: The name of their folder; "full-..." if they have every row of every table.
        number: Number of the checkpoint that they were written for.
        blocks: The blocks.
    """

    folder: str
    number: int
    blocks: tuple[Block, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.num_bytes for block in self.blocks)

    def rows_of_tables(self, tables: Mapping[str, tuple[str, ...]]) -> Piece:
        """The piece as a later checkpoint uses it: only the arrays of tables.

        All other arrays are in the piece that the later checkpoint adds, maybe in other shapes.
        """
        arrays = {changed_name(key) for key in tables}.union(*tables.values())
        kept = (
            replace(block, parts=tuple(part for part in block.parts if part.array in arrays))
            for block in self.blocks
        )
        return replace(self, blocks=tuple(block for block in kept if block.parts))


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Attributes:
        number: Checkpoints of a folder are numbered from 1.
        id: Sixteen random hexadecimal digits: tells checkpoints with equal numbers apart.
        before: Number and id of the checkpoints before it in the same training, oldest first.
        arrays: The arrays by name.
        tables: For each table, by its key in the model's state dict: the names of its arrays, the
            weight first.
        pieces: The pieces, in the order in which they are applied; the first one is full.
        state: A tree of JSON values and references to arrays.
    """

    number: int
    id: str
    before: tuple[tuple[int, str], ...]
    arrays: Mapping[str, Array]
    tables: Mapping[str, tuple[str, ...]]
    pieces: tuple[Piece, ...]
    state: Any

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.number:08}.json"


def changed_name(key: str) -> str:
    """Name of the array with the last change of each row of a table; see `merge`."""
    return f"changed/{key}"


def manifest_numbers(folder: Path) -> list[int]:
    """Numbers of the checkpoints in a folder that have a manifest, ascending."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if _MANIFEST_NAME.fullmatch(path.name)]
    return sorted(int(name.removesuffix(".json")) for name in names)


def last_number(folder: Path) -> int:
    """The highest number in a folder, also of pieces that no manifest names; 0 if it is empty."""
    names = [path.name for path in folder.iterdir()]
    pieces = [int(name[-8:]) for name in names if PIECE_NAME.fullmatch(name)]
    return max([0, *pieces, *manifest_numbers(folder)])


def newest(folder: Path) -> int | None:
    """Number of the newest complete checkpoint in a folder; None if there is none.

    Raises:
        CheckpointError: the file `LAST` is damaged.
    """
    file = folder / "LAST"
    try:
        require_own(folder, file)
        with file.open("rb") as opened:
            name = opened.read(100).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        # A manifest is written after its blocks, so the checkpoint of each that exists is complete.
        return max(manifest_numbers(folder), default=None)
    if not _MANIFEST_NAME.fullmatch(name):
        raise CheckpointError(
            f"{file}: must be the name of a manifest such as 00000012.json, got {name!r}; "
            f"{_advice(folder, None)}"
        )
    return int(name.removesuffix(".json"))


def set_newest(folder: Path, manifest: Manifest) -> None:
    """Name the newest complete checkpoint; its files must be on the disk."""
    with appearing_whole(folder / "LAST") as partial:
        partial.write_text(f"{manifest.name}\n")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest atomically.

    Raises:
        CheckpointError: it is too large to be read again.
        OSError: the disk is full, or cannot be written.
    """
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "recsys": __version__,
        "number": manifest.number,
        "id": manifest.id,
        "before": [list(each) for each in manifest.before],
        "arrays": {name: [each.dtype, list(each.shape)] for name, each in manifest.arrays.items()},
        "tables": {key: list(names) for key, names in manifest.tables.items()},
        "pieces": [
            {
                "folder": piece.folder,
                "number": piece.number,
                "blocks": [
                    {
                        "file": block.file,
                        "num_bytes": block.num_bytes,
                        "crc32": block.crc32,
                        "parts": [
                            [part.array, part.begin, part.end, part.rows] for part in block.parts
                        ],
                    }
                    for block in piece.blocks
                ],
            }
            for piece in manifest.pieces
        ],
        "state": manifest.state,
    }
    text = json.dumps(content, allow_nan=False)
    if len(text) > _MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{folder / manifest.name}: a manifest may have {_MAX_MANIFEST_BYTES} bytes, and this "
            f"one would have {len(text)}; save large lists of numbers as tensors"
        )
    with appearing_whole(folder / manifest.name) as partial:
        partial.write_text(text)


def read_manifest(folder: Path, number: int | None = None) -> Manifest:
    """Read and check a manifest.

    Args:
        folder: The folder of checkpoints.
        number: Number of the checkpoint; None for the newest complete one.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another version.
    """
    if number is None:
        number = newest(folder)
    if number is None:
        raise CheckpointError(
            f"{folder}: has no complete checkpoint (no file LAST); train until one is written"
        )
    file = folder / f"{number:08}.json"
    try:
        require_own(folder, file)
        num_bytes = file.stat().st_size
        if num_bytes > _MAX_MANIFEST_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, and at most {_MAX_MANIFEST_BYTES} are")  # noqa: TRY301
        content = json.loads(file.read_text(encoding="utf-8"))
        _require_no_newer_version(file, content)
        found = _parse(content)
        if found.number != number:
            raise ValueError(f"it is the manifest of checkpoint {found.number}")  # noqa: TRY301
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: there is no checkpoint {number}; {_advice(folder, number)}"
        ) from None
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: is not a manifest that this version of recsys can read "
            f"({type(error).__name__}: {str(error)[:500]}); {_advice(folder, number)}"
        ) from error
    return found


def require_own(folder: Path, file: Path) -> None:
    """Check that a path is an ordinary file, and that no link leads out of the folder.

    Raises:
        CheckpointError: it is not.
        FileNotFoundError: there is no such file.
    """
    if not S_ISREG(file.stat().st_mode):
        raise CheckpointError(f"{file}: must be a file; copy the checkpoint again")
    if not file.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{file}: leads out of {folder}; a checkpoint has no links")


def _advice(folder: Path, number: int | None) -> str:
    """The way out: which other checkpoints there are."""
    others = [str(each) for each in manifest_numbers(folder) if each != number]
    if not others:
        return "there is no other one; train from the start, or copy one here from elsewhere"
    return f"load another by its number, {' or '.join(others)} (--checkpoint {others[-1]})"


def _require_no_newer_version(file: Path, content: Any) -> None:
    """Refuse a checkpoint of a newer version of recsys; another one would be refused, too.

    Raises:
        CheckpointError: it is of a newer version.
    """
    version = content["version"]
    if content["format"] == _FORMAT and type(version) is int and version > _VERSION:
        wrote = content.get("recsys")
        newer = f"recsys {wrote[:50]}" if is_text(wrote) else "a newer version of recsys"
        raise CheckpointError(
            f"{file}: version must be {_VERSION}, got {version}: {newer} wrote this checkpoint, "
            f"and this is recsys {__version__}; update recsys"
        )


def _parse(content: Any) -> Manifest:
    """Check the types and ranges of everything that was read.

    Raises:
        ValueError, KeyError, TypeError: something is missing, or is not as it must be.
    """
    for key, wanted in (("format", _FORMAT), ("version", _VERSION)):
        if content[key] != wanted:
            raise ValueError(f"{key} must be {wanted!r}, got {content[key]!r}")
    arrays = {
        _text(name): _parse_array(name, *description)
        for name, description in content["arrays"].items()
    }
    tables = {_text(key): tuple(map(_text, names)) for key, names in content["tables"].items()}
    keys = {name: key for key, names in tables.items() for name in names}
    for key, names in tables.items():
        _require_table(key, names, arrays)
    number = _count(content["number"], "number")
    if not 1 <= number < 10**8:
        raise ValueError(f"number must lie in [1, 10**8), got {number}")
    kinds = [_text(each["folder"])[:4] for each in content["pieces"]]
    if not kinds or kinds != ["full"] + ["delt"] * (len(kinds) - 1):
        raise ValueError("the first piece must be a full one, and no other")
    pieces = tuple(_parse_piece(each, arrays, keys) for each in content["pieces"])
    if len({piece.folder for piece in pieces}) < len(pieces):
        raise ValueError("a piece may be named once")
    if any(piece.number > number for piece in pieces):
        raise ValueError("a piece must not be of a later checkpoint")
    before = tuple((_count(number, "a number"), _id(name)) for number, name in content["before"])
    numbers = [0, *(each for each, _ in before), number]
    if any(first >= second for first, second in pairwise(numbers)):
        raise ValueError("the checkpoints before must have rising numbers")
    return Manifest(number, _id(content["id"]), before, arrays, tables, pieces, content["state"])


def _parse_array(name: str, dtype: Any, shape: Any) -> Array:
    if dtype not in DTYPES:
        raise ValueError(f"array {name!r}: dtype {dtype!r} is unknown")
    found = Array(dtype, tuple(_count(each, "a dimension") for each in shape[:_MOST_DIMENSIONS]))
    # No dimension of 0 may hide large ones.
    if len(shape) > _MOST_DIMENSIONS or prod(max(1, each) for each in found.shape) > 2**59:
        raise ValueError(f"array {name!r}: shape {str(shape)[:100]} is impossible")
    return found


def _require_table(key: str, names: tuple[str, ...], arrays: Mapping[str, Array]) -> None:
    """Check the arrays of a table.

    State of rows that were never updated is in no file, so its size is checked against the weight.

    Raises:
        ValueError, KeyError: they cannot belong to one table.
    """
    prefix = f"table-state/{key}/"
    is_named = names[:1] == (f"model/{key}",) and len(set(names)) == len(names)
    for name in names[1:]:
        is_named &= name.startswith(prefix) and "/" not in name.removeprefix(prefix)
    if not is_named:
        raise ValueError(f"table {key!r}: arrays {names} are not its own")
    weight = arrays[names[0]]
    for name in names:
        array = arrays[name]
        is_sound = len(array.shape) in (1, 2) and array.num_rows == weight.num_rows
        if not is_sound or not 0 < prod(array.shape[1:]) <= prod(weight.shape[1:]):
            raise ValueError(f"array {name!r}: cannot have shape {array.shape}")
    changed = arrays.get(changed_name(key))
    if changed not in (None, Array("I32", (weight.num_rows,))):
        raise ValueError(f"array {changed_name(key)!r}: must have an I32 number for each row")


def _parse_piece(content: Any, arrays: Mapping[str, Array], keys: Mapping[str, str]) -> Piece:
    folder, number = _text(content["folder"]), _count(content["number"], "a piece's number")
    if not PIECE_NAME.fullmatch(folder) or int(folder[-8:]) != number:
        raise ValueError(
            f"a piece's folder must be like delta-00000012, with its number, got {folder!r}"
        )
    of_rows = {} if folder.startswith("full") else keys
    blocks = tuple(_parse_block(each, arrays, of_rows) for each in content["blocks"])
    if len({block.file for block in blocks}) < len(blocks):
        raise ValueError(f"{folder}: a block may be named once")
    return Piece(folder, number, blocks)


def _parse_block(content: Any, arrays: Mapping[str, Array], of_rows: Mapping[str, str]) -> Block:
    """Parse a block; arrays of `of_rows` must be in it by row numbers, and others in ranges."""
    file = _text(content["file"])
    if not _BLOCK_NAME.fullmatch(file):
        raise ValueError(f"a block must be like block-00012.safetensors, got {file!r}")
    parts = []
    for name, begin, end, rows in content["parts"]:
        part = Part(_text(name), _count(begin, "begin"), _count(end, "end"), _text(rows))
        if not part.begin <= part.end <= arrays[part.array].num_rows:
            raise ValueError(f"{file}: rows [{begin}, {end}) are not rows of {name!r}")
        if rows != (f"rows/{of_rows[name]}" if name in of_rows else ""):
            raise ValueError(f"{file}: {name!r} cannot have row numbers {rows!r}")
        parts.append(part)
    if len({part.array for part in parts}) < len(parts):
        raise ValueError(f"{file}: a block may have an array once")
    num_bytes, crc32 = _count(content["num_bytes"], "num_bytes"), _count(content["crc32"], "crc32")
    if num_bytes > MAX_BLOCK_BYTES:
        raise ValueError(f"{file}: a block has at most {MAX_BLOCK_BYTES} bytes, got {num_bytes}")
    return Block(file, num_bytes, crc32, tuple(parts))


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{what} must be a whole number of at least 0, got {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name must be text, got {value!r}")
    value.encode()  # raises for half of a surrogate pair
    return value


def _id(value: Any) -> str:
    if not _ID.fullmatch(_text(value)):
        raise ValueError(f"an id must be 16 hexadecimal digits, got {value!r}")
    return str(value)
