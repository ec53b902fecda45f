import warnings

import pytest

from recsys.config import load_config
from recsys.train.dry_run import dry_run
from recsys.train.loop.settings_warnings import warn_of_unread_keys
from recsys.train.parts.build import open_source
from recsys.train.ranks.launched import processes_of
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


UNREAD = {
    ("optimizer.eps=0.001",): "optimizer.eps=0.001 has no effect: optimizer.name is 'sgd'; drop",
    (
        "optimizer.name=adagrad",
        "optimizer.betas=[0.5, 0.9]",
    ): r"optimizer.betas=\(0.5, 0.9\) has no",
    (
        "optimizer.name=adam",
        "dense_optimizer.name=sgd",
        "dense_optimizer.eps=0.5",
    ): "dense_optimizer.e",
    (
        "checkpoint.every_seconds=0",
        "checkpoint.buffer=1MiB",
    ): "checkpoint.buffer=1MiB has no effect",
    (
        "schedule.name=fae",
        "schedule.adaptive=false",
        "schedule.patience=2",
    ): "schedule.patience=2 has",
}


@pytest.mark.parametrize("settings", UNREAD)
def test_a_key_that_nothing_reads_is_warned_of(small_config, settings):
    config = small_config(*settings)

    with pytest.warns(UserWarning, match=UNREAD[settings]) as told:
        warn_of_unread_keys(config, open_source(config))

    assert len(told) == 1


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["optimizer.name=rowwise_adagrad", "optimizer.eps=0.001"],
        ["optimizer.name=adam", "optimizer.betas=[0.5, 0.9]", "dense_optimizer.name=sgd"],
        ["optimizer.eps=0.001", "dense_optimizer.name=adam"],  # the dense part takes it from there
        ["optimizer.name=partial_rowwise_adam"],  # with the default eps of Adam
        ["schedule.name=fae", "schedule.patience=2"],
    ],
)
def test_keys_that_are_read_are_not_warned_of(small_config, settings):
    config = small_config(*settings)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unread_keys(config, open_source(config))


def test_keys_of_synthetic_data_are_warned_of_with_a_store(small_config, table_store, tmp_path):
    config = small_config("synthetic.drift=0.5", data=str(table_store()))

    with pytest.warns(UserWarning, match=r"synthetic.drift=0.5 has no effect: the data is the sto"):
        run(config, tmp_path / "run")
    with pytest.warns(UserWarning, match=r"synthetic.drift=0.5 has no effect: the data is the sto"):
        dry_run(config, tmp_path / "another")
    assert load_config(tmp_path / "run" / "config.toml") == config  # it can still be read


def test_processes_that_torchrun_did_not_start_are_warned_that_each_trains_alone(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with processes_of(tmp_path):
        pass  # no warning, which would be an error

    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.warns(
            UserWarning, match="trains alone, .* WORLD_SIZE=2 .* unset RANK and WORLD_SIZ"
        ),
        processes_of(tmp_path) as processes,
    ):
        assert processes.rank == 0
