import pytest
import torch
from torch import nn

from recsys.embeddings.kernels.torch.row_space import TorchRowSpace, number_rows


def test_tables_from_anywhere_are_brought_into_one_allocation_and_stay_what_they_are():
    tables = [nn.Parameter(torch.randn(size, 3)) for size in (4, 0, 2)]
    before = [table.detach().clone() for table in tables]

    space = TorchRowSpace(tables)

    assert len({table.untyped_storage().data_ptr() for table in tables if len(table)}) == 1
    assert all(torch.equal(*pair) for pair in zip(tables, before, strict=True))
    assert torch.equal(space.rows, torch.cat(before))
    space.rows[4] = 7
    assert tables[2][0].tolist() == [7, 7, 7]


def test_tables_that_lie_together_are_left_alone():
    rows = torch.randn(10, 3)
    tables = [rows[6:8], rows[1:4]]

    space = TorchRowSpace(tables)

    assert [table.data_ptr() for table in tables] == [rows[6].data_ptr(), rows[1].data_ptr()]
    assert space.first_rows == [5, 0]
    assert torch.equal(space.rows, rows[1:8])
    assert space.holds(tables)


def test_rows_written_by_a_kernel_do_not_look_like_an_operation_on_a_table():
    weight = nn.Parameter(torch.zeros(4, 3))
    space = TorchRowSpace([weight])
    version = weight._version

    space.rows.index_copy_(0, torch.tensor([1]), torch.ones(1, 3))

    assert weight._version == version
    assert weight[1].tolist() == [1, 1, 1]


def test_tables_that_share_memory_are_not_torn_apart():
    rows, other = torch.randn(10, 3), torch.randn(2, 3)

    with pytest.raises(ValueError, match="must not overlap in memory"):
        TorchRowSpace([rows[:4], rows[2:6], other])


def test_numbers_that_are_kept_have_arrived_before_another_stream_may_read_them(monkeypatch):
    are_late = []

    class OnHost:
        def pin_memory(self):
            return self

        def to(self, device, *, non_blocking=False):
            are_late.append((device.type, non_blocking))
            return self

    space = number_rows([3, 4], 2, torch.zeros(1, 2))
    space.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "from_numpy", lambda _: OnHost())

    space.numbers_of([0, 3])

    assert are_late == [("cuda", False)]
