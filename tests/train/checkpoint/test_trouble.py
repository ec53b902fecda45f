"""What may go wrong beside a full disk: Ctrl-C, merges at a bad moment, two writers, no `close`."""

import errno
import fcntl
import gc
import linecache
import os
import sys
import threading
import time
import warnings

import pytest
import torch

from recsys.errors import CheckpointError, ConfigError
from recsys.train.checkpoint import newest, save_checkpoint
from recsys.train.checkpoint.blocks import PieceWriter
from recsys.train.checkpoint.manifest import manifest_numbers, read_manifest
from recsys.train.checkpoint.writer import BackgroundWriter
from tests.train.checkpoint import trainings
from tests.train.checkpoint.trainings import (
    begin,
    load,
    make_training,
    require_equal,
    require_restores,
    save_and_wait,
    saved,
)

OWN_FILES = ("checkpoints.py", "writer.py", "contents.py", "saved_tables.py", "changed_rows.py")


def require_only_needed_files(folder):
    last = newest(folder)
    manifests = [] if last is None else [read_manifest(folder, last)]
    if manifests and manifests[0].before:
        number = manifests[0].before[-1][0]
        manifests += [read_manifest(folder, number)] if number in manifest_numbers(folder) else []
    expected = {each.name for each in manifests} | ({"LAST"} if manifests else set())
    for each in manifests:
        expected |= {piece.folder for piece in each.pieces}
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
                raise KeyboardInterrupt
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
def test_ctrl_c_in_save_loses_no_row(tier, tmp_path):
    training, checkpoints = begin(tmp_path, tier)
    training.step(0)
    checkpoints.save()
    for line in lines_to_try(1, 23):
        training.step(line, most=50)
        is_reached = interrupt_at(line, checkpoints.save)
        if line % 2:
            checkpoints.wait()
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the copy of every row may have been ended
            checkpoints.save()
            if checkpoints.wait() is None:
                checkpoints.save()
        interrupt_at(line % 20, checkpoints.close)
        checkpoints.close()
        require_restores(training, folder)
        require_only_needed_files(folder)
        if not is_reached:
            break
    assert line > 100


@pytest.mark.in_ci("2")
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_ctrl_c_in_wait_keeps_the_result(tmp_path, monkeypatch, first):
    """At every fourth line, so that all cases together try each."""
    write, is_full = PieceWriter.write, [False]

    def fail(self, rows):
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, rows)

    monkeypatch.setattr(PieceWriter, "write", fail)
    training, checkpoints = begin(tmp_path)
    save_and_wait(checkpoints)
    for line in range(first, 100, 4):
        training.step(line, most=20)
        is_full[0] = True
        checkpoints.save()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_reached = interrupt_at(line, checkpoints.wait)
            is_full[0] = False
            save_and_wait(checkpoints)
        require_restores(training, tmp_path)
        if not is_reached:
            break
    checkpoints.close()
    assert line > 5


def test_the_first_checkpoint_is_not_merged_into_its_own_full_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.train.checkpoint.writer.BLOCK_BYTES", 1)
    training = make_training()
    training.step(0)
    checkpoints = saved(training, tmp_path)
    checkpoints.prepare()
    with torch.no_grad():
        training.model.tables.embedding_bags.t0.weight.mul_(2)  # the delta is larger than the table
        training.model.tables.embedding_bags.t1.weight.mul_(2)
        training.model.tables.embedding_bags.t2.weight.mul_(2)
    save_and_wait(checkpoints)
    checkpoints.finish_merge()

    require_restores(training, tmp_path)
    checkpoints.close()


