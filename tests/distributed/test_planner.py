"""What TorchRec's planner counts for tables in two tiers."""

import pytest
from ranks_shared import DIM, ROWS

torchrec = pytest.importorskip("torchrec")


def test_slots_need_memory_and_rows_in_files_do_not(ranks):
    found, _ = ranks("plans")

    for (name, how), plain in found["None"].items():
        host, file = found["host"][name, how], found["file"][name, how]
        num_rows, dim = ROWS[name], DIM[name]
        slot_bytes, num_features, num_pinned = found["tables"][name]
        # The row map, the pinned rows, and 20 slots for each feature that has as many other rows.
        num_slots = num_pinned + min(20 * num_features, num_rows - num_pinned)
        fast = 4 * num_rows + num_slots * slot_bytes
        slots = sum(host) - sum(plain)
        assert fast <= slots <= fast + 2
        assert sum(host) - sum(file) == 2 * 4 * dim * num_rows  # rows and Adagrad's state
    assert found["file plan"] == ["t0", "t1", "t2", "t3", "t4"]
