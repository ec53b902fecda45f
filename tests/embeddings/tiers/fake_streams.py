"""Streams of CUDA without a GPU, which tell what work comes after which.

A stream knows what comes before the next work that it is given; an event keeps that, and a stream
that waits for the event knows it, too.
"""

import threading
from contextlib import contextmanager

from recsys.embeddings import HotColdEmbeddingBag
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.tiers.cold.staging import TransferStream

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
