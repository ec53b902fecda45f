"""Sums and padded steps of jagged rows, beside plain Python."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.models import pad_left, sum_of_bags

DTYPES = [torch.int32, torch.int64]
LENGTHS = st.lists(st.integers(0, 5), min_size=0, max_size=6)


def rows_of(lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return torch.rand(sum(lengths), 3, generator=generator, dtype=torch.float64)


def gradient_of(function, values):
    """The result, and the gradient of a sum that tells all its numbers apart."""
    values = values.clone().requires_grad_()
    result = function(values)
    factors = torch.arange(1, result.numel() + 1, dtype=torch.float64).view_as(result)
    ((result * factors).sum() + 0 * values.sum()).backward()
    return result.detach(), values.grad


def sums_by_hand(values, lengths):
    rows, sums = iter(values), []
    for length in lengths:
        total = torch.zeros(3, dtype=torch.float64)
        for _ in range(length):
            total = total + next(rows)
        sums.append(total)
    return torch.stack(sums) if sums else values.new_zeros(0, 3)


def padded_by_hand(values, lengths, num_steps):
    rows, samples = list(values), []
    for length in lengths:
        bag, rows = rows[:length], rows[length:]
        kept = bag[max(0, length - num_steps) :]
        missing = [torch.zeros(3, dtype=torch.float64)] * (num_steps - len(kept))
        samples.append(torch.stack([*missing, *kept]))
    return torch.stack(samples) if samples else values.new_zeros(0, num_steps, 3)


@given(lengths=LENGTHS, dtype=st.sampled_from(DTYPES))
def test_sums_of_bags_are_those_of_a_loop(lengths, dtype):
    values, of_bag = rows_of(lengths), torch.tensor(lengths, dtype=dtype)

    found = gradient_of(lambda rows: sum_of_bags(rows, of_bag), values)
    expected = gradient_of(lambda rows: sums_by_hand(rows, lengths), values)

    assert all(map(torch.equal, found, expected))


@given(lengths=LENGTHS, num_steps=st.integers(1, 4), dtype=st.sampled_from(DTYPES))
def test_padded_steps_are_those_of_a_loop(lengths, num_steps, dtype):
    values, of_bag = rows_of(lengths), torch.tensor(lengths, dtype=dtype)

    found = gradient_of(lambda rows: pad_left(rows, of_bag, num_steps)[0], values)
    expected = gradient_of(lambda rows: padded_by_hand(rows, lengths, num_steps), values)
    _, is_step = pad_left(values, of_bag, num_steps)

    assert all(map(torch.equal, found, expected))
    assert is_step.tolist() == [
        [step >= num_steps - length for step in range(num_steps)] for length in lengths
    ]
