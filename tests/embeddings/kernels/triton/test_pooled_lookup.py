from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED
from recsys.embeddings.kernels.torch.bags import TorchBags, layers_of
from recsys.embeddings.kernels.torch.row_space import ReachedRows, TorchRowSpace, number_rows
from recsys.embeddings.kernels.triton.pooled_lookup import pooled_lookup, row_gradient_dots
from recsys.embeddings.kernels.triton.transfers import HostRows
from recsys.embeddings.rows.lookups import Lookups
from recsys.errors import MalformedBags
from tests import torch_kernels as by_torch
from tests.torch_kernels import TorchSlotMap

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
cases = {
    "seed": st.integers(0, 2**31),
    "dim": st.sampled_from([1, 3, 4, 9, 16, 300]),
    "batch_size": st.integers(0, 9),
    "longest": st.sampled_from([None, 0, 1, 7]),
    "how": st.sampled_from(["sum", "mean", "weighted", "weighted mean"]),
    "int_dtype": st.sampled_from([torch.int32, torch.int64]),
    "padding": st.sampled_from([None, 1]),
}


def on(case, device):
    """The tables and the input of a case on a device."""
    weights = None if case.weights is None else case.weights.to(device)
    space = TorchRowSpace([table.to(device) for table in case.copies()])
    return space, case._replace(
        values=case.values.to(device), offsets=case.offsets.to(device), weights=weights
    )


def pooled(function, space, case, **others):
    """Columns that no lookup has are left as they were."""
    shape = case.batch_size, case.lookups.width
    result = torch.full(shape, 7, dtype=space.compute_dtype, device=space.device)
    assert function(space, case.lookups, case.bags(**others), result) == -1
    return result


@settings(deadline=None)
@given(dtype=st.sampled_from(DTYPES), **cases)
def test_rows_are_pooled_to_the_bit_as_by_torch(
    triton_device, make_case, dtype, padding, **of_case
):
    case = make_case(**of_case, dtype=dtype)
    space, case = on(case, triton_device)
    expected = pooled(by_torch.pooled_lookup, space, case, padding=padding)

    found = pooled(pooled_lookup, space, case, padding=padding)

    assert torch.equal(found, expected)
    space.errors.check()


@settings(deadline=None)
@given(dtype=st.sampled_from(DTYPES), **cases)
def test_rows_in_two_tiers_are_pooled_to_the_bit_as_in_one(
    triton_device, make_case, dtype, padding, **of_case
):
    case = make_case(**of_case, dtype=dtype)
    space, case = on(case, triton_device)
    expected = pooled(by_torch.pooled_lookup, space, case, padding=padding)

    rows = in_two_tiers(case, triton_device)
    found = pooled(pooled_lookup, rows, case, padding=padding)

    assert torch.equal(found, expected)
    rows.errors.check()


def in_two_tiers(case, device):
    """A third of the rows in slots, and nan in their place on the host; a third are awaited."""
    tables, sizes = case.copies(), list(map(len, case.tables))
    if device.type == "cuda":
        tables = [table.pin_memory() for table in tables]
    everything = torch.cat(tables)
    kind = torch.arange(len(everything)) % 3
    in_slots = (kind == 0).nonzero().flatten()
    held = torch.full((len(everything), everything.shape[1]), torch.nan, dtype=everything.dtype)
    slots = in_slots.flip(0)
    held[slots] = everything[in_slots]
    numbers = number_rows(sizes, everything.shape[1], held.to(device))
    slot_map = TorchSlotMap(numbers, len(held)).tensors
    slot_map.slot_of_row[in_slots.to(device)] = slots.int().to(device)
    awaited = (kind == 1).nonzero().flatten().to(device)
    slot_map.slot_of_row[awaited] = (awaited + AWAITED).int()
    for table, first in zip(tables, numbers.first_rows, strict=True):
        table[kind[first : first + len(table)] == 0] = torch.nan
    return ReachedRows(numbers, slot_map, held.to(device), HostRows(tables, device))


@settings(deadline=None)
@given(dtype=st.sampled_from(DTYPES), **cases)
def test_gradients_of_weights_are_those_of_torch(
    triton_device, make_case, dtype, padding, **of_case
):
    space, case = on(make_case(**of_case, dtype=dtype), triton_device)
    gradient = case.gradient(space.compute_dtype).to(triton_device).contiguous()
    expected = torch.ones(len(case.values), dtype=space.compute_dtype, device=triton_device)
    found = expected.clone()
    arguments = space, case.lookups, case.bags(padding=padding), gradient
    by_torch.row_gradient_dots(*arguments, expected)

    row_gradient_dots(*arguments, found)

    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=20 * tolerance)


def test_lookups_beyond_one_program_are_pooled(triton_device):
    """More samples than a program has bags, and columns that are no multiple of 16 bytes."""
    lookups = Lookups(
        tables=np.array([1, 0], np.uint64),
        positions=np.array([1, 0], np.uint64),
        columns=np.array([0, 33], np.uint64),
        width=65,
    )
    tables = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(0)).to(triton_device)
    space = TorchRowSpace(list(tables))
    values = torch.arange(600, device=triton_device) % 50
    bags = TorchBags(values, None, None, 300, is_mean=False)
    found = torch.zeros(300, 65, device=triton_device)

    pooled_lookup(space, lookups, bags, found)

    of_both = tables[1][values[300:]], tables[0][values[:300]]
    expected = torch.cat([of_both[0], found.new_zeros(300, 1), of_both[1]], 1)
    assert torch.equal(found, expected)


