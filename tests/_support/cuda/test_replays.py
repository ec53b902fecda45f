"""Launches are recorded when they come again, and replayed with what changes; a fake stands in."""

import pytest
import torch

from recsys._support.cuda import replays
from recsys._support.cuda.replays import Replays, replaying
from tests.fake_replays import record_on_cpu


@pytest.fixture
def recorded(monkeypatch):
    return record_on_cpu(monkeypatch)


def double(numbers):
    return numbers * 2


def test_the_second_call_records_and_later_ones_replay(recorded):
    known = Replays()

    with replaying():
        found = [known.run("x", double, [torch.tensor([step])]) for step in range(5)]

    assert [each.item() for each in found] == [0, 2, 4, 6, 8]
    [only] = recorded
    assert only.num_replays == 4


def test_a_key_a_shape_and_a_dtype_have_a_graph_each(recorded):
    known = Replays()
    inputs = [torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.int64)]

    with replaying():
        for _ in range(3):
            for each in inputs:
                assert torch.equal(known.run("x", double, [each]), each * 2)
            assert known.run("y", lambda each: each + 1, [inputs[0]])[0] == 2

    assert [each.num_replays for each in recorded] == [2, 2, 2, 2]


def test_each_stream_has_graphs_of_its_own(recorded, monkeypatch):
    """Those of one stream share memory; two streams may replay at the same time."""
    known = Replays()

    with replaying():
        for step in range(6):
            monkeypatch.setattr(replays, "current_stream_number", lambda _, of=step % 2: of)
            assert known.run("x", double, [torch.tensor([step])]).item() == 2 * step

    assert [each.num_replays for each in recorded] == [2, 2]


def test_nothing_is_recorded_outside(recorded):
    known = Replays()

    for _ in range(3):
        assert known.run("x", double, [torch.ones(1)]) == 2
    with replaying():
        pass
    assert known.run("x", double, [torch.ones(1)]) == 2

    assert not recorded


def test_a_function_may_return_nothing(recorded):
    known, sums = Replays(), torch.zeros(2)

    def add(numbers):
        sums.add_(numbers)

    with replaying():
        for step in range(4):
            assert known.run("x", add, [torch.tensor(step)]) is None

    assert sums.tolist() == [6, 6]


def test_more_keys_than_graphs_are_launched(recorded, monkeypatch):
    monkeypatch.setattr(replays, "_MOST_RECORDED", 2)
    known = Replays()

    with replaying():
        for _ in range(3):
            for key in range(4):
                assert known.run(key, double, [torch.tensor(key)]) == 2 * key

    assert len(recorded) == 2


def test_what_cannot_be_recorded_is_launched_and_a_warning_says_why(monkeypatch):
    def refuse(launch, inputs, reads):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(replays, "_CAN_RECORD", {"cpu"})
    monkeypatch.setattr(replays, "_record", refuse)
    known = Replays()

    with replaying():
        known.run("x", double, [torch.ones(1)])
        with pytest.warns(UserWarning, match="cannot be replayed .*operation not permitted"):
            assert known.run("x", double, [torch.ones(1)]) == 2
        assert known.run("x", double, [torch.ones(1)]) == 2


@pytest.mark.gpu
def test_a_gpu_replays():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    device = torch.device("cuda", 0)
    known, sums, calls = Replays(), torch.zeros(1000, device=device), []

    def launch(numbers):
        calls.append(numbers)
        order = numbers.sort().indices  # takes memory in between
        sums.add_(numbers)
        return order

    with replaying():
        found = [
            known.run("x", launch, [torch.arange(1000, device=device).flip(0) * step])
            for step in range(1, 6)
        ]

    assert len(calls) == 2
    assert all(torch.equal(each, torch.arange(1000, device=device).flip(0)) for each in found)
    assert torch.equal(sums.cpu(), torch.arange(1000.0).flip(0) * 15)
    assert torch.rand(1, device=device) < 1
