import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.triton.transfers import HostRows, fetch_rows, move_rows, write_rows

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
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
    """Some rows in any order, each with a slot of its own, and places of no row between them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(sum(sizes), generator=generator)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[: len(rows)]
    rows = rows[: len(slots)]
    return torch.where(torch.rand(len(rows), generator=generator) < 0.3, -1, rows), slots[
        : len(rows)
    ]


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
    """In windows without rows, with some at the begin, and with one at the end."""
    tables = host_tables([300, 200], 100, torch.float32, triton_device)
    places = torch.tensor([*range(150), 390, 511, 512, 640, 901])
    rows, slots = torch.full((905,), -1), torch.zeros(905, dtype=torch.int64)
    rows[places] = torch.randperm(500)[: len(places)]
    slots[places] = torch.randperm(400)[: len(places)]
    found = torch.zeros(400, 100, device=triton_device)
    expected = torch.zeros(400, 100)
    expected[slots[places]] = torch.cat(tables)[rows[places]]

    host = HostRows(tables, triton_device)
    fetch_rows(host, rows.to(triton_device), slots.to(triton_device), found, most_programs=2)

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


@given(**cases)
def test_one_launch_writes_rows_back_and_puts_others_into_their_slots(
    triton_device, sizes, dim, dtype, seed
):
    tables = host_tables(sizes, dim, dtype, triton_device)
    rows, slots = moves(sizes, seed)
    others = torch.where(torch.rand(len(rows)) < 0.3, -1, rows)
    is_fetched = torch.arange(len(rows)) % 2 == 0  # no row is both written and fetched
    fetched = torch.where(is_fetched, others, -1)
    written = torch.where(is_fetched, -1, rows)
    fetched = fetched.roll(1)  # a slot is written back and gets another row
    of_slots = torch.randn(NUM_SLOTS, dim).to(dtype)
    expected_rows, expected = torch.cat(tables), of_slots.clone()
    expected_rows[written[written >= 0]] = of_slots[slots[written >= 0]]
    expected[slots[fetched >= 0]] = torch.cat(tables)[fetched[fetched >= 0]]

    host, found = HostRows(tables, triton_device), of_slots.to(triton_device)
    lists = [each.to(triton_device) for each in (written, slots, fetched, slots)]
    move_rows(host, *lists, found)
    if triton_device.type == "cuda":
        torch.cuda.synchronize()

    assert torch.equal(torch.cat(tables), expected_rows)
    assert torch.equal(found.cpu(), expected)


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