def test_a_large_dense_part_alone_causes_no_merge(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.train.checkpoint.writer.BLOCK_BYTES", 1)
    training = make_training()
    training.model.large = torch.nn.Parameter(torch.zeros(10_000))
    checkpoints = saved(training, tmp_path)
    for number in range(4):
        training.step(number, most=2)
        save_and_wait(checkpoints)
        checkpoints.finish_merge()
    checkpoints.close()

    assert read_manifest(tmp_path).pieces[0].folder == "full-00000001"


def test_a_merge_that_ends_between_two_blocks_leaves_the_delta(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.train.checkpoint.writer._MOST_DELTAS", 1)
    monkeypatch.setattr("recsys.train.checkpoint.blocks.BLOCK_BYTES", 500)
    training, checkpoints = begin(tmp_path)
    put = BackgroundWriter.put

    def put_and_merge(self, task):  # as if the training thread were slow between two blocks
        put(self, task)
        put(self, lambda: [self._continue_merge() for _ in range(1000) if self._merging])

    for number in range(6):
        training.step(number)
        if number > 1:
            monkeypatch.setattr(BackgroundWriter, "put", put_and_merge)
        checkpoints.save()
        checkpoints.wait(strict=True)
        require_restores(training, tmp_path)
    checkpoints.close()

    require_only_needed_files(tmp_path)


def test_a_merge_that_gets_no_time_between_saves_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.train.checkpoint.writer.BLOCK_BYTES", 1)
    training, checkpoints = begin(tmp_path)
    merge_on, finish, may_merge = (
        BackgroundWriter._continue_merge,
        BackgroundWriter.finish_merge,
        [],
    )

    def merge_if_waited_for(self):
        return merge_on(self) if may_merge else time.sleep(0.001)

    def wait(self):
        may_merge.append(True)
        finish(self)
        may_merge.clear()

    monkeypatch.setattr(BackgroundWriter, "_continue_merge", merge_if_waited_for)
    monkeypatch.setattr(BackgroundWriter, "finish_merge", wait)
    sizes = []
    for number in range(12):
        training.step(number)
        for table in training.model.tables.embedding_bags.parameters():
            with torch.no_grad():
                table.mul_(2)  # so that each delta has every row
        save_and_wait(checkpoints)
        sizes.append(sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")))
    require_restores(training, tmp_path)
    checkpoints.close()

    assert max(sizes[4:]) < 6 * sizes[0]


@pytest.mark.parametrize("place", ["manifest", "last", "after last"])
def test_a_failed_commit_leaves_the_checkpoint_before(tmp_path, monkeypatch, place):
    training, checkpoints = begin(tmp_path)
    training.step(0)
    save_and_wait(checkpoints)
    before = training.numbers()
    name = "set_newest" if "last" in place else "write_manifest"
    function = getattr(sys.modules["recsys.train.checkpoint.writer"], name)

    def fail(*args):
        if place == "after last":
            function(*args)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr(f"recsys.train.checkpoint.writer.{name}", fail)
        training.step(1)
        checkpoints.save()
        with pytest.warns(UserWarning, match="Input/output error"):
            checkpoints.wait()

    again = make_training(seed=1)
    load(again, tmp_path)
    if place == "after last":  # it may be on the disk, and is whole
        require_equal(again.numbers(), training.numbers())
    else:
        require_equal(again.numbers(), before)
        assert manifest_numbers(tmp_path) == [1]
    training.step(2, most=5)
    checkpoints.save()
    checkpoints.close()
    require_restores(training, tmp_path)
    require_only_needed_files(tmp_path)


def test_an_error_of_a_merge_does_not_end_the_thread(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.train.checkpoint.writer._MOST_DELTAS", 1)
    monkeypatch.setattr("recsys.train.checkpoint.writer.merge", lambda *_: iter([1 / 0]))
    training, checkpoints = begin(tmp_path)
    checkpoints.save()
    training.step(0)
    checkpoints.save()
    checkpoints.finish_merge()

    with pytest.raises(ZeroDivisionError):
        checkpoints.wait()
    assert checkpoints.wait() == 2
    monkeypatch.undo()
    checkpoints.close()
    require_restores(training, tmp_path)
    require_only_needed_files(tmp_path)


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
    assert [number for number, _ in read_manifest(tmp_path).before] == [1]


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
        checkpoints._release()  # as the interpreter does when it exits
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
        return {each for each in threading.enumerate() if each.name == "recsys-checkpoints"}

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
    assert all(update.changed is None for update in training.model.tables.updates())
    require_restores(training, tmp_path)
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    require_only_needed_files(tmp_path)


def test_a_table_of_another_dtype_is_refused(tmp_path):
    training, checkpoints = begin(tmp_path)
    training.step(0)
    save_and_wait(checkpoints)
    training.model.to(torch.bfloat16)

    with pytest.raises(ConfigError, match=r"is BF16 .* and was F32 .* begin a new folder"):
        checkpoints.save()
    checkpoints.close()


def test_a_checkpoint_of_another_model_cannot_be_continued(tmp_path):
    training = make_training()
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    training.model.top = torch.nn.Linear(12, 2)

    with pytest.raises(CheckpointError, match="is of another model"):
        saved(training, tmp_path, after=1)
    require_only_needed_files(tmp_path)


def test_state_that_is_removed_while_every_row_is_copied(tmp_path, monkeypatch):
    training = make_training()
    training.step(0)
    is_cleared = threading.Event()
    write = PieceWriter.write

    def wait(self, rows):
        is_cleared.wait(20)
        write(self, rows)

    monkeypatch.setattr("recsys.train.checkpoint.blocks.BLOCK_BYTES", 500)
    monkeypatch.setattr(PieceWriter, "write", wait)
    checkpoints = saved(training, tmp_path)
    checkpoints.prepare()
    fresh = make_training()
    training.optimizers[1].load_state_dict(fresh.optimizers[1].state_dict())
    is_cleared.set()
    checkpoints.save()
    with pytest.warns(UserWarning, match="'momentum1' was removed from its state while every row"):
        assert checkpoints.wait() is None
    training.step(1)
    checkpoints.save()
    checkpoints.close()

    require_restores(training, tmp_path)
    require_only_needed_files(tmp_path)


def test_tables_of_the_same_size_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.train.checkpoint.writer._MOST_DELTAS", 1)
    monkeypatch.setattr(trainings, "SIZES", (40, 40, 40))
    training, checkpoints = begin(tmp_path)
    for number in range(3):
        training.step(number)
        checkpoints.save()
        checkpoints.wait(strict=True)
        checkpoints.finish_merge()
    checkpoints.close()

    assert read_manifest(tmp_path).pieces[0].number > 1
    require_restores(training, tmp_path)
