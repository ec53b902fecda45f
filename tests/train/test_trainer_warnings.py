import pytest

from recsys.train.trainer import train


def run(config, folder):
    return train(config, folder, show_progress=False)


def test_a_decay_that_begins_behind_the_last_step_is_warned_of(small_config, tmp_path):
    settings = ["lr_schedule.decay=linear", "lr_schedule.decay_start=15"]

    with pytest.warns(UserWarning, match="never fall: .* from step 15 on, and the run has 15 ste"):
        run(small_config(*settings), tmp_path / "late")

    run(small_config(settings[0], "lr_schedule.decay_start=14"), tmp_path / "in_time")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lr_schedule.warmup_steps", "rates never reach their full value: lr_schedule.warmup_step"),
        ("eval.every_steps", "the only evaluation is the one after the last step: eval.every_step"),
    ],
)
def test_what_would_come_behind_the_last_step_is_warned_of(small_config, tmp_path, key, message):
    with pytest.warns(UserWarning, match=f"{message}.* is 16, and the run has 15 steps"):
        run(small_config(f"{key}=16"), tmp_path / "late")

    run(small_config(f"{key}=15"), tmp_path / "in_time")


def test_more_threads_than_cores_are_warned_of(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.train.loop.settings_warnings.num_cores", lambda: 0)

    with pytest.warns(UserWarning, match="num_threads is 1, .* may use 0 cores; .* set num_thr"):
        run(small_config("num_threads=1"), tmp_path / "run")


def test_looking_ahead_over_resident_rows_is_warned_of(small_config, tmp_path):
    with pytest.warns(UserWarning, match=r"schedule=LookAhead\(depth=2\) has no effect"):
        run(small_config("schedule.name=lookahead"), tmp_path / "named")

    record = run(small_config(), tmp_path / "left_out")

    assert record["schedule"] == {"name": "sequential"}


@pytest.mark.filterwarnings("ignore:staleness. .* sampled inputs have the same level")
def test_a_run_too_short_to_skip_is_warned_of(small_config, tmp_path):
    settings = ["skip.policy=drop_input", "batch_size=32", "skip.staleness.min_updates=2"]

    with pytest.warns(UserWarning, match=r"nothing is skipped: .* 3 windows .* 1000 .* 57 steps"):
        run(small_config(*settings), tmp_path / "short")
    measure = "skip.staleness.measure=signal_to_noise"
    with pytest.warns(UserWarning, match=r"nothing is skipped: .* 4 windows .* 57 steps"):
        run(small_config(*settings, measure), tmp_path / "another measure")
    with pytest.warns(UserWarning, match=r"no sample is left out: .*warm_up is 100, .* 57 steps"):
        run(small_config("skip.policy=importance", "batch_size=32"), tmp_path / "importance")
    settings += ["skip.staleness.window=40", "skip.staleness.patience=1", "epochs=2"]
    with pytest.warns(
        UserWarning, match=r"guard never compares: skip\.guard\.every is 1000 .* 114 s"
    ):
        run(small_config(*settings), tmp_path / "longer")

    run(small_config(*settings, "skip.guard.every=0"), tmp_path / "without a guard")
