"""Deltas for a server: the rows of a model that changed between two checkpoints.

    recsys export RUN --to safetensors --checkpoint 7 --out FULL       a whole model
    recsys export RUN --since 7 --out DELTA                            what changed after it
    recsys apply FULL DELTA [DELTA ...] --out FILE                     the whole model of today

All are safetensors files, with the names that the deltas of a checkpoint have: for each table
`KEY.rows`, (M,) int64 ascending, and `KEY`, the (M, D) rows; of everything else the whole tensor.
`since` and `checkpoint` in the metadata are the numbers of the two checkpoints, and `since_id` and
`checkpoint_id` their ids. So a server knows whether a delta is the next one. Optimizer state is not
in these files. Memory does not grow with the model: rows are written where they belong in the file.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from recsys._support.files import appearing_whole, read_together, require_new
from recsys._support.safetensors_dtypes import DTYPES
from recsys.errors import CheckpointError
from recsys.train.checkpoint.format import (
    ROWS,
    piece_number,
    read_blocks,
    read_manifest,
    read_state,
    safetensors_header,
)
from recsys.train.checkpoint.restore import read_pieces, whole_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from recsys.train.checkpoint.format import Manifest, Piece

__all__ = ["apply_deltas", "export_checkpoint", "export_delta"]

_Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


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
    return _export(folder, Path(file), number, None)


def export_delta(folder: Path, file: str | Path, since: int) -> Path:
    """Write the rows that changed after a checkpoint, up to the newest complete one.

    Args:
        folder: The folder of checkpoints.
        file: A new file.
        since: Number of the older checkpoint. Its own files may be deleted.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: the newest checkpoint is damaged, it does not continue from `since`, or
            what changed since then is no longer known, because every row was copied again.
        OSError: the disk is full, or cannot be written.
    """
    return _export(folder, Path(file), None, since)


def apply_deltas(full: str | Path, deltas: Sequence[str | Path], file: str | Path) -> Path:
    """Write the model that results from a whole one and the deltas after it.

    Args:
        full: A file of `export_checkpoint` or `apply_deltas`.
        deltas: Files of `export_delta`, in order.
        file: A new file.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: a file is damaged, or a delta is missing, repeated, or of another model.
        OSError: the disk is full, or cannot be written.
    """
    opened = [_Exported.open(Path(each)) for each in (full, *deltas)]
    whole = last = opened[0]
    if "since" in whole.metadata:
        raise CheckpointError(
            f"{whole.path}: is a delta, not a whole model; give the model of checkpoint "
            f"{whole.metadata['since']} before it"
        )
    for delta in opened[1:]:
        delta.require_after(last)
        delta.require_fits(whole.shapes)
        last = delta
    metadata = {key: last.metadata[key] for key in ("checkpoint", "checkpoint_id")}
    with _writing(Path(file), whole.shapes, metadata) as write:
        for each in opened:
            for name in each.shapes.keys() & whole.shapes.keys():
                write(name, each.file.get_tensor(name), each.rows(name))
    return Path(file)


def _export(folder: Path, file: Path, number: int | None, since: int | None) -> Path:
    """Write the model of a checkpoint: all rows, or those that changed after `since`."""
    with read_together(folder):
        manifest = read_manifest(folder, number)
        metadata = {"checkpoint": str(manifest.number), "checkpoint_id": manifest.id}
        if since is not None:
            metadata |= {"since": str(since), "since_id": _id_of(folder, manifest, since)}
        pieces = read_pieces(folder, manifest)
        state = read_state(folder, manifest.deltas[0], is_mapped=True)["model"]
        dense = {key: each for key, each in state.items() if isinstance(each, torch.Tensor)}
        shapes: _Shapes = {key: (each.dtype, tuple(each.shape)) for key, each in dense.items()}
        changed: dict[str, Tensor] = {}
        if since is not None:
            pieces = [
                piece
                for piece in pieces
                if piece.name.startswith("delta") and piece_number(piece.name) > since
            ]
            changed = _changed_rows(folder, pieces)
        for key, table in whole_tables(manifest, pieces).items():
            weight, rows = table.arrays["weight"], changed.get(key)
            shapes[key] = (
                DTYPES[weight.dtype],
                (table.end if rows is None else len(rows), *weight.row_shape),
            )
            if rows is not None:
                shapes[key + ROWS] = rows.dtype, tuple(rows.shape)
        with _writing(file, shapes, metadata) as write:
            for key, rows in changed.items():
                write(key + ROWS, rows)
            for key, tensor in dense.items():
                write(key, tensor)
            for piece in pieces:
                for block in read_blocks(folder, piece):
                    rows = block.rows
                    if rows is not None and block.key in changed:
                        rows = torch.searchsorted(changed[block.key], rows)
                    write(block.key, block.arrays["weight"], rows, block.begin)
    return file


def _id_of(folder: Path, manifest: Manifest, since: int) -> str:
    """The id of an earlier checkpoint, if what has changed after it is known.

    Raises:
        CheckpointError: it is not.
    """
    ids = dict(manifest.since)
    if since in ids:
        return ids[since]
    if since == manifest.number:
        raise CheckpointError(
            f"{folder}: checkpoint {since} is the newest, so nothing has changed since; export "
            "again after the next checkpoint"
        )
    raise CheckpointError(
        f"{folder}: what changed between checkpoint {since} and {manifest.number} is not known; "
        f"the changes since {list(ids)} are; export the whole model again"
    )


def _changed_rows(folder: Path, deltas: Sequence[Piece]) -> dict[str, Tensor]:
    """For each table, the rows that deltas have, (M,) ascending."""
    found = {key: [torch.empty(0, dtype=torch.int64)] for each in deltas for key in each.tables}
    for piece in deltas:
        for block in read_blocks(folder, piece):
            assert block.rows is not None
            found[block.key].append(block.rows)
    return {key: torch.unique(torch.cat(rows)) for key, rows in found.items()}


class _Exported(NamedTuple):
    """A file of this module.

    Attributes:
        path: Its path.
        file: The open file.
        metadata: The texts in its header.
        shapes: Dtype and shape of each tensor.
    """

    path: Path
    file: Any
    metadata: dict[str, str]
    shapes: _Shapes

    @classmethod
    def open(cls, path: Path) -> _Exported:
        """Open a file.

        Raises:
            CheckpointError: it was not written by this module, or it is damaged.
        """
        try:
            file: Any = safe_open(path, "pt")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {
                name: (DTYPES[each.get_dtype()], tuple(each.get_shape()))
                for name, each in slices.items()
            }
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"{path}: is not a complete safetensors file ({error})"
            ) from error
        metadata = file.metadata() or {}
        if not {"checkpoint", "checkpoint_id"} <= metadata.keys():
            raise CheckpointError(
                f"{path}: does not say of which checkpoint it is; write it by `recsys export RUN "
                "--to safetensors --checkpoint NUMBER`"
            )
        return cls(path, file, metadata, shapes)

    def require_after(self, other: _Exported) -> None:
        """Check that this is the delta after another file.

        Raises:
            CheckpointError: it is not.
        """
        if "since" not in self.metadata:
            raise CheckpointError(f"{self.path}: is a whole model, not a delta; give it first")
        since = self.metadata["since"], self.metadata.get("since_id")
        if since != (other.metadata["checkpoint"], other.metadata["checkpoint_id"]):
            number, is_other = since[0], since[0] == other.metadata["checkpoint"]
            raise CheckpointError(
                f"{self.path}: continues from checkpoint {number}"
                f"{' of another training' if is_other else ''}, and {other.path} is checkpoint "
                f"{other.metadata['checkpoint']}; a delta between them is missing, one is given "
                "twice, or they are of two trainings: give each delta once, in order"
            )

    def require_fits(self, whole: _Shapes) -> None:
        """Check that every tensor belongs to a tensor of the whole model.

        Raises:
            CheckpointError: one does not.
        """
        for name, (dtype, shape) in self.shapes.items():
            if name.endswith(ROWS) and name.removesuffix(ROWS) in self.shapes:
                continue
            rows = self.rows(name)
            wanted = whole.get(name)
            if wanted is not None and rows is not None:
                if len(rows) and not 0 <= rows.min() <= rows.max() < wanted[1][0]:
                    raise CheckpointError(
                        f"{self.path}: {name + ROWS} has rows {rows.min()} to {rows.max()}, and "
                        f"the table has {wanted[1][0]}"
                    )
                wanted = wanted[0], (len(rows), *wanted[1][1:])
            if wanted != (dtype, shape):
                raise CheckpointError(
                    f"{self.path}: has {name}, {dtype} {shape}, and the whole model has "
                    f"{'none' if wanted is None else wanted}; is it of another model?"
                )

    def rows(self, name: str) -> Tensor | None:
        """The numbers of the rows of a tensor, (M,); None if it is whole."""
        return self.file.get_tensor(name + ROWS) if name + ROWS in self.shapes else None


@contextmanager
def _writing(
    file: Path, shapes: _Shapes, metadata: Mapping[str, str]
) -> Iterator[Callable[..., None]]:
    """Write a new file of tensors.

    Args:
        file: The file.
        shapes: Dtype and shape of each tensor.
        metadata: Further texts.

    Yields:
        A function that writes a tensor, or some of its rows: their numbers, or the first one,
        follow the values.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: it cannot hold a dtype.
        OSError: the disk is full, or cannot be written.
    """
    require_new(file)
    # Tensors with large numbers first, so that each begins at a multiple of its numbers' size.
    names = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))
    header, begins = safetensors_header({name: shapes[name] for name in names}, metadata)
    sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
    with appearing_whole(file) as partial:
        with partial.open("wb") as opened:
            # Takes the room now: a write to a mapped page could not report a full disk.
            os.posix_fallocate(opened.fileno(), 0, len(header) + sum(sizes.values()))
            opened.write(header)
        content = np.memmap(partial, np.uint8, "r+")

        def write(name: str, values: Tensor, rows: Tensor | None = None, begin: int = 0) -> None:
            if values.numel():
                shape = shapes[name][1]
                of_tensor = content[begins[name] : begins[name] + sizes[name]]
                of_tensor = of_tensor.reshape(shape[0] if shape else 1, -1)
                own = values.contiguous().view(-1).view(torch.uint8).numpy()
                own = own.reshape(-1, of_tensor.shape[1])
                where = slice(begin, begin + len(own)) if rows is None else rows.numpy()
                of_tensor[where] = own

        yield write
        content.flush()
