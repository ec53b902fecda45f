"""Merges a full piece and the deltas after it into a new full piece.

Works on files alone, so training goes on meanwhile. The base is read block by block. Of each delta,
the row numbers of one block are in memory at a time; its rows are read when they are needed.

The merged piece also has `changed/KEY`, (E,) int32: the number of the checkpoint before which each
row of a table was last updated. `recsys export --since` reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys._support.safetensors_dtypes import DTYPES
from recsys.errors import CheckpointError
from recsys.train.checkpoint.blocks import BlockBuilder, check_block, read_block, read_header
from recsys.train.checkpoint.manifest import Array, Part, changed_name

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.train.checkpoint.blocks import PieceWriter
    from recsys.train.checkpoint.manifest import Block, Manifest, Piece

__all__ = ["DeltaRows", "delta_rows", "merge", "merged_arrays"]


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
    names_of_tables = {name for names in manifest.tables.values() for name in names}
    tables = {names[0]: key for key, names in manifest.tables.items()}
    of_table: tuple[str, list[DeltaRows]] = "", []
    for block in base.blocks:
        tensors = read_block(folder, base, block)
        for part in block.parts:
            if part.array not in tables:
                continue
            key = tables[part.array]
            if of_table[0] != key:
                of_table = key, delta_rows(folder, manifest, key)
            names = {*manifest.tables[key], changed_name(key)}
            of_part = {
                each.array: tensors[each.array]
                for each in block.parts
                if each.array in names and (each.begin, each.end) == (part.begin, part.end)
            }
            found = _rows_of_base(manifest, key, part, of_part, base.number)
            for delta in of_table[1]:
                delta.write_to(found, part.begin, part.end)
            builder.add(found, [Part(name, part.begin, part.end) for name in found])
            yield
    for block in deltas[-1].blocks if deltas else ():
        tensors = read_block(folder, deltas[-1], block)
        for part in block.parts:
            if part.array not in names_of_tables:
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
        self._header, _ = read_header(self._path)
        self._parts = parts
        self._key = parts[0].rows.removeprefix("rows/")
        self._rows: NDArray[np.int64] | None = None

    def rows(self) -> NDArray[np.int64]:
        """Row numbers, (M,) ascending."""
        if self._rows is None:
            part = self._parts[0]
            content = self._read(part.rows, 0, self._header[part.rows].shape[0])
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

    def _read(self, name: str, first: int, last: int) -> bytes:
        """Rows [first, last) of a tensor."""
        entry = self._header[name]
        row_bytes = entry.num_bytes // max(1, entry.shape[0])
        with self._path.open("rb") as file:
            file.seek(entry.begin + first * row_bytes)
            content = file.read((last - first) * row_bytes)
        if len(content) < (last - first) * row_bytes:
            raise CheckpointError(f"{self._path}: was cut off while it was read")
        return content


def delta_rows(folder: Path, manifest: Manifest, key: str, after: int = 0) -> list[DeltaRows]:
    """The blocks of deltas that have rows of a table, oldest first.

    Args:
        folder: The folder of checkpoints.
        manifest: The checkpoint.
        key: Key of the table.
        after: Deltas of this checkpoint, and of those before it, are left out.
    """
    found = []
    for piece in manifest.pieces[1:]:
        for block in piece.blocks if piece.number > after else ():
            parts = [part for part in block.parts if part.rows == f"rows/{key}"]
            if parts:
                found.append(DeltaRows(folder, piece, block, parts))
    return found
