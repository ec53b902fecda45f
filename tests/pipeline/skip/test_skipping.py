"""What is left out depends on no schedule, tier or depth; a resumed run is the same run."""

import json
from types import SimpleNamespace

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
    Subsample,
)
from recsys.pipeline.skip.refill import RawBatch
from recsys.pipeline.skip.skipping import choose_stale

pytestmark = [
    pytest.mark.filterwarnings("ignore:schedule=.*room for"),
]


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
def test_every_schedule_and_tier_gives_equal_results(skips, name, runs, tmp_path):
    policy = skips.POLICIES[name]
    expected = skips.Run(Sequential(), policy).train(num_epochs=2)

    for tier, schedule in runs:
        options = skips.options_of(tier, tmp_path / "rows")
        run = skips.Run(schedule, policy, options).train(num_epochs=2)
        skips.require_equal(expected, run)
        assert run.pipeline.skipping.report() == expected.pipeline.skipping.report()

    skipping = expected.pipeline.skipping
    assert skipping.num_seen == 2 * len(expected.loader.source.splits["train"])
    assert (skipping.num_skipped > 0) == (not isinstance(policy, Observe | FreezeRows))
    if isinstance(policy, Observe):
        skips.require_equal(skips.Run(Sequential(), None).train(num_epochs=2), expected)


@pytest.mark.parametrize("name", ["drop_input", "importance"])
def test_hotline_leaves_out_the_same_samples_when_it_splits(skips, name):
    policy = skips.POLICIES[name]
    expected = skips.Run(Sequential(), policy).train(num_epochs=1)

    options = skips.options_of("host", None)
    run = skips.Run(Hotline(learning_steps=5), policy, options).train(num_epochs=1)

    assert run.pipeline.popular_split.num_split > 0
    assert run.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize("name", ["freeze_rows guarded", "subsample", "importance guarded"])
def test_a_run_resumed_anywhere_is_the_same_run(skips, name):
    policy, schedule = skips.POLICIES[name], LookAhead(3)
    options = skips.options_of("host", None)
    expected = skips.Run(schedule, policy, options).train(num_epochs=2)
    num_steps = len(expected.losses)

    run = skips.Run(schedule, policy, options)
    # Windows end after 33, 66 and 99 steps, and hold from 65, 98 and 131 on; versions of
    # importance are made after 16, 32, ... steps, and hold from 48, 64, ... on.
    stops = (1, 2, 16, 17, 33, 34, *range(46, 50), *range(63, 68), *range(97, 100))
    for stop in (*stops, *range(129, 134), num_steps - 1):
        run.train(stop, num_epochs=2)
        state = run.state()
        losses, run = run.losses, skips.Run(schedule, policy, options).load(state)
        run.losses = losses
    run.train(num_epochs=2)

    skips.require_equal(expected, run)
    assert run.pipeline.skipping.position == expected.pipeline.skipping.position
    assert run.pipeline.skipping.report() == expected.pipeline.skipping.report()


def test_random_drop_leaves_out_its_share_and_repeats_nothing(skips):
    run = skips.Run(Sequential(), RandomDrop(share=0.25))

    run.train(num_epochs=1)

    skipping = run.pipeline.skipping
    assert skipping.num_seen == 1600
    assert abs(skipping.num_skipped / 1600 - 0.25) < 0.04
    assert skipping.report()["share_skipped"] == skipping.num_skipped / 1600
    json.dumps(skipping.report())
    assert len(run.losses) == -(-(skipping.num_seen - skipping.num_skipped) // 16)


def test_subsample_is_unbiased(skips):
    """The mean gradient over many draws lies within the standard error of the full gradient."""
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(64, 5, generator=generator)
    labels = (torch.rand(64, generator=generator) < 0.3).float()
    is_stale = torch.rand(64, generator=generator) < 0.6
    layer = torch.nn.Linear(5, 1)

    def gradient(samples, weights):
        layer.zero_grad()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            layer(features[samples]).squeeze(1), labels[samples], weights, reduction="sum"
        )
        losses.backward()
        return torch.cat([layer.weight.grad.flatten(), layer.bias.grad])

    tracker = SimpleNamespace(
        use_flags_of=lambda _: None,
        all_stale=lambda *_: is_stale,
        add_inputs=lambda *_: None,
        has_stale_rows=True,
    )
    inputs = SimpleNamespace(parts=lambda *_: [])
    draws = []
    for seed in range(2000):
        policy = Subsample(0.2, 0.3, skips.STALENESS, None, seed)
        raw = RawBatch(None, 64, 0, 1000 * seed, 0, 0)
        chosen = choose_stale(policy, inputs, tracker, lambda _: 1.0, "skip=test", raw)
        draws.append(gradient(torch.from_numpy(chosen.samples), torch.from_numpy(chosen.weights)))
    draws = torch.stack(draws)

    error = draws.std(0) / len(draws) ** 0.5
    full = gradient(torch.arange(64), None)
    assert bool(((draws.mean(0) - full).abs() < 3 * error).all())
    dropped = gradient((~is_stale).nonzero().flatten(), None)
    assert bool(((dropped - full).abs() > 3 * error).any())


def test_a_failed_step_is_a_step_of_the_tracker(skips):
    """The window ends although its last step failed."""
    run = skips.Run(LookAhead(2), skips.POLICIES["drop_input"], skips.options_of("host", None))
    run.train(32)
    whole, run.pipeline._forward = run.pipeline._forward, None
    with pytest.raises(TypeError):
        run.train(33)
    run.pipeline._forward = whole
    run.train()

    skipping = run.pipeline.skipping
    assert skipping.tracker.report()["num_followed"] > 0
    assert skipping.tracker.num_steps == skipping.position.num_batches


def test_evaluation_between_steps_is_not_filtered(skips):
    policy = skips.POLICIES["drop_input"]
    expected = skips.Run(LookAhead(2), policy, skips.options_of("host", None)).train()
    run = skips.Run(LookAhead(2), policy, skips.options_of("host", None))
    test = BatchLoader(skips.Clicks(), "test", 100, shuffle=False)

    for stop in (10, 70, 71):
        run.train(stop)
        run.model.eval()
        with torch.no_grad():
            sizes = [len(output[1]) for _, output in run.pipeline.steps(test)]
        run.model.train()
        assert sum(sizes) == 1600
    run.train()

    skips.require_equal(expected, run)


@pytest.mark.parametrize("name", ["random_drop", "drop_input", "importance"])
def test_an_epoch_left_early_continues_with_the_next_sample(skips, name):
    policy = skips.POLICIES[name]
    expected = skips.Run(LookAhead(2), policy, skips.options_of("host", None)).train()
    run = skips.Run(LookAhead(2), policy, skips.options_of("host", None))

    for stop in (1, 5, 40, 41, 66, 67):
        run.train(stop)  # closes its iterator
    run.train()

    skips.require_equal(expected, run)
