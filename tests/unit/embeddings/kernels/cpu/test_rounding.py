from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from recsys.embeddings.kernels.cpu.rounding import (
    TO_NEAREST,
    fold,
    key_of_row,
    narrow,
    table_key,
    widen,
)
from tests.exact.oracle import round_rows, signed

INFINITY = float("inf")


@njit
def widen_all(stored, values):
    for place in range(len(stored)):
        values[place] = widen(stored[place])


@njit
def narrow_all(values, stored, keys, table, row):
    key = key_of_row(keys, table, row)
    for place in range(len(values)):
        stored[place] = narrow(stored[place], values[place], key, np.uint64(place))


def all_stored():
    return torch.from_numpy(np.arange(2**16, dtype=np.uint16)).view(torch.bfloat16)


def widened(stored):
    values = np.empty(len(stored), np.float32)
    widen_all(stored.view(torch.uint16).numpy(), values)
    return torch.from_numpy(values)


def narrowed(values, keys=TO_NEAREST, table=0, row=0):
    stored = np.zeros(len(values), np.uint16)
    narrow_all(values.numpy(), stored, keys, np.uint64(table), np.uint64(row))
    return torch.from_numpy(stored).view(torch.bfloat16)


def keys_of(seed, step, num_tables=1):
    return np.array([table_key(seed, step, table) for table in range(num_tables)], np.uint64)


def drawn(seed):
    """Any float32s, a tenth of them halfway between two stored numbers, and ordinary ones."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (2000,), generator=generator).int()
    bits[:200] = (bits[:200] & -(2**16)) | 2**15
    ordinary = torch.randn(500, generator=generator)
    return torch.cat([bits.view(torch.float32), ordinary, ordinary * 1e-6, 65504 + 20 * ordinary])


def same(found, expected):
    """Bit for bit; one NaN is as good as another."""
    is_nan = expected.isnan()
    bits = [each.view(torch.int16)[~is_nan] for each in (found, expected)]
    return torch.equal(found.isnan(), is_nan) and torch.equal(*bits)


def neighbours(values):
    """The stored numbers that finite values lie between, and the share of the way to the upper."""
    stored = all_stored()
    stored = stored[stored.isfinite()].double().unique()
    above = torch.searchsorted(stored, values.double()).clamp(min=1)
    lower, upper = stored[above - 1], stored[above]
    return lower, upper, (values.double() - lower) / (upper - lower)


def test_every_stored_number_is_widened_to_what_it_is():
    stored = all_stored()

    found, expected = widened(stored), stored.float()

    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("keys", [TO_NEAREST, keys_of(1, 2)], ids=["nearest", "chance"])
def test_every_stored_number_is_narrowed_to_itself(keys):
    stored = all_stored()

    assert same(narrowed(widened(stored), keys), stored)


@given(st.integers(0, 2**31))
def test_to_nearest_is_as_torch_rounds(seed):
    values = drawn(seed)

    found = narrowed(values)

    assert same(found, values.bfloat16())
    assert same(round_rows(values, None), found)


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 9), st.integers(0, 2**40))
def test_chance_is_that_of_the_reference(seed, step, table, row):
    values = drawn(seed % 2**31)
    keys = keys_of(seed, step, 10)

    found = narrowed(values, keys, table, row)

    key = torch.tensor([signed(fold(int(keys[table]), row))])
    assert same(found, round_rows(values.unsqueeze(0), key)[0])


# Ordinary numbers and small ones.
VALUES = torch.tensor([1.0013, -0.3333, 3.3e-6, -7e-8, 2.0**-24 / 1000, 2.0**-24 / 3])


@pytest.mark.parametrize("varied", ["seed", "step", "table", "row"])
def test_numbers_are_right_on_average_whichever_part_of_their_place_varies(varied):
    count = 20_000
    lower, upper, share = neighbours(VALUES)
    places = [
        {"seed": 5, "step": 6, "table": 0, "row": 7} | {varied: number} for number in range(count)
    ]
    keys = [table_key(at["seed"], at["step"], at["table"]) for at in places]
    found = [
        narrowed(VALUES, np.array([key], np.uint64), 0, at["row"])
        for key, at in zip(keys, places, strict=True)
    ]
    drawn_up = torch.stack(found).double() == upper

    for column, probability in enumerate(share.tolist()):
        deviation = sqrt(probability * (1 - probability) / count)
        frequency = drawn_up[:, column].double().mean().item()
        assert abs(frequency - probability) <= 5 * deviation, (VALUES[column], lower[column])


def test_what_is_out_of_reach_is_infinity_and_what_is_nearer_to_the_largest_is_not():
    largest = torch.finfo(torch.bfloat16).max
    half = 2.0**119  # of the step that comes next
    values = torch.tensor([largest + half * 0.99, largest + half, -largest - half, INFINITY])
    values = values.repeat(100)

    found = narrowed(values, keys_of(0, 1)).double()

    assert found.tolist() == [largest, INFINITY, -INFINITY, INFINITY] * 100


def test_the_hash_goes_on_in_splitmix64s_sequence():
    # The first numbers of the reference implementation from the seed 1234567.
    assert [fold(1234567, number) for number in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
