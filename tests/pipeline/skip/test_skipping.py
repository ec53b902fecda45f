"""What is left out depends on no schedule, tier or depth; a resumed run is the same run."""

import copy
import json
import re

import pytest
import torch

from recsys.datasets import BatchLoader
from recsys.pipeline import (
    Auto,
    FreezeRows,
    Hotline,
    LookAhead,
    Observe,
    RandomDrop,
    Sequential,
)
from tests.pipeline.skip import clicks
from tests.pipeline.skip.clicks import POLICIES, Run, options_of, require_equal

pytestmark = pytest.mark.filterwarnings("ignore:schedule=.*room for")


# Resident tables have only one schedule that takes effect.
RUNS = [
    ("host", Sequential()),
    ("host", LookAhead(31)),
    ("file", LookAhead(3)),
    ("host", Hotline(learning_steps=1000)),
    ("host", Auto(candidates=(Sequential(), LookAhead(2)), steps_per_turn=2, num_rounds=1)),
]


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("freeze_rows guarded", RUNS[:3]),
        ("importance guarded", RUNS[3:]),
        ("drop_input", RUNS[3:4]),
        ("observe", RUNS[2:3]),
    ],
)
def test_every_schedule_and_tier_gives_equal_results(name, runs, tmp_path):
    policy = POLICIES[name]
    expected = Run(Sequential(), policy).train(num_epochs=2)

    for tier, schedule in runs:
        options = options_of(tier, tmp_path / "rows")
        run = Run(schedule, policy, options).train(num_epochs=2)
        require_equal(expected, run)
        assert run.pipeline.skipping.report() == expected.pipeline.skipping.report()

    skipping = expected.pipeline.skipping
    assert skipping.num_seen == 2 * len(expected.loader.source.splits["train"])
    assert (skipping.num_skipped > 0) == (not isinstance(policy, Observe | FreezeRows))
    if isinstance(policy, Observe):
        require_equal(Run(Sequential(), None).train(num_epochs=2), expected)


@pytest.mark.parametrize("name", ["drop_input", "importance"])
def test_hotline_leaves_out_the_same_samples_when_it_splits(name):
    expected = Run(Sequential(), POLICIES[name]).train()

    run = Run(Hotline(learning_steps=5), POLICIES[name], options_of("host", None)).train()

    assert run.pipeline.popular_split.num_split > 0
    assert run.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize("name", ["freeze_rows guarded", "subsample", "importance guarded"])
def test_a_run_resumed_anywhere_is_the_same_run(name):
    policy, schedule = POLICIES[name], LookAhead(3)
    options = options_of("host", None)
    expected = Run(schedule, policy, options).train(num_epochs=2)
    num_steps = len(expected.losses)

    run = Run(schedule, policy, options)
    # Windows end after 33, 66 and 99 steps, and hold from 65, 98 and 131 on; versions of
    # importance are made after 16, 32, ... steps, and hold from 48, 64, ... on.
    stops = (1, 2, 16, 17, 33, 34, *range(46, 50), *range(63, 68), *range(97, 100))
    for stop in (*stops, *range(129, 134), num_steps - 1):
        run.train(stop, num_epochs=2)
        state = run.state()
        skipping = state["pipeline"]["skipping"]  # as recsys 0.1 wrote it
        skipping["policy"] = re.sub(r"Guard\(every=0, .*?\)", "None", skipping["policy"])
        losses, run = run.losses, Run(schedule, policy, options).load(state)
        run.losses = losses
    run.train(num_epochs=2)

    require_equal(expected, run)
    assert run.pipeline.skipping.position == expected.pipeline.skipping.position
    assert run.pipeline.skipping.report() == expected.pipeline.skipping.report()


