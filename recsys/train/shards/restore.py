"""Restores the rows of one process from the checkpoints of any number of processes.

Rows and their state come from the processes that had them; all else from the first one: the dense
part, its optimizer, and the state of the run, which is the same on every process. Random states are
those of the first one, too, unless the run continues on as many processes as have saved.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.files import read_together
from recsys._support.safetensors_dtypes import DTYPES
from recsys.errors import CheckpointError
from recsys.train.checkpoint.blocks import read_block
from recsys.train.checkpoint.contents import Contents, errors_of_state
from recsys.train.checkpoint.manifest import read_manifest
from recsys.train.checkpoint.restore import (
    OtherArrays,
    names_in_tables,
    require_whole,
    whole_other,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.embeddings.saved_tables import SavedTable
    from recsys.train.checkpoint.manifest import Manifest, Part
    from recsys.train.shards.folder import Shards

__all__ = ["restore_shards"]


def restore_shards(
    shards: Shards,
    number: int,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    own: Mapping[str, tuple[int, int]] | None = None,
    random_of: int = 0,
) -> Any:
    """Restore the rows of this process, the dense part, its optimizer, and the random states.

    Args:
        shards: The folders.
        number: Number of a checkpoint that all have.
        model: The model, with the rows of this process.
        optimizers: Its optimizers, in the same order as when they were saved.
        own: For each of its tables, by key: the first row here and the row after the last one. None
            if it has all rows.
        random_of: The process that saved whose random states are restored.

    Returns:
        The state that the first process gave to `save`.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint is of another model.
    """
    contents = Contents(model, optimizers)
    is_whole = own is None
    if own is None:
        own = {table.key: (0, table.num_rows) for table in contents.tables.tables}
    _require_same_tables(shards, own, is_whole=is_whole)
    with ExitStack() as stack:
        for folder in shards.folders:
            stack.enter_context(read_together(folder))
        manifests = [read_manifest(folder, number) for folder in shards.folders]
        _require_one_moment(manifests)
        needed = [
            rank
            for rank in range(len(manifests))
            if rank in (0, random_of) or _has_any(shards, rank, own)
        ]
        for rank in needed:
            try:
                require_whole(shards.folders[rank], manifests[rank])
            except CheckpointError as error:
                way_out = whole_other(shards.folders, shards.numbers(), number)
                raise CheckpointError(f"checkpoint {number}: {error}; {way_out}") from error
        stack.enter_context(contents.tables.restoring())
        targets = _Rows(contents.tables.tables, own, manifests)
        dense = OtherArrays(manifests[0], contents)
        _require_same_shapes(manifests[0], dense.tensors)
        for rank in needed:
            folder, manifest = shards.folders[rank], manifests[rank]
            names = names_in_tables(manifest)
            for piece in manifest.pieces:
                for block in piece.blocks:
                    tensors = read_block(folder, piece, block)
                    for part in block.parts:
                        if part.array in names:
                            key, name = names[part.array]
                            targets.write(key, name, shards.layout[key][rank], part, tensors)
                        elif rank == (random_of if part.array.startswith("random/") else 0):
                            dense.write(part, tensors)
        with errors_of_state():
            tree = manifests[0].state | {"random": manifests[random_of].state["random"]}
        return contents.restore_tree(tree, dense.array, only_dense=True)


def _require_same_tables(
    shards: Shards, own: Mapping[str, tuple[int, int]], *, is_whole: bool
) -> None:
    """Check that the checkpoint has the tables of the model.

    Raises:
        CheckpointError: it does not.
    """
    sizes = {key: max(end for _, end in ranges) for key, ranges in shards.layout.items()}
    ends = {key: end for key, (_, end) in own.items()}
    for key in sorted(ends | sizes if is_whole else ends):
        here, there = ends.get(key, 0), sizes.get(key, 0)
        if here > there or (is_whole and here != there):
            raise CheckpointError(
                f"the checkpoint is of another model: {key} has {there} rows there and {here} "
                "here; build the model as for the run that was saved"
            )


def _require_one_moment(manifests: Sequence[Manifest]) -> None:
    """Check that all processes saved after the same step.

    Raises:
        CheckpointError: they did not.
    """
    with errors_of_state():
        steps = [each.state["state"]["state"]["progress"]["num_steps"] for each in manifests]
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"checkpoint {manifests[0].number}: processes saved it after different steps, "
            f"{steps}; load another checkpoint by its number"
        )


def _has_any(shards: Shards, rank: int, own: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a process that saved has rows that this one needs."""
    return any(
        max(begin, shards.layout[key][rank][0]) < min(end, shards.layout[key][rank][1])
        for key, (begin, end) in own.items()
    )


def _require_same_shapes(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Check that the tensors of the model besides tables have their shapes in the checkpoint.

    Raises:
        CheckpointError: they do not.
    """
    of_tables = names_in_tables(manifest)
    saved = {
        name: array.shape
        for name, array in manifest.arrays.items()
        if name.startswith("model/") and name not in of_tables
    }
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(own | saved):
        if own.get(name) != saved.get(name):
            raise CheckpointError(
                f"checkpoint {manifest.number} is of another model: "
                f"{name.removeprefix('model/')} has shape {saved.get(name)} there and "
                f"{own.get(name)} here; build the model as for the run that was saved"
            )


class _Rows:
    """Writes rows where this process has them.

    Args:
        tables: The tables of this process.
        own: Which rows it has of each.
        manifests: The checkpoint of each process. State that one has is made here, as zeros.
    """

    def __init__(
        self,
        tables: Sequence[SavedTable],
        own: Mapping[str, tuple[int, int]],
        manifests: Sequence[Manifest],
    ) -> None:
        self._tables = {table.key: table for table in tables}
        self._own = own
        made = set()
        for manifest in manifests:
            for array_name, (key, name) in names_in_tables(manifest).items():
                table = self._tables.get(key)
                if table is not None and name != "weight" and (key, name) not in made:
                    array = manifest.arrays[array_name]
                    shape = (table.num_rows, *array.shape[1:])
                    table.make_array(name, shape, DTYPES[array.dtype])
                    made.add((key, name))

    def write(
        self,
        key: str,
        name: str,
        there: tuple[int, int],
        part: Part,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Write those rows of a part that are here.

        Args:
            key: The table.
            name: The array of the table.
            there: The rows of the process that saved the part.
            part: A part of a block.
            tensors: The tensors of the block.
        """
        table = self._tables.get(key)
        if table is None:
            return
        (begin, end), values = self._own[key], tensors[part.array]
        if part.rows:
            rows = tensors[part.rows].numpy() + there[0]
            # A process without rows of a table has one that it does not need.
            is_here = (rows >= begin) & (rows < min(end, there[1]))
            if is_here.any():
                table.scatter(name, rows[is_here] - begin, values[torch.from_numpy(is_here)])
            return
        first = there[0] + part.begin
        here = slice(max(begin - first, 0), min(end, there[1]) - first)
        if here.start < min(here.stop, len(values)):
            table.write(name, first + here.start - begin, values[here])
