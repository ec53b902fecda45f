"""Transfers on a stream of their own: which work on a device comes after which.

Fakes stand in for CUDA; see `fake_streams.py`.
"""

import itertools

import pytest
import torch

from recsys._support.cuda.replays import replaying
from recsys.embeddings.tiers.cold.staging import TransferStream
from tests.embeddings.tiers.fake_streams import FakeEvent, FakeMemory, FakeStream, Recorded


def test_a_transfer_comes_after_what_was_queued_when_it_was_put_in_and_no_more(cuda):
    stream = TransferStream([FakeMemory()])
    cuda.default.work("last use of the slot")
    transfer = stream.transfer()
    cuda.default.work("next mini-batch")

    with transfer:
        before = cuda.current_stream().work("copy")

    assert before == {"last use of the slot"}
    assert cuda.current_stream() is cuda.default


def test_what_is_computed_comes_after_the_transfer_once_it_has_waited(cuda):
    stream = TransferStream([FakeMemory()])
    with stream.transfer():
        cuda.current_stream().work("copy")

    assert "copy" not in cuda.default.work("something else")
    stream.wait()
    assert "copy" in cuda.default.work("lookup")


def test_transfers_come_one_after_the_other_and_the_last_is_waited_for(cuda):
    stream = TransferStream([FakeMemory()])
    transfers = [stream.transfer(), stream.transfer()]
    for number, transfer in enumerate(transfers):
        with transfer:
            before = cuda.current_stream().work(number)
    stream.wait()

    assert 0 in before
    assert cuda.default.before == {0, 1}


def test_a_transfer_that_fails_is_waited_for_too(cuda):
    stream = TransferStream([FakeMemory()])

    def fail():
        with stream.transfer():
            cuda.current_stream().work("half of it")
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    stream.wait()

    assert cuda.default.before == {"half of it"}


def test_nothing_is_waited_for_before_the_first_transfer(cuda):
    TransferStream([FakeMemory()]).wait()

    assert not cuda.default.before


def test_a_transfer_comes_after_what_every_stream_that_uses_slots_has_queued(cuda):
    stream, other = TransferStream([FakeMemory()]), FakeStream()
    with cuda.stream(other):
        stream.wait()
        other.work("evaluation")

    with stream.transfer():
        before = cuda.current_stream().work("copy")

    assert before == {"evaluation"}
    assert not cuda.default.before


def test_records_are_changed_after_what_other_streams_have_queued(cuda):
    stream, other = TransferStream([FakeMemory()]), FakeStream()
    with cuda.stream(other):
        stream.wait()
        other.work("evaluation")

    stream.wait()

    assert cuda.default.before == {"evaluation"}


def test_a_first_transfer_comes_after_the_stream_on_which_slots_were_made(cuda):
    cuda.default.work("make records")
    stream, other = TransferStream([FakeMemory()]), FakeStream()

    with cuda.stream(other):
        transfer = stream.transfer()
    with transfer:
        before = cuda.current_stream().work("claim")

    assert before == {"make records"}


def test_an_update_waits_for_streams_that_use_slots_and_for_no_transfer(cuda):
    stream, flushing, updating = TransferStream([FakeMemory()]), FakeStream(), FakeStream()
    with cuda.stream(flushing):
        stream.wait()
        flushing.work("flush")
    with stream.transfer():
        cuda.current_stream().work("copy for a later step")

    with cuda.stream(updating):
        stream.use()
        before = updating.work("update")
    with stream.transfer():
        later = cuda.current_stream().work("write back")

    assert before == {"flush"}
    assert "update" in later


def test_numbers_are_read_after_their_event_and_after_nothing_that_was_queued_later(cuda):
    class FakeNumbers:
        def tolist(self):
            return [cuda.current_stream().work("read")]

    stream = TransferStream([FakeMemory()])
    with stream.transfer():
        cuda.current_stream().work("claim")
        made = stream.record()
        cuda.current_stream().work("copies")
    cuda.default.work("step")

    [before] = stream.read(FakeNumbers(), made)

    assert FakeEvent.host_waited_for == {"claim"}
    assert not before  # no work of the stream: `tolist` would wait for it
    assert cuda.current_stream() is cuda.default


