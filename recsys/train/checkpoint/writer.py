"""Writes checkpoints in a background thread.

    training thread   adds copies of rows to a bounded queue; waits only while it is full
    writing thread    writes blocks, then manifest and `LAST`, in the order of the queue; between
                      two tasks it merges pieces, and then deletes the files of older checkpoints

Order on the disk, each step flushed before the next: blocks, their folder, the manifest, `LAST`.
Only then are files deleted that neither this checkpoint nor the one before it needs. So a crash at
any moment leaves the newest complete checkpoint readable.
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from recsys._support.files import lock_if_free
from recsys._support.machine import lower_thread_priority
from recsys._support.sizes import format_bytes
from recsys.errors import CheckpointError
from recsys.train.checkpoint.blocks import BLOCK_BYTES, PieceWriter
from recsys.train.checkpoint.manifest import (
    OWN_FILE_NAME,
    PIECE_NAME,
    manifest_numbers,
    newest,
    read_manifest,
    set_newest,
    write_manifest,
)
from recsys.train.checkpoint.merge import merge, merged_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

    from recsys.train.checkpoint.blocks import Rows
    from recsys.train.checkpoint.manifest import Manifest, Piece

__all__ = [
    "BackgroundWriter",
    "PieceTask",
    "commit",
    "remove_unneeded",
    "require_space",
    "wants_merge",
]

_MOST_DELTAS = 64
_CHECK_SECONDS = 1.0  # how often a waiting thread checks that the other one is alive


class PieceTask:
    """One piece while it is written; the first error ends it, and its files are removed.

    Args:
        folder: The folder of checkpoints.
        name: Name of the piece's folder.
        number: Number of its checkpoint.

    Attributes:
        error: What ended it; None while all is well.
        piece: The finished piece.
    """

    def __init__(self, folder: Path, name: str, number: int) -> None:
        self._folder, self.name, self._number = folder, name, number
        self._writer: PieceWriter | None = None
        self.error: Exception | None = None
        self.piece: Piece | None = None

    def run(self, step: Callable[[PieceWriter], None]) -> None:
        """Do one step of writing, unless one has failed before."""
        if self.error is not None:
            return
        try:
            if self._writer is None:
                self._writer = PieceWriter(self._folder, self.name, self._number)
            step(self._writer)
        except Exception as error:  # the thread goes on, and training is told
            self.fail(error)

    def write(self, rows: Rows) -> None:
        """Write a block."""
        self.run(lambda writer: writer.write(rows))

    def finish(self) -> None:
        """Flush the folder; the piece is complete."""

        def finish(writer: PieceWriter) -> None:
            self.piece = writer.finish()

        self.run(finish)

    def fail(self, error: Exception) -> None:
        """End the piece, and remove the files that it has written."""
        self.error = error
        # Without a writer, a folder of this name is not its own.
        if self._writer is not None and not _is_named(self._folder, self.name):
            shutil.rmtree(self._folder / self.name, ignore_errors=True)


class BackgroundWriter:
    """Runs tasks in a thread, in order, and merges pieces when it has no task.

    Args:
        folder: The folder of checkpoints.
        buffer_bytes: Memory for blocks that wait to be written.

    Attributes:
        merge_error: The error of the last merge, if it failed.
        fault: The error of a task that must not have raised one.
        most_blocks: The most blocks that have waited at a time.
        unfinished: Names of pieces that no manifest has yet; their files stay.
        pinned: As for `remove_unneeded`.
    """

    def __init__(self, folder: Path, buffer_bytes: int) -> None:
        self._folder = folder
        self.merge_error: Exception | None = None
        self.fault: Exception | None = None
        # One block is being filled and one is being written, besides those in the queue.
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(
            max(1, buffer_bytes // BLOCK_BYTES - 2)
        )
        self._merging: Generator[None] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.most_blocks = 0
        self.unfinished: set[str] = set()
        self.pinned: int | None = None

    def put(self, task: Callable[[], None]) -> None:
        """Queue a task; waits while the queue is full. A task must not raise."""
        if self._thread is None or not self._thread.is_alive():
            self._is_closed = False
            self._thread = threading.Thread(
                target=self._run, name="recsys-checkpoints", daemon=True
            )
            self._thread.start()
        self._tasks.put(task)
        self.most_blocks = max(self.most_blocks, self._tasks.qsize())

    def run(self, task: Callable[[], None]) -> None:
        """Run a task after all that are queued, and wait for it; without a thread, run it here."""
        thread, done = self._thread, threading.Event()

        def run() -> None:
            try:
                task()
            finally:
                done.set()

        if thread is None:
            run()
            return
        self.put(run)
        # A call of `close` that Ctrl-C has ended may end the thread before it comes to this task.
        while not done.wait(_CHECK_SECONDS) and thread.is_alive():
            pass

    def wait(self) -> None:
        """Wait until all tasks have run; a merge may still go on."""
        self.run(lambda: None)

    def finish_merge(self) -> None:
        """Wait until no merge is under way."""

        def merge() -> None:
            while self._merging is not None:
                self._continue_merge()

        self.run(merge)

    def close(self) -> None:
        """Run the remaining tasks, give up a merge, and end the thread."""
        thread = self._thread
        if thread is None:
            return
        if thread is threading.current_thread():  # a task had the last reference to `Checkpoints`
            self._is_closed = True
            return
        # An earlier call that Ctrl-C has ended may have ended the thread.
        while thread.is_alive() and not self._is_closed:
            with suppress(queue.Full):
                self._tasks.put(None, timeout=_CHECK_SECONDS)
                self._is_closed = True
        thread.join()
        self._thread, self._is_closed = None, False

    def start_merge(self, manifest: Manifest) -> None:
        """In the thread: merge the pieces of a checkpoint whenever there is no task."""
        if self._merging is None:
            self._merging = self._merge(manifest)

    def _run(self) -> None:
        lower_thread_priority()
        while True:
            try:
                task = self._tasks.get(block=self._merging is None and not self._is_closed)
            except queue.Empty:
                if not self._is_closed:
                    self._continue_merge()
                    continue
                task = None
            if task is None:
                if self._merging is not None:
                    self._merging.close()
                return
            try:
                task()
            except Exception as error:  # the thread goes on, so that `wait` ends
                self.fault = error
            del task  # it holds a block's memory

    def _continue_merge(self) -> None:
        """Merge one more block."""
        assert self._merging is not None
        try:
            next(self._merging)
        except StopIteration:
            self._merging = None
        except Exception as error:  # the thread goes on, and the next `save` warns
            self._merging, self.merge_error = None, error

    def _merge(self, manifest: Manifest) -> Generator[None]:
        name = f"full-{manifest.number:08}"
        require_space(self._folder, sum(each.num_bytes for each in manifest.arrays.values()))
        writer = PieceWriter(self._folder, name, manifest.number)
        self.unfinished.add(name)
        try:
            yield from merge(self._folder, manifest, writer)
            piece = writer.finish()
            self._use_merged(manifest, piece)
        except BaseException:
            self.unfinished.discard(name)
            # A manifest that names it may have been written before the error.
            if not _is_named(self._folder, name):
                shutil.rmtree(writer.path, ignore_errors=True)
            raise
        self.unfinished.discard(name)
        remove_unneeded(self._folder, self.unfinished, self.pinned)

    def _use_merged(self, manifest: Manifest, piece: Piece) -> None:
        """Let the merged checkpoint, and newer ones, begin with the merged piece."""
        replaced = {each.folder for each in manifest.pieces}
        for number in reversed(manifest_numbers(self._folder)):
            if number < manifest.number:
                continue
            other = read_manifest(self._folder, number)
            rest = [each for each in other.pieces if each.folder not in replaced]
            first = piece if not rest else piece.rows_of_tables(other.tables)
            numbers = {
                key: array
                for key, array in merged_arrays(manifest).items()
                if key.startswith("changed/")
            }
            arrays = {**other.arrays, **numbers}
            write_manifest(self._folder, replace(other, pieces=(first, *rest), arrays=arrays))


def wants_merge(manifest: Manifest, times: int = 1) -> bool:
    """Whether the deltas of a checkpoint are so large that a merge saves space and time.

    Args:
        manifest: The checkpoint.
        times: How many times the bytes of all rows the deltas may have.
    """
    # Only rows of tables count: the dense part is in every delta, and a merge does not save it.
    full, *deltas = (each.rows_of_tables(manifest.tables) for each in manifest.pieces)
    if full.number == manifest.number:  # the merged piece would have the name of the full one
        return False
    most = max(full.num_bytes, BLOCK_BYTES)  # small tables are not merged at every checkpoint
    return sum(each.num_bytes for each in deltas) > times * most or len(deltas) > _MOST_DELTAS


def commit(folder: Path, manifest: Manifest) -> None:
    """Write a manifest whose pieces are on the disk, and name it as the newest.

    Args:
        folder: The folder of checkpoints.
        manifest: The checkpoint.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    try:
        write_manifest(folder, manifest)
        set_newest(folder, manifest)
    except BaseException:
        # `LAST` may name the checkpoint already, if only flushing it has failed.
        with suppress(OSError, CheckpointError):
            if newest(folder) != manifest.number:
                (folder / manifest.name).unlink(missing_ok=True)
        raise


