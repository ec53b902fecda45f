"""Saves a training run again and again, at a small share of its time: `Checkpoints`.

    prepare   starts to copy every row to a full piece, in the background; from now on rows that
              are updated are recorded
    save      the cut, between two steps: rows updated since the last checkpoint, and everything
              else, are copied; the writing thread writes them to a delta, then the manifest

The full piece is copied while rows change. That is no error: each row that changed meanwhile is
recorded, so the deltas after it overwrite it. Once the deltas are larger than the full piece, the
next full piece is copied in the same way, after a cut.

Several processes save together: each writes its own pieces, and the first one the manifest, once
the pieces of all are there.
"""

from __future__ import annotations

import secrets
import threading
import time
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import finalize

import torch

from recsys._support.files import alone_with, make_folders
from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.embeddings.update.changed_rows import rows_of
from recsys.errors import AlreadyExists, CheckpointError, ConfigError
from recsys.train.checkpoint.contents import Contents, listed
from recsys.train.checkpoint.format import (
    BLOCK_BYTES,
    OWN_NAME,
    PIECE_NAME,
    ROWS,
    Manifest,
    array_name,
    is_finished,
    last_number,
    newest,
    read_manifest,
    read_piece,
    read_state,
    row_ranges,
)
from recsys.train.checkpoint.restore import require_same
from recsys.train.checkpoint.writer import (
    PieceWriter,
    WritingThread,
    commit,
    remove_unneeded,
    require_space,
    signals_held,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.embeddings.saved_tables import SavedTable
    from recsys.train.checkpoint.contents import Share
    from recsys.train.checkpoint.format import Array, Table

__all__ = ["Checkpoints", "save_checkpoint"]

# Errors that do not end the training. Others are faults of the program.
_EXPECTED = OSError, CheckpointError, MemoryError
_LISTED_WORDS = 2**14  # a million rows: their numbers take 8 MiB
_POLL_SECONDS = 0.02  # how often the first process looks for the pieces of the others
_Range = tuple[str, int, int]  # a table, its first row and the row after the last one
_PATIENCE = 10.0  # seconds that it waits for them at an end that they may not come to


def save_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    pipeline: Any = None,
    loader: Any = None,
    schedulers: Any = (),
    state: Any = None,
) -> int:
    """Save everything that training needs to go on exactly; returns when it is on the disk.

    Call it between two steps. Tables are copied in blocks, and rows in fast memory stay there. The
    checkpoint before it in the folder is kept, older ones are deleted. `Checkpoints` writes many
    checkpoints of one run at less cost.

    Args:
        folder: The folder of checkpoints; made if it does not exist.
        model: The model.
        optimizers: Its optimizers. Those that recsys modules have made for their rows need not be
            among them.
        pipeline: A `TrainPipeline`, for its schedule.
        loader: A loader with `state_dict`, for its position.
        schedulers: Learning-rate schedulers, one or several.
        state: Anything else: numbers, texts, tensors, lists and dictionaries of them.

    Returns:
        Number of the checkpoint.

    Raises:
        AlreadyExists: `folder` holds something else.
        CheckpointError: a value cannot be saved.
        ConfigError: `loader` or another argument has no `state_dict`, or `loader` counts
            mini-batches that wait in `pipeline` as used.
        OSError: the disk is full, or cannot be written.
    """
    with Checkpoints(folder, model=model, optimizers=optimizers) as checkpoints:
        checkpoints.save(pipeline=pipeline, loader=loader, schedulers=schedulers, state=state)
        number = checkpoints.wait(strict=True)
    assert number is not None
    return number


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
        share: The rows of the model, where several processes save together; None if it has all.
            Then `save` and `wait` are collectives.

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
        share: Share | None = None,
    ) -> None:
        self._folder, self._share = Path(folder), share
        self._rank = 0 if share is None else share.rank
        _require_only_checkpoints(self._folder)
        self._contents = Contents(model, listed(optimizers), share)
        make_folders(self._folder)
        self._last: Manifest | None = None  # known to the first process
        self._full: PieceWriter | None = None  # that no checkpoint has yet
        self._full_copied: Future[None]
        self._is_outgrown = False  # the full piece, by the deltas
        self._continues = after is not None  # the last checkpoint, by a delta
        self._cut: _Cut | None = None
        self._weights: dict[str, tuple[int, Array]] = {}  # as they were saved
        self._sizes: dict[str, int] = {}  # bytes of each piece
        self._counts = {"num_saved": 0, "num_failed": 0, "written_bytes": 0}
        self._seconds = 0.0
        with ExitStack() as stack:
            if not self._rank:
                refusal = (
                    f"another Checkpoints is at work in {self._folder}; close it, or choose "
                    "another folder"
                )
                stack.enter_context(alone_with(self._folder / "LOCK", refusal))
                last = newest(self._folder)
                number = last if after is None else after
                self._last = None if number is None else read_manifest(self._folder, number)
                if share is None and number == last:  # else what is continued is deleted, maybe
                    remove_unneeded(self._folder, unfinished=True)
            self._number = last_number(self._folder) if share is None else share.numbers_after
            if after is not None:
                manifest = read_manifest(self._folder, after)
                pieces = [read_piece(self._folder, name) for name in manifest.pieces]
                saved = read_state(self._folder, manifest.deltas[0], is_mapped=True)
                require_same(manifest, pieces, saved, self._contents)
                self._sizes = {piece.name: piece.num_bytes for piece in pieces}
                self._contents.tables.track()
            lock = stack.pop_all()
        self._buffer_bytes, self._thread = buffer_bytes, WritingThread(buffer_bytes)
        # Runs also when the last reference is dropped, and when the interpreter exits.
        self._release = finalize(self, _release, self._thread, self._contents, lock)

    def prepare(self) -> None:
        """Start to copy every row in the background, unless there is a full piece already.

        Returns at once. The first `save` waits until the copy is complete.
        """
        self._require_open()
        if not self._continues and self._full is None:
            with signals_held():
                self._contents.tables.track()
                self._copy_every_row()

    def save(
        self,
        *,
        pipeline: Any = None,
        loader: Any = None,
        schedulers: Any = (),
        state: Any = None,
    ) -> None:
        """Save a checkpoint: call it between two steps.

        Returns when all rows are copied; they are written in the background.

        Args:
            pipeline: As for `save_checkpoint`, like the arguments after it.
            loader: A loader with `state_dict`, for its position.
            schedulers: Learning-rate schedulers, one or several.
            state: Anything else.

        Raises:
            CheckpointError: a value cannot be saved.
            ConfigError: this object is closed, `loader` or another argument has no `state_dict`,
                `loader` counts mini-batches that wait in `pipeline` as trained on, or the dtype or
                the size of a table has changed.
        """
        self._require_open()
        _require_trained_position(pipeline, loader)
        begin = time.perf_counter()
        small = self._contents.state(
            {
                "pipeline": _states_of("pipeline", pipeline),
                "loader": _states_of("loader", loader),
                "schedulers": _states_of("schedulers", schedulers),
                "state": state,
            }
        )
        self._settle()
        self.prepare()
        self._finish_copy()
        with signals_held():
            self._take(small)
            if self._is_outgrown and self._full is None:
                self._copy_every_row()
        self._seconds += time.perf_counter() - begin

    def wait(self, *, strict: bool = False) -> int | None:
        """Wait until the last `save` is on the disk.

        Args:
            strict: Raise if it could not be written.

        Returns:
            Number of the newest complete checkpoint; None if there is none. Of several processes,
            only the first one knows it.

        Raises:
            OSError, CheckpointError: with `strict`, the last `save` could not be written.
        """
        self._settle(strict=strict)
        return self.newest

    @property
    def newest(self) -> int | None:
        """Number of the newest checkpoint that is known to be complete, without waiting for any."""
        cut, manifest = self._cut, self._last
        if cut is not None and cut.manifest is not None:
            manifest = cut.manifest
        return None if manifest is None else manifest.number

    def close(self) -> None:
        """Write what waits, and stop recording updated rows. Another call does nothing.

        It is no collective: another process may have ended. Call `wait` before, if none has.
        """
        if not self._release.alive:
            return
        try:
            if self._share is None:
                self._settle()
            elif self._cut is not None:
                with suppress(TimeoutError):
                    self._cut.committed.exception(_PATIENCE)
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def give_up(self) -> None:
        """End at once, without writing what waits; complete checkpoints stay."""
        if self._cut is not None:
            self._cut.delta.stop()
        self._end()

    def describe(self) -> dict[str, Any]:
        """For a run record: what was saved since this object was made, and what it cost.

        `exposed_seconds` is the time that training waited in `save`, `memory_bytes` the memory for
        the record of updated rows and for blocks that may wait.
        """
        record = self._contents.tables.tracked_bytes
        memory_bytes = record + self._buffer_bytes if record else 0
        return {**self._counts, "exposed_seconds": self._seconds, "memory_bytes": memory_bytes}

    def _take(self, small: dict[str, Any]) -> None:
        """The cut: copy the rows that have changed and everything else, and queue the manifest."""
        contents, put = self._contents, self._thread.put
        contents.tables.flush()
        tables = contents.describe_tables()
        weights = {key: (table.end, table.arrays["weight"]) for key, table in tables.items()}
        if weights != (self._weights or weights):
            raise ConfigError(
                f"{self._folder}: the dtype or the size of a table has changed since the last "
                "checkpoint; begin a new folder"
            )
        self._weights = weights
        self._number += 1
        delta = PieceWriter(self._folder, self._name_of("delta", self._number))
        bits = contents.tables.take_changed()
        try:
            delta.run(delta.write_state, small)
            builder = _BlockBuilder(lambda *block: put(delta.run, delta.write_rows, *block))
            for table, of_table in zip(contents.tables.tables, bits, strict=True):
                _add_rows(builder, table, tables[table.key], of_table)
            builder.flush()
            written = put(_finish, delta, tables, self._full)
        except BaseException:
            put(delta.remove)
            contents.tables.put_back(bits)
            raise
        self._cut = cut = _Cut(self._number, delta, self._full, bits, written)
        if not self._rank:
            cut.committed = put(self._commit, cut)

    def _commit(self, cut: _Cut) -> None:
        """In the writing thread of the first process: complete a checkpoint.

        Raises:
            CheckpointError: pieces of another process do not come.
            OSError: the disk is full, or cannot be written.
            _FilesLost: earlier pieces were deleted.
        """
        cut.written.result()
        folder, last = self._folder, self._last
        own = [cut.delta] if cut.full is None else [cut.full, cut.delta]
        ranks = range(1 if self._share is None else self._share.num_ranks)
        new = [piece.path.name + _suffix(rank) for piece in own for rank in ranks]
        while not all(is_finished(folder, name) for name in new):
            if cut.is_given_up.wait(_POLL_SECONDS):
                raise CheckpointError("another process has not written its rows")
        self._sizes |= {name: read_piece(folder, name).num_bytes for name in new}
        before = () if last is None or not self._continues else ((last.number, last.id),)
        if cut.full is None:
            assert last is not None
            lost = [name for name in last.pieces if not is_finished(folder, name)]
            if lost:
                raise _FilesLost(f"{lost[0]} was deleted; the next checkpoint copies every row")
            new, before = [*last.pieces, *new], (*last.since, *before)
        number_before = 0 if last is None else last.number
        new_id = secrets.token_hex(8)
        manifest = Manifest(cut.number, new_id, number_before, before, tuple(new))
        commit(folder, manifest)
        remove_unneeded(folder)
        cut.manifest = manifest

    def _settle(self, *, strict: bool = False) -> None:
        """Wait until the last `save` is written, and take over its result. A collective."""
        cut = self._cut
        if cut is None:
            return
        failed = self._gather(cut.written.exception() is not None)
        if any(failed):
            cut.is_given_up.set()
        error = cut.committed.exception()
        # If only flushing `LAST` has failed, the checkpoint is there.
        is_complete = error is None or newest(self._folder) == cut.number
        is_complete, has_lost = self._gather((is_complete, isinstance(error, _FilesLost)))[0]
        has_full_failed = cut.full is not None and any(self._gather(cut.full.error is not None))
        with signals_held():
            self._cut = None
            self._counts["num_saved" if is_complete else "num_failed"] += 1
            if is_complete:
                self._continues = True
                if not self._rank:
                    self._last = cut.manifest or read_manifest(self._folder, cut.number)
                    deltas = [self._sizes[name] for name in self._last.deltas]
                    self._counts["written_bytes"] += sum(deltas)
            else:
                cut.delta.remove()
                self._contents.tables.put_back(cut.bits)
                self._continues &= not has_lost
            if self._full is cut.full and (is_complete or has_full_failed):
                self._full = None
        self._is_outgrown = self._gather(self._are_deltas_large())[0]
        if error is None:
            return
        if strict or not isinstance(error, _EXPECTED):
            raise error
        number = self.newest
        complete = (
            "there is no complete one"
            if number is None
            else f"the newest complete one is checkpoint {number}"
        )
        what = f"a checkpoint could not be written to {self._folder}, and training goes on"
        _warn(f"{what}; {complete}", error)

    def _finish_copy(self) -> None:
        """Wait for the copy of every row, if one is under way. A collective.

        A row that is updated after the cut is not in its delta, so it must be copied by then.
        """
        if self._full is None:
            return
        self._full_copied.result()
        if any(self._gather(self._full.error is not None)) and self._continues:
            if self._full.error is not None:
                _warn("rows could not be copied again, and deltas go on", self._full.error)
            self._full = None

    def _are_deltas_large(self) -> bool:
        """Whether a new full piece saves space and time when the run is continued."""
        pieces = () if self._last is None else self._last.pieces
        of_full = sum(self._sizes[name] for name in pieces if name.startswith("full"))
        of_all = sum(self._sizes[name] for name in pieces)
        return of_all - of_full > max(of_full, BLOCK_BYTES)

    def _copy_every_row(self) -> None:
        """Start to copy every row to a full piece, which the next checkpoint has."""
        self._full = PieceWriter(self._folder, self._name_of("full", self._number + 1))
        tables, described = self._contents.tables.tables, self._contents.describe_tables()
        task = _copy_every_row, self._folder, self._full, tables, described
        self._full_copied = self._thread.put(self._full.run, *task)

    def _name_of(self, kind: str, number: int) -> str:
        return f"{kind}-{number:08}{_suffix(self._rank)}"

    def _gather(self, value: Any) -> list[Any]:
        """What every process gave, by rank. A collective."""
        return [value] if self._share is None else self._share.gather(value)

    def _end(self) -> None:
        """Stop what is under way, end the thread, and remove what no checkpoint has."""
        if self._cut is not None:
            self._cut.is_given_up.set()
        if self._full is not None:
            self._full.stop()
        self._thread.close()
        if self._full is not None and self._cut is None:  # no checkpoint has it
            self._full.remove()
        if not self._rank:
            remove_unneeded(self._folder, unfinished=self._share is None)
        self._release()

    def _require_open(self) -> None:
        if not self._release.alive:
            raise ConfigError(
                f"{self._folder}: this object is closed and cannot save; make another `Checkpoints`"
            )