def test_memory_of_the_slots_is_kept_for_the_stream_that_uses_it(cuda):
    memories = [FakeMemory(), FakeMemory()]

    stream = TransferStream(memories)

    assert [memory.used_by for memory in memories] == [[stream._stream]] * 2


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_step_comes_after_the_transfers_of_its_rows_and_these_after_the_step_before(
    cuda, is_reached, is_ahead
):
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    batches = [torch.arange(6).view(1, 6) + 6 * step for step in range(8)]

    for step, ids in enumerate(batches):
        if is_ahead and step + 1 < len(batches):
            assert run.bag.prefetch(batches[step + 1]).is_held
        before = run.compute(step, ids)
        if is_reached and not is_ahead:  # the lookup has read rows where they are
            before = cuda.default.before
        assert all(set(run.of_row("fetch", row)) & before for row in ids.flatten().tolist())

    own = run.hot._stream._stream
    assert {stream for stream, _ in run.copies.values()} == {own}
    # Each row is written back by the tier's stream, after the step that updated it.
    written = [key for key in run.copies if key[0] == "write_back"]
    assert written
    assert all(key[1] // 6 in run.copies[key][1] for key in written)


@pytest.mark.parametrize("is_reached", [True], indirect=True)
def test_a_step_does_not_come_after_transfers_for_later_steps(cuda, is_reached):
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    ids = torch.arange(4).view(1, 4)
    claims = [run.bag.prefetch(each) for each in (ids, ids + 4)]

    before = run.compute("step", ids)

    assert all(set(run.of_row("fetch", row)) <= before for row in range(4))
    assert not any(set(run.of_row("fetch", row)) & before for row in range(4, 8))
    assert claims[1].is_held


@pytest.mark.parametrize("are_replayed", [False, True])
@pytest.mark.parametrize("is_reached", [True], indirect=True)
def test_claims_and_releases_are_made_between_transfers_and_no_step_waits_for_later_ones(
    cuda, is_reached, are_replayed, request
):
    replayed = replaying(are_replayed)
    replayed.__enter__()
    request.addfinalizer(lambda: replayed.__exit__(None, None, None))
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    batches = [torch.arange(4).view(1, 4) + 4 * step for step in range(5)]
    run.bag.prefetch(batches[0])

    for step, (ids, following) in enumerate(itertools.pairwise(batches)):
        assert run.bag.prefetch(following).is_held
        before = run.compute(step, ids)
        claims = [key for key, *_ in run.claims if key[0] == "queue_claim"]
        assert set(claims[: step + 1]) <= before
        assert claims[step + 1] not in before

    own, releases = run.hot._stream._stream, 0
    for number, ((name, _), stream, before) in enumerate(run.claims):
        assert stream is own
        assert {key for key, *_ in run.claims[:number]} <= before
        if name == "release":
            assert releases in before  # the step that held the slots
            releases += 1
    assert releases == 3
    fetched = [before for (name, *_), (_, before) in run.copies.items() if name == "fetch"]
    assert all(claims[0] in before for before in fetched)


@pytest.mark.parametrize("are_replayed", [False, True])
@pytest.mark.parametrize("is_reached", [True], indirect=True)
def test_a_claim_that_fits_by_the_counts_of_the_one_before_waits_for_no_step_after_that(
    cuda, is_reached, are_replayed
):
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    batches = [torch.tensor([[0, 0, 0, 1, 1, 1, 2]]) + 3 * step for step in range(5)]

    with replaying(are_replayed):
        run.bag.prefetch(batches[0])
        for step, (ids, following) in enumerate(itertools.pairwise(batches)):
            assert run.bag.prefetch(following).is_held
            claims = [key for key, *_ in run.claims if key[0] == "queue_claim"]
            assert len(claims) == step + 2
            assert claims[step] in FakeEvent.host_waited_for
            assert claims[step + 1] not in FakeEvent.host_waited_for
            has_copied = set(run.of_row("fetch", 3 * step)) <= FakeEvent.host_waited_for
            assert has_copied == are_replayed  # then one graph makes claim and copies
            run.compute(step, ids)
            assert step - 1 not in FakeEvent.host_waited_for


@pytest.mark.parametrize("is_reached", [True], indirect=True)
def test_memory_that_a_claim_reads_or_makes_is_kept_for_the_other_stream(cuda, is_reached):
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    ids = torch.arange(4).view(1, 4)

    run.bag.prefetch(ids)

    own = run.hot._stream._stream
    [ticket] = run.tiers.ahead.waiting()
    copied = ticket.ids.values.data_ptr()
    assert copied != ids.data_ptr()  # the caller may overwrite its own
    assert run.claimed == [copied]
    assert any(kept.data_ptr() == copied for kept, stream in cuda.kept if stream is own)
    run.compute("step", ids)
    slots = ticket.slot_of_value.data_ptr()
    assert any(kept.data_ptr() == slots for kept, stream in cuda.kept if stream is cuda.default)


@pytest.mark.parametrize("what", ["flush", "lookup"])
def test_a_flush_and_a_lookup_without_a_ticket_come_after_rows_fetched_ahead(
    cuda, is_reached, what
):
    run = Recorded(cuda, torch.device("cpu"), is_reached=is_reached)
    ids = torch.arange(6).view(1, 6)
    run.compute("step", ids)
    claim = run.bag.prefetch(ids + 6)

    with torch.no_grad():
        run.bag.weight.sum() if what == "flush" else run.bag(ids + 6)

    fetched = set().union(*(run.of_row("fetch", row) for row in range(12)))
    assert len(fetched) == 12
    assert claim.is_held
    assert fetched <= cuda.default.work("read")
    written = {run.copies[key][0] for key in run.copies if key[0] == "write_back"}
    assert written == ({cuda.default} if what == "flush" else set())
