"""Models, iterators and steps that change or fail while a pipeline skips."""

import copy

import pytest

from recsys.datasets.loader import BatchLoader
from recsys.pipeline import Importance, Sequential

pytestmark = [
    pytest.mark.filterwarnings("ignore:schedule=.*room for"),
    pytest.mark.filterwarnings("ignore:staleness. a share"),
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


def test_importance_that_is_loaded_without_a_state_starts_anew(skips):
    state = skips.Run(Sequential(), skips.POLICIES["random_drop"]).train(5).state()
    policy = Importance(share=0.3, warm_up=32, guard=None)
    run = skips.Run(Sequential(), policy).train(20).load(state)

    assert run.pipeline.skipping.report()["importance"]["num_steps"] == 0
    assert run.pipeline.skipping.importance.weights is None


def test_after_a_step_that_raised_no_update_is_counted_or_frozen(skips):
    run = skips.Run(Sequential(), skips.POLICIES["freeze_rows"]).train(4)
    whole, run.pipeline._forward = run.pipeline._forward, None
    with pytest.raises(TypeError):
        run.train(5)
    run.pipeline._forward = whole

    watch = run.pipeline.skipping.tracker._watch
    assert not watch.is_counting
    assert watch.freezes is None


def test_iterators_without_samples_that_wait_are_dropped_silently(skips):
    run = skips.Run(Sequential(), skips.POLICIES["observe"])
    batches = list(run.loader)[:3]

    for _ in range(4):
        iterator = iter(batches)
        for _ in batches:
            run.pipeline.progress(iterator)

    assert len(run.pipeline._windows._owners) == 1
    assert run.pipeline.skipping.num_seen == 4 * 3 * 16
