"""`Paper` against an oracle that is written from a description of the published code alone."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from recsys.pipeline import FAE, HotColdLoader, LookAhead, TrainPipeline
from tests.pipeline.skip.paper_toys import Stream, Toy


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


def test_rows_without_a_lookup_in_the_window_count_as_stale_as_in_the_published_code():
    # The loader shuffles: rows by place in its order, 10 mini-batches of 2.
    order, rows = Stream([0] * 20).order, [0] * 20
    for place in range(4, 20, 2):
        rows[order[place]] = 1  # never looked up in the window, mini-batches 0 and 1
    stream = Stream(rows)
    pipeline = TrainPipeline(stream.model, None, skip=stream.paper)
    stream.model.train()
    list(pipeline.steps(stream.loader))
    # Row 0 moves by 4 * 1/4 * 1/4 in the window, above every threshold.
    [decision] = pipeline.skipping.paper.decisions
    assert decision["num_stale_rows"] == {"f0": 7}
    assert [rows[n] for batch in stream.model.trained[2:] for n in batch] == [0] * 8


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


@pytest.mark.parametrize(
    "changed", [{"first_snapshot": 50}, {"first_snapshot": 8}, {"sample_share": 0.04}]
)
def test_windows_and_samples_that_do_not_fit_drop_nothing(changed):
    stream = Stream([0] * 20)
    paper = replace(stream.paper, **changed)
    pipeline = TrainPipeline(stream.model, None, skip=paper)
    stream.model.train()

    for _ in range(2):
        list(pipeline.steps(stream.loader))

    assert not pipeline.skipping.num_skipped
    assert not pipeline.skipping.paper.decisions
