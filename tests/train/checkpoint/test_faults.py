"""What may go wrong: Ctrl-C, a full disk, damaged and deleted files, two writers."""

import fcntl
import json
import linecache
import os
import shutil
import signal
import sys
import warnings
import zlib

import pytest

from recsys import load_checkpoint, save_checkpoint
from recsys.errors import CheckpointError, ConfigError
from tests.train.checkpoint.trainings import (
    Training,
    full_disk,
    manifest_of,
    require_only_needed_files,
    require_restores,
    save_and_wait,
    set_block_bytes,
)

OWN_FILES = ("save.py", "restore.py", "format.py", "saved_tables.py", "changed_rows.py")
STEP = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "stress" else 23


def interrupt_at(line_number, call):
    """Call a function, with Ctrl-C at a line of the code of checkpoints; whether it was reached."""
    count = [line_number]

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(OWN_FILES):
            return None
        # Between the end of a `with` block and its exit, an interrupt leaves a switch of torch off
        # for all later tests. Python has this gap at every `with`.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "DisableTorchFunctionSubclass" not in text:
            count[0] -= 1
            if count[0] == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    known = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(known)
    return False


@pytest.mark.slow(but=("host",))
@pytest.mark.parametrize("tier", ["resident", "host"])
def test_ctrl_c_in_save_and_wait_loses_no_row(tier, tmp_path):
    training = Training("adagrad", tier)
    with training.saved(tmp_path) as checkpoints:
        training.step(0)
        checkpoints.save()
        for line in range(1, 100_000, STEP):
            training.step(line, most=50)
            is_reached = interrupt_at(line, lambda: save_and_wait(checkpoints))
            training.step(line + 1, most=5)
            save_and_wait(checkpoints)
            require_restores(training, tmp_path)
            if not is_reached:
                break

    require_only_needed_files(tmp_path)
    assert line > 100


@pytest.mark.parametrize("lost", ["", "full-00000001/piece.json"])
def test_after_files_are_deleted_the_next_but_one_has_every_row(tmp_path, lost):
    folder, training = tmp_path / "saved", Training()
    with training.saved(folder) as checkpoints:
        training.step(0)
        assert save_and_wait(checkpoints) == 1
        (folder / lost).unlink() if lost else shutil.rmtree(folder)
        training.step(1)
        with pytest.warns(UserWarning, match="full-00000001"):
            save_and_wait(checkpoints)
        for number in (3, 4):
            training.step(number)
            assert save_and_wait(checkpoints) == number

    require_restores(training, folder)


def test_a_new_full_copy_that_fails_is_warned_of_and_deltas_go_on(tmp_path, monkeypatch):
    set_block_bytes(monkeypatch, 500)
    training = Training()
    with (
        training.saved(tmp_path) as checkpoints,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for number in range(1, 7):
            training.step(number)
            assert save_and_wait(checkpoints) == number
            monkeypatch.setattr("recsys.train.checkpoint.save.require_space", full_disk)

    assert {"rows could not be copied again" in str(each.message) for each in caught} == {True}
    assert next(iter(manifest_of(tmp_path, 6)["pieces"])) == "full-00000001"
    require_restores(training, tmp_path)
    require_only_needed_files(tmp_path)


def of_version(text, version):
    """A manifest of another version, with which its checksum agrees."""
    changed = json.dumps(json.loads(text.splitlines()[0]) | {"version": version})
    return f"{changed}\n{zlib.crc32(changed.encode())}\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"before": 1', '"before": 7'), "checksum"),
        (lambda text: text[:-1], "checksum"),
        (lambda text: "[" * 200_000 + "\n0\n", ""),
        (lambda _: "", ""),
        (lambda text: of_version(text, 5) + "7", "version"),
        # As recsys wrote it when a manifest had no second line.
        (lambda text: of_version(text, 1).splitlines()[0], "version"),
    ],
)
def test_a_damaged_manifest_and_one_of_another_version_are_refused(tmp_path, damage, message):
    parts = Training().parts
    for _ in range(2):
        save_checkpoint(tmp_path, **parts)
    file = tmp_path / "00000002.json"
    file.write_text(damage(file.read_text()))

    with pytest.raises(CheckpointError, match=rf"00000002\.json: .*{message}"):
        load_checkpoint(tmp_path, **parts)
    load_checkpoint(tmp_path, **parts, number=1)


def test_a_missing_checkpoint_names_the_others(tmp_path):
    parts = Training().parts
    save_checkpoint(tmp_path, **parts)

    with pytest.raises(CheckpointError, match="load checkpoint 1 "):
        load_checkpoint(tmp_path, **parts, number=9)


def test_files_that_a_kill_left_do_not_stop_a_checkpoint(tmp_path):
    parts = Training().parts
    save_checkpoint(tmp_path, **parts)
    (tmp_path / "full-00000002").mkdir()
    (tmp_path / "delta-00000003").mkdir()

    reader = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)  # nothing is deleted
    assert save_checkpoint(tmp_path, **parts) == 4
    os.close(reader)
    save_checkpoint(tmp_path, **parts)

    require_only_needed_files(tmp_path)


def test_one_object_at_a_time_writes_to_a_folder_until_it_is_closed(tmp_path):
    training = Training()
    first = training.saved(tmp_path)
    first.save()
    with pytest.raises(ConfigError, match="another Checkpoints"):
        save_checkpoint(tmp_path, **training.parts)
    first.close()
    with pytest.raises(ConfigError, match="closed"):
        first.save()

    with training.saved(tmp_path) as other:
        first.close()  # does nothing to the other one
        training.step(1)
        other.save()

    require_restores(training, tmp_path)