def _is_named(folder: Path, name: str) -> bool:
    """Whether a manifest in a folder names a piece, or cannot be read."""
    try:
        manifests = [read_manifest(folder, number) for number in manifest_numbers(folder)]
    except (OSError, CheckpointError):
        return True
    return any(piece.folder == name for each in manifests for piece in each.pieces)


def remove_unneeded(
    folder: Path, unfinished: Iterable[str] = (), pinned: int | None = None
) -> None:
    """Delete everything that neither the newest checkpoint nor the one before it needs.

    Files that cannot be deleted stay, and all stay while another process reads the folder.

    Args:
        folder: The folder of checkpoints.
        unfinished: Names of pieces that are being written; their files stay.
        pinned: Number of another checkpoint that stays, if it exists.
    """
    with suppress(OSError, CheckpointError), lock_if_free(folder) as is_locked:
        if not is_locked:  # the next checkpoint deletes them
            return
        last = newest(folder)
        kept = [] if last is None else [read_manifest(folder, last)]
        if kept and kept[0].before:
            number, name = kept[0].before[-1]
            with suppress(CheckpointError):
                before = read_manifest(folder, number)
                kept += [before] if before.id == name else []
        if pinned is not None and kept:
            with suppress(CheckpointError):
                kept.append(read_manifest(folder, pinned))
        numbers = {each.number for each in kept}
        needed = {piece.folder for each in kept for piece in each.pieces}.union(unfinished)
        for number in manifest_numbers(folder):
            if number not in numbers:
                (folder / f"{number:08}.json").unlink(missing_ok=True)
        for path in folder.iterdir():
            if PIECE_NAME.fullmatch(path.name) and path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)
            elif OWN_FILE_NAME.fullmatch(path.name) and path.name.endswith(".partial"):
                path.unlink(missing_ok=True)


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin a piece that the disk has no room for.

    Raises:
        OSError: there is too little space.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"{folder}: {format_bytes(num_bytes)} are needed, and {format_bytes(free)} are free "
            f"({os.strerror(errno.ENOSPC)})",
        )
