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
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self
from weakref import finalize

from recsys._support.files import alone_with, make_folders
from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.errors import AlreadyExists, CheckpointError, ConfigError
from recsys.train.checkpoint.blocks import BLOCK_BYTES, BlockBuilder
from recsys.train.checkpoint.contents import Contents, add_arrays
from recsys.train.checkpoint.manifest import (
    OWN_FILE_NAME,
    PIECE_NAME,
    Manifest,
    last_number,
    newest,
    read_manifest,
)
from recsys.train.checkpoint.restore import require_same_arrays
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

    from recsys.train.checkpoint.contents import TableArrays
    from recsys.train.checkpoint.manifest import Array, Piece

__all__ = ["Checkpoints", "listed"]

# Errors that do not end the training. Others are faults of the program.
_EXPECTED = OSError, CheckpointError, MemoryError


class Checkpoints:
    """Saves a model, its optimizers and a state in a folder; a context manager that closes it.

    From `prepare` to `close`, rows may be changed by updates only, or by torch operations on the
    tables' `weight`; `ChangedRows` lists the other writes. A failure to write, such as a full disk,
    does not end the training: it warns, and the next `save` tries again. One object at a time may
    write to a folder. An object that is dropped without `close` is closed, but does not warn.

    Args:
        folder: The folder of checkpoints; made if it does not exist.
        model: The model.
        optimizers: Its optimizers, always in the same order.
        buffer_bytes: Memory for rows that wait to be written.
        after: Number of the checkpoint in this folder that the model was just restored from. Then
            only rows updated since are written.
        numbers_after: Checkpoints get higher numbers than this one.

    Raises:
        CheckpointError: `after` is not a complete checkpoint, or it is of another model.
        ConfigError: another object writes to `folder`.
        AlreadyExists: `folder` holds something else.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        buffer_bytes: int = 128 * 2**20,
        after: int | None = None,
        numbers_after: int = 0,
    ) -> None:
        self._folder = Path(folder)
        _require_only_checkpoints(self._folder)
        self._contents = Contents(model, listed(optimizers))
        make_folders(self._folder)
        self._writer = BackgroundWriter(self._folder, buffer_bytes)
        self._full: PieceTask | None = None
        self._pieces: tuple[Piece, ...] = ()
        self._lacks_files = False  # pieces were deleted or damaged, so every row is copied again
        self._arrays: dict[str, Array] = {}
        self._cut: _Cut | None = None
        self._counts = {"num_saved": 0, "num_failed": 0, "written_bytes": 0}
        self._seconds = 0.0
        with ExitStack() as stack:
            refusal = (
                f"another Checkpoints is at work in {self._folder}; close it, or choose another "
                "folder"
            )
            stack.enter_context(alone_with(self._folder / "LOCK", refusal))
            newest_number = newest(self._folder)
            number = newest_number if after is None else after
            self._last = None if number is None else read_manifest(self._folder, number)
            self._number = max(last_number(self._folder), numbers_after)
            if after is None or after == newest_number:  # else it is deleted, maybe
                remove_unneeded(self._folder)
            if after is not None:
                assert self._last is not None
                require_same_arrays(self._last, self._contents)
                self._pieces, self._arrays = self._last.pieces, dict(self._last.arrays)
                self._contents.tables.track()
            lock = stack.pop_all()
        # Runs also when the last reference is dropped, and when the interpreter exits.
        self._release = finalize(self, _release, self._writer, self._contents, lock)

    def prepare(self) -> None:
        """Start to copy every row in the background, unless there is a full piece already.

        Returns at once. The first `save` waits until the copy is complete.
        """
        self._require_open()
        if (self._pieces and not self._lacks_files) or self._full is not None:
            return
        self._contents.tables.track()
        number = self._number + 1
        full = PieceTask(self._folder, f"full-{number:08}", number)
        self._writer.unfinished.add(full.name)
        self._full = full
        tables = self._contents.table_arrays()
        self._arrays = {name: array for each in tables for name, array in each.arrays().items()}
        num_bytes = sum(array.num_bytes for array in self._arrays.values())

        def copy() -> None:
            full.run(lambda _: require_space(self._folder, num_bytes))
            builder = BlockBuilder(full.write)
            try:
                # In this thread, a read of a table must never write rows in slots back to it.
                with DisableTorchFunctionSubclass():
                    for each in tables:
                        for _ in each.add_range(builder):
                            if full.error is not None:
                                return
            except Exception as error:  # such as a table in files that cannot be read
                full.fail(error)
            builder.flush()
            full.finish()

        self._writer.put(copy)

    def save(
        self,
        *,
        pipeline: Any = None,
        loader: Any = None,
        schedulers: Any = (),
        state: Any = None,
        number: int | None = None,
    ) -> None:
        """Save a checkpoint: call it between two steps.

        Returns when all rows are copied; they are written in the background.

        Args:
            pipeline: As for `save_checkpoint`, like the arguments after it.
            loader: A loader with `state_dict`, for its position.
            schedulers: Learning-rate schedulers, one or several.
            state: Anything else.
            number: Number of the checkpoint, for processes that save together; None for the next.

        Raises:
            CheckpointError: a value cannot be saved, or the folder has a higher number already.
            ConfigError: this object is closed, `loader` or another argument has no `state_dict`,
                `loader` counts mini-batches that wait in `pipeline` as trained on, or the dtype or
                the size of a table has changed.
        """
        self._require_open()
        if number is not None and number <= self._number:
            raise CheckpointError(
                f"{self._folder}: checkpoint {number} must have a higher number than "
                f"{self._number}, which the folder has already; begin a new folder"
            )
        _require_trained_position(pipeline, loader)
        begin = perf_counter()
        small = self._contents.small(  # raises before anything is taken
            {
                "pipeline": _state_of("pipeline", pipeline),
                "loader": _state_of("loader", loader),
                "schedulers": [_state_of("schedulers", each) for each in listed(schedulers)],
                "state": state,
            }
        )
        self._settle()
        if self._last is not None and wants_merge(self._last, times=2):
            self._writer.finish_merge()  # else the disk fills, if saves leave it no time
        self.prepare()
        if self._full is not None:
            # A row that is updated after the cut is not in the delta, so it must be copied by now.
            self._writer.wait()
        tables = self._contents.tables
        tables.flush()
        of_tables = self._contents.table_arrays()
        self._require_same_rows(of_tables)
        self._number = number = self._number + 1 if number is None else number
        task = PieceTask(self._folder, f"delta-{number:08}", number)
        self._writer.unfinished.add(task.name)
        # From here on, an error or Ctrl-C leaves a cut that `_settle` takes back.
        cut = self._cut = _Cut(task)
        cut.bits = bits = tables.take_changed()
        builder = BlockBuilder(lambda rows: self._writer.put(lambda: task.write(rows)))
        arrays: dict[str, Array] = add_arrays(builder, small.arrays)
        builder.flush()  # later checkpoints need only the blocks with rows of tables
        names = {}
        for each, of_table in zip(of_tables, bits, strict=True):
            arrays |= each.arrays()
            names[each.table.key] = tuple(each.names.values())
            each.add_rows(builder, of_table)
        builder.flush()
        tree = small.tree
        self._writer.put(lambda: self._commit(cut, number, arrays, names, tree))
        cut.is_queued = True
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

    @property
    def newest(self) -> int | None:
        """Number of the newest checkpoint that is known to be complete, without waiting for any."""
        cut = self._cut
        manifest = self._last if cut is None or cut.manifest is None else cut.manifest
        return None if manifest is None else manifest.number

    def pin(self, number: int | None) -> None:
        """Keep a checkpoint, besides the two newest ones, until another is pinned.

        Processes that save together pin the newest one that all of them have.

        Args:
            number: Its number; None to keep no other one.
        """
        self._writer.pinned = number

    def finish_merge(self) -> None:
        """Wait until no merge of older checkpoints is under way."""
        self._writer.finish_merge()

    def close(self) -> None:
        """Write what waits, and stop recording updated rows. Another call does nothing."""
        if not self._release.alive:
            return
        self._writer.close()
        try:
            self._settle()
        finally:
            remove_unneeded(self._folder, pinned=self._writer.pinned)
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def give_up(self) -> None:
        """End at once, without writing what waits; complete checkpoints stay."""
        for task in (self._full, None if self._cut is None else self._cut.task):
            if task is not None and task.error is None:
                # Not `fail`, which deletes files: the thread may be completing this piece.
                task.error = CheckpointError("given up")
        self._cut = None
        self._writer.close()
        remove_unneeded(self._folder, pinned=self._writer.pinned)
        self._release()

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
        if full is not None and full.piece is None:
            if full.error is None:  # Ctrl-C ended `prepare`
                full.fail(CheckpointError("the copy of every row was not made"))
            assert full.error is not None
            cut.task.fail(full.error)
        if cut.task.error is not None:
            return
        assert cut.task.piece is not None
        try:
            before = () if last is None else (*last.before, (last.number, last.id))
            if full is not None:
                assert full.piece is not None
                pieces = [full.piece]
            else:
                assert last is not None
                last = self._reread(last.number)
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
            commit(self._folder, manifest)
        except Exception as error:  # the thread goes on, and training is told
            cut.task.fail(error)
            return
        cut.manifest = manifest
        self._writer.unfinished.difference_update(piece.folder for piece in manifest.pieces)
        remove_unneeded(self._folder, self._writer.unfinished, self._writer.pinned)
        if wants_merge(manifest):
            self._writer.start_merge(manifest)

    def _reread(self, number: int) -> Manifest:
        """In the writing thread: the last checkpoint, which a merge may have changed.

        Raises:
            CheckpointError: it was deleted or damaged; the next `save` copies every row.
        """
        try:
            return read_manifest(self._folder, number)
        except CheckpointError as error:
            self._lacks_files = True
            raise CheckpointError(
                f"the manifest of checkpoint {number} was deleted or damaged; the next checkpoint "
                "copies every row again"
            ) from error

    def _settle(self, *, strict: bool = False) -> None:
        """Wait until the last `save` is written, and take over its result.

        Ctrl-C may end this at any place; then the next call does it again.
        """
        merge_error = self._writer.merge_error
        if merge_error is not None:
            self._lacks_files |= isinstance(merge_error, CheckpointError)
            self._writer.merge_error = None
            if not isinstance(merge_error, _EXPECTED):
                raise merge_error
            copies = ", so the next one copies every row again" if self._lacks_files else ""
            _warn(f"older checkpoints could not be merged{copies}", merge_error)
        cut = self._cut
        if cut is None:
            return
        self._writer.wait()
        if cut.manifest is not None:
            self._lacks_files &= self._full is None
            self._last, self._pieces, self._full = cut.manifest, cut.manifest.pieces, None
            self._arrays = dict(cut.manifest.arrays)
            self._counts["num_saved"] += 1
            self._counts["written_bytes"] += cut.manifest.pieces[-1].num_bytes
            self._cut = None
            return
        if cut.task.error is None:  # an error or Ctrl-C ended `save`
            error = self._writer.fault or CheckpointError("the checkpoint was not finished")
            self._writer.run(partial(cut.task.fail, error))
        if cut.bits is None:
            self._contents.tables.mark_all()
        else:
            self._contents.tables.put_back(cut.bits)
        if self._full is not None and self._full.error is not None:
            self._writer.unfinished.discard(self._full.name)
            self._full = None  # `prepare` copies every row again
        self._writer.unfinished.discard(cut.task.name)
        self._counts["num_failed"] += 1
        self._cut = None
        if not cut.is_queued:  # `save` has raised its error
            return
        assert cut.task.error is not None
        if strict or not isinstance(cut.task.error, _EXPECTED):
            raise cut.task.error
        complete = "there is no complete one"
        if self._last is not None:
            complete = f"the newest complete one is checkpoint {self._last.number}"
        what = f"a checkpoint could not be written to {self._folder}, and training goes on"
        _warn(f"{what}; {complete}", cut.task.error)

    def _require_open(self) -> None:
        if not self._release.alive:
            raise ConfigError(
                f"{self._folder}: this object is closed and cannot save; make another `Checkpoints`"
            )

    def _require_same_rows(self, tables: Sequence[TableArrays]) -> None:
        """Check that rows of this checkpoint fit the rows that earlier pieces have."""
        for each in tables:
            for name, array in each.arrays().items():
                known = self._arrays.get(name, array)
                if array != known:
                    raise ConfigError(
                        f"{name}: is {array.dtype} {array.shape}, and was {known.dtype} "
                        f"{known.shape} in the checkpoint before; begin a new folder of checkpoints"
                    )


def _release(writer: BackgroundWriter, contents: Contents, lock: ExitStack) -> None:
    """End the thread, the record of updated rows, and the lock on the folder."""
    writer.close()
    contents.tables.stop_tracking()
    lock.close()


def _warn(what: str, error: Exception) -> None:
    warnings.warn(
        f"{what} ({str(error) or type(error).__name__}); free some space, or check the disk",
        stacklevel=4,
    )


class _Cut:
    """A checkpoint while it is written.

    Attributes:
        task: Writes its delta.
        bits: The rows in it; None until they are taken.
        is_queued: Whether all that belongs to it is queued.
        manifest: The complete checkpoint.
    """

    def __init__(self, task: PieceTask) -> None:
        self.task = task
        self.bits: Sequence[NDArray[np.uint64]] | None = None
        self.is_queued = False
        self.manifest: Manifest | None = None


def _require_only_checkpoints(folder: Path) -> None:
    """Refuse a folder that holds something else.

    Raises:
        AlreadyExists: it does.
    """
    if not folder.exists():
        return
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
    if names and not any(OWN_FILE_NAME.fullmatch(n) or PIECE_NAME.fullmatch(n) for n in names):
        raise AlreadyExists(
            f"{folder} is not a folder of checkpoints: it has {names[0]}; choose another"
        )


def _state_of(argument: str, value: Any) -> Any:
    """The `state_dict` of an argument; None for None.

    Raises:
        ConfigError: it has none.
    """
    if value is None:
        return None
    if not hasattr(value, "state_dict"):
        raise ConfigError(
            f"{argument} must have state_dict and load_state_dict, got {type(value).__name__}; "
            "save what it needs as state"
        )
    return value.state_dict()


def _require_trained_position(pipeline: Any, loader: Any) -> None:
    """Check that the loader's position does not count mini-batches that wait in the pipeline.

    Raises:
        ConfigError: it counts some; a run that is resumed would leave them out.
    """
    num_untold = 0 if loader is None else getattr(pipeline, "num_untold", 0)
    if num_untold:
        raise ConfigError(
            f"loader: the {type(loader).__name__} may count {num_untold} mini-batches as used "
            "that wait in the pipeline, because the iterator that was trained on has no "
            "num_waiting; train on a BatchLoader itself, give the iterator num_waiting "
            "(docs/python.md), or, if nothing is skipped, use schedule=Sequential()"
        )


def listed(value: Any) -> list[Any]:
    """One value or several, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]
