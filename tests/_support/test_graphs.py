"""How graphs are captured; what a capture changes is tested where graphs are, on a GPU."""

import torch

from recsys._support.graphs import graph_on


def test_a_capture_has_a_stream_of_its_device_and_lets_other_threads_work(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")

    capture = graph_on(torch.device("cuda", 1))

    assert capture.func is torch.cuda.graph
    assert capture.keywords == {
        "stream": "stream of cuda:1",
        "capture_error_mode": "thread_local",
    }
