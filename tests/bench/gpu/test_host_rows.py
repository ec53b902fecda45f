import dataclasses

import pytest
import torch

from recsys.bench.gpu import host_rows, run
from recsys.bench.gpu.checks import Check
from recsys.bench.gpu.host_rows import bytes_in_huge_pages, measure_host_rows
from recsys.bench.gpu.record import Record
from recsys.bench.gpu.run import bench_gpu
from recsys.embeddings.kernels import choice
from recsys.embeddings.kernels.torch.errors import errors_on

ROWS = ["in order", "random in 1 GiB", "random", "random, sorted"]


@pytest.fixture
def copies(monkeypatch):
    """Kernels that copy nothing, and what they were called with: programs, rows, if written."""
    monkeypatch.setattr(choice, "_BY_TRITON", {"cuda", "cpu"})
    found = []

    def fetch(host, rows, slots, in_slots, *, most_programs):
        found.append((most_programs, rows, False))

    def write(host, rows, slots, in_slots, *, most_programs):
        found.append((most_programs, rows, True))

    kernels = choice.host_copies_on(torch.device("cpu"))
    return kernels._replace(fetch_rows=fetch, write_rows=write), found


def test_distinct_rows_are_copied_from_where_the_name_says(copies, monkeypatch):
    monkeypatch.setattr(host_rows, "_NUM_ROWS", 50)
    monkeypatch.setattr(host_rows, "_PART_BYTES", 400 * 4 * 4)
    kernels, lists = copies

    measured = measure_host_rows(torch.zeros(1000, 4), torch.device("cpu"), kernels)

    assert [(each.rows, each.num_programs) for each in measured] == [
        (name, most) for name in ROWS for most in (2, 4, 16, 64)
    ]
    assert all(each.to_device > 0 and each.to_host > 0 for each in measured)
    assert all(each.products_beside is None for each in measured)
    assert all(len(rows) == 50 for _, rows, _ in lists)
    fetched, written = (
        [rows for _, rows, is_written in lists if is_written == which] for which in (False, True)
    )
    moved = list(map(torch.cat, zip(fetched, written, strict=True)))
    assert all(len(set(rows.tolist())) == 100 for rows in moved)  # none is written and fetched
    in_order, in_part, anywhere, in_turn = moved[:: len(moved) // 4]
    assert sorted(in_order.tolist()) == list(range(100))
    assert 300 < in_part.max() < 400
    assert 900 < anywhere.max() < 1000
    assert fetched[-1].tolist() == fetched[-1].sort().values.tolist() != fetched[-33].tolist()
    assert sorted(anywhere.tolist()) == sorted(in_turn.tolist())
    quarter = len(lists) // 4
    assert [most for most, *_ in lists] == sorted(most for most, *_ in lists[:quarter]) * 4


def test_rows_are_copied_by_the_kernel(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(choice, "_BY_TRITON", {"cuda", "cpu"})
    monkeypatch.setattr(host_rows, "_NUMS_OF_PROGRAMS", (2,))
    monkeypatch.setattr(host_rows, "_rows_of", lambda *_: {"in order": torch.arange(6)})
    table = torch.arange(12.0).reshape(6, 2)
    read = table[::2].clone()

    measure_host_rows(table, torch.device("cpu"), choice.host_copies_on(torch.device("cpu")))

    assert torch.equal(table[::2], read)
    assert torch.equal(table[1::2], read)  # each was written from the slot of the row before it


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("has_kernel", [False, True])
def test_the_record_has_them_or_the_reason(quick_plan, monkeypatch, has_kernel):
    monkeypatch.setattr(run, "run_checks", lambda *_, **__: iter([Check("stub", "passed")]))
    monkeypatch.setattr(run, "cases_of", lambda _: [(8, [])])
    if has_kernel:
        monkeypatch.setattr(choice, "_BY_TRITON", {"cuda", "cpu"})
        monkeypatch.setattr(run, "measure_host_rows", refuse)
    record = Record(None, "cpu")

    bench_gpu(dataclasses.replace(quick_plan, has_kernels=True), record)

    expected = "OSError: no memory" if has_kernel else "no kernel of 'cpu' copies rows of the host"
    assert record.details["host_rows"] == {"reason": expected}
    errors_on(torch.device("cpu")).forget()


def refuse(*_):
    raise OSError("no memory")


def test_bytes_in_huge_pages_are_those_that_the_system_counts(monkeypatch, tmp_path):
    memory = tmp_path / "smaps_rollup"
    monkeypatch.setattr(host_rows, "_MEMORY", memory)
    assert bytes_in_huge_pages() is None
    memory.write_text("Rss:  9000 kB\nAnonHugePages:      6144 kB\nSwap: 0 kB\n")
    assert bytes_in_huge_pages() == 6144 * 1024
