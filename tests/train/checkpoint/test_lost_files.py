"""Files of checkpoints that are deleted or damaged while training goes on."""

import shutil
from pathlib import Path

import pytest

from tests.train.checkpoint.trainings import (
    make_training,
    require_restores,
    save_and_wait,
    saved,
)


def save_step(training, checkpoints, number):
    training.step(number)
    found = save_and_wait(checkpoints)
    checkpoints.finish_merge()
    return found


def damage(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("lost", ["the folder", "the manifest"])
def test_after_a_checkpoint_is_deleted_the_next_but_one_has_every_row(tmp_path, lost):
    folder, training = tmp_path / "saved", make_training()
    with saved(training, folder) as checkpoints:
        save_step(training, checkpoints, 0)
        if lost == "the folder":
            shutil.rmtree(folder)
        else:
            (folder / "00000001.json").write_text("{")

        with pytest.warns(UserWarning, match="the next checkpoint copies every row again"):
            save_step(training, checkpoints, 1)
        assert save_step(training, checkpoints, 2) == 3
        assert save_step(training, checkpoints, 3) == 4

    require_restores(training, folder)


@pytest.mark.parametrize("lose", [Path.unlink, damage], ids=["deleted", "damaged"])
def test_a_piece_that_cannot_be_merged_is_copied_again(tmp_path, monkeypatch, lose):
    monkeypatch.setattr("recsys.train.checkpoint.writer._MOST_DELTAS", 1)
    training = make_training()
    with saved(training, tmp_path) as checkpoints:
        save_step(training, checkpoints, 0)
        lose(tmp_path / "full-00000001" / "block-00000.safetensors")
        save_step(training, checkpoints, 1)

        with pytest.warns(UserWarning, match=r"so the next one copies every row again .*full-"):
            checkpoints.wait()
        for number in range(2, 5):
            save_step(training, checkpoints, number)

    assert not (tmp_path / "full-00000001").exists()
    require_restores(training, tmp_path)


def test_ctrl_c_while_a_failed_merge_is_told_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.train.checkpoint.writer._MOST_DELTAS", 1)
    training = make_training()
    with saved(training, tmp_path) as checkpoints:
        save_step(training, checkpoints, 0)
        (tmp_path / "full-00000001" / "block-00000.safetensors").unlink()
        save_step(training, checkpoints, 1)
        with monkeypatch.context() as context:
            context.setattr("recsys.train.checkpoint.checkpoints._warn", interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save()

        save_step(training, checkpoints, 2)

    require_restores(training, tmp_path)


def interrupt(*_):
    raise KeyboardInterrupt
