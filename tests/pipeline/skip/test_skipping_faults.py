"""Models, iterators and steps that change or fail while a pipeline skips."""

import copy

import pytest

from recsys.datasets import BatchLoader
from recsys.pipeline import Sequential

pytestmark = [
    pytest.mark.filterwarnings("ignore:schedule=.*room for"),
]


@pytest.mark.parametrize("name", ["observe", "freeze_rows"])
def test_two_iterators_in_turn_count_every_step_and_sample(skips, name):
    run = skips.Run(Sequential(), skips.POLICIES[name])
    other = BatchLoader(skips.Clicks(seed=5), "train", 16, shuffle=False)
    iterators = [iter(run.loader), iter(other)]

    for step in range(70):
        run.pipeline.progress(iterators[step % 2])

    skipping = run.pipeline.skipping
    assert skipping.position.num_batches == skipping.tracker.num_steps == 70
    assert skipping.num_seen == skipping.position.num_kept == 70 * 16
    assert run.loader.state_dict()["next_sample"] == 35 * 16


@pytest.mark.parametrize(
    ("earlier", "name"),
    [
        ("drop_input guarded", "drop_input guarded"),
        ("random_drop", "drop_input guarded"),
        (None, "subsample"),
        ("random_drop", "observe"),
    ],
)
def test_a_state_loaded_after_training_equals_one_loaded_in_a_new_run(skips, earlier, name):
    state = skips.Run(Sequential(), earlier and skips.POLICIES[earlier]).train(20).state()
    policy = skips.POLICIES[name]
    run = skips.Run(Sequential(), policy).train(90)
    run.pipeline.skipping.tracker.share = 0.01  # as a guard lowers it

    run.load(copy.deepcopy(state))
    fresh = skips.Run(Sequential(), policy).load(state)

    found, expected = run.pipeline.skipping, fresh.pipeline.skipping
    assert found.report() == expected.report()
    assert found.position == expected.position
    assert found.tracker.share == expected.tracker.share
    run.losses = []
    skips.require_equal(fresh.train(80), run.train(80))
    assert found.report() == expected.report()
