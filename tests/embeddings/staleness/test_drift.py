"""The measures of drift, against their formulas in plain Python."""

import math

import pytest
import torch

from recsys.embeddings.staleness.drift import MEASURES, Movement, measure_drift


def plain(measure, earlier, before, now, updates, rate):
    change = [abs(b - a) for a, b in zip(before, now, strict=True)]
    mean = sum(change) / len(change)
    first = [b - a for a, b in zip(earlier, before, strict=True)]
    second = [b - a for a, b in zip(before, now, strict=True)]
    sizes = sum(a * a for a in first) + sum(a * a for a in second)
    signal = max(0.0, sum(a * b for a, b in zip(first, second, strict=True)))
    return {
        "largest_change": max(change),
        "mean_change": mean,
        "relative_change": mean / (sum(map(abs, before)) / len(before)),
        "change_per_update": mean / updates,
        "change_per_step_size": mean / rate,
        "signal_to_noise": signal / (sizes / 2),
    }[measure]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("measure", MEASURES)
def test_measures_are_their_formulas(measure, dtype):
    generator = torch.Generator().manual_seed(0)
    earlier, before, now = (torch.randn(9, 5, generator=generator).to(dtype) for _ in range(3))
    updates = torch.arange(1, 10)

    found = measure_drift(measure, Movement(before, now, earlier, updates, 0.3))

    expected = [
        plain(measure, *(each[row].tolist() for each in (earlier, before, now)), row + 1, 0.3)
        for row in range(9)
    ]
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_row_that_is_no_number_has_infinite_drift(measure):
    rows = torch.ones(1, 2)
    movement = Movement(rows, rows * math.nan, rows, torch.ones(1), 0.1)
    assert measure_drift(measure, movement).tolist() == [math.inf]


def test_rows_that_did_not_move_have_no_drift():
    rows = torch.ones(2, 3)
    for measure in MEASURES:
        movement = Movement(rows, rows, rows, torch.ones(2), 0.1)
        assert measure_drift(measure, movement).tolist() == [0, 0]


def test_a_row_of_zeros_has_no_relative_change():
    zeros = torch.zeros(1, 3)
    movement = Movement(zeros, zeros, None, torch.ones(1), 0.1)
    assert measure_drift("relative_change", movement).tolist() == [math.inf]


def test_signal_to_noise_tells_direction_from_distance():
    steps = torch.tensor([[1.0, 0.0], [1.0, 0.0], [100.0, 0.0]])
    back = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 100.0]])
    start = torch.zeros(3, 2)
    movement = Movement(start + steps, start + steps + back, start, torch.ones(3), 0.1)
    assert measure_drift("signal_to_noise", movement).tolist() == [1, 0, 0]
