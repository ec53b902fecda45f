import json
import os

import numpy as np
import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import PopularityProfile, TableConfig
from recsys.errors import ProfileError


@pytest.fixture
def profile():
    tables = [
        TableConfig(name="t", num_embeddings=3, embedding_dim=4, feature_names=("a", "b")),
        TableConfig(name="u", num_embeddings=2000, embedding_dim=8, feature_names=("a",)),
    ]
    made = PopularityProfile(tables)
    rows = torch.arange(200).repeat(2).reshape(2, -1) % 3
    made.add(JaggedIds.from_one_hot(["a", "b"], rows))
    return made


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_a_profile_is_loaded_as_it_was_saved_and_goes_on_counting(profile, tmp_path, dtype):
    profile = PopularityProfile.from_about(profile.about(), profile.counts().astype(dtype))

    profile.save(tmp_path / "new" / "profile.npz")
    loaded = PopularityProfile.load(tmp_path / "new" / "profile.npz")

    for each in (profile, loaded):
        each.add(JaggedIds.from_one_hot(["b", "a"], torch.ones(2, 50, dtype=torch.int64)))
    np.testing.assert_array_equal(loaded.counts(), profile.counts())
    assert loaded.counts().dtype == profile.counts().dtype
    assert repr(loaded) == repr(profile)
    assert loaded.features == {"t": ("a", "b"), "u": ("a",)}


def test_saving_replaces_a_file_and_leaves_nothing_beside_it(profile, tmp_path):
    (tmp_path / "profile.npz").write_text("old")

    profile.save(tmp_path / "profile.npz")

    assert [path.name for path in tmp_path.iterdir()] == ["profile.npz"]
    assert PopularityProfile.load(tmp_path / "profile.npz").num_lookups == profile.num_lookups


def test_a_save_that_fails_keeps_the_file_that_was_there(profile, tmp_path, monkeypatch):
    file = tmp_path / "profile.npz"
    profile.save(file)
    before = file.read_bytes()

    def fill_disk(stream, **arrays):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", fill_disk)
    with pytest.raises(OSError, match="No space left"):
        profile.save(file)

    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_holds_no_pickle(profile, tmp_path):
    profile.save(tmp_path / "profile.npz")

    with np.load(tmp_path / "profile.npz", allow_pickle=False) as arrays:
        kinds = {name: arrays[name].dtype for name in arrays.files}

    assert kinds == {"meta": np.uint8, "counts": np.uint32}


def test_a_file_cut_off_anywhere_is_refused(profile, tmp_path):
    file = tmp_path / "profile.npz"
    profile.save(file)
    whole = file.read_bytes()

    for length in [0, 1, 3, 4, *range(10, len(whole), 37), len(whole) - 1]:
        file.write_bytes(whole[:length])

        with pytest.raises(ProfileError, match=r"profile.npz .*recsys profile STORE --out"):
            PopularityProfile.load(file)


def test_a_file_with_a_changed_byte_of_counts_is_refused(profile, tmp_path):
    file = tmp_path / "profile.npz"
    profile.save(file)
    content = bytearray(file.read_bytes())
    content[content.index(b"counts.npy") + 40] ^= 0xFF
    file.write_bytes(content)

    with pytest.raises(ProfileError, match="it is damaged or another file"):
        PopularityProfile.load(file)


def write_meta(file, **changes):
    """A profile's file with another meta; a None leaves a key out."""
    meta = {
        "format": "recsys-profile",
        "version": 1,
        "tables": {"a": 2},
        "features": {"a": ["a"]},
        "num_samples": 1,
    } | changes
    text = json.dumps({key: value for key, value in meta.items() if value is not None})
    np.savez(file, meta=np.frombuffer(text.encode(), np.uint8), counts=np.zeros(2, np.uint32))


def test_the_file_that_the_next_test_damages_is_a_good_one(tmp_path):
    write_meta(tmp_path / "f.npz")

    assert PopularityProfile.load(tmp_path / "f.npz").table_sizes == {"a": 2}


def save_array(file):
    with file.open("wb") as stream:  # np.save would add .npy to a name
        np.save(stream, np.zeros(3))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda f: np.savez(f, counts=np.zeros(3)), r"is not a profile \(it has no array 'meta'\)"),
        (save_array, r"is not a profile \(it is a single array\)"),
        (lambda f: np.savez(f, meta=np.zeros(3), counts=np.zeros(3)), "'meta' is not text"),
        (lambda f: write_meta(f, format="other"), "does not name the format recsys-profile"),
        (lambda f: write_meta(f, version=2), "version must be 1 .*, got 2; count again"),
        (lambda f: write_meta(f, num_samples=None), "num_samples is missing or of another type"),
        (lambda f: write_meta(f, num_samples=-1), "num_samples is missing"),
        (lambda f: write_meta(f, features={"a": 5}), "every table must have features"),
        (lambda f: write_meta(f, features={"a": []}), "every table must have features"),
        (lambda f: write_meta(f, tables={}, features={}), "every table must have features"),
        (lambda f: write_meta(f, tables={"a": 3}), r"counts must be \(3,\) uint32 or int64"),
        (lambda f: write_meta(f, tables={"a": 0}), "and at least one row"),
        (lambda f: write_meta(f, tables={"b": 2}), "every table must have features"),
        (lambda f: f.write_text("label,1,2"), "it is damaged or another file"),
    ],
)
def test_what_is_no_profile_of_this_version_is_refused(tmp_path, write, message):
    file = tmp_path / "f.npz"
    write(file)

    with pytest.raises(ProfileError, match=message):
        PopularityProfile.load(file)


def test_an_archive_with_a_pickle_is_refused_unread(tmp_path):
    np.savez(tmp_path / "f.npz", meta=np.array([{"format": "x"}], object), counts=np.zeros(1))

    with pytest.raises(ProfileError, match="cannot be read as a profile"):
        PopularityProfile.load(tmp_path / "f.npz")


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npz"):
        PopularityProfile.load(tmp_path / "nowhere.npz")


def test_a_folder_and_a_pipe_are_no_profiles(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ProfileError, match=r"is a folder, not a profile; if it is a store, count"):
        PopularityProfile.load(tmp_path)
    with pytest.raises(ProfileError, match=r"pipe is not a profile .*not a plain file"):
        PopularityProfile.load(tmp_path / "pipe")


@pytest.mark.parametrize("counts", [np.array([2**62, 2**62]), np.array([-1, 0])])
def test_counts_that_overflow_or_are_negative_are_refused(tmp_path, counts):
    write_meta(tmp_path / "f.npz")
    with np.load(tmp_path / "f.npz") as arrays:
        np.savez(tmp_path / "g.npz", meta=arrays["meta"], counts=counts)

    with pytest.raises(ProfileError, match=r"counts must (sum to less than|not be negative)"):
        PopularityProfile.load(tmp_path / "g.npz")
