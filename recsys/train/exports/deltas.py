"""Deltas for a server: the rows of a model that changed between two checkpoints.

    recsys export RUN --to safetensors --checkpoint 7 --out FULL       a whole model
    recsys export RUN --since 7 --out DELTA                            what changed after it
    recsys apply FULL DELTA [DELTA ...] --out FILE                     the whole model of today

All are safetensors files. For each table a delta has `KEY.rows`, (M,) int64 ascending, and `KEY`,
the (M, D) rows; of everything else it has the whole tensor. `since` and `checkpoint` in its
metadata are the numbers of the two checkpoints, and `since_id` and `checkpoint_id` their ids. So a
server knows whether a delta is the next one. Optimizer state is not in these files.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys._support.files import appearing_whole, read_together, require_new
from recsys._support.safetensors_dtypes import DTYPES
from recsys.errors import CheckpointError
from recsys.train.checkpoint.blocks import read_block, read_header, safetensors_header
from recsys.train.checkpoint.manifest import changed_name, read_manifest
from recsys.train.checkpoint.merge import delta_rows
from recsys.train.checkpoint.restore import require_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.train.checkpoint.blocks import Stored
    from recsys.train.checkpoint.manifest import Manifest

__all__ = ["apply_deltas", "export_checkpoint", "export_delta"]

_ROWS = ".rows"
_COPIED_ROWS = 65_536


def export_checkpoint(folder: Path, file: str | Path, number: int | None = None) -> Path:
    """Write the whole model of a checkpoint.

    Args:
        folder: The folder of checkpoints.
        file: A new file.
        number: Number of the checkpoint; None for the newest complete one.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: there is no such checkpoint, or it is damaged.
        OSError: the disk is full, or cannot be written.
    """
    with read_together(folder):
        manifest = read_manifest(folder, number)
        metadata = {"checkpoint": str(manifest.number), "checkpoint_id": manifest.id}
        return _write(folder, manifest, Path(file), metadata, since=None)


def export_delta(folder: Path, file: str | Path, since: int) -> Path:
    """Write the rows that changed after a checkpoint, up to the newest complete one.

    The files of the older checkpoint may be deleted: each row's last change is on record.

    Args:
        folder: The folder of checkpoints.
        file: A new file.
        since: Number of the older checkpoint.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: the newest checkpoint is damaged, or does not continue from `since`.
        OSError: the disk is full, or cannot be written.
    """
    with read_together(folder):
        manifest = read_manifest(folder)
        ids = dict(manifest.before)
        if since not in ids:
            if since == manifest.number:
                raise CheckpointError(
                    f"{folder}: checkpoint {since} is the newest, so nothing has changed since; "
                    "export again after the next checkpoint"
                )
            raise CheckpointError(
                f"{folder}: checkpoint {manifest.number} does not continue from checkpoint "
                f"{since}; the last of those that it continues from are {list(ids)[-5:]}"
            )
        metadata = {
            "since": str(since),
            "since_id": ids[since],
            "checkpoint": str(manifest.number),
            "checkpoint_id": manifest.id,
        }
        return _write(folder, manifest, Path(file), metadata, since=since)


def apply_deltas(full: str | Path, deltas: Sequence[str | Path], file: str | Path) -> Path:
    """Write the model that results from a whole one and the deltas after it.

    Memory does not grow with the model: its file is copied, and rows are replaced in the copy.

    Args:
        full: A file of `export_checkpoint` or `apply_deltas`.
        deltas: Files of `export_delta`, in order.
        file: A new file.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: a file is damaged, or a delta is missing, repeated, or of another model.
        OSError: the disk is full, or cannot be written.
    """
    file = Path(file)
    whole = _Exported.open(Path(full))
    if "since" in whole.metadata:
        raise CheckpointError(
            f"{whole.path}: is a delta, not a whole model; give the model of checkpoint "
            f"{whole.metadata['since']} before it"
        )
    opened = [_Exported.open(Path(delta)) for delta in deltas]
    last = whole
    for each in opened:
        each.require_after(last)
        each.require_fits(whole)
        last = each
    require_new(file)
    num_bytes = sum(each.num_bytes for each in whole.tensors.values())
    metadata = {key: last.metadata[key] for key in ("checkpoint", "checkpoint_id")}
    with appearing_whole(file) as partial:
        with partial.open("wb") as target, whole.path.open("rb") as source:
            header = safetensors_header(
                {
                    name: (each.dtype, each.shape, each.num_bytes)
                    for name, each in whole.tensors.items()
                },
                metadata,
            )
            target.write(header)
            moved = len(header) + num_bytes - whole.path.stat().st_size
            source.seek(whole.path.stat().st_size - num_bytes)
            shutil.copyfileobj(source, target, 4 * 2**20)
            if target.tell() != len(header) + num_bytes:
                raise CheckpointError(f"{whole.path}: was changed while it was read")
        for each in opened:
            each.write_into(partial, moved, whole)
    return file


class _Exported(NamedTuple):
    """A file of this module, checked.

    Attributes:
        path: Its path.
        metadata: The texts in its header.
        tensors: The tensors, in the order of their data.
    """

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, Stored]

    @classmethod
    def open(cls, path: Path) -> _Exported:
        """Open a file.

        Raises:
            CheckpointError: it was not written by this module, or it is damaged.
        """
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: must be a file")
        tensors, metadata = read_header(path)
        if not {"checkpoint", "checkpoint_id"} <= metadata.keys():
            raise CheckpointError(
                f"{path}: does not say of which checkpoint it is; write it by `recsys export RUN "
                "--to safetensors --checkpoint NUMBER`"
            )
        return cls(path, metadata, tensors)

    @property
    def checkpoint(self) -> tuple[str, str]:
        """Number and id of its checkpoint."""
        return self.metadata["checkpoint"], self.metadata["checkpoint_id"]

    def require_after(self, other: _Exported) -> None:
        """Check that this is the delta after another file.

        Raises:
            CheckpointError: it is not.
        """
        if "since" not in self.metadata:
            raise CheckpointError(f"{self.path}: is a whole model, not a delta; give it first")
        since = self.metadata["since"], self.metadata.get("since_id", "")
        if since != other.checkpoint:
            number, is_other = since[0], since[0] == other.metadata["checkpoint"]
            raise CheckpointError(
                f"{self.path}: continues from checkpoint {number}"
                f"{' of another training' if is_other else ''}, and {other.path} is checkpoint "
                f"{other.metadata['checkpoint']}; a delta between them is missing, one is given "
                "twice, or they are of two trainings: give each delta once, in order"
            )

    def require_fits(self, whole: _Exported) -> None:
        """Check that every tensor belongs to a tensor of the whole model.

        Raises:
            CheckpointError: one does not.
        """
        for name, each in self.tensors.items():
            is_rows = name.endswith(_ROWS) and name.removesuffix(_ROWS) in self.tensors
            target = whole.tensors.get(name.removesuffix(_ROWS) if is_rows else name)
            rows = self.tensors.get(name + _ROWS)
            if target is None:
                fault = "which the whole model does not have"
            elif is_rows:
                fits = each.dtype == "I64" and len(each.shape) == 1
                fault = "" if fits else "whose row numbers must be (M,) int64"
            else:
                wanted = target.shape if rows is None else rows.shape + target.shape[1:]
                fits = (each.dtype, each.shape) == (target.dtype, wanted)
                fault = "" if fits else f"which must be {target.dtype} {wanted}"
            if fault:
                raise CheckpointError(f"{self.path}: has {name}, {fault}; is it of another model?")

    def write_into(self, file: Path, moved: int, whole: _Exported) -> None:
        """Write this delta's rows and tensors into a copy of the whole model.

        Args:
            file: The copy.
            moved: Bytes by which its header is longer than that of the whole model.
            whole: The whole model.

        Raises:
            CheckpointError: a row number is not a row of its table.
        """
        for name, each in self.tensors.items():
            if name not in whole.tensors:
                continue
            values, target_each = self._map(name), whole.tensors[name]
            place = target_each.begin + moved
            if not target_each.num_bytes:
                continue
            num_rows = target_each.shape[0] if target_each.shape else 1
            target = np.memmap(
                file, np.uint8, "r+", place, (num_rows, target_each.num_bytes // num_rows)
            )
            if name + _ROWS not in self.tensors:
                target[:] = values.reshape(target.shape)
            elif each.shape[0]:
                rows = self._map(name + _ROWS).view("<i8")
                if rows.min() < 0 or rows.max() >= num_rows:
                    raise CheckpointError(
                        f"{self.path}: {name + _ROWS} has rows {rows.min()} to {rows.max()}, and "
                        f"the table has {num_rows}"
                    )
                values = values.reshape(len(rows), -1)
                for begin in range(0, len(rows), _COPIED_ROWS):
                    end = begin + _COPIED_ROWS
                    target[rows[begin:end]] = values[begin:end]
            target.flush()

    def _map(self, name: str) -> NDArray[np.uint8]:
        each = self.tensors[name]
        if not each.num_bytes:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r", each.begin, (each.num_bytes,))


def _write(
    folder: Path,
    manifest: Manifest,
    file: Path,
    metadata: Mapping[str, str],
    *,
    since: int | None,
) -> Path:
    """Write the model of a checkpoint: all rows, or those that changed after `since`."""
    require_new(file)
    require_whole(folder, manifest)
    changed: dict[str, NDArray[np.int64]] = {}
    if since is not None:
        for key in manifest.tables:
            changed[key] = np.flatnonzero(_is_changed(folder, manifest, key, since))
    arrays = {
        name.removeprefix("model/"): array
        for name, array in manifest.arrays.items()
        if name.startswith("model/")
    }
    taken = arrays.keys() & {"__metadata__", *(key + _ROWS for key in manifest.tables)}
    if taken:
        raise CheckpointError(f"{folder}: a tensor named {min(taken)!r} cannot be exported")
    row_numbers = {key + _ROWS: rows for key, rows in changed.items()}
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {
        name: ("I64", rows.shape, rows.nbytes) for name, rows in row_numbers.items()
    }
    for key, array in arrays.items():
        shape = (len(changed[key]), *array.shape[1:]) if key in changed else array.shape
        tensors[key] = array.dtype, shape, array.row_bytes * (shape[0] if shape else 1)
    # Tensors with large numbers first, so that each begins at a multiple of its numbers' size.
    in_order = sorted(tensors, key=lambda name: -DTYPES[tensors[name][0]].itemsize)
    with appearing_whole(file) as partial, partial.open("wb") as opened:
        opened.write(safetensors_header({name: tensors[name] for name in in_order}, metadata))
        for name in in_order:
            if name in row_numbers:
                opened.write(row_numbers[name].astype("<i8").data)
                continue
            for begin, values in _rows_of(folder, manifest, name):
                kept = values
                if name in changed:
                    rows = changed[name]
                    first, last = np.searchsorted(rows, [begin, begin + len(values)])
                    kept = values[torch.from_numpy(rows[first:last] - begin)]
                opened.write(kept.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        opened.flush()
        os.fsync(opened.fileno())
    return file


def _rows_of(folder: Path, manifest: Manifest, key: str) -> Iterator[tuple[int, Tensor]]:
    """The rows of a tensor of the model in order, range by range: the first row, and the rows."""
    name, is_table = f"model/{key}", key in manifest.tables
    # Whole arrays are in the last delta; a merge without deltas has them in the full piece.
    pieces = manifest.pieces[:1] if is_table else manifest.pieces[-1:]
    changes = delta_rows(folder, manifest, key) if is_table else []
    for piece in pieces:
        for block in piece.blocks:
            for part in block.parts:
                if part.array == name:
                    values = read_block(folder, piece, block)[name]
                    for delta in changes:
                        delta.write_to({name: values}, part.begin, part.end)
                    yield part.begin, values


def _is_changed(folder: Path, manifest: Manifest, key: str, since: int) -> NDArray[np.bool_]:
    """Which rows of a table changed after a checkpoint, (E,)."""
    full = manifest.pieces[0]
    name = changed_name(key)
    # Without a record of changes, every row counts as changed when the piece was written.
    num_rows = manifest.arrays[manifest.tables[key][0]].num_rows
    is_changed = np.full(num_rows, full.number > since)
    for block in full.blocks:
        for part in block.parts:
            if part.array == name:
                numbers = read_block(folder, full, block)[name]
                is_changed[part.begin : part.end] = (numbers > since).numpy()
    for delta in delta_rows(folder, manifest, key, after=since):
        is_changed[delta.rows()] = True
    return is_changed
