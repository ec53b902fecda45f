"""Restores a checkpoint: checks every file first, then applies the pieces in order.

Nothing is changed before all files have the right length and checksum, and all arrays of the model
the right shape. Memory is bounded: one block is read at a time, and rows go straight to their
tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from recsys._support.files import read_together
from recsys._support.safetensors_dtypes import DTYPES
from recsys.errors import CheckpointError, WeightsError
from recsys.train.checkpoint.blocks import check_block, read_block
from recsys.train.checkpoint.contents import Contents
from recsys.train.checkpoint.manifest import manifest_numbers, read_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.train.checkpoint.manifest import Manifest, Part

__all__ = [
    "OtherArrays",
    "names_in_tables",
    "require_same_arrays",
    "require_whole",
    "restore",
    "whole_other",
]


def restore(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], number: int | None
) -> Any:
    """Restore a model, its optimizers and the random states.

    Args:
        folder: The folder of checkpoints.
        model: Built as for the run that was saved; budget, tier and device may differ.
        optimizers: Its optimizers, in the same order.
        number: Number of the checkpoint; None for the newest complete one.

    Returns:
        The state that was given to `save`.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it is of another model. The
            message names another one that is whole, if there is one.
    """
    with read_together(folder):
        return _restore(folder, Contents(model, optimizers), number)


def _restore(folder: Path, contents: Contents, number: int | None) -> Any:
    manifest = read_manifest(folder, number)
    try:
        require_whole(folder, manifest)
    except CheckpointError as error:
        way_out = whole_other([folder], manifest_numbers(folder), manifest.number)
        raise CheckpointError(f"checkpoint {manifest.number}: {error}; {way_out}") from error
    require_same_arrays(manifest, contents)
    contents.require_tree(manifest.state)
    with contents.tables.restoring():
        names = names_in_tables(manifest)
        tables = {table.key: table for table in contents.tables.tables}
        others = OtherArrays(manifest, contents)
        for array_name, (key, name) in names.items():
            if name != "weight":
                array = manifest.arrays[array_name]
                made = tables[key].make_array(name, array.shape, DTYPES[array.dtype])
                others.tensors[array_name] = made
        for piece in manifest.pieces:
            for block in piece.blocks:
                tensors = read_block(folder, piece, block)
                for part in block.parts:
                    if part.array not in names:
                        others.write(part, tensors)
                        continue
                    key, name = names[part.array]
                    if part.rows:
                        rows = tensors[part.rows].numpy()
                        tables[key].scatter(name, rows, tensors[part.array])
                    else:
                        tables[key].write(name, part.begin, tensors[part.array])
        return contents.restore_tree(manifest.state, others.array)


def require_whole(folder: Path, manifest: Manifest) -> None:
    """Check the length and the checksum of every file.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for piece in manifest.pieces:
        for block in piece.blocks:
            check_block(folder, piece, block)


def whole_other(folders: Sequence[Path], numbers: Sequence[int], number: int) -> str:
    """The way out where a checkpoint is damaged: the newest other one whose files are whole.

    Args:
        folders: The folders of checkpoints: one, or those of processes that have saved together.
        numbers: Numbers of the checkpoints that all of them have, ascending.
        number: Number of the damaged one.
    """
    for other in reversed(numbers):
        if other != number:
            try:
                for folder in folders:
                    require_whole(folder, read_manifest(folder, other))
            except CheckpointError:
                continue
            return (
                f"checkpoint {other} is whole: load that one by its number (--checkpoint {other})"
            )
    return "no other checkpoint in this folder is whole; train from the start"


def require_same_arrays(manifest: Manifest, contents: Contents) -> None:
    """Check that the arrays of the model are those of the checkpoint.

    Raises:
        CheckpointError: an array is missing, or has another dtype or shape.
    """
    expected = {name: _shape_of(tensor) for name, tensor in contents.model_tensors().items()}
    for table in contents.tables.tables:
        expected[f"model/{table.key}"] = _shape_of(table.weight)
    saved = {
        name: (DTYPES[array.dtype], array.shape)
        for name, array in manifest.arrays.items()
        if name.startswith("model/")
    }
    for name in sorted(expected | saved):
        if expected.get(name) != saved.get(name):
            raise CheckpointError(
                f"checkpoint {manifest.number} is of another model: {name.removeprefix('model/')} "
                f"is {_shown(saved.get(name))} there and {_shown(expected.get(name))} in this "
                "model; build the model as for the run that was saved"
            )
    own = {table.key for table in contents.tables.tables}
    if own != manifest.tables.keys():
        key = min(own ^ manifest.tables.keys())
        raise CheckpointError(
            f"checkpoint {manifest.number}: table {key!r} is updated by recsys "
            f"{'in this model only' if key in own else 'in the checkpoint only'}; accelerate the "
            "model as for the run that was saved"
        )
    for table in contents.tables.tables:
        for name in manifest.tables[table.key][1:]:
            array = manifest.arrays[name]
            own_name = name.rpartition("/")[2]
            try:
                table.require_state(own_name, array.shape, DTYPES[array.dtype])
            except WeightsError as error:
                raise CheckpointError(f"checkpoint {manifest.number}: {error}") from error


def names_in_tables(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """For each array of a table: the table's key, and the array's name in the table."""
    return {
        name: (key, name.rpartition("/")[2] if place else "weight")
        for key, names in manifest.tables.items()
        for place, name in enumerate(names)
    }


class OtherArrays:
    """The arrays besides those of tables: the model's are written in place, and others are made.

    Args:
        manifest: The checkpoint.
        contents: The model.

    Attributes:
        tensors: The arrays so far, by name. State of tables that the tree refers to may be added.
    """

    def __init__(self, manifest: Manifest, contents: Contents) -> None:
        of_tables = names_in_tables(manifest)
        self._arrays = {
            name: array
            for name, array in manifest.arrays.items()
            # Numbers of last changes are for exports; they are not read.
            if name not in of_tables and not name.startswith("changed/")
        }
        self.tensors = contents.model_tensors()

    def write(self, part: Part, tensors: Mapping[str, Tensor]) -> None:
        """Write the rows of one part."""
        if part.array not in self._arrays:
            return
        target = self.array(part.array)
        with torch.no_grad():
            rows = target if target.dim() else target.reshape(1)
            rows.detach()[part.begin : part.end].copy_(tensors[part.array])

    def array(self, name: str) -> Tensor:
        """An array, such as one that the tree refers to."""
        if name not in self.tensors:
            array = self._arrays[name]
            self.tensors[name] = torch.zeros(array.shape, dtype=DTYPES[array.dtype])
        return self.tensors[name]


def _shape_of(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _shown(found: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "absent" if found is None else f"{found[0]} of shape {found[1]}"
