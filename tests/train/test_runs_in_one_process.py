"""What a run leaves in the process that trained it."""

import os
import threading
import time
from pathlib import Path

import pytest

from recsys.train.trainer import train

OPEN_FILES = Path("/proc/self/fd")
END_SECONDS = 10  # a thread of an executor ends soon after the executor is deleted


def files_in(folder):
    found = [str(each.readlink()) for each in OPEN_FILES.iterdir() if os.path.lexists(each)]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [each for each in found + maps if str(folder) in each]


def threads():
    return {each for each in threading.enumerate() if each.name.startswith("recsys-")}


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="open files are listed on Linux alone")
@pytest.mark.parametrize("is_named", [False, True])
def test_a_run_with_rows_in_files_keeps_none_open_and_no_thread(small_config, tmp_path, is_named):
    before = threads()
    settings = ["synthetic.table_sizes=[900, 700, 1, 800]", "budget=20KiB", "cold_tier=file"]
    settings += ["checkpoint.every_steps=5"]
    if is_named:
        settings.append(f"cold_path={tmp_path / 'rows'}")

    train(small_config(*settings), tmp_path / "run", show_progress=False)

    assert not files_in(tmp_path)
    end = time.monotonic() + END_SECONDS
    while threads() - before and time.monotonic() < end:
        time.sleep(0.01)
    assert not threads() - before
