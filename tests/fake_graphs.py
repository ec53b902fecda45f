"""CUDA graphs of the dense part on the CPU, with what makes the real ones hard to use.

Functions are called a few times before they are recorded. What they return is in memory that the
next replay overwrites, and the results of later graphs are lost as soon as the first one is
replayed. A replay runs in the autocast state of the recording.
"""

import torch

from recsys.pipeline import captured_dense, dense_graphs


def capture_on_cpu(monkeypatch):
    """Let the dense part be captured on the CPU; the result has one entry for each capture."""
    made = []

    def make(*_):
        made.append(FakeRecorder())
        return made[-1]

    monkeypatch.setattr(captured_dense, "_CAN_CAPTURE", {"cuda", "cpu"})
    monkeypatch.setattr(dense_graphs, "GraphRecorder", make)
    return made


class FakeRecorder:
    """As `recsys._support.cuda.graphs.GraphRecorder`."""

    def __init__(self):
        self._results = []  # of each graph

    def warm_up(self, launches):
        for launch in launches * 3:
            launch()

    def record(self, launch):
        is_first = not self._results
        is_autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        found = list(launch())
        self._results.append(found)

        def replay():
            if is_first:
                for results in self._results[1:]:
                    _write(results, [None if each is None else torch.nan for each in results])
            with (
                torch.enable_grad(),
                torch.autocast("cpu", dtype, enabled=is_autocast, cache_enabled=False),
            ):
                _write(found, launch())

        return found, replay


def _write(places, values):
    for place, value in zip(places, values, strict=True):
        if place is not None:
            # A graph's writes change no version.
            place.data.copy_(torch.as_tensor(value).detach())
