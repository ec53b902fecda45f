"""Writes checkpoints in a background thread.

    training thread   hands over copies of rows; waits only while too many of them wait
    writing thread    writes files, `piece.json`, the manifest and `LAST`, in this order

Each step is on the disk before the next. Only then are files deleted that neither this checkpoint
nor the one before it needs. So a crash at any moment leaves the newest complete checkpoint
readable.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.files import flush_to_disk, lock_if_free
from recsys._support.machine import lower_thread_priority
from recsys._support.sizes import format_bytes
from recsys.errors import CheckpointError
from recsys.train.checkpoint.format import (
    BLOCK_BYTES,
    OWN_NAME,
    PIECE_FILE,
    PIECE_NAME,
    STATE_FILE,
    File,
    Piece,
    manifest_numbers,
    newest,
    piece_number,
    read_manifest,
    safetensors_header,
    set_newest,
    write_checked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor

    from recsys.train.checkpoint.format import Manifest, Table

__all__ = [
    "PieceWriter",
    "WritingThread",
    "commit",
    "remove_unneeded",
    "require_space",
    "signals_held",
]

_THREAD_NAME = "recsys-checkpoints"


class PieceWriter:
    """Writes one piece; the first error ends it and removes its files.

    Args:
        folder: The folder of checkpoints.
        name: Name of the piece.

    Attributes:
        path: The folder of the piece.
        error: What ended it; None while all is well.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.error: Exception | None = None
        self._files: list[File] = []

    def run(self, step: Callable[..., None], *given: Any) -> None:
        """Do one step of writing, unless an earlier one has failed."""
        if self.error is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            step(*given)
        except Exception as error:  # the thread goes on, and training is told
            self.error = error
            self.remove()

    def write_rows(
        self, tensors: Mapping[str, Tensor], rows: Sequence[tuple[str, int, int]]
    ) -> None:
        """Write a block, straight from the tensors' memory, and flush it to the disk.

        Args:
            tensors: CPU tensors by name.
            rows: As in `File`.
        """
        path = self.path / f"block-{len(self._files):05}.safetensors"
        header, _ = safetensors_header(
            {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
        )
        with path.open("wb") as file:
            file.write(header)
            crc32 = zlib.crc32(header)
            for tensor in tensors.values():
                content = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
                file.write(content)
                crc32 = zlib.crc32(content, crc32)
            file.flush()
            os.fsync(file.fileno())
            self._files.append(File(path.name, file.tell(), crc32, tuple(rows)))

    def write_state(self, state: dict[str, Any]) -> None:
        """Write everything but tables: in the training thread, because it is not copied."""
        with (self.path / STATE_FILE).open("wb") as file:
            torch.save(state, file)

    def finish(self, tables: dict[str, Table]) -> None:
        """Flush everything to the disk, and write `piece.json`.

        Args:
            tables: As in `Piece`.
        """
        state = self.path / STATE_FILE
        if state.exists():
            flush_to_disk(state)
            with state.open("rb") as file:
                crc32 = 0
                while content := file.read(BLOCK_BYTES):
                    crc32 = zlib.crc32(content, crc32)
                self._files.append(File(STATE_FILE, file.tell(), crc32))
        piece = Piece(self.path.name, tables, tuple(self._files))
        write_checked(self.path / PIECE_FILE, piece)
        flush_to_disk(self.path.parent)

    def stop(self) -> None:
        """Let the steps that wait do nothing; an unfinished piece is of no use."""
        if self.error is None:
            self.error = CheckpointError("given up")

    def remove(self) -> None:
        """Remove the files that were written so far."""
        shutil.rmtree(self.path, ignore_errors=True)


class WritingThread:
    """Runs tasks in one thread, in order.

    Args:
        buffer_bytes: Memory for blocks that wait to be written.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(1, _THREAD_NAME, lower_thread_priority)
        # One more block is being filled.
        self._room = threading.Semaphore(max(1, buffer_bytes // BLOCK_BYTES - 1))

    def put(self, task: Callable[..., Any], *given: Any) -> Future[Any]:
        """Queue a task; waits while too many wait."""
        self._room.acquire()
        future = self._pool.submit(task, *given)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """Run what waits, and end the thread."""
        # A task may have had the last reference to `Checkpoints`: a thread cannot wait for itself.
        is_own = threading.current_thread().name.startswith(_THREAD_NAME)
        self._pool.shutdown(wait=not is_own)


def commit(folder: Path, manifest: Manifest) -> None:
    """Write a manifest whose pieces are on the disk, and name it as the newest.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    file = folder / f"{manifest.number:08}.json"
    try:
        write_checked(file, manifest)
        set_newest(folder, manifest.number)
    except BaseException:
        # `LAST` may name the checkpoint already, if only flushing it has failed.
        with suppress(OSError, CheckpointError):
            if newest(folder) != manifest.number:
                file.unlink(missing_ok=True)
        raise


def remove_unneeded(folder: Path, *, unfinished: bool = False) -> None:
    """Delete everything that neither the newest checkpoint nor the one before it needs.

    Files that cannot be deleted stay, and all stay while another process reads the folder.

    Args:
        folder: The folder of checkpoints.
        unfinished: Also delete pieces that are newer, which a process that was killed has left.
    """
    with suppress(OSError, CheckpointError), lock_if_free(folder) as is_locked:
        if not is_locked:  # the next checkpoint deletes them
            return
        last = newest(folder) or 0
        kept = [read_manifest(folder, last)] if last else []
        if kept and kept[0].before in manifest_numbers(folder):
            kept.append(read_manifest(folder, kept[0].before))
        numbers = {manifest.number for manifest in kept}
        needed = {name for manifest in kept for name in manifest.pieces}
        for number in manifest_numbers(folder):
            if number not in numbers:
                (folder / f"{number:08}.json").unlink(missing_ok=True)
        for path in folder.iterdir():
            if PIECE_NAME.fullmatch(path.name):
                if path.name not in needed and (unfinished or piece_number(path.name) <= last):
                    shutil.rmtree(path, ignore_errors=True)
            elif OWN_NAME.fullmatch(path.name) and path.name.endswith(".partial"):
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


@contextmanager
def signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the `with` block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no signal is handled here
        return
    came: list[int] = []
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for held in came:
            signal.raise_signal(held)
