"""What may go wrong: Ctrl-C, a full disk, damaged and deleted files, two writers, no `close`."""

import errno
import fcntl
import gc
import json
import linecache
import os
import shutil
import signal
import sys
import threading
import warnings
import zlib

import pytest

from recsys.errors import CheckpointError, ConfigError
from recsys.train.checkpoint import newest, save_checkpoint
from recsys.train.checkpoint.format import manifest_numbers, read_manifest
from tests.train.checkpoint.trainings import (
    begin,
    load,
    make_training,
    require_equal,
    require_restores,
    save_and_wait,
    saved,
    set_block_bytes,
)

OWN_FILES = ("save.py", "writer.py", "contents.py", "saved_tables.py", "changed_rows.py")


def require_only_needed_files(folder):
    last = newest(folder)
    manifests = [] if last is None else [read_manifest(folder, last)]
    if manifests and manifests[0].before in manifest_numbers(folder):
        manifests.append(read_manifest(folder, manifests[0].before))
    expected = {"LAST"} if manifests else set()
    for manifest in manifests:
        expected |= {f"{manifest.number:08}.json", *manifest.pieces}
    assert {path.name for path in folder.iterdir()} == expected


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


def lines_to_try(start, step):
    return range(start, 100_000, 1 if os.environ.get("HYPOTHESIS_PROFILE") == "stress" else step)


@pytest.mark.in_ci("host")
@pytest.mark.parametrize("tier", ["resident", "host"])
def test_ctrl_c_in_save_and_wait_loses_no_row(tier, tmp_path):
    training, checkpoints = begin(tmp_path, tier)
    training.step(0)
    checkpoints.save()
    for line in lines_to_try(1, 23):
        training.step(line, most=50)
        is_reached = interrupt_at(line, lambda: save_and_wait(checkpoints))
        training.step(line + 1, most=5)
        save_and_wait(checkpoints)
        require_restores(training, tmp_path)
        if not is_reached:
            break
    checkpoints.close()

    require_only_needed_files(tmp_path)
    assert line > 100


@pytest.mark.outside_ci
def test_ctrl_c_in_the_first_save_and_in_close(tmp_path):
    for line in lines_to_try(2, 41):
        training = make_training()
        training.step(0)
        folder = tmp_path / str(line)
        checkpoints = saved(training, folder)
        is_reached = interrupt_at(line, checkpoints.save)
        training.step(line)
        save_and_wait(checkpoints)
        interrupt_at(line % 20, checkpoints.close)
        checkpoints.close()
        require_restores(training, folder)
        require_only_needed_files(folder)
        if not is_reached:
            break
    assert line > 100


@pytest.mark.parametrize("place", ["manifest", "last", "after last"])
def test_a_failed_commit_leaves_the_checkpoint_before(tmp_path, monkeypatch, place):
    training, checkpoints = begin(tmp_path)
    training.step(0)
    save_and_wait(checkpoints)
    before = training.numbers()
    name = "_set_newest" if "last" in place else "_write_checked"
    function = getattr(sys.modules["recsys.train.checkpoint.format"], name)

    def fail(*args):
        if place == "after last" or "piece" in str(args[0]):
            function(*args)
        if "piece" in str(args[0]):
            return
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr(f"recsys.train.checkpoint.format.{name}", fail)
        training.step(1)
        checkpoints.save()
        if place == "after last":  # it is there, and the one before is kept
            assert checkpoints.wait() == 2
        else:
            with pytest.warns(UserWarning, match="Input/output error"):
                checkpoints.wait()

    again = make_training(seed=1)
    load(again, tmp_path)
    if place == "after last":
        require_equal(again.numbers(), training.numbers())
    else:
        require_equal(again.numbers(), before)
        assert manifest_numbers(tmp_path) == [1]
    training.step(2, most=5)
    checkpoints.save()
    checkpoints.close()
    require_restores(training, tmp_path)
    require_only_needed_files(tmp_path)


@pytest.mark.parametrize("lost", ["the folder", "a file"])
def test_after_files_are_deleted_the_next_but_one_has_every_row(tmp_path, lost):
    folder, training = tmp_path / "saved", make_training()
    with saved(training, folder) as checkpoints:
        training.step(0)
        assert save_and_wait(checkpoints) == 1
        if lost == "the folder":
            shutil.rmtree(folder)
        else:
            (folder / "full-00000001" / "piece.json").unlink()
        training.step(1)
        with pytest.warns(UserWarning, match=r"full-00000001/piece\.json: cannot be read"):
            save_and_wait(checkpoints)
        for number in (3, 4):
            training.step(number)
            assert save_and_wait(checkpoints) == number

    require_restores(training, folder)


