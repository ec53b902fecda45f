"""`Checkpoints`: saves a training run again and again, at a small share of its time.

    prepare   starts to copy every row to a full piece, in the background; from now on rows that
              are updated are recorded
    save      the cut, between two steps: rows updated since the last checkpoint are copied, and
              the background thread writes them to a delta

The full piece is copied while rows change. That is no error: each row that changed meanwhile is
recorded, so the delta of the first checkpoint overwrites it.
"""

from __future__ import annotations

import secrets
import warnings
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from recsys.errors import AlreadyExists, CheckpointError
from recsys.train.checkpoint.blocks import BLOCK_BYTES, BlockBuilder
from recsys.train.checkpoint.contents import Contents, add_arrays
from recsys.train.checkpoint.manifest import Manifest, manifest_numbers, newest, read_manifest
from recsys.train.checkpoint.writer import (
    BackgroundWriter,
    PieceTask,
    commit,
    remove_unneeded,
    require_space,
    wants_merge,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from torch.optim import Optimizer

    from recsys.train.checkpoint.manifest import Array, Piece

__all__ = ["Checkpoints"]


class Checkpoints:
    """Saves a model, its optimizers and a state in a folder.

    From `prepare` to `close`, rows may be changed by updates only, or by torch operations on the
    tables' `weight`; `ChangedRows` lists the other writes. A failure to write, such as a full disk,
    does not end the training: it warns, and the next `save` tries again.

    Args:
        folder: The folder of checkpoints; made if it does not exist.
        model: The model.
        optimizers: Its optimizers, always in the same order.
        buffer_bytes: Memory for rows that wait to be written.
        after: Number of the checkpoint in this folder that the model was just restored from. Then
            only rows updated since are written.

    Raises:
        CheckpointError: `after` is not a complete checkpoint.
        AlreadyExists: `folder` holds something else.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        buffer_bytes: int = 128 * 2**20,
        after: int | None = None,
    ) -> None:
        self._folder = Path(folder)
        _require_own(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._contents = Contents(model, optimizers)
        self._writer = BackgroundWriter(self._folder, buffer_bytes)
        number = newest(self._folder) if after is None else after
        self._last = None if number is None else read_manifest(self._folder, number)
        self._number = max([0, *manifest_numbers(self._folder)])
        self._full: PieceTask | None = None
        self._pieces: tuple[Piece, ...] = ()
        self._cut: _Cut | None = None
        self._counts = {"num_saved": 0, "num_failed": 0, "written_bytes": 0}
        self._seconds = 0.0
        remove_unneeded(self._folder)
        if after is not None:
            assert self._last is not None
            self._pieces = self._last.pieces
            self._contents.tables.track()

    def prepare(self) -> None:
        """Start to copy every row in the background, unless there is a full piece already.

        Returns at once. The first `save` waits until the copy is complete.
        """
        if self._pieces or self._full is not None:
            return
        self._contents.tables.track()
        number = self._number + 1
        full = self._full = PieceTask(self._folder, f"full-{number:08}", number)
        tables = self._contents.table_arrays()
        num_bytes = sum(array.num_bytes for each in tables for array in each.arrays().values())

        def copy() -> None:
            full.run(lambda _: require_space(self._folder, num_bytes))
            builder = BlockBuilder(full.write)
            try:
                for each in tables:
                    for _ in each.add_range(builder):
                        if full.error is not None:
                            return
            except OSError as error:  # a table in files cannot be read
                full.fail(error)
            builder.flush()
            full.finish()

        self._writer.put(copy)

    def save(
        self,
        *,
        pipeline: Any = None,
        loader: Any = None,
        schedulers: Sequence[Any] = (),
        state: Any = None,
    ) -> None:
        """Save a checkpoint: call it between two steps.

        Returns when all rows are copied; they are written in the background.

        Args:
            pipeline: As for `save_checkpoint`, like the arguments after it.
            loader: A loader with `state_dict`, for its position.
            schedulers: Learning-rate schedulers.
            state: Anything else.

        Raises:
            CheckpointError: a value cannot be saved.
        """
        begin = perf_counter()
        small = self._contents.small(  # raises before anything is taken
            {
                "pipeline": None if pipeline is None else pipeline.state_dict(),
                "loader": None if loader is None else loader.state_dict(),
                "schedulers": [each.state_dict() for each in schedulers],
                "state": state,
            }
        )
        self._settle()
        self.prepare()
        if self._full is not None:
            # A row that is updated after the cut is not in the delta, so it must be copied by now.
            self._writer.wait()
        self._number += 1
        tables, number = self._contents.tables, self._number
        tables.flush()
        task = PieceTask(self._folder, f"delta-{number:08}", number)
        cut = self._cut = _Cut(task, tables.take_changed())
        builder = BlockBuilder(lambda rows: self._writer.put(lambda: task.write(rows)))
        arrays: dict[str, Array] = add_arrays(builder, small.arrays)
        builder.flush()  # later checkpoints need only the blocks with rows of tables
        names = {}
        for each, bits in zip(self._contents.table_arrays(), cut.bits, strict=True):
            arrays |= each.arrays()
            names[each.table.key] = tuple(each.names.values())
            each.add_rows(builder, bits)
        builder.flush()
        tree = small.tree
        self._writer.put(lambda: self._commit(cut, number, arrays, names, tree))
        self._seconds += perf_counter() - begin

    def wait(self, *, strict: bool = False) -> int | None:
        """Wait until the last `save` is on the disk.

        Args:
            strict: Raise if it could not be written.

        Returns:
            Number of the newest complete checkpoint; None if there is none.

        Raises:
            OSError, CheckpointError: with `strict`, the last `save` could not be written.
        """
        self._settle(strict=strict)
        return None if self._last is None else self._last.number

    def finish_merge(self) -> None:
        """Wait until no merge of older checkpoints is under way."""
        self._writer.finish_merge()

    def close(self) -> None:
        """Write what waits, and stop recording updated rows."""
        self._writer.close()
        self._settle()
        self._contents.tables.stop_tracking()
        remove_unneeded(self._folder)

    def give_up(self) -> None:
        """End at once, without writing what waits; complete checkpoints stay."""
        for task in (self._full, None if self._cut is None else self._cut.task):
            if task is not None and task.error is None:
                # Not `fail`, which deletes files: the thread may be completing this piece.
                task.error = CheckpointError("given up")
        self._cut = None
        self._writer.close()
        self._contents.tables.stop_tracking()
        remove_unneeded(self._folder)

    def describe(self) -> dict[str, Any]:
        """For a run record: what was saved since this object was made, and what it cost.

        `exposed_seconds` is the time that training waited in `save`, `memory_bytes` the memory for
        the record of updated rows and for blocks that waited.
        """
        return {
            **self._counts,
            "exposed_seconds": self._seconds,
            "memory_bytes": self._contents.tables.tracked_bytes
            + self._writer.most_blocks * BLOCK_BYTES,
        }

    def _commit(
        self,
        cut: _Cut,
        number: int,
        arrays: dict[str, Array],
        names: dict[str, tuple[str, ...]],
        tree: Any,
    ) -> None:
        """In the writing thread: complete a checkpoint whose blocks were written."""
        cut.task.finish()
        full, last = self._full, self._last
        if full is not None and full.error is not None:
            cut.task.fail(full.error)
        if cut.task.error is not None:
            return
        assert cut.task.piece is not None
        try:
            if last is not None:
                last = read_manifest(self._folder, last.number)  # a merge may have changed it
            before = () if last is None else (*last.before, (last.number, last.id))
            if full is not None:
                assert full.piece is not None
                pieces = [full.piece]
            else:
                assert last is not None
                pieces = [piece.rows_of_tables(names) for piece in last.pieces]
                arrays |= {
                    name: each for name, each in last.arrays.items() if name.startswith("changed/")
                }
            manifest = Manifest(
                number,
                secrets.token_hex(8),
                before,
                arrays,
                names,
                (*pieces, cut.task.piece),
                tree,
            )
            commit(self._folder, manifest, self._writer.merged)
        except (OSError, CheckpointError) as error:
            cut.task.fail(error)
            return
        cut.manifest = manifest
        if wants_merge(manifest):
            self._writer.start_merge(manifest)

    def _settle(self, *, strict: bool = False) -> None:
        """Wait until the last `save` is written, and take over its result."""
        if self._writer.merge_error is not None:
            error, self._writer.merge_error = self._writer.merge_error, None
            _warn("older checkpoints could not be merged", error)
        cut, self._cut = self._cut, None
        if cut is None:
            return
        self._writer.wait()
        if self._writer.fault is not None:
            raise self._writer.fault
        if cut.manifest is not None:
            self._last, self._pieces, self._full = cut.manifest, cut.manifest.pieces, None
            self._counts["num_saved"] += 1
            self._counts["written_bytes"] += cut.manifest.pieces[-1].num_bytes
            return
        self._counts["num_failed"] += 1
        self._contents.tables.put_back(cut.bits)
        if self._full is not None and self._full.error is not None:
            self._full = None  # `prepare` copies every row again
        assert cut.task.error is not None
        if strict:
            raise cut.task.error
        complete = "there is no complete one"
        if self._last is not None:
            complete = f"the newest complete one is checkpoint {self._last.number}"
        what = f"a checkpoint could not be written to {self._folder}, and training goes on"
        _warn(f"{what}; {complete}", cut.task.error)


def _warn(what: str, error: Exception) -> None:
    warnings.warn(f"{what} ({error}); free some space, or check the disk", stacklevel=4)


class _Cut:
    """A checkpoint while it is written."""

    def __init__(self, task: PieceTask, bits: Sequence[NDArray[np.uint64]]) -> None:
        self.task, self.bits = task, bits
        self.manifest: Manifest | None = None


def _require_own(folder: Path) -> None:
    """Refuse a folder that holds something else.

    Raises:
        AlreadyExists: it does.
    """
    if not folder.exists():
        return
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
    own = ("full-", "delta-")
    if names and not any(
        name == "LAST" or name.endswith((".json", ".partial")) or name.startswith(own)
        for name in names
    ):
        raise AlreadyExists(
            f"{folder} is not a folder of checkpoints: it has {names[0]}; choose another"
        )
