import hashlib
import json

import pytest

from recsys.datasets.criteo.growing_folder import GrowingFolder
from recsys.errors import AlreadyExists, StoreError


@pytest.fixture
def folder(tmp_path):
    """With two committed files, one of them in a sub-folder."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "one").write_text("one")
    (tmp_path / "sub" / "two").write_text("two")
    folder = GrowingFolder(tmp_path)
    folder.commit({"days": ["a", 1]})
    return folder


def contents(folder):
    return {
        path.relative_to(folder.path).as_posix(): path.read_text()
        for path in folder.path.rglob("*")
        if path.is_file() and path.name != "committed.json"
    }


def test_what_was_committed_comes_back_and_nothing_else(folder):
    with (folder.path / "one").open("a") as file:
        file.write(" and more")
    (folder.path / "three").write_text("three")
    (folder.path / "new").mkdir()
    (folder.path / "new" / "four").write_text("four")
    (folder.path / "committed.json.partial").write_text("half a rec")

    about = folder.roll_back()

    assert about == {"days": ["a", 1]}
    assert contents(folder) == {"one": "one", "sub/two": "two"}
    assert not (folder.path / "new").exists()


def test_a_later_commit_takes_the_place_of_the_one_before(folder):
    with (folder.path / "one").open("a") as file:
        file.write(" and more")
    folder.commit({"days": ["a", 2]})

    assert folder.roll_back() == {"days": ["a", 2]}
    assert contents(folder) == {"one": "one and more", "sub/two": "two"}


def test_without_a_commit_nothing_is_kept(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "two").write_text("two")

    assert GrowingFolder(tmp_path).roll_back() is None

    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_claimed_while_it_is_empty_and_stays_claimed(tmp_path):
    folder = GrowingFolder(tmp_path)
    assert not folder.has_marker

    folder.claim()
    (tmp_path / "one").write_text("one")
    folder.claim()
    folder.roll_back()

    assert folder.has_marker
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_with_something_in_it_is_not_claimed_even_with_a_record(folder):
    with pytest.raises(AlreadyExists, match=r"must be empty or made .*has 'committed\.json'; move"):
        folder.claim()

    assert not folder.has_marker
    assert contents(folder) == {"one": "one", "sub/two": "two"}


def test_a_commit_that_fails_leaves_the_one_before(folder, monkeypatch):
    def fail(path):
        raise OSError("disk gone")

    (folder.path / "three").write_text("three")
    monkeypatch.setattr("recsys.datasets.criteo.growing_folder.flush_to_disk", fail)

    with pytest.raises(OSError, match="disk gone"):
        folder.commit({"days": []})

    assert folder.roll_back() == {"days": ["a", 1]}
    assert contents(folder) == {"one": "one", "sub/two": "two"}


def test_files_reach_the_disk_before_the_record_that_names_them(folder, monkeypatch):
    flushed = []
    for place in ("recsys.datasets.criteo.growing_folder", "recsys._support.files"):
        monkeypatch.setattr(f"{place}.flush_to_disk", flushed.append)

    folder.commit({})

    names = [path.relative_to(folder.path).as_posix() for path in flushed]
    record = names.index("committed.json.partial")
    assert sorted(names[:record]) == [".", "one", "sub", "sub/two"]
    assert names[record + 1 :] == ["."]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-10],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"one": 3', '"one": 2'),
        lambda text: json.dumps(json.loads(text) | {"more": 1}),
    ],
)
def test_a_damaged_record_is_refused_and_nothing_is_touched(folder, change):
    record = folder.path / "committed.json"
    record.write_text(change(record.read_text()))
    (folder.path / "one").write_text("one and more")

    with pytest.raises(StoreError, match=rf"committed\.json .* remove {folder.path} to start"):
        folder.roll_back()

    assert contents(folder) == {"one": "one and more", "sub/two": "two"}


@pytest.mark.parametrize("name", ["one", "sub/two"])
@pytest.mark.parametrize("change", [lambda file: file.write_text("t"), lambda file: file.unlink()])
def test_a_file_that_lost_what_was_committed_is_named(folder, name, change):
    change(folder.path / name)

    with pytest.raises(
        StoreError, match=rf"{name} must have at least 3 bytes, has [01]: .*damaged"
    ):
        folder.roll_back()


def test_a_link_is_refused_and_the_file_it_leads_to_is_kept(folder, tmp_path_factory):
    own = tmp_path_factory.mktemp("own") / "file"
    own.write_text("one of the user's files")
    (folder.path / "one").unlink()
    (folder.path / "one").symlink_to(own)

    with pytest.raises(StoreError, match="one must not be a symbolic link"):
        folder.roll_back()

    assert own.read_text() == "one of the user's files"


@pytest.mark.parametrize(
    "content",
    [
        {"about": {}, "num_bytes": {"one": "3"}},
        {"about": {}, "num_bytes": {"one": -3}},
        {"about": {}, "num_bytes": []},
        {"about": [], "num_bytes": {}},
        {"num_bytes": {}},
    ],
)
def test_a_record_with_a_right_sum_and_wrong_types_is_refused(folder, content):
    text = json.dumps(content, sort_keys=True)
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder.path / "committed.json").write_text(json.dumps(content))

    with pytest.raises(StoreError, match=r"lacks the notes or the length of a file: .* damaged"):
        folder.roll_back()
