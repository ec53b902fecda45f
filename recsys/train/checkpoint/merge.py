"""Merges a full piece and the deltas after it into a new full piece.

Works on files alone, so training goes on meanwhile. The base is read block by block. Of each delta,
the row numbers of one block are in memory at a time; its rows are read when they are needed.

The merged piece also has `changed/KEY`, (E,) int32: the number of the checkpoint before which each
row of a table was last updated. `recsys export --since` reads it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys.train.checkpoint.blocks import BlockBuilder, check_block, read_block
from recsys.train.checkpoint.manifest import DTYPES, Array, Part, changed_name

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.train.checkpoint.blocks import PieceWriter
    from recsys.train.checkpoint.manifest import Block, Manifest, Piece

__all__ = ["DeltaRows", "delta_rows", "merge", "merged_arrays", "read_header"]


def merged_arrays(manifest: Manifest) -> dict[str, Array]:
    """The arrays of a merged checkpoint."""
    numbers = {
        changed_name(key): Array("I32", (manifest.arrays[names[0]].num_rows,))
        for key, names in manifest.tables.items()
    }
    return {**manifest.arrays, **numbers}


def merge(folder: Path, manifest: Manifest, writer: PieceWriter) -> Generator[None]:
    """Write a full piece that replaces all pieces of a checkpoint; yields after each block.

    Args:
        folder: The folder of checkpoints.
        manifest: The checkpoint.
        writer: Writes the new piece.

    Raises:
        CheckpointError: a file is damaged.
        OSError: the disk is full, or cannot be written.
    """
    base, *deltas = manifest.pieces
    for piece in deltas:
        for block in piece.blocks:
            check_block(folder, piece, block)
            yield
    builder = BlockBuilder(writer.write)
    tables = {names[0]: key for key, names in manifest.tables.items()}
    of_table: tuple[str, list[DeltaRows]] = "", []
    for block in base.blocks:
        tensors = read_block(folder, base, block, merged_arrays(manifest))
        for part in block.parts:
            if part.array not in tables:
                continue
            key = tables[part.array]
            if of_table[0] != key:
                of_table = key, delta_rows(folder, deltas, key)
            found = _rows_of_base(manifest, key, part, tensors, base.number)
            for delta in of_table[1]:
                delta.write_to(found, part.begin, part.end)
            builder.add(found, [Part(name, part.begin, part.end) for name in found])
            yield
    of_tables = {name for names in manifest.tables.values() for name in names}
    for block in deltas[-1].blocks if deltas else ():
        tensors = read_block(folder, deltas[-1], block, manifest.arrays)
        for part in block.parts:
            if part.array not in of_tables:
                builder.add({part.array: tensors[part.array]}, [part])
        yield
    builder.flush()


def _rows_of_base(
    manifest: Manifest, key: str, part: Part, tensors: Mapping[str, Tensor], number: int
) -> dict[str, Tensor]:
    """Rows of all arrays of a table as the base has them; zeros for state that it does not have."""
    count = part.end - part.begin
    found = {}
    for name in manifest.tables[key]:
        array = manifest.arrays[name]
        known = tensors.get(name)
        if known is None:
            known = torch.zeros(count, *array.shape[1:], dtype=DTYPES[array.dtype])
        found[name] = known
    changed = tensors.get(changed_name(key))
    found[changed_name(key)] = (
        torch.full((count,), number, dtype=torch.int32) if changed is None else changed
    )
    return found


class DeltaRows:
    """The rows of one table in one block of a delta; nothing is read before it is needed."""

    def __init__(self, folder: Path, piece: Piece, block: Block, parts: Sequence[Part]) -> None:
        self._path = folder / piece.folder / block.file
        self._number = piece.number
        self._header, self._data = read_header(self._path, block.num_bytes)
        self._parts = parts
        self._key = parts[0].rows.removeprefix("rows/")
        self._rows: NDArray[np.int64] | None = None

    def rows(self) -> NDArray[np.int64]:
        """Row numbers, (M,) ascending."""
        if self._rows is None:
            content = self._read(self._parts[0].rows, 0, None)
            self._rows = np.frombuffer(content, np.dtype("<i8"))
        return self._rows

    def write_to(self, tensors: Mapping[str, Tensor], begin: int, end: int) -> None:
        """Overwrite the rows of [begin, end) that this delta has.

        Args:
            tensors: Rows [begin, end) of arrays of the table, by their names.
            begin: The first row.
            end: The row after the last one.
        """
        if begin >= self._parts[0].end:
            self._rows = None  # ranges come in order
        if begin >= self._parts[0].end or end <= self._parts[0].begin:
            return
        first, last = np.searchsorted(self.rows(), [begin, end])
        if first == last:
            return
        places = torch.from_numpy(self.rows()[first:last] - begin)
        for part in self._parts:
            if part.array not in tensors:
                continue
            target = tensors[part.array]
            content = bytearray(self._read(part.array, int(first), int(last)))
            values = torch.frombuffer(content, dtype=target.dtype)
            target[places] = values.view(-1, *target.shape[1:])
        changed = tensors.get(changed_name(self._key))
        if changed is not None:
            changed[places] = self._number

    def _read(self, name: str, first: int, last: int | None) -> bytes:
        """Rows [first, last) of a tensor; all rows for None."""
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        num_rows = entry["shape"][0]
        row_bytes = (end - begin) // max(1, num_rows)
        last = num_rows if last is None else last
        with self._path.open("rb") as file:
            file.seek(self._data + begin + first * row_bytes)
            return file.read((last - first) * row_bytes)


def delta_rows(folder: Path, deltas: Sequence[Piece], key: str) -> list[DeltaRows]:
    """The blocks of some deltas that have rows of a table, oldest first."""
    found = []
    for piece in deltas:
        for block in piece.blocks:
            parts = [part for part in block.parts if part.rows == f"rows/{key}"]
            if parts:
                found.append(DeltaRows(folder, piece, block, parts))
    return found


def read_header(path: Path, num_bytes: int) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file that was checked before, and where its data begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        assert length < num_bytes
        return json.loads(file.read(length)), 8 + length
