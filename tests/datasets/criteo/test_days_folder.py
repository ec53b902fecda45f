"""The folder that a store of Criteo 1TB days grows in: whose it is, and when it goes."""

import pytest

from recsys.datasets.criteo.prepare import prepare_criteo_1tb
from recsys.datasets.criteo.read import CriteoReader
from recsys.errors import AlreadyExists, ConfigError


@pytest.fixture
def days(raw_line, tmp_path):
    paths = [tmp_path / f"day_{day}" for day in range(2)]
    for day, path in enumerate(paths):
        integers = [str(column) for column in range(13)]
        ids = [f"{day + column:x}" for column in range(26)]
        path.write_text("".join(raw_line(str(line % 2), integers, ids) + "\n" for line in range(5)))
    return paths


@pytest.fixture
def unfinished(tmp_path):
    """Where the folder is, or would be."""
    return tmp_path / "store.unfinished"


def prepare(paths, out):
    return prepare_criteo_1tb(paths, out, show_progress=False, num_threads=1)


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def stop_at(monkeypatch, day):
    """Have runs end, as by Ctrl-C, where they come to a day."""
    read = CriteoReader.read

    def read_or_stop(self, path):
        if path == day:
            raise KeyboardInterrupt
        return read(self, path)

    monkeypatch.setattr(CriteoReader, "read", read_or_stop)


def test_two_processes_do_not_work_on_one_store(days, tmp_path, monkeypatch):
    original = CriteoReader.read

    def read(self, path):
        prepare(days, tmp_path / "store")
        return original(self, path)

    monkeypatch.setattr(CriteoReader, "read", read)

    with pytest.raises(ConfigError, match=r"another `recsys prepare criteo-1tb` is at work in"):
        prepare(days, tmp_path / "store")


@pytest.mark.parametrize("name", ["thesis.txt", "store/my/thesis.txt", "ids/thesis.txt"])
def test_a_folder_that_recsys_did_not_make_is_left_alone(days, tmp_path, unfinished, name):
    (unfinished / name).parent.mkdir(parents=True)
    (unfinished / name).write_text("mine")

    with pytest.raises(AlreadyExists, match=rf"but it has '{name.split('/')[0]}'; move it away"):
        prepare(days, tmp_path / "store")
    (tmp_path / "store").mkdir()
    with pytest.raises(AlreadyExists, match="store exists already"):
        prepare(days, tmp_path / "store")

    assert [path.read_text() for path in unfinished.rglob("*.*")] == ["mine"]


def test_an_existing_store_is_never_overwritten(days, tmp_path, unfinished):
    prepare(days, tmp_path / "store")
    before = contents(tmp_path / "store")

    with pytest.raises(AlreadyExists, match="exists already; choose another"):
        prepare(days, tmp_path / "store")

    assert contents(tmp_path / "store") == before
    assert not unfinished.exists()


def test_a_link_to_nothing_in_the_place_of_a_store_is_refused_before_days_are_read(
    days, tmp_path, unfinished
):
    (tmp_path / "store").symlink_to(tmp_path / "nowhere")

    with pytest.raises(AlreadyExists, match=r"store is a link to .*nowhere, which does not exist;"):
        prepare(days, tmp_path / "store")

    assert not unfinished.exists()


def test_committed_days_outlive_a_store_that_appears_beside_them(
    days, tmp_path, unfinished, monkeypatch
):
    with monkeypatch.context() as patches:
        stop_at(patches, days[1])
        with pytest.raises(KeyboardInterrupt):
            prepare(days, tmp_path / "store")
    before = contents(unfinished)
    (tmp_path / "store").mkdir()

    with pytest.raises(AlreadyExists):
        prepare(days, tmp_path / "store")

    assert contents(unfinished) == before
    (tmp_path / "store").rmdir()
    assert prepare(days, tmp_path / "store").num_files_before == 1


def test_what_a_run_killed_in_its_first_day_left_is_no_hindrance(
    days, tmp_path, unfinished, monkeypatch
):
    prepare(days, tmp_path / "expected")
    with monkeypatch.context() as patches:
        # A killed process clears nothing away.
        patches.setattr("recsys.datasets.criteo.prepare._remove", lambda folder: None)
        stop_at(patches, days[0])
        with pytest.raises(KeyboardInterrupt):
            prepare(days, tmp_path / "store")
    assert (unfinished / "store").is_dir()

    prepare(days, tmp_path / "store")

    assert contents(tmp_path / "store") == contents(tmp_path / "expected")
    assert not unfinished.exists()
