"""Power failures: a checkpoint's operations on files are recorded, and replayed up to each one.

Three disks are replayed. Each loses what its system may lose:

    kill     nothing: the process is killed, and the system goes on
    journal  content that was not flushed; names are kept in the order of the operations
    strict   content that was not flushed, and names in folders that were not flushed; of these the
             newest one is kept, since names may reach the disk in any order

Whatever is lost, the newest complete checkpoint opens, and has its exact content.
"""

import copy
import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from recsys import load_checkpoint
from tests.train.checkpoint.trainings import Training, require_equal, set_block_bytes


class Recorder:
    """Records what happens to the files under a folder: (operation, path, more)."""

    def __init__(self, monkeypatch, folder):
        self.folder, self.events = folder, []
        open_file, fsync = io.open, os.fsync

        def record_open(path, mode="r", *args, **kwargs):
            file = open_file(path, mode, *args, **kwargs)
            if self.holds(path) and any(letter in mode for letter in "wxa"):
                self.events.append(("create", Path(path), None))
                return RecordedFile(file, Path(path), self.events)
            return file

        def record_fsync(descriptor):
            fsync(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if self.holds(path):
                self.events.append(("fsync", path, None))

        monkeypatch.setattr(io, "open", record_open)
        monkeypatch.setattr(os, "fsync", record_fsync)
        for module, name in (
            (os, "replace"),
            (os, "rename"),
            (os, "mkdir"),
            (os, "unlink"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(module, name, self.recorded(getattr(module, name), name))

    def holds(self, path):
        return isinstance(path, str | Path) and self.folder in [Path(path), *Path(path).parents]

    def recorded(self, function, name):
        def call(path, *args, **kwargs):
            found = function(path, *args, **kwargs)
            if self.holds(path):
                more = Path(args[0]) if name in ("replace", "rename") else None
                self.events.append((name, Path(path), more))
            return found

        return call


class RecordedFile:
    def __init__(self, file, path, events):
        self._file, self._path, self._events = file, path, events

    def write(self, content):
        data = content.encode() if isinstance(content, str) else bytes(content)
        self._events.append(("write", self._path, data))
        return self._file.write(content)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *args):
        return self._file.__exit__(*args)

    def __getattr__(self, name):
        return getattr(self._file, name)


class Disk:
    """Files as the system has them, and as they would be after a power failure."""

    def __init__(self, folder):
        self.folder = folder
        self.content, self.flushed = {}, {}  # by file
        self.names = {}  # path -> file, as the system has it
        self.flushed_names, self.newest_name = {}, {}
        self.folders = {path for path in folder.rglob("*") if path.is_dir()} | {folder}
        self.flushed_folders = set(self.folders)
        for path in folder.rglob("*"):
            if path.is_file():
                file = object()
                self.names[path] = self.flushed_names[path] = file
                self.content[file] = self.flushed[file] = path.read_bytes()

    def apply(self, operation, path, more):
        self.newest_name = {}
        if operation == "create":
            file = object()
            self.names[path], self.content[file] = file, b""
        elif operation == "write":
            self.content[self.names[path]] += more
        elif operation == "fsync" and path in self.folders:
            for name in {*self.names, *self.flushed_names}:
                if name.parent == path:
                    self.flushed_names.pop(name, None)
                    if name in self.names:
                        self.flushed_names[name] = self.names[name]
            self.flushed_folders |= {each for each in self.folders if each.parent == path}
        elif operation == "fsync":
            self.flushed[self.names[path]] = self.content[self.names[path]]
        elif operation in ("replace", "rename"):
            self.newest_name[more] = self.names[more] = self.names.pop(path)
        elif operation == "mkdir":
            self.folders.add(path)
        elif operation == "unlink":
            self.names.pop(path, None)
        elif operation == "rmtree":
            self.folders.discard(path)
            self.names = {n: f for n, f in self.names.items() if path not in n.parents}
        else:
            raise AssertionError(operation)

    def after(self, failure):
        """What a failure leaves: the folders, and the content of each file."""
        names, content, folders = self.names, self.flushed, self.folders
        if failure == "kill":
            content = self.content
        if failure == "strict":
            names, folders = self.flushed_names | self.newest_name, self.flushed_folders
        return sorted(folders), {
            path: content.get(file, b"") for path, file in names.items() if path.parent in folders
        }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The operations of checkpoints with a new full copy, and the content of each checkpoint."""
    folder = tmp_path_factory.mktemp("disk") / "saved"
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_block_bytes(monkeypatch, 4000)
        training, contents, done = Training(), {}, {}
        checkpoints = training.saved(folder)

        def save(number):
            training.step(number)
            checkpoints.save(state=number)
            contents[number] = training.snapshot()
            checkpoints.wait()

        save(1)
        disk = Disk(folder)
        recorder = Recorder(monkeypatch, folder)
        for number in range(2, 6):
            save(number)
            done[number] = len(recorder.events)
        checkpoints.close()
    assert {"full", "delt"} == {
        path.name[:4] for operation, path, _ in recorder.events if operation == "mkdir"
    }
    return SimpleNamespace(disk=disk, events=recorder.events, contents=contents, done=done)


@pytest.mark.slow(but=("strict",))
@pytest.mark.parametrize("failure", ["kill", "journal", "strict"])
def test_after_a_failure_at_any_operation_the_newest_checkpoint_opens(recorded, tmp_path, failure):
    disk, again = copy.deepcopy(recorded.disk), Training(seed=1)
    restored, before = [], None
    for count, event in enumerate([None, *recorded.events]):
        if event is not None:
            disk.apply(*event)
        left = disk.after(failure)
        if left != before:  # most operations leave the same, as they are not flushed
            target = tmp_path / str(count)
            for path in left[0]:
                (target / path.relative_to(disk.folder)).mkdir(parents=True)
            for path, content in left[1].items():
                (target / path.relative_to(disk.folder)).write_bytes(content)
            number, before = load_checkpoint(target, **again.parts), left
            require_equal(again.snapshot(), recorded.contents[number])
            shutil.rmtree(target)
        complete = [1, *(each for each, end in recorded.done.items() if end <= count)]
        assert number >= max(complete)
        restored.append(number)

    assert restored == sorted(restored)
    assert set(restored) == set(range(1, 6))


def test_the_name_of_a_new_folder_of_checkpoints_is_flushed(tmp_path, monkeypatch):
    recorder, folder = Recorder(monkeypatch, tmp_path), tmp_path / "runs" / "saved"

    Training().saved(folder).close()

    assert {tmp_path, folder.parent} <= {
        path for operation, path, _ in recorder.events if operation == "fsync"
    }
