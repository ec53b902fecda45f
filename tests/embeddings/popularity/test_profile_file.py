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


def change_a_byte(file):
    content = bytearray(file.read_bytes())
    content[content.index(b"counts.npy") + 40] ^= 0xFF
    file.write_bytes(content)


def save_with(file, **changes):
    with np.load(file) as arrays:
        made = dict(arrays) | changes
    np.savez(file, **made)


@pytest.mark.parametrize(
    "damage",
    [
        change_a_byte,
        lambda f: np.savez(f, counts=np.zeros(3)),
        lambda f: save_with(f, counts=np.zeros(2003, np.uint32)),
        lambda f: save_with(f, counts=np.zeros((1, 2003), np.uint32)),
        lambda f: save_with(f, meta=np.frombuffer(b'{"format": "recsys-profile"}', np.uint8)),
        lambda f: save_with(f, sha256=np.zeros(32, np.uint8)),
    ],
)
def test_a_file_with_other_contents_is_refused(profile, tmp_path, damage):
    file = tmp_path / "f.npz"
    profile.save(file)
    damage(file)

    with pytest.raises(ProfileError, match=r"f\.npz"):
        PopularityProfile.load(file)


def test_a_profile_of_another_version_is_refused(profile, tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.embeddings.popularity.files._VERSION", 1)
    profile.save(tmp_path / "f.npz")
    monkeypatch.undo()

    with pytest.raises(ProfileError, match=r"must be recsys-profile 2 .*, got recsys-profile 1"):
        PopularityProfile.load(tmp_path / "f.npz")
