"""Recorded launches without a GPU: what is recorded is called again, its result overwritten."""

from recsys._support.cuda import replays


class FakeRecorded:
    """Like `replays._Recorded`."""

    def __init__(self, launch, inputs):
        self.inputs = [each.clone() for each in inputs]
        self._launch, self.result, self.num_replays = launch, None, 0

    def replay(self):
        found = self._launch(*self.inputs)
        self.num_replays += 1
        if self.result is None:
            self.result = found
        elif found is not None:
            self.result.copy_(found)


def record_on_cpu(monkeypatch):
    """Have `Replays` record on the CPU; returns the list of what was recorded."""
    recorded = []

    def record(launch, inputs, reads):
        recorded.append(FakeRecorded(launch, inputs))
        return recorded[-1]

    monkeypatch.setattr(replays, "_CAN_RECORD", {"cuda", "cpu"})
    monkeypatch.setattr(replays, "_record", record)
    return recorded
