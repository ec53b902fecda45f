import pytest

from recsys.train.trainer import train


def run(config, folder):
    return train(config, folder, show_progress=False)


DECAYS = "lr_schedule.decay=linear"
NO_CORES = "recsys.train.loop.settings_warnings.num_cores"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ((DECAYS, "lr_schedule.decay_start=15"), "never fall"),
        (("lr_schedule.warmup_steps=16",), "lr_schedule.warmup_steps"),
        (("eval.every_steps=16",), "eval.every_steps"),
    ],
)
def test_settings_without_an_effect_are_warned_of(small_config, tmp_path, settings, name):
    with pytest.warns(UserWarning, match=name):
        run(small_config(*settings), tmp_path / "run")


@pytest.mark.parametrize(
    "settings",
    [
        (DECAYS, "lr_schedule.decay_start=14"),
        ("lr_schedule.warmup_steps=15",),
        ("eval.every_steps=15",),
    ],
)
def test_settings_with_an_effect_are_not_warned_of(small_config, tmp_path, settings):
    assert run(small_config(*settings), tmp_path / "run")["schedule"] == {"name": "sequential"}


def test_more_threads_than_cores_are_warned_of(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr(NO_CORES, lambda: 0)

    with pytest.warns(UserWarning, match="num_threads"):
        run(small_config("num_threads=1"), tmp_path / "run")
