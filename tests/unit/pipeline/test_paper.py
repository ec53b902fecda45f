"""`Paper` against an oracle that is written from a description of the published code alone."""

import copy

import numpy as np
import pytest
import torch

from recsys.pipeline import FAE, HotColdLoader, LookAhead
from tests.unit.pipeline.paper_toys import Toy


def train(pipeline, loader, num_steps=None):
    """Train for the rest of two epochs, or for some steps."""
    pipeline._model.train()
    count = 0
    while loader.epoch < 2:
        for _ in pipeline.steps(loader):
            count += 1
            if count == num_steps:
                return


def outcome(pipeline):
    """What was decided, as the oracle says it."""
    return [
        (one["threshold"], one["tries"], sum(one["num_stale_rows"].values()))
        for one in pipeline.skipping.paper.decisions
    ]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device(request.param)


@pytest.mark.parametrize(("tier", "num_toys"), [("host", 20), ("file", 20)])
def test_policy_equals_the_oracle(tier, num_toys, device, tmp_path):
    if tier == "file" and device.type == "cuda":
        pytest.skip("a device reads no files")
    seen = dict.fromkeys(("drops", "does not converge", "has no sample"), 0)
    for seed in range(num_toys):
        toy = Toy(seed, tier, device=device, folder=tmp_path / str(seed))
        model, loader = toy.model(), toy.loader()
        assert all(bool(g.num_slots) == (tier != "resident") for g in model.embeddings.groups())
        pipeline = toy.pipeline(model)
        epochs, tables = toy.oracle()

        train(pipeline, loader)

        assert model.trained == [batch for epoch in epochs for batch in epoch.mini_batches], seed
        decided = [epoch for epoch in epochs if epoch.threshold is not None]
        expected = [(epoch.threshold, epoch.tries, epoch.num_stale_rows) for epoch in decided]
        assert outcome(pipeline) == expected, seed
        for weight, rows in zip(model.embeddings.table_weights(), tables, strict=True):
            assert torch.equal(weight.detach().cpu(), torch.tensor(rows)), seed
        num_dropped = sum(len(epoch.dropped) for epoch in epochs)
        assert pipeline.skipping.num_skipped == num_dropped, seed
        seen["drops"] += num_dropped > 0
        seen["does not converge"] += any(not epoch.threshold for epoch in decided)
        seen["has no sample"] += len(decided) < len(epochs)
    assert all(count >= 2 for count in seen.values()), seen


def test_a_run_continues_as_if_it_had_not_stopped():
    toy = Toy(2, "host", first_snapshot=2, window_share=0.2, tolerance=0.3)
    whole = toy.model()
    pipeline = toy.pipeline(whole)
    train(pipeline, toy.loader())
    assert pipeline.skipping.num_skipped

    for num_steps in range(1, len(whole.trained)):
        first, loader = toy.model(), toy.loader()
        stopped = toy.pipeline(first)
        train(stopped, loader, num_steps)
        state = copy.deepcopy([first.state_dict(), loader.state_dict(), stopped.state_dict()])
        model, loader = toy.model(), toy.loader()
        model.load_state_dict(state[0])
        loader.load_state_dict(state[1])
        resumed = toy.pipeline(model)
        resumed.load_state_dict(state[2])

        train(resumed, loader)

        assert first.trained + model.trained == whole.trained, num_steps
        assert resumed.skipping.paper.decisions == pipeline.skipping.paper.decisions
        assert resumed.skipping.num_skipped == pipeline.skipping.num_skipped
        for table, expected in zip(
            model.embeddings.table_weights(), whole.embeddings.table_weights(), strict=True
        ):
            assert torch.equal(table, expected)


def test_other_loaders_and_schedules_are_refused():
    toy = Toy(0, "host")
    with pytest.raises(ValueError, match=r"skip=Paper\(...\) .* depth 2; use Sequential\(\)"):
        toy.pipeline(toy.model(), LookAhead())

    pipeline = toy.pipeline(toy.model())
    pipeline._model.train()
    batches = [toy.source.read(np.arange(4))]
    loaders = [
        HotColdLoader(toy.source, "train", 4, toy.is_hot, fae)
        for fae in (FAE(rate=100), FAE(rate=50, is_adaptive=False))
    ]
    for loader in (batches, *loaders):
        with pytest.raises(ValueError, match=r"HotColdLoader|FAE\(rate=100, is_adaptive=False\)"):
            pipeline.progress(iter(loader))
    pipeline.progress(iter(toy.loader()))
