"""Slots that several streams of a device use: which work comes after which.

Fakes stand in for CUDA; see `fake_streams.py`.
"""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import HotColdEmbedding, HotColdEmbeddingBag
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.tiers.cold.device_copies import DeviceCopies
from tests.embeddings.tiers.fake_streams import NUM_ROWS, FakeStream, Recorded


@pytest.mark.parametrize("is_claimed", [True, False])
def test_rows_prefetched_on_another_stream_are_moved_after_the_steps_before(
    cuda, is_reached, is_claimed
):
    """`is_claimed`: steps take slots claimed ahead; else these are claimed in the step."""
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    copying = FakeStream()  # that of copies of mini-batches
    batches = [torch.arange(6).view(1, 6) + 6 * step for step in range(8)]

    for step, (ids, following) in enumerate(itertools.pairwise(batches)):
        run.compute(step, ids)
        with cuda.stream(copying):
            claim = run.bag.prefetch(following)
        if not is_claimed:
            claim.cancel()

    written = [key for key in run.copies if key[0] == "write_back"]
    assert written
    assert all(key[1] // 6 in run.copies[key][1] for key in written)


def test_rows_are_moved_after_an_evaluation_on_a_stream_of_its_own(cuda, is_reached):
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    evaluating = FakeStream()
    batches = [torch.arange(6).view(1, 6) + 6 * step for step in range(8)]

    for step, ids in enumerate(batches):
        with cuda.stream(evaluating), torch.no_grad():
            run.bag(ids)
            evaluating.work(f"evaluation {step}")
        claims, copies = len(run.claims), len(run.copies)
        run.compute(step, ids)
        evaluations = {f"evaluation {before}" for before in range(step + 1)}
        assert all(evaluations <= before for *_, before in run.claims[claims:])
        assert all(evaluations <= before for _, before in list(run.copies.values())[copies:])

    assert any(key[0] == "write_back" for key in run.copies)


@pytest.fixture
def updates(cuda):
    """Records the updates of a run as work of their stream; gets what comes before each."""

    def record(run):
        kernels, found = run.bag._group.kernels, []
        row_update = kernels.row_update

        def recorded(*arguments):
            found.append(cuda.current_stream().work(f"update {len(found)}"))
            return row_update(*arguments)

        kernels.row_update = recorded
        return found

    return record


def test_rows_are_moved_after_updates_on_another_stream_than_their_lookups(
    cuda, is_reached, updates
):
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    computing, updating, copying = FakeStream(), FakeStream(), FakeStream()
    batches = [torch.arange(6).view(1, 6) + 6 * step for step in range(8)]
    found = updates(run)

    for ids in batches:
        with cuda.stream(copying):
            assert run.bag.prefetch(ids).is_held
        with cuda.stream(computing):
            pooled = run.bag(ids)
        with cuda.stream(updating):
            pooled.square().sum().backward()

    assert len(found) == 8
    written = [key for key in run.copies if key[0] == "write_back"]
    assert written
    assert all(f"update {key[1] // 6}" in run.copies[key][1] for key in written)


@pytest.mark.parametrize("what", ["flush", "evaluation"])
def test_rows_are_updated_after_what_another_stream_does_with_them(cuda, is_reached, updates, what):
    """A flush marks slots as clean at its end; an evaluation reads rows where they are."""
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    other, ids = FakeStream(), torch.arange(6).view(1, 6)
    found = updates(run)
    run.bag.prefetch(ids)
    run.compute("step", ids)
    run.bag.prefetch(ids)
    pooled = run.bag(ids)

    with cuda.stream(other), torch.no_grad():
        run.bag.weight.sum() if what == "flush" else run.bag(ids)
        other.work(what)
    pooled.sum().backward()

    assert what in found[1]


@pytest.mark.parametrize("is_reached", [True], indirect=True)
def test_restored_tables_may_be_written_to_although_a_device_reads_them_late(
    is_reached, monkeypatch
):
    late, look_up = [], DeviceCopies.look_up

    def look_up_later(*arguments):
        late.append(partial(look_up, *arguments))
        return -1

    def wait(_):
        while late:
            late.pop(0)()

    monkeypatch.setattr(DeviceCopies, "look_up", look_up_later)
    monkeypatch.setattr(DeviceCopies, "wait", wait)
    model = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum", sparse=True))
    rows = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget="8KiB")
    with torch.no_grad():
        found = model(torch.arange(8).unsqueeze(1))

    recsys.restore(model)
    with torch.no_grad():
        model[0].weight.zero_()

    wait(None)
    assert torch.equal(found, rows[:8])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("kind", [HotColdEmbeddingBag, HotColdEmbedding])
def test_on_a_gpu_rows_prefetched_on_another_stream_keep_the_updates_before(kind):
    """The steps are late: without an order, their rows would be evicted before."""
    rows = torch.arange(NUM_ROWS * 4.0).view(NUM_ROWS, 4)
    batches = [(torch.arange(6) + 6 * step).view(6, 1).cuda() % NUM_ROWS for step in range(60)]
    copying, found = torch.cuda.Stream(), []
    torch.cuda.synchronize()
    for budget in (None, 4 * NUM_ROWS + 12 * 24):
        weight = rows.clone() if budget else rows.cuda()
        options = {"device": "cuda", "optimizer": SGD(lr=0.5), "budget": budget}
        module = kind(NUM_ROWS, 4, _weight=weight, **options)
        for ids, following in itertools.pairwise(batches):
            torch.cuda._sleep(2_000_000)
            module(ids).square().sum().backward()
            if budget:
                with torch.cuda.stream(copying):
                    assert module.prefetch(following).is_held
        found.append(module.weight.detach().cpu())

    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_on_a_gpu_updates_on_another_stream_than_their_lookups_are_kept():
    """The updates are late: without an order, their rows would be evicted before."""
    rows = torch.arange(NUM_ROWS * 4.0).view(NUM_ROWS, 4)
    batches = [(torch.arange(6) + 6 * step).view(6, 1).cuda() % NUM_ROWS for step in range(60)]
    computing, updating, copying = (torch.cuda.Stream() for _ in range(3))
    found = []
    torch.cuda.synchronize()
    for budget in (None, 4 * NUM_ROWS + 12 * 24):
        weight = rows.clone() if budget else rows.cuda()
        options = {"device": "cuda", "optimizer": SGD(lr=0.5), "budget": budget}
        module = HotColdEmbeddingBag(NUM_ROWS, 4, mode="sum", _weight=weight, **options)
        torch.cuda.synchronize()
        for ids in batches:
            if budget:
                with torch.cuda.stream(copying):
                    assert module.prefetch(ids).is_held
            with torch.cuda.stream(computing):
                computing.wait_stream(updating)
                pooled = module(ids)
            with torch.cuda.stream(updating):
                updating.wait_stream(computing)
                torch.cuda._sleep(2_000_000)
                pooled.square().sum().backward()
        torch.cuda.synchronize()
        found.append(module.weight.detach().cpu())

    assert torch.equal(*found)