class _Cut:
    """A checkpoint while it is written.

    Attributes:
        number: Its number.
        delta: Its delta.
        full: The full piece that it is the first to have, if any.
        bits: The rows in the delta.
        written: Done when this process has written its pieces.
        manifest: The checkpoint, once the first process has completed it.
        committed: Done when the checkpoint is complete, on the first process; else as `written`.
        is_given_up: Set when other processes will not write theirs.
    """

    def __init__(
        self,
        number: int,
        delta: PieceWriter,
        full: PieceWriter | None,
        bits: Sequence[NDArray[np.uint64]],
        written: Future[Any],
    ) -> None:
        self.number, self.delta, self.full, self.bits = number, delta, full, bits
        self.written = self.committed = written
        self.manifest: Manifest | None = None
        self.is_given_up = threading.Event()


class _FilesLost(CheckpointError):
    """Files that a new checkpoint needs were deleted."""


class _BlockBuilder:
    """Collects rows, and passes them on in blocks of about `BLOCK_BYTES`.

    Args:
        emit: Called with the tensors of each block by name, and its rows as in `File`.
    """

    def __init__(self, emit: Callable[[dict[str, Tensor], list[_Range]], Any]) -> None:
        self._emit = emit
        self._tensors: dict[str, Tensor] = {}
        self._rows: list[_Range] = []
        self._num_bytes = 0

    def add(self, tensors: dict[str, Tensor], rows: _Range) -> None:
        """Add rows of all arrays of a table, which one block has together."""
        num_bytes = sum(each.nbytes for each in tensors.values())
        if self._num_bytes + num_bytes > BLOCK_BYTES or tensors.keys() & self._tensors.keys():
            self.flush()
        self._tensors |= tensors
        self._rows.append(rows)
        self._num_bytes += num_bytes

    def flush(self) -> None:
        """Pass on what was collected."""
        if self._rows:
            self._emit(self._tensors, self._rows)
        self._tensors, self._rows, self._num_bytes = {}, [], 0


