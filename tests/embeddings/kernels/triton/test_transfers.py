import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.triton.transfers import HostRows, fetch_rows, write_rows

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
NUM_SLOTS = 40


def host_tables(sizes, dim, dtype, device):
    generator = torch.Generator().manual_seed(dim)
    tables = [torch.randn(size, dim, generator=generator).to(dtype) for size in sizes]
    return [table.pin_memory() for table in tables] if device.type == "cuda" else tables


cases = {
    "sizes": st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    "dim": st.sampled_from([1, 3, 4, 16]),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 99),
}


def moves(sizes, seed):
    """Some rows in any order, each with a slot of its own, and then places of no row."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(sum(sizes), generator=generator)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[: len(rows)]
    rows = rows[: len(slots)].clone()
    rows[int(torch.randint(len(rows) + 1, (), generator=generator)) :] = -1
    return rows, slots


@given(**cases)
def test_rows_of_a_list_are_copied_into_their_slots(triton_device, sizes, dim, dtype, seed):
    tables = host_tables(sizes, dim, dtype, triton_device)
    rows, slots = moves(sizes, seed)
    found = torch.full((NUM_SLOTS, dim), 7, dtype=dtype, device=triton_device)
    expected = found.clone().cpu()
    expected[slots[rows >= 0]] = torch.cat(tables)[rows[rows >= 0]]

    host = HostRows(tables, triton_device)
    fetch_rows(host, rows.to(triton_device), slots.to(triton_device), found)

    assert torch.equal(found.cpu(), expected)


def test_few_programs_copy_the_rows_of_long_lists(triton_device):
    """In full windows, in one that is not full, and not in those after it."""
    tables = host_tables([300, 400], 100, torch.float32, triton_device)
    rows, slots = torch.full((905,), -1), torch.zeros(905, dtype=torch.int64)
    rows[:601], slots[:601] = torch.randperm(700)[:601], torch.randperm(650)[:601]
    rows[700] = 3  # after places of no row for more than a window: no program looks there
    found = torch.zeros(650, 100, device=triton_device)
    expected = torch.zeros(650, 100)
    expected[slots[:601]] = torch.cat(tables)[rows[:601]]

    host = HostRows(tables, triton_device)
    lists = rows.to(triton_device), slots.to(triton_device)
    fetch_rows(host, *lists, found, most_programs=2)

    assert torch.equal(found.cpu(), expected)


@given(**cases)
def test_rows_of_a_list_are_written_to_the_tables(triton_device, sizes, dim, dtype, seed):
    tables = host_tables(sizes, dim, dtype, triton_device)
    rows, slots = moves(sizes, seed)
    of_slots = torch.randn(NUM_SLOTS, dim).to(dtype)
    expected = torch.cat(tables)
    expected[rows[rows >= 0]] = of_slots[slots[rows >= 0]]

    host = HostRows(tables, triton_device)
    write_rows(host, rows.to(triton_device), slots.to(triton_device), of_slots.to(triton_device))
    if triton_device.type == "cuda":
        torch.cuda.synchronize()

    assert torch.equal(torch.cat(tables), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_of_one_number_per_row_is_copied(triton_device, dtype):
    [state] = host_tables([9], 1, dtype, triton_device)
    found = torch.zeros(9, 1, dtype=dtype, device=triton_device)
    every = torch.arange(9, device=triton_device)

    fetch_rows(HostRows([state.view(9)], triton_device), every, every, found)

    assert torch.equal(found.cpu(), state)


def test_a_table_given_without_rows_is_read_as_zeros_and_not_written(triton_device):
    [first, last] = host_tables([2, 3], 4, torch.float32, triton_device)
    before = [first.clone(), last.clone()]
    host = HostRows([first, torch.empty(0, 4), last], triton_device, sizes=[2, 5, 3])
    every = torch.arange(10, device=triton_device)
    found = torch.full((10, 4), 7.0, device=triton_device)

    fetch_rows(host, every, every, found)
    write_rows(host, every, every, found)
    if triton_device.type == "cuda":
        torch.cuda.synchronize()

    assert torch.equal(found.cpu(), torch.cat([first, torch.zeros(5, 4), last]))
    assert all(map(torch.equal, before, [first, last]))