def test_a_new_full_copy_that_fails_is_warned_of_and_deltas_go_on(tmp_path, monkeypatch):
    set_block_bytes(monkeypatch, 500)
    training, checkpoints = begin(tmp_path)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with checkpoints, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            training.step(number)
            if number == 1:
                monkeypatch.setattr("recsys.train.checkpoint.save.require_space", fail)
            assert save_and_wait(checkpoints) == number + 1

    assert {"rows could not be copied again" in str(each.message) for each in caught} == {True}
    assert next(iter(read_manifest(tmp_path).pieces)) == "full-00000001"
    require_restores(training, tmp_path)
    require_only_needed_files(tmp_path)


def with_changes(text, **changes):
    """A manifest after changes with which its checksum agrees."""
    changed = json.dumps(json.loads(text.splitlines()[0]) | changes)
    return f"{changed}\n{zlib.crc32(changed.encode())}\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"before": 1', '"before": 7'), "its checksum"),
        (lambda text: text[:-1], "its checksum"),
        (lambda text: text.splitlines()[0], "its checksum"),
        (lambda text: "[" * 200_000 + "\n0\n", "RecursionError"),
        (lambda _: "", "JSONDecodeError"),
        (lambda text: with_changes(text, version=5) + "7", "version must be 4, got 5"),
        # As recsys wrote it when a manifest had no second line.
        (lambda text: with_changes(text, version=1).splitlines()[0], "another recsys wrote"),
    ],
)
def test_a_damaged_manifest_and_one_of_another_version_are_refused(tmp_path, damage, message):
    training = make_training()
    for _ in range(2):
        save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    file = tmp_path / "00000002.json"
    file.write_text(damage(file.read_text()))

    with pytest.raises(CheckpointError, match=rf"00000002\.json: .*{message}"):
        load(training, tmp_path)
    load(training, tmp_path, number=1)


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "00000012", "\xff\xfe", "1" * 500])
def test_a_missing_checkpoint_and_a_damaged_last_file_name_the_others(tmp_path, text):
    training = make_training()
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    (tmp_path / "LAST").write_text(text)

    for number in (None, 9):
        with pytest.raises(CheckpointError, match="load checkpoint 1 "):
            load(training, tmp_path, number=number)


def test_without_last_the_manifest_with_the_highest_number_is_the_newest(tmp_path):
    assert newest(tmp_path) is None
    for number in (9, 11, 10):
        (tmp_path / f"{number:08}.json").touch()

    assert newest(tmp_path) == 11


def test_files_that_a_kill_left_do_not_stop_a_checkpoint(tmp_path):
    training = make_training()
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    (tmp_path / "full-00000002").mkdir()
    (tmp_path / "delta-00000003").mkdir()

    reader = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)  # nothing is deleted
    assert save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers) == 4
    os.close(reader)
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)

    require_only_needed_files(tmp_path)


def test_a_checkpoint_that_is_continued_is_not_deleted_before(tmp_path):
    training = make_training()
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    expected = training.numbers()
    reader = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    for number in range(3):
        training.step(number)
        save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    os.close(reader)
    again = make_training(seed=1)
    load(again, tmp_path, number=1)
    checkpoints = saved(again, tmp_path, after=1)
    checkpoints.save()
    checkpoints.close()

    require_equal(again.numbers(), expected)
    require_restores(again, tmp_path)
    assert [number for number, _ in read_manifest(tmp_path).since] == [1]
    assert read_manifest(tmp_path).before == 1


def test_two_objects_do_not_write_to_one_folder(tmp_path):
    training, checkpoints = begin(tmp_path)
    training.step(0)
    checkpoints.save()

    with pytest.raises(ConfigError, match="another Checkpoints is at work"):
        save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)

    checkpoints.close()
    require_restores(training, tmp_path)
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)


def test_a_forked_process_that_ends_leaves_the_lock(tmp_path):
    _training, checkpoints = begin(tmp_path)
    child = os.fork()
    if not child:
        checkpoints._lock.close()  # as garbage collection does
        os._exit(0)
    os.waitpid(child, 0)

    assert (tmp_path / "LOCK").exists()
    checkpoints.close()
    assert not (tmp_path / "LOCK").exists()


def test_a_closed_object_saves_no_more(tmp_path):
    training, checkpoints = begin(tmp_path)
    checkpoints.save()
    checkpoints.close()

    for call in (checkpoints.save, checkpoints.prepare):
        with pytest.raises(ConfigError, match="is closed and cannot save"):
            call()
    other = saved(training, tmp_path)
    other.prepare()
    checkpoints.close()  # does nothing to the other one
    other.save()
    other.close()
    assert checkpoints.wait() == 1
    require_restores(training, tmp_path)


def test_an_object_that_is_dropped_writes_what_waits_and_ends(tmp_path):
    def threads():
        return {
            each for each in threading.enumerate() if each.name.startswith("recsys-checkpoints")
        }

    known = threads()
    training = make_training()
    training.step(0)
    checkpoints = saved(training, tmp_path)
    checkpoints.save()
    mine = threads() - known
    del checkpoints
    gc.collect()
    for thread in mine:
        thread.join(20)

    assert not any(thread.is_alive() for thread in mine)
    require_restores(training, tmp_path)
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    require_only_needed_files(tmp_path)
