"""The mark of a folder whose rows are newer than what is there, rows moving in the background."""

import json
import threading

import pytest
import torch

from recsys.embeddings.tiers.cold.cold_files import ColdFiles
from recsys.errors import ColdTierError


def is_marked(folder):
    return json.loads((folder / "arrays.json").read_text())["is_dirty"]


@pytest.fixture
def whole(tmp_path):
    """A folder that is whole."""
    files = ColdFiles(tmp_path / "rows", {"users": ((10, 4), torch.float32)})
    files.keep_files()
    files.sync({})
    assert not is_marked(files.folder)
    return files


def test_a_mark_that_cannot_be_written_is_tried_again(whole, monkeypatch):
    def refuse(_):
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(ColdFiles, "_write_manifest", refuse)
        with pytest.raises(
            ColdTierError, match=r"rows: arrays.json must .* \(no space left\); free"
        ):
            whole.mark_dirty()

    whole.mark_dirty()

    assert is_marked(whole.folder)


def test_an_array_that_is_made_while_rows_are_written_back_waits_for_the_mark(whole, monkeypatch):
    write, num_inside, most, second = ColdFiles._write_manifest, [], [0], threading.Event()

    def watched(files):
        num_inside.append(None)
        most[0] = max(most[0], len(num_inside))
        if len(num_inside) > 1:
            second.set()
        second.wait(0.2)  # for another thread that should not come
        write(files)
        num_inside.pop()

    monkeypatch.setattr(ColdFiles, "_write_manifest", watched)
    background = threading.Thread(target=whole.mark_dirty)
    background.start()
    whole.make("users", "momentum1", (10,), torch.float32)
    background.join()

    assert most == [1]
    assert is_marked(whole.folder)
