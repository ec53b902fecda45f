"""Journey 8: what has stopped changing is skipped, beside its controls and under the guard."""

import pyarrow.csv
import pytest

from tests.commands import options, recsys
from tests.journeys.journey import SMALL, auc_of, clicks, record_of, require_equal

SAMPLES = ("synthetic.num_samples=2000", "synthetic.table_sizes=[9, 7, 1, 12]")
RECIPE = (*SMALL, *SAMPLES, "batch_size=32", "epochs=4")
STALE = ("share=0.4", "staleness.window=34", "staleness.min_updates=2")
NO_GUARD = ("guard.every=0",)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains with more settings; returns the run."""

    def run(policy="", *keys, more=()):
        folder = tmp_path_factory.mktemp("skipping") / "run"
        settings = (*RECIPE, *more, *(f"skip.{policy}.{key}" for key in keys))
        recsys("train", "synthetic:criteo-kaggle", "--run", folder, *options(*settings))
        return folder

    return run


@pytest.fixture(scope="module")
def whole(train):
    """The first control: nothing is skipped."""
    return train()


def test_the_second_control_leaves_out_as_many_random_samples_as_it_should(train, whole):
    skipped = record_of(train("random_drop", "share=0.25"))["skipped"]

    assert record_of(whole)["skipped"] is None
    assert skipped["num_seen"] == record_of(whole)["throughput"]["num_samples"]
    assert skipped["num_skipped"] / skipped["num_seen"] == pytest.approx(0.25, abs=0.02)


def test_observing_changes_no_bit(train, whole):
    require_equal(train("observe", *STALE), whole)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("drop_input", STALE), ("subsample", STALE), ("importance", ("share=0.4", "warm_up=0"))],
)
def test_a_policy_leaves_out_samples_and_still_learns(train, whole, policy, settings):
    run = train(policy, *settings, *NO_GUARD)
    skipped = record_of(run)["skipped"]

    assert 0 < skipped["num_skipped"] <= 0.45 * skipped["num_seen"]
    assert auc_of(run) > auc_of(whole) - 0.1


def test_frozen_rows_are_trained_on_and_not_updated(train, whole):
    run = train("freeze_rows", *STALE, *NO_GUARD)

    assert record_of(run)["skipped"]["num_skipped"] == 0
    assert auc_of(run) > auc_of(whole) - 0.1
    with pytest.raises(AssertionError):
        require_equal(run, whole)


def test_the_published_policy_leaves_out_stale_samples_of_popular_rows(train):
    schedule = ("schedule.fae.rate=100", "schedule.fae.adaptive=false")
    constants = ("first_snapshot=8", "window_share=0.1")
    sample = ("sample_share=0.5", "highest_threshold=1.0")
    tables = ("synthetic.table_sizes=[9, 7, 1, 900]", "budget=24KiB")
    run = train("paper", *constants, *sample, more=(*schedule, *tables))

    skipped = record_of(run)["skipped"]
    assert 0 < skipped["num_skipped"] < skipped["num_seen"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of what the guard decides
@pytest.mark.parametrize("turns", [False, True])
def test_the_guard_steps_in_if_quality_falls(tmp_path, turns):
    table = clicks(0)
    if turns:  # before the window of the guard at step 184
        labels = table["click"].to_numpy().copy()
        labels[1460:] ^= 1
        table = table.set_column(0, "click", [labels])
    file, store, run = tmp_path / "clicks.csv", tmp_path / "store", tmp_path / "run"
    pyarrow.csv.write_csv(table, file)
    (tmp_path / "schema.toml").write_text(recsys("inspect", file))
    recsys("prepare", "table", file, "--schema", tmp_path / "schema.toml", "--out", store)

    settings = (*SMALL, "batch_size=8", "shuffle=false", "skip.importance.warm_up=0")
    guard = ("skip.importance.guard.every=46", "skip.importance.guard.steps=14")
    recsys("train", store, "--run", run, *options(*settings, *guard))

    assert bool(record_of(run)["skipped"]["guard"]["decisions"]) == turns