def test_a_second_lookup_copies_nothing_to_the_device(triton_device, make_case, monkeypatch):
    space, case = on(make_case(0, 4, 6, 3), triton_device)
    expected = pooled(pooled_lookup, space, case)
    monkeypatch.setattr(space, "numbers_of", lambda _: pytest.fail("numbers were copied"))

    assert torch.equal(pooled(pooled_lookup, space, case), expected)


def test_an_input_that_is_a_view_is_read_as_it_is(triton_device, make_case):
    space, case = on(make_case(0, 4, 6, 3, "weighted"), triton_device)
    expected = pooled(pooled_lookup, space, case)
    values, offsets, weights = (
        torch.stack([each, each.neg()], 1)[:, 0]
        for each in (case.values, case.offsets, case.weights)
    )

    found = pooled(
        pooled_lookup, space, case._replace(values=values, offsets=offsets, weights=weights)
    )

    assert torch.equal(found, expected)


@pytest.mark.parametrize("longest", [None, 3])
@pytest.mark.parametrize("bad", [-1, 40])
def test_the_first_id_that_is_no_row_is_recorded(triton_device, make_case, longest, bad):
    case = make_case(5, 4, 6, longest)
    place = len(case.values) - 1 if longest is None else int(case.offsets[18]) - 1
    case.values[[2, 17 if longest is None else place]] = bad
    space, case = on(case, triton_device)

    found = pooled(pooled_lookup, space, case)
    space.errors.report(KeyError)

    with pytest.raises(KeyError) as error:
        space.errors.check()
    assert error.value.args == (2,)
    assert found.isfinite().all()
    space.errors.check()  # and only once


def test_ids_of_features_that_are_not_looked_up_may_be_anything(triton_device, make_case):
    case = make_case(5, 4, 6, None)
    case.values[18:] = -9
    space, case = on(case, triton_device)

    pooled(pooled_lookup, space, case)

    space.errors.check()


@pytest.mark.parametrize("place", [0, 7, 20, 24])
@pytest.mark.parametrize("bound", [-3, 1, 10**9], ids=str)
def test_the_first_invalid_offset_is_recorded_and_nothing_is_read_out_of_bounds(
    triton_device, make_case, place, bound
):
    case = make_case(5, 4, 6, 3)
    case.offsets[place] = bound
    space, case = on(case, triton_device)
    pooled(by_torch.pooled_lookup, space, case)
    expected = int(space.errors.first)
    space.errors.forget()

    found = pooled(pooled_lookup, space, case)

    assert int(space.errors.first) == expected
    assert found.isfinite().all()
    with pytest.raises(MalformedBags, match=f"number {place} does not"):
        space.errors.check()


@pytest.mark.in_ci("cuda", "weights")
@pytest.mark.parametrize("place", [("weights", 899), ("offsets", 290)], ids=str)
def test_errors_far_into_an_input_are_recorded(triton_device, place):
    """Beyond what the first program checks."""
    name, position = place
    space = TorchRowSpace([torch.zeros(5, 4, device=triton_device)])
    weights, offsets = torch.ones(900), torch.arange(0, 903, 3)
    (weights if name == "weights" else offsets)[position] = torch.nan if name == "weights" else 0
    bags = TorchBags(
        torch.zeros(900, dtype=torch.int64, device=triton_device),
        offsets.to(triton_device),
        weights.to(triton_device),
        300,
        is_mean=False,
    )

    pooled_lookup(space, Lookups.one(0, 4), bags, torch.zeros(300, 4, device=triton_device))

    with pytest.raises(ValueError, match=str(position)):
        space.errors.check()


@pytest.mark.parametrize("longest", [None, 3])
def test_tables_without_rows_have_only_invalid_ids(triton_device, longest):
    lookups = Lookups.one(0, 4)
    space = TorchRowSpace([torch.zeros(0, 4, device=triton_device)])
    values = torch.zeros(3, dtype=torch.int64, device=triton_device)
    offsets = None if longest is None else torch.arange(4, device=triton_device)
    found = torch.ones(3, 4, device=triton_device)

    pooled_lookup(space, lookups, TorchBags(values, offsets, None, 3, is_mean=False), found)
    space.errors.report(KeyError)

    with pytest.raises(KeyError):
        space.errors.check()
    assert not found.any()


def test_lookups_in_each_of_many_tables_are_placed_once(triton_device, monkeypatch):
    tables = [torch.randn(2, 4, device=triton_device) for _ in range(100)]
    space = TorchRowSpace(tables)
    lookups = [Lookups.one(number, 4) for number in range(len(tables))]
    bags = TorchBags(torch.tensor([1], device=triton_device), None, None, 1, is_mean=False)
    result = torch.empty(1, 4, device=triton_device)
    for each in lookups:
        pooled_lookup(space, each, bags, result)
        assert layers_of(space, each, 1)
    monkeypatch.setattr(space, "numbers_of", None)  # nothing is uploaded again

    for table, each in zip(tables, lookups, strict=True):
        pooled_lookup(space, each, bags, result)
        assert torch.equal(result[0], table[1])
        assert layers_of(space, each, 1)


def test_placed_lookups_are_dropped_when_kernels_of_all_streams_have_read_them(
    triton_device, monkeypatch
):
    space = TorchRowSpace([torch.randn(2, 4, device=triton_device)])
    bags = TorchBags(torch.tensor([1], device=triton_device), None, None, 1, is_mean=False)
    result, waits = torch.empty(1, 4, device=triton_device), []
    monkeypatch.setattr(space, "numbers_of", partial(torch.tensor, device=triton_device))
    monkeypatch.setattr(space, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: waits.append(len(space.placed)))

    for _ in range(100):
        pooled_lookup(space, Lookups.one(0, 4), bags, result)

    assert waits == [66]
