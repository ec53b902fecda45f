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
import signal
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from recsys._support.files import alone_with, make_folders
from recsys._support.machine import lower_thread_priority
from recsys.embeddings.update.changed_rows import rows_of
from recsys.errors import CheckpointError, ConfigError, refuse
from recsys.train.checkpoint.format import (
    BLOCK_BYTES,
    PIECE_FILE,
    ROWS,
    Manifest,
    PieceWriter,
    Table,
    array_name,
    commit,
    last_number,
    newest,
    read_manifest,
    read_piece,
    remove_unneeded,
    require_space,
)
from recsys.train.checkpoint.restore import EVERYTHING, Contents, Share, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.embeddings.saved_tables import SavedTable

__all__ = ["Checkpoints", "save_checkpoint"]

# Errors that do not end the training. Others are faults of the program.
_EXPECTED = OSError, CheckpointError, MemoryError
_LISTED_WORDS = 2**14  # a million rows: their numbers take 8 MiB
_POLL_SECONDS = 0.02  # how often the first process looks for the pieces of the others
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


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Saves a model, its optimizers and a state in a folder; a context manager that closes it.

    From `prepare` to `close`, rows may be changed by updates only, or by torch operations on the
    tables' `weight`, which keep their dtype; `ChangedRows` lists the other writes. A failure to
    write, such as a full disk, does not end the training: it warns, and the next `save` tries
    again. One object at a time may write to a folder. Close it: then rows are recorded no more.

    Args:
        folder: The folder of checkpoints; made if it does not exist.
        model: The model.
        optimizers: Its optimizers, always in the same order.
        buffer_bytes: Memory for rows that wait to be written.
        after: Number of the checkpoint in this folder that the model was just restored from. Then
            only rows updated since are written.
        share: The rows of the model, where several processes save together. Then making this
            object, `save` and `wait` are collectives.

    Raises:
        CheckpointError: `after` is not a complete checkpoint.
        ConfigError: another object writes to `folder`, or this process does not see it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        buffer_bytes: int = 128 * 2**20,
        after: int | None = None,
        share: Share = EVERYTHING,
    ) -> None:
        self._folder, self._share = Path(folder), share
        self._lock_file = self._folder / "LOCK"
        self._contents = Contents(model, listed(optimizers), share)
        self._full: PieceWriter | None = None  # one that no manifest names yet
        self._full_copied: Future[None]
        self._continues = after is not None  # the last checkpoint, by a delta
        self._cut: _Cut | None = None
        self._counts = {"num_saved": 0, "num_failed": 0, "written_bytes": 0}
        with ExitStack() as stack:
            # No other process writes before the first one has told it what is there.
            found = None if share.rank else self._open(stack, after)
            self._last, self._number = share.gather(found)[0]
            self._folder.mkdir(parents=True, exist_ok=True)  # asks a file server that lags
            if not self._lock_file.is_file():
                raise ConfigError(
                    f"{self._folder}: process {share.rank} does not see this folder, which the "
                    "first process has made; name a folder that all machines share"
                )
            if after is not None:
                self._contents.tables.track()
            self._lock, self._is_closed = stack.pop_all(), False
        self._buffer_bytes = buffer_bytes
        self._thread = ThreadPoolExecutor(1, "recsys-checkpoints", lower_thread_priority)
        # Blocks that may wait; one more is being filled.
        self._room = threading.Semaphore(max(1, buffer_bytes // BLOCK_BYTES - 1))

    def _open(self, stack: ExitStack, after: int | None) -> tuple[Manifest | None, int]:
        """Lock the folder; returns the checkpoint before the next one, and the highest number."""
        folder = self._folder
        make_folders(folder)
        refusal = f"another Checkpoints is at work in {folder}; close it, or choose another folder"
        stack.enter_context(alone_with(self._lock_file, refusal))
        last = newest(folder)
        number = last if after is None else after
        if number == last:  # else what is continued is deleted, maybe
            remove_unneeded(folder, unfinished=True)
        return None if number is None else read_manifest(folder, number), last_number(folder)

    def prepare(self) -> None:
        """Start to copy every row in the background, unless there is a full piece already.

        Returns at once. The first `save` waits until the copy is complete.

        Raises:
            ConfigError: this object is closed.
        """
        if self._is_closed:
            raise ConfigError(
                f"{self._folder}: this object is closed and cannot save; make another `Checkpoints`"
            )
        if not self._continues and self._full is None:
            with _signals_held():
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
            ConfigError: this object is closed, `loader` or another argument has no `state_dict`, or
                `loader` counts mini-batches that wait in `pipeline` as trained on.
        """
        given = {
            "pipeline": listed(pipeline),
            "loader": listed(loader),
            "schedulers": listed(schedulers),
        }
        num_untold = 0 if loader is None else getattr(pipeline, "num_untold", 0)
        refuse(
            (
                num_untold > 0,  # a run that is resumed would leave them out
                f"loader: the {type(loader).__name__} may count {num_untold} mini-batches as used "
                "that wait in the pipeline, because the iterator that was trained on has no "
                "num_waiting; train on a BatchLoader itself, give the iterator num_waiting "
                "(docs/python.md), or, if nothing is skipped, use schedule=Sequential()",
            ),
            *(
                (
                    not hasattr(part, "state_dict"),
                    f"{name} must have state_dict and load_state_dict, got {type(part).__name__}; "
                    "save what it needs as state",
                )
                for name, parts in given.items()
                for part in parts
            ),
        )
        states = {name: [part.state_dict() for part in parts] for name, parts in given.items()}
        small = self._contents.state({**states, "state": state})
        self._settle()
        self.prepare()
        if self._full is not None:
            # A row that is updated after the cut is not in its delta, so it must be copied by then.
            self._full_copied.result()
            error = self._full.error
            if any(self._share.gather(error is not None)) and self._continues:
                self._full = None
                if error is not None:
                    _warn("rows could not be copied again, and deltas go on", error)
        # Before the cut, after which the first process may know a newer checkpoint than the others.
        is_outgrown = self._last is not None and self._last.has_large_deltas
        with _signals_held():
            self._take(small)
            if is_outgrown and self._full is None:
                self._copy_every_row()

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
        return self.newest

    @property
    def newest(self) -> int | None:
        """Number of the newest checkpoint that is known to be complete, without waiting for any."""
        return None if self._last is None else self._last.number

    def close(self) -> None:
        """Write what waits, and stop recording updated rows. Another call does nothing.

        It is no collective: another process may have ended. Call `wait` before, if none has.
        """
        if self._is_closed:
            return
        try:
            if self._share.num_ranks == 1:
                self._settle()
            elif self._cut is not None:
                with suppress(TimeoutError):
                    self._committed.exception(_PATIENCE)
        finally:
            self.give_up()

    def __exit__(self, *_: object) -> None:
        self.close()

    def give_up(self) -> None:
        """End at once, without writing what waits; complete checkpoints stay."""
        if self._cut is not None:
            self._cut.is_given_up.set()
        self._thread.shutdown(cancel_futures=True)
        if not self._share.rank:
            remove_unneeded(self._folder, unfinished=True)
        self._contents.tables.stop_tracking()
        self._lock.close()
        self._is_closed = True

    def describe(self) -> dict[str, Any]:
        """For a run record: what was saved since this object was made.

        `memory_bytes` is the memory for the record of updated rows and for blocks that may wait.
        """
        record = self._contents.tables.tracked_bytes
        return {**self._counts, "memory_bytes": record + self._buffer_bytes if record else 0}

    def _take(self, small: dict[str, Any]) -> None:
        """The cut: copy the rows that have changed and everything else, and queue the manifest."""
        tables = self._contents.tables
        tables.flush()
        described = self._contents.describe_tables()
        self._number += 1
        delta = self._new_piece("delta", self._number, described)
        bits = tables.take_changed()
        try:
            delta.run(delta.write_state, small)
            for block in _blocks(tables.tables, described, bits):
                self._put(delta.run, delta.write_rows, _read(block))
            finished = self._put(delta.run, delta.finish)
        except BaseException:
            self._put(delta.remove)
            tables.put_back(bits)
            raise
        pieces = [delta] if self._full is None else [self._full, delta]
        self._cut = cut = _Cut(self._number, pieces, bits, finished, threading.Event())
        self._committed = self._put(self._commit, cut)

    def _commit(self, cut: _Cut) -> None:
        """In the writing thread: complete a checkpoint; the first process writes the manifest.

        Raises:
            CheckpointError: earlier pieces are gone.
            TimeoutError: pieces of another process do not come.
            Exception: this process could not write its pieces.
        """
        for piece in cut.pieces:
            if piece.error is not None:
                raise piece.error
        if self._share.rank:
            return
        folder, last = self._folder, self._last
        ranks = range(self._share.num_ranks)
        names = [piece.path.name + _suffix(rank) for piece in cut.pieces for rank in ranks]
        while not all((folder / name / PIECE_FILE).is_file() for name in names):
            if cut.is_given_up.wait(_POLL_SECONDS):
                raise TimeoutError("another process has not written its rows")
        since = [(last.number, last.id)] if last is not None and self._continues else []
        if last is not None and len(cut.pieces) == 1:  # a delta alone, after the pieces before
            names, since = [*last.pieces, *names], last.since + since
        sizes = {
            name: sum(file.num_bytes for file in read_piece(folder, name).files) for name in names
        }
        manifest = Manifest(cut.number, secrets.token_hex(8), self.newest or 0, since, sizes)
        commit(folder, manifest)
        remove_unneeded(folder)
        self._last = manifest

    def _settle(self, *, strict: bool = False) -> None:
        """Wait until the last `save` is written, and take over its result. A collective."""
        cut = self._cut
        if cut is None:
            return
        cut.finished.result()
        if any(self._share.gather(any(piece.error is not None for piece in cut.pieces))):
            cut.is_given_up.set()
        error = self._committed.exception()
        last, is_complete, has_lost = self._share.gather(
            (self._last, error is None, isinstance(error, CheckpointError))
        )[0]
        with _signals_held():
            self._cut = None
            self._last = last
            self._counts["num_saved" if is_complete else "num_failed"] += 1
            if is_complete:
                self._continues = True
                self._counts["written_bytes"] += sum(last.pieces[name] for name in last.deltas)
            else:
                for piece in cut.pieces:
                    piece.remove()
                self._contents.tables.put_back(cut.bits)
                self._continues &= not has_lost  # else the next one copies every row
            if self._full in cut.pieces:
                self._full = None
        if error is None:
            return
        if strict or not isinstance(error, _EXPECTED):
            raise error
        _warn(
            f"a checkpoint could not be written to {self._folder}, and training goes on; the "
            f"newest complete one is {self.newest or 'none'}",
            error,
        )

    def _copy_every_row(self) -> None:
        """Start to copy every row to a full piece, which the next checkpoint has.

        Rows are read in the writing thread, block by block.
        """
        tables, described = self._contents.tables.tables, self._contents.describe_tables()
        self._full = full = self._new_piece("full", self._number + 1, described)
        num_bytes = sum(
            (end - begin) * array.row_bytes
            for begin, end, arrays in described.values()
            for array in arrays.values()
        )
        self._thread.submit(full.run, require_space, self._folder, num_bytes)
        for block in _blocks(tables, described):
            self._thread.submit(full.run, lambda block: full.write_rows(_read(block)), block)
        self._full_copied = self._thread.submit(full.run, full.finish)

    def _new_piece(self, kind: str, number: int, tables: dict[str, Table]) -> PieceWriter:
        return PieceWriter(self._folder, f"{kind}-{number:08}{_suffix(self._share.rank)}", tables)

    def _put(self, task: Callable[..., Any], *given: Any) -> Future[Any]:
        """Queue a task in the writing thread; waits while too many wait."""
        room = self._room
        room.acquire()
        future = self._thread.submit(task, *given)
        future.add_done_callback(lambda _: room.release())  # has no reference to this object
        return future


class _Cut(NamedTuple):
    """A checkpoint while it is written.

    Attributes:
        number: Its number.
        pieces: Its delta, after the full piece that it is the first to have, if any.
        bits: The rows in the delta.
        finished: Done when this process has written its pieces, or failed.
        is_given_up: Set when other processes will not write theirs.
    """

    number: int
    pieces: list[PieceWriter]
    bits: list[NDArray[np.uint64]]
    finished: Future[None]
    is_given_up: threading.Event


# Of a block: a table; its arrays, and its rows in the whole table; numbers of rows in this process,
# ascending.
_Part = tuple["SavedTable", Table, "range | NDArray[np.int64]"]


def _blocks(
    tables: Sequence[SavedTable],
    described: dict[str, Table],
    bits: Sequence[NDArray[np.uint64]] | None = None,
) -> Iterator[list[_Part]]:
    """Divide rows into blocks of about `BLOCK_BYTES`, with at most one part of each table.

    Args:
        tables: The tables.
        described: Their arrays and rows.
        bits: One bit for each row, as `ChangedRows.take` returns them: only rows whose bit is set;
            None for all rows.
    """
    block: list[_Part] = []
    num_bytes = 0
    for index, table in enumerate(tables):
        saved = described[table.key]
        row_bytes = 8 + sum(array.row_bytes for array in saved.arrays.values())
        for rows in _rows(
            saved.end - saved.begin, row_bytes, None if bits is None else bits[index]
        ):
            if block and (block[-1][0] is table or num_bytes + len(rows) * row_bytes > BLOCK_BYTES):
                yield block
                block, num_bytes = [], 0
            block.append((table, saved, rows))
            num_bytes += len(rows) * row_bytes
    if block:
        yield block


def _rows(
    num_rows: int, row_bytes: int, bits: NDArray[np.uint64] | None
) -> Iterator[range | NDArray[np.int64]]:
    """Divide the rows of a table into parts of at most `BLOCK_BYTES`; a row is never divided."""
    count = max(1, BLOCK_BYTES // row_bytes)
    found: Iterable[range | NDArray[np.int64]] = [range(num_rows)]
    if bits is not None:
        words = range(0, len(bits) if num_rows else 0, _LISTED_WORDS)  # a bit stands for no row
        found = (rows_of(bits[word : word + _LISTED_WORDS]) + 64 * word for word in words)
    for rows in found:
        for first in range(0, len(rows), count):
            yield rows[first : first + count]


def _read(block: Sequence[_Part]) -> dict[str, Tensor]:
    """Copy the rows of a block."""
    found = {}
    for table, (begin, _, arrays), rows in block:
        for name in arrays:
            found[array_name(table.key, name)] = (
                table.read(name, rows.start, rows.stop)
                if isinstance(rows, range)
                else table.gather(name, rows)
            )
        numbers = rows[:1] if isinstance(rows, range) else rows
        found[table.key + ROWS] = torch.tensor(numbers) + begin
    return found


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the `with` block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no signal is handled here
        return
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for held in came:
            signal.raise_signal(held)


def _suffix(rank: int) -> str:
    """What the names of a process's pieces end with."""
    return f"-{rank}" if rank else ""


def _warn(what: str, error: Exception) -> None:
    warnings.warn(
        f"{what} ({str(error) or type(error).__name__}); free some space, or check the disk",
        stacklevel=4,
    )