def _copy_every_row(
    folder: Path, full: PieceWriter, tables: Sequence[SavedTable], described: dict[str, Table]
) -> None:
    """In the writing thread: write a full piece while rows are updated.

    Raises:
        CheckpointError: a table's state was removed meanwhile, or the piece is not wanted any more.
        OSError: the disk is full, or cannot be written.
    """
    sizes = {
        key: sum(array.row_bytes for array in table.arrays.values())
        for key, table in described.items()
    }
    require_space(folder, sum(len(table.weight) * sizes[table.key] for table in tables))
    builder = _BlockBuilder(full.write_rows)
    # In this thread, a read of a table must never write rows in slots back to it.
    with DisableTorchFunctionSubclass():
        for table in tables:
            key, (begin, end, arrays) = table.key, described[table.key]
            for first, last in row_ranges(end - begin, sizes[key]):
                if full.error is not None:
                    raise full.error
                try:
                    found = {
                        array_name(key, each): table.read(each, first, last) for each in arrays
                    }
                except KeyError as error:
                    raise CheckpointError(
                        f"table {key!r}: {error} was removed from its state while every row was "
                        "copied; the next checkpoint copies them again"
                    ) from error
                builder.add(found, (key, begin + first, begin + last))
    builder.flush()
    full.finish(described)


