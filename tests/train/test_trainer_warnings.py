import pytest

from recsys.train.trainer import train


def run(config, folder):
    return train(config, folder, show_progress=False)


NO_CORES = "recsys.train.loop.settings_warnings.num_cores"


def test_more_threads_than_cores_are_warned_of(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr(NO_CORES, lambda: 0)

    with pytest.warns(UserWarning, match="num_threads"):
        run(small_config("num_threads=1"), tmp_path / "run")
