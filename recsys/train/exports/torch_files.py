"""Files that PyTorch writes, on a disk that may become full."""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["opened_for_torch"]


@contextmanager
def opened_for_torch(file: Path) -> Iterator[IO[bytes]]:
    """Open a file for `torch.save` or `torch.export.save`, so that errors of writing are raised.

    PyTorch writes its archives in C++. There, an error becomes a RuntimeError that hides its cause,
    or ends the process, because a destructor writes to the file again.

    Args:
        file: A new file, or one to replace.

    Yields:
        A stream whose `write` raises nothing.

    Raises:
        OSError, KeyboardInterrupt: the first error of a write, at the end of the `with` block.
    """
    with _Stream(file.open("wb", buffering=0)) as stream:
        try:
            yield stream
        finally:
            if stream.error is not None:
                raise stream.error


class _Stream(io.BufferedWriter):
    """Writes to a file up to the first error, which it keeps, and drops what follows."""

    error: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                super().write(data)
            except BaseException as error:  # Ctrl-C raises here, too
                self.error = error
        return memoryview(data).nbytes