def _add_rows(
    builder: _BlockBuilder, table: SavedTable, described: Table, bits: NDArray[np.uint64]
) -> None:
    """Add some rows of a table with their numbers.

    Args:
        builder: Receives them.
        table: The table.
        described: Its arrays and its rows.
        bits: One bit for each row, as `ChangedRows.take` returns them.
    """
    begin, end, arrays = described
    if begin == end:  # a row that stands for none
        return
    row_bytes = 8 + sum(array.row_bytes for array in arrays.values())
    for word in range(0, len(bits), _LISTED_WORDS):
        listed_rows = rows_of(bits[word : word + _LISTED_WORDS]) + 64 * word
        for first, last in row_ranges(len(listed_rows), row_bytes):
            rows = listed_rows[first:last]
            found = {array_name(table.key, each): table.gather(each, rows) for each in arrays}
            found[table.key + ROWS] = torch.from_numpy(rows + begin)
            builder.add(found, (table.key, begin + int(rows[0]), begin + int(rows[-1]) + 1))


def _finish(delta: PieceWriter, tables: dict[str, Table], full: PieceWriter | None) -> None:
    """In the writing thread: complete the delta of a checkpoint.

    Raises:
        Exception: it could not be written, or the full piece could not.
    """
    if full is not None and full.error is not None:
        delta.error = full.error
        delta.remove()
    delta.run(delta.finish, tables)
    if delta.error is not None:
        raise delta.error


