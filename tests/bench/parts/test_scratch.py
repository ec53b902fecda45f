import errno
import os
from pathlib import Path

import pytest

from recsys.bench.parts.scratch import scratch_folder


def test_what_a_benchmark_writes_is_removed_and_a_full_disk_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write(folder):
        (folder / "rows").write_bytes(b"1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # buffered writes name no file

    with pytest.raises(OSError, match="TMPDIR says where") as caught, scratch_folder() as folder:
        write(folder)

    assert Path(caught.value.filename).parent == tmp_path
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
