"""Transfers on a stream of their own: which work on a device comes after which.

Fakes stand in for CUDA. A stream knows what comes before the next work that it is given; an event
keeps that, and a stream that waits for the event knows it, too.
"""

import itertools
import threading
from contextlib import contextmanager

import pytest
import torch

from recsys._support.replays import replaying
from recsys.embeddings import HotColdEmbedding, HotColdEmbeddingBag
from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.tiers.cold.staging import TransferStream
from tests.host_copies import HOST_COPIES, reach_host

NUM_ROWS = 300


class FakeEvent(frozenset):
    """What comes before the event."""

    host_waited_for = frozenset()

    def synchronize(self):
        FakeEvent.host_waited_for |= self


class FakeStream:
    def __init__(self, device=None, priority=0):
        self.before = frozenset()

    def record_event(self):
        return FakeEvent(self.before)

    def wait_event(self, event):
        self.before |= event

    def work(self, name):
        """Queue some work; returns what comes before it."""
        before = self.before
        self.before |= {name}
        return before


class FakeCuda:
    """Streams of `torch.cuda`: every thread has the default one until it is told otherwise.

    Attributes:
        kept: Tensors whose memory a stream other than their own uses, each with the stream.
    """

    def __init__(self):
        self.default, self._of_thread = FakeStream(), threading.local()
        self.kept = []

    def current_stream(self, device=None):
        return getattr(self._of_thread, "stream", self.default)

    @contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before


class FakeMemory:
    device = "cuda:0"

    def __init__(self):
        self.used_by = []

    def record_stream(self, stream):
        self.used_by.append(stream)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(FakeEvent, "host_waited_for", frozenset())
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *pair: fake.kept.append(pair))
    return fake


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


class Recorded:
    """A bag on a device whose tier says what comes before each copy of rows.

    The CPU stands in for the device, and does at once what a stream would do later.
    """

    def __init__(self, cuda, device, *, is_reached=False):
        self.bag = HotColdEmbeddingBag(
            NUM_ROWS, 4, mode="sum", device=device, optimizer=SGD(lr=0.5), budget=4 * 300 + 12 * 24
        )
        [tiers] = self.bag.tiers()
        self.cuda, self.copies, self.tiers, self.hot = cuda, {}, tiers, tiers.hot
        self.hot._stream = TransferStream([FakeMemory()])
        copying = tiers.residency._copies if is_reached else self.hot
        assert copying is not None
        for name in ("fetch", "write_back"):
            setattr(copying, name, self._recorded(name, getattr(copying, name)))
        if is_reached:
            copying.launch = self._recorded_launch(copying.launch)
        self.claims, self.claimed = [], []
        for name in ("queue_claim", "release"):
            owner = self.hot if name == "queue_claim" else self.hot.map
            setattr(owner, name, self._recorded_claim(name, getattr(owner, name)))

    def _recorded(self, name, copy):
        def recorded(*arguments):
            self._record(name, arguments[-2])
            copy(*arguments)

        return recorded

    def _recorded_launch(self, launch):
        def recorded(moves):
            self._record("write_back", moves.written_rows)
            self._record("fetch", moves.fetched_rows)
            launch(moves)

        return recorded

    def _recorded_claim(self, name, claim):
        def recorded(*arguments):
            stream, key = self.cuda.current_stream(), (name, len(self.claims))
            self.claims.append((key, stream, stream.work(key)))
            if name == "queue_claim":
                self.claimed.append(arguments[1].values.data_ptr())
            return claim(*arguments)

        return recorded

    def _record(self, name, rows):
        for row in rows.tolist():
            if row >= 0:
                stream, times = self.cuda.current_stream(), len(self.copies)
                self.copies[name, row, times] = stream, stream.work((name, row, times))

    def compute(self, name, ids):
        """A step; returns what its forward comes after."""
        pooled = self.bag(ids)
        before = self.cuda.default.work(name)
        pooled.square().sum().backward()
        return before

    def of_row(self, what, row):
        return [key for key in self.copies if key[:2] == (what, row)]


@pytest.fixture(params=[False, True], ids=["staged", "reached"])
def is_reached(request, monkeypatch):
    """Whether the device copies rows of the host by itself; the CPU stands in for it."""
    monkeypatch.setattr(kernel_choice, "_BY_TORCH", {"cuda", "cpu"})
    reach_host(monkeypatch, HOST_COPIES if request.param else None)
    return request.param


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
