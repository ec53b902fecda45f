"""How graphs are captured; what a capture changes is tested where graphs are, on a GPU."""

from contextlib import contextmanager

import torch

from recsys._support.cuda.graphs import GraphRecorder


class FakeGraph:
    def replay(self):
        return "replayed"


def test_a_capture_has_a_stream_of_its_device_and_lets_other_threads_work(monkeypatch):
    captures = []

    @contextmanager
    def capture(graph, **options):
        captures.append(options)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    recorder = GraphRecorder(torch.device("cuda", 1), "pool")

    found = [recorder.record(lambda: "forward"), recorder.record(lambda: "backward")]

    assert [result for result, _ in found] == ["forward", "backward"]
    assert [replay() for _, replay in found] == ["replayed"] * 2
    assert (
        captures
        == [{"pool": "pool", "stream": "stream of cuda:1", "capture_error_mode": "thread_local"}]
        * 2
    )
