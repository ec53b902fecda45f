"""Restores a checkpoint: checks every file first, then applies the pieces in order.

Nothing is changed before all files have the right length and checksum, and the model is found to be
that of the checkpoint. One block is read at a time, and its rows go straight to their tables. One
of several processes takes the rows that it has; everything else comes from the first process that
saved. Random states come from the same process, if as many processes have saved.
"""

from __future__ import annotations

import warnings
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys._support.files import read_together
from recsys._support.safetensors_dtypes import DTYPES
from recsys.errors import CheckpointError, WeightsError
from recsys.train.checkpoint.contents import Contents, errors_of_state, listed
from recsys.train.checkpoint.format import (
    STATE_FILE,
    check_file,
    manifest_numbers,
    read_blocks,
    read_manifest,
    read_piece,
    read_state,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from recsys.train.checkpoint.format import Manifest, Piece, Rows, Table

__all__ = ["load_checkpoint", "read_pieces", "require_same", "restore", "whole_tables"]


def load_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    pipeline: Any = None,
    loader: Any = None,
    schedulers: Any = (),
    number: int | None = None,
) -> Any:
    """Restore what `save_checkpoint` saved, and the random states of Python, numpy and torch.

    Nothing is changed before every file is found to be whole. Tables are read in blocks. Budget,
    plan, tier and device may differ from those of the run that was saved. What was saved of a
    pipeline, a loader or schedulers and is not given here is not restored, with a warning.

    The `grad` of every parameter becomes None, because it belongs to the weights before. Torch's
    `load_state_dict` keeps it. Gradients of rows that no update has used are dropped, too.

    Args:
        folder: The folder of checkpoints.
        model: A model of the same shape.
        optimizers: Its optimizers, in the same order.
        pipeline: As for `save_checkpoint`; its state is ignored under another schedule.
        loader: As for `save_checkpoint`.
        schedulers: As for `save_checkpoint`.
        number: Number of the checkpoint; None for the newest complete one.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: there is none, it is damaged (then the message names one that is whole), or
            it is of another model.
        ConfigError: the state of `pipeline` or `loader` is that of another one.
        TypeError: `number` is no whole number.
    """
    folder = Path(folder)
    if (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder}: its checkpoints are in {folder / 'checkpoints'}")
    number = None if number is None else index(number)
    found = restore(folder, Contents(model, listed(optimizers)), number)
    model.zero_grad()  # those of tables that recsys updates are dropped already
    of_kinds = {"pipeline": pipeline, "loader": loader, "schedulers": schedulers}
    given = {name: listed(value) for name, value in of_kinds.items()}
    for name, targets in given.items():
        if targets and len(targets) != len(found[name]):
            raise CheckpointError(
                f"{folder}: the checkpoint was saved with {len(found[name])} for {name}=, and "
                f"{len(targets)} were given; give as many"
            )
        with errors_of_state():
            for target, saved in zip(targets, found[name], strict=False):
                target.load_state_dict(saved)
    left_out = [name for name, targets in given.items() if any(found[name]) and not targets]
    if left_out:
        arguments = ", ".join(f"{name}=" for name in left_out)
        warnings.warn(
            f"{folder}: the state of {', '.join(left_out)} in the checkpoint is not restored; give "
            f"{arguments} to load_checkpoint, or go on without",
            stacklevel=2,
        )
    return found["state"]


