"""The folder of what a benchmark writes and needs no more after it."""

from __future__ import annotations

import errno
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["scratch_folder"]


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder where TMPDIR says; it is removed afterwards.

    Raises:
        OSError: its disk is full; the error names the folder.
    """
    with tempfile.TemporaryDirectory(prefix="recsys-bench-") as name:
        try:
            yield Path(name)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                reason = f"{error.strerror} (TMPDIR says where benchmarks write)"
                raise OSError(error.errno, reason, name) from error
            raise
