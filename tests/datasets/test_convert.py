import pytest

from recsys.datasets.convert import convert_store
from recsys.errors import ConfigError


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^the format must be one of \('classic-npz', 'torchrec-npy'\), got 'csv'",
    ):
        convert_store(tmp_path / "store", "csv", tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "name"), [("classic-npz", "processed.npz"), ("torchrec-npy", "train")]
)
def test_a_folder_is_not_taken_for_a_files_name(tmp_path, to, name):
    with pytest.raises(ConfigError) as caught:
        convert_store(tmp_path / "store", to, tmp_path)

    assert f"name what is to be in it, such as {tmp_path / name}" in str(caught.value)


def test_a_format_of_whole_stores_has_no_split(tmp_path):
    with pytest.raises(ConfigError, match="cannot have split 'test' alone; leave the split out"):
        convert_store(tmp_path / "store", "classic-npz", tmp_path / "out", split="test")