def restore(folder: Path, contents: Contents, number: int | None = None) -> Any:
    """Restore a model, its optimizers and the random states.

    Args:
        folder: The folder of checkpoints.
        contents: The model, built as for the run that was saved; budget, tier and device may
            differ.
        number: Number of the checkpoint; None for the newest complete one.

    Returns:
        The state that was given to `Checkpoints.save`, with what it adds.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it is of another model. The
            message names another one that is whole, if there is one.
    """
    with read_together(folder):
        manifest = read_manifest(folder, number)
        try:
            pieces = read_pieces(folder, manifest)
        except CheckpointError as error:
            hint = _whole_other(folder, manifest.number)
            raise CheckpointError(f"checkpoint {manifest.number}: {error}; {hint}") from error
        saved = read_state(folder, manifest.deltas[0])
        is_shared = require_same(manifest, pieces, saved, contents)
        of_random = saved
        if contents.share is not None and contents.share.num_ranks == len(manifest.deltas):
            of_random = read_state(folder, manifest.deltas[contents.share.rank])
        with contents.tables.restoring(), errors_of_state():
            tables = whole_tables(manifest, pieces)
            arrays = {
                id(table.make_array(name, (table.num_rows, *array.row_shape), DTYPES[array.dtype]))
                for table in contents.tables.tables
                for name, array in tables[table.key].arrays.items()
                if name != "weight"
            }
            for piece in pieces:
                for rows in read_blocks(folder, piece):
                    if rows.key in tables:
                        _write(contents, rows, tables[rows.key])
            return contents.restore(saved, arrays, of_random["random"], is_shared=is_shared)


def read_pieces(folder: Path, manifest: Manifest) -> list[Piece]:
    """The pieces of a checkpoint, after a check of the length and the checksum of every file.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    pieces = [read_piece(folder, name) for name in manifest.pieces]
    for piece in pieces:
        for file in piece.files:
            if file.name != STATE_FILE or piece.name in manifest.deltas:
                check_file(folder, piece.name, file)
    return pieces


def whole_tables(manifest: Manifest, pieces: Sequence[Piece]) -> dict[str, Table]:
    """The tables of a checkpoint, of all processes, with the number of all rows as their end."""
    found: dict[str, Table] = {}
    for piece in pieces:
        if piece.name in manifest.deltas:
            for key, table in piece.tables.items():
                known = found.get(key, table)
                end, arrays = max(known.end, table.end), known.arrays | table.arrays
                found[key] = table._replace(begin=0, end=end, arrays=arrays)
    return found


def require_same(
    manifest: Manifest, pieces: Sequence[Piece], saved: dict[str, Any], contents: Contents
) -> bool:
    """Check that a checkpoint is of this model; returns whether several processes have its rows.

    Args:
        manifest: The checkpoint.
        pieces: Its pieces.
        saved: Its state.
        contents: The model.

    Raises:
        CheckpointError: it is of another model, or of other optimizers.
    """
    tables, at = whole_tables(manifest, pieces), f"checkpoint {manifest.number}"
    is_shared = contents.share is not None or len(manifest.deltas) > 1
    with errors_of_state():
        contents.require_same(saved, tables, at, is_shared=is_shared)
    for table in contents.tables.tables:
        for name, array in tables[table.key].arrays.items():
            if name != "weight":
                shape = table.num_rows, *array.row_shape
                try:
                    table.require_state(name, shape, DTYPES[array.dtype])
                except WeightsError as error:
                    raise CheckpointError(f"{at}: {error}") from error
    return is_shared


def _write(contents: Contents, rows: Rows, saved: Table) -> None:
    """Write those rows of a block that this process has, and that are of an array in `saved`."""
    for table in contents.tables.tables:
        if table.key != rows.key:
            continue
        begin, end = contents.rows_of(table)
        arrays = {name: each for name, each in rows.arrays.items() if name in saved.arrays}
        if rows.rows is not None:
            is_here = (rows.rows >= begin) & (rows.rows < end)
            numbers = (rows.rows[is_here] - begin).numpy()
            for name, values in arrays.items():
                table.scatter(name, numbers, values[is_here])
        elif max(begin, rows.begin) < min(end, rows.end):
            here = slice(max(begin - rows.begin, 0), min(end, rows.end) - rows.begin)
            for name, values in arrays.items():
                table.write(name, rows.begin + here.start - begin, values[here])


def _whole_other(folder: Path, number: int) -> str:
    """The hint where a checkpoint is damaged: the newest other one whose files are whole."""
    for other in reversed(manifest_numbers(folder)):
        if other != number:
            try:
                read_pieces(folder, read_manifest(folder, other))
            except CheckpointError:
                continue
            return (
                f"checkpoint {other} is whole: load that one by its number (--checkpoint {other})"
            )
    return "no other checkpoint in this folder is whole; train from the start"
