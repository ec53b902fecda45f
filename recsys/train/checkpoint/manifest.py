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

A manifest is a line of JSON and a line with its CRC-32. The version is compared first, since
another one may have other lines. Then damage is found before any other value is used.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from recsys._support.files import appearing_whole
from recsys._support.safetensors_dtypes import DTYPE_NAMES, DTYPES
from recsys._version import __version__
from recsys.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

__all__ = [
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
    "set_newest",
    "write_manifest",
]

_VERSION = 2
PIECE_NAME = re.compile(r"(full|delta)-[0-9]{8}")
_MANIFEST_NAME = re.compile(r"[0-9]{8}\.json")
OWN_FILE_NAME = re.compile(r"LOCK|(LAST|[0-9]{8}\.json)(\.partial)?")


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
        OSError: the disk is full, or cannot be written.
    """
    content = {
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
    with appearing_whole(folder / manifest.name) as partial:
        partial.write_text(f"{text}\n{zlib.crc32(text.encode())}\n")


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
        text, _, crc32 = file.read_text(encoding="utf-8").partition("\n")
        content = json.loads(text)
        if content["version"] == _VERSION:
            if crc32.strip() != str(zlib.crc32(text.encode())):
                raise ValueError("its checksum is missing or differs")  # noqa: TRY301
            found = _parse(content)
            if found.number != number:
                raise ValueError(f"it is the manifest of checkpoint {found.number}")  # noqa: TRY301
            return found
        fault = f"{file}: version must be {_VERSION}, got {content['version']}: " + (
            f"recsys {content['recsys']} wrote this checkpoint, and this is recsys {__version__}; "
            "update recsys"
            if content["version"] > _VERSION
            else "an older recsys wrote this checkpoint; load it with that one, or train from the "
            "start"
        )
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: there is no checkpoint {number}; {_advice(folder, number)}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: is not a manifest that this version of recsys can read "
            f"({type(error).__name__}: {str(error)[:500]}); {_advice(folder, number)}"
        ) from error
    raise CheckpointError(fault)


def _advice(folder: Path, number: int | None) -> str:
    """The way out: which other checkpoints there are."""
    others = [str(each) for each in manifest_numbers(folder) if each != number]
    if not others:
        return "there is no other one; train from the start, or copy one here from elsewhere"
    return f"load another by its number, {' or '.join(others)} (--checkpoint {others[-1]})"


def _parse(content: Any) -> Manifest:
    """The manifest that `write_manifest` wrote."""
    pieces = [
        Piece(
            piece["folder"],
            piece["number"],
            tuple(
                Block(
                    block["file"],
                    block["num_bytes"],
                    block["crc32"],
                    tuple(Part(*part) for part in block["parts"]),
                )
                for block in piece["blocks"]
            ),
        )
        for piece in content["pieces"]
    ]
    return Manifest(
        content["number"],
        content["id"],
        tuple((number, name) for number, name in content["before"]),
        {name: Array(dtype, tuple(shape)) for name, (dtype, shape) in content["arrays"].items()},
        {key: tuple(names) for key, names in content["tables"].items()},
        tuple(pieces),
        content["state"],
    )