def _release(thread: WritingThread, contents: Contents, lock: ExitStack) -> None:
    """End the thread, the record of updated rows, and the lock on the folder."""
    thread.close()
    contents.tables.stop_tracking()
    lock.close()


def _suffix(rank: int) -> str:
    """What the names of a process's pieces end with."""
    return f"-{rank}" if rank else ""


def _warn(what: str, error: Exception) -> None:
    warnings.warn(
        f"{what} ({str(error) or type(error).__name__}); free some space, or check the disk",
        stacklevel=4,
    )


def _require_only_checkpoints(folder: Path) -> None:
    """Refuse a folder that holds something else.

    Raises:
        AlreadyExists: it does.
    """
    if not folder.exists():
        return
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
    if names and not any(OWN_NAME.fullmatch(n) or PIECE_NAME.fullmatch(n) for n in names):
        raise AlreadyExists(
            f"{folder} is not a folder of checkpoints: it has {names[0]}; choose another"
        )


def _states_of(argument: str, value: Any) -> list[Any]:
    """The `state_dict` of each object that was given as an argument.

    Raises:
        ConfigError: one has none.
    """
    for given in listed(value):
        if not hasattr(given, "state_dict"):
            raise ConfigError(
                f"{argument} must have state_dict and load_state_dict, got {type(given).__name__}; "
                "save what it needs as state"
            )
    return [given.state_dict() for given in listed(value)]


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
