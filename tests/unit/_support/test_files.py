import errno
import fcntl
import os

import pytest

from recsys._support.files import alone_in, appearing_whole, read_together


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_on_a_full_disk_the_error_names_the_final_path(tmp_path, number):
    file = tmp_path / "record.json"

    with pytest.raises(OSError, match="full") as raised, appearing_whole(file):
        raise OSError(number, "full", "copied.json", None, "record.json.partial")

    assert str(raised.value) == f"[Errno {number}] full: '{file}'"


@pytest.mark.parametrize("fails", ["writing", "flushing"])
def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch, fails):
    file = tmp_path / "record.json"
    file.write_text("before")

    def fail(_):
        raise OSError("disk gone")

    def write():
        with appearing_whole(file) as partial:
            partial.write_text("half")
            if fails == "writing":
                fail(partial)
            monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(OSError, match="disk gone"):
        write()

    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_another_process_writes_is_refused(tmp_path):
    file = tmp_path / "scores"

    with appearing_whole(file) as partial:
        partial.write_text("half")
        with (
            pytest.raises(BlockingIOError, match="another process is writing it") as raised,
            appearing_whole(file),
        ):
            pass
        partial.write_text("whole")

    assert raised.value.filename == str(file)
    assert file.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "scores.partial").write_text("left")

    with appearing_whole(tmp_path / "scores") as partial:
        partial.write_text("whole")

    assert (tmp_path / "scores").read_text() == "whole"
    with read_together(tmp_path), alone_in(tmp_path, "recsys train"):
        pass


def test_nfs_locks_what_a_killed_process_left(tmp_path, monkeypatch):
    flock = fcntl.flock

    def flock_of_nfs(descriptor, operation):
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and access == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    (tmp_path / "scores.partial").write_text("left")

    with appearing_whole(tmp_path / "scores") as partial:
        partial.write_text("whole")

    assert (tmp_path / "scores").read_text() == "whole"


def test_what_a_killed_process_left_is_replaced(tmp_path):
    (tmp_path / "scores.partial").write_text("of a killed process")

    with appearing_whole(tmp_path / "scores") as partial:
        assert not partial.read_text()
        partial.write_text("whole")

    assert (tmp_path / "scores").read_text() == "whole"
    assert not (tmp_path / "scores.partial").exists()


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path):
    """A stranger's folder may hold one that leads to a file of the user."""
    (tmp_path / "own").write_text("own")
    (tmp_path / "file.partial").symlink_to(tmp_path / "own")

    with pytest.raises(OSError, match=r"file\.partial"), appearing_whole(tmp_path / "file"):
        pass

    assert (tmp_path / "own").read_text() == "own"