def test_random_drop_leaves_out_its_share_and_repeats_nothing():
    run = Run(Sequential(), RandomDrop(share=0.25)).train()

    skipping = run.pipeline.skipping
    assert skipping.num_seen == 1600
    assert abs(skipping.num_skipped / 1600 - 0.25) < 0.04
    assert skipping.report()["share_skipped"] == skipping.num_skipped / 1600
    json.dumps(skipping.report())
    assert len(run.losses) == -(-(skipping.num_seen - skipping.num_skipped) // 16)


@pytest.mark.parametrize("name", ["importance", "random_drop weighted"])
def test_mini_batches_without_refill_count_as_their_raw_ones(name):
    """They have fewer samples than a whole one on purpose."""
    run, whole, half = (
        Run(Sequential(), POLICIES[name], whole=size).train() for size in (None, 16, 32)
    )

    require_equal(run, whole)
    assert half.losses[0] == run.losses[0]
    assert half.losses != run.losses


def test_weights_make_up_for_what_is_left_out_of_a_mini_batch():
    run, means = Run(Sequential(), POLICIES["random_drop weighted"]), []
    run.model.register_forward_pre_hook(lambda _, args: means.append(args[0].weights.mean()))
    run.train()

    assert min(means) < 1 < max(means)  # a mini-batch counts by what was kept of it
    assert sum(means) / len(means) == pytest.approx(1, abs=0.04)


def test_a_raw_mini_batch_of_which_nothing_is_kept_makes_no_step():
    """With two samples each, both are left out at times."""
    policy = RandomDrop(0.6, weighted=True, refill=False)
    run = Run(LookAhead(3), policy, options_of("host", None), batch_size=2).train()
    position = run.pipeline.skipping.position

    assert (position.num_seen, position.num_raw, position.offset) == (1600, 800, 0)
    assert 0.75 < len(run.losses) / 800 < 0.85
    assert position.num_batches == len(run.losses)
    assert abs(run.pipeline.skipping.num_skipped / 1600 - 0.6) < 0.04


@pytest.mark.parametrize("name", ["random_drop", "drop_input", "importance"])
def test_an_epoch_left_early_or_evaluated_between_continues_with_the_next_sample(name):
    options = options_of("host", None)
    expected = Run(LookAhead(2), POLICIES[name], options).train()
    run = Run(LookAhead(2), POLICIES[name], options)
    test = BatchLoader(clicks.Clicks(), "test", 100, shuffle=False)

    for stop in (1, 5, 40, 41, 66, 67):
        run.train(stop)  # closes its iterator
        run.model.eval()
        with torch.no_grad():
            sizes = [len(output[1]) for _, output in run.pipeline.steps(test)]
        run.model.train()
        assert sum(sizes) == 1600  # nothing is left out
    run.train()

    require_equal(expected, run)


def test_a_failed_step_is_a_step_of_the_tracker():
    """The window ends although its last step failed."""
    run = Run(LookAhead(2), POLICIES["drop_input"], options_of("host", None)).train(32)
    whole, run.pipeline._forward = run.pipeline._forward, None
    with pytest.raises(TypeError):
        run.train(33)
    run.pipeline._forward = whole
    run.train()

    skipping = run.pipeline.skipping
    assert skipping.tracker.report()["num_followed"] > 0
    assert skipping.tracker.num_steps == skipping.position.num_batches


@pytest.mark.parametrize("name", ["observe", "freeze_rows"])
def test_two_iterators_in_turn_count_every_step_and_sample(name):
    run = Run(Sequential(), POLICIES[name])
    other = BatchLoader(clicks.Clicks(seed=5), "train", 16, shuffle=False)
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
def test_a_state_loaded_after_training_equals_one_loaded_in_a_new_run(earlier, name):
    state = Run(Sequential(), earlier and POLICIES[earlier]).train(20).state()
    run = Run(Sequential(), POLICIES[name]).train(90)
    run.pipeline.skipping.tracker.share = 0.01  # as a guard lowers it

    run.load(copy.deepcopy(state))
    fresh = Run(Sequential(), POLICIES[name]).load(state)

    found, expected = run.pipeline.skipping, fresh.pipeline.skipping
    assert found.report() == expected.report()
    assert found.position == expected.position
    assert found.tracker.share == expected.tracker.share
    run.losses = []
    require_equal(fresh.train(80), run.train(80))
    assert found.report() == expected.report()
