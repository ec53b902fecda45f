"""What TorchRec's planner counts for tables in two tiers."""

import pytest

torchrec = pytest.importorskip("torchrec")


def test_slots_need_memory_and_rows_in_files_do_not(ranks):
    found, _ = ranks("plans")

    for (name, how), plain in found["None"].items():
        host, file = found["host"][name, how], found["file"][name, how]
        num_rows, dim, fast = found["tables"][name]
        slots = sum(host) - sum(plain)
        assert fast <= slots <= fast + 2
        assert sum(host) - sum(file) == 2 * 4 * dim * num_rows  # rows and Adagrad's state
    assert found["file plan"] == ["t0", "t1", "t2", "t3", "t4"]
