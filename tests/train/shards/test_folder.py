"""The folder with the checkpoints of several processes."""

from types import SimpleNamespace

import pytest

from recsys.errors import CheckpointError
from recsys.train.shards.folder import (
    Saved,
    Shards,
    find_saved,
    newest_saved,
    remove_older,
)
from recsys.train.shards.restore import _require_one_moment

LAYOUT = {"model.t.weight": [(0, 5), (5, 9)], "model.u.weight": [(0, 3), (0, 0)]}


def shards_with(root, after, *numbers):
    """Shards whose ranks have these checkpoints."""
    shards = Shards.after(root, after, LAYOUT)
    for folder, of_rank in zip(shards.folders, numbers, strict=True):
        folder.mkdir(parents=True)
        for number in of_rank:
            (folder / f"{number:08}.json").write_text("{}")
    shards.write_layout()
    return shards


def test_the_newest_checkpoint_is_one_that_every_process_has(tmp_path):
    root = tmp_path / "shards"
    shards = shards_with(root, 0, [1, 2, 3], [1, 2])

    assert newest_saved(tmp_path / "checkpoints", root) == Saved(2, shards)
    assert find_saved(tmp_path / "checkpoints", root, 1) == Saved(1, shards)
    with pytest.raises(CheckpointError, match="no complete checkpoint 3; load the newest one, 2"):
        find_saved(tmp_path / "checkpoints", root, 3)


def test_checkpoints_of_other_numbers_of_processes_are_older_if_their_number_is_lower(tmp_path):
    root, checkpoints = tmp_path / "shards", tmp_path / "checkpoints"
    assert newest_saved(checkpoints, root) is None
    first = shards_with(root, 0, [4, 5], [4, 5])
    checkpoints.mkdir()
    (checkpoints / "00000006.json").write_text("{}")
    assert newest_saved(checkpoints, root) == Saved(6, None)

    second = shards_with(root, 6, [7], [7])
    unsaved = shards_with(root, 7, [8], [])

    assert newest_saved(checkpoints, root) == Saved(7, second)
    remove_older(checkpoints, root, second)
    assert second.folder.exists()
    assert not any(each.exists() for each in (checkpoints, first.folder, unsaved.folder))


@pytest.mark.parametrize(
    "text",
    [
        '{"model.t.weight": [[0, 5], [5]]}',
        '{"model.t.weight": [[5, 0], [5, 9]]}',
        '{"model.t.weight": [[0, 5.0], [5, 9]]}',
        '{"model.t.weight": [[-1, 5], [5, 9]]}',
        '{"model.t.weight": [[0, 5]], "model.u.weight": [[0, 5], [5, 9]]}',
        '{"model.t.weight": []}',
        '{"model.t.weight": 3}',
        "{}",
        "",
        "[]",
        "{",
    ],
)
def test_a_damaged_layout_is_named(tmp_path, text):
    shards = shards_with(tmp_path, 0, [1], [1])
    (shards.folder / "layout.json").write_text(text)

    with pytest.raises(CheckpointError, match=r"layout\.json"):
        newest_saved(tmp_path / "checkpoints", tmp_path)


def test_a_folder_without_a_layout_has_no_checkpoint_and_is_cleared_unless_all_have_saved(tmp_path):
    started = shards_with(tmp_path, 0, [1], [])
    (started.folder / "layout.json").unlink()
    started.clear()
    assert not started.folder.exists()
    started.clear()

    saved = shards_with(tmp_path, 0, [1, 2], [2])
    (saved.folder / "layout.json").unlink()
    assert newest_saved(tmp_path / "checkpoints", tmp_path) is None
    with pytest.raises(CheckpointError, match=r"a checkpoint of 2 processes, and its layout\.json"):
        saved.clear()
    assert saved.folder.exists()


def test_processes_that_saved_after_different_steps_are_refused():
    manifests = [
        SimpleNamespace(number=3, state={"state": {"state": {"progress": {"num_steps": step}}}})
        for step in (7, 7, 9)
    ]
    _require_one_moment(manifests[:2])
    with pytest.raises(CheckpointError, match=r"checkpoint 3: .* different steps, \[7, 7, 9\]"):
        _require_one_moment(manifests)
