"""A replay counts what training counts, without computing."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recsys.config import load_config
from recsys.embeddings.lookup.abstract_tables import tiers_of
from recsys.errors import BudgetTooSmall
from recsys.pipeline.stalls import StageClock
from recsys.train.loop.tier_report import describe_transfers
from recsys.train.parts.build import build_loader, build_model, build_pipeline, open_source
from recsys.what_if.replay import Replay

SMALL = ["synthetic.num_samples=1400", "synthetic.table_sizes=[900, 700, 1, 800]"]
DEEP = ["schedule.name=lookahead", "schedule.depth=6"]


def trained(config, source):
    """The counts of training, before rows are written back to be saved; slots, and mean depth."""
    model, optimizers = build_model(config, source)
    pipeline = build_pipeline(model, optimizers, config, StageClock(), 100)
    loader = build_loader(config, source, None)
    for _ in range(config.epochs):
        for _ in pipeline.steps(loader):
            pass
    [tiers] = tiers_of(model)
    return tiers.residency.counts, tiers.hot.num_slots, pipeline.mean_depth


def require_equal_counts(config):
    source = open_source(config)
    counts, num_slots, mean_depth = trained(config, source)

    found = Replay(config, source).run(config, num_slots, 10_000)

    assert found.fetched.sum() == counts.num_fetched > 0
    assert found.written_back.sum() == counts.num_written_back
    assert (found.num_lookups, found.num_hits) == (counts.num_lookups, counts.num_hits)
    assert found.mean_depth == mean_depth
    assert found.num_samples == config.epochs * len(source.splits["train"])
    return found


@pytest.mark.filterwarnings("ignore:schedule=LookAhead")  # with too few slots for its depth
@settings(max_examples=min(12, settings().max_examples // 3))
@given(
    budget=st.sampled_from(["40KiB", "60KiB", "120KiB"]),
    schedule=st.sampled_from([[], DEEP, ["schedule.name=sequential"]]),
    batch_size=st.sampled_from([16, 33, 64]),
    seed=st.integers(0, 3),
    epochs=st.sampled_from([1, 2]),
)
@example(budget="40KiB", schedule=DEEP, batch_size=64, seed=0, epochs=2)
@example(budget="60KiB", schedule=[], batch_size=16, seed=1, epochs=1)
def test_counts_are_those_of_training(budget, schedule, batch_size, seed, epochs):
    changes = [f"budget={budget}", f"batch_size={batch_size}", f"seed={seed}", f"epochs={epochs}"]
    config = load_config(
        None,
        [*SMALL, *changes, *schedule, "model.embedding_dim=16", "optimizer.name=adagrad"],
        data="synthetic:criteo-kaggle",
    )

    require_equal_counts(config)


@pytest.mark.filterwarnings("ignore:schedule=LookAhead")
def test_a_depth_without_room_shrinks_as_in_training():
    config = load_config(
        None,
        [*SMALL, "budget=24KiB", "batch_size=64", *DEEP],
        data="synthetic:criteo-kaggle",
    )

    found = require_equal_counts(config)

    assert 0 < found.mean_depth < 5


def test_bags_and_shared_tables_count_as_in_training():
    sizes = ["synthetic.num_samples=700", "synthetic.table_sizes=[300, 500, 20]"]
    config = load_config(
        None,
        [*sizes, "budget=24KiB", "batch_size=4", "model.embedding_dim=8"],
        data="synthetic:taobao",
    )

    require_equal_counts(config)


def test_one_replay_can_be_repeated_with_other_slots():
    config = load_config(None, [*SMALL, "budget=1KiB"], data="synthetic:criteo-kaggle")
    source = open_source(config)
    replay = Replay(config, source)

    first = replay.run(config, 400, 10_000)
    more = replay.run(config, 1200, 10_000)
    again = replay.run(config, 400, 10_000)

    assert first.num_hits < more.num_hits
    for ours, expected in zip(again[:-1], first[:-1], strict=True):  # but for the seconds
        assert np.array_equal(ours, expected)


def test_a_replay_ends_after_the_steps_it_may_make():
    config = load_config(None, [*SMALL, "budget=1KiB", "epochs=2"], data="synthetic:criteo-kaggle")
    source = open_source(config)

    whole = Replay(config, source).run(config, 900, 10_000)
    part = Replay(config, source).run(config, 900, 12)

    assert (part.num_steps, part.num_samples) == (12, 1200 + 2 * 128)
    is_part = whole.claimed_in < 12
    assert np.array_equal(part.fetched[part.claimed_in < 12], whole.fetched[is_part])


def test_a_mini_batch_that_does_not_fit_is_refused_with_its_rows():
    config = load_config(None, [*SMALL, "budget=1KiB"], data="synthetic:criteo-kaggle")
    source = open_source(config)

    with pytest.raises(BudgetTooSmall, match=r"needs \d+ rows in fast memory, and .* slots for 20"):
        Replay(config, source).run(config, 20, 10)


def test_the_record_of_a_run_holds_the_rows_that_training_moved(small_config, tmp_path):
    config = small_config(*SMALL[1:], "budget=20KiB")
    source = open_source(config)
    model, optimizers = build_model(config, source)
    pipeline = build_pipeline(model, optimizers, config, StageClock(), 100)
    for _ in pipeline.steps(build_loader(config, source, None)):
        pass

    told = describe_transfers(model)

    [tiers] = tiers_of(model)
    counts, busy = tiers.residency.counts, tiers.residency.times.busy
    assert told == {
        "fetched_rows": counts.num_fetched,
        "written_back_rows": counts.num_written_back,
        "fetch_seconds": busy.fetch,
        "write_back_seconds": busy.write_back,
    }
    assert min(told.values()) > 0
    resident, _ = build_model(small_config(), source)
    assert describe_transfers(resident) is None
