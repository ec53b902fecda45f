"""Rows and state of ranks: where they begin, and that they go through checkpoints."""

import pytest
import torch
from ranks_shared import ROWS, first_rows

from tests.distributed.test_exactness import whole

torchrec = pytest.importorskip("torchrec")


def require_same(found, expected):
    assert found.keys() == expected.keys()
    for name, pieces in expected.items():
        for (_, values), (_, others) in zip(pieces, found[name], strict=True):
            assert torch.equal(values, others), name


@pytest.mark.parametrize("tiers", [None, {"budget": 12_000}])
def test_rows_of_a_module_on_the_cpu_are_kept(ranks, tiers):
    found = ranks("begins", tiers=tiers)

    for name in ROWS:
        assert torch.equal(whole(found, "rows", name), first_rows(name))


def test_rows_of_a_module_on_the_meta_device_are_drawn(ranks):
    found = ranks("begins", device="meta")

    for name, num_rows in ROWS.items():
        rows = whole(found, "rows", name)
        assert rows.shape == first_rows(name).shape
        assert 0 < float(rows.abs().max()) <= num_rows**-0.5


def test_rows_of_a_plain_model_are_loaded(ranks):
    found = ranks("loads_plain_rows")

    for name in ROWS:
        assert torch.equal(whole(found, "rows", name), first_rows(name))


@pytest.mark.parametrize("exchange", ["pooled", "rows"])
@pytest.mark.parametrize("output_dtensor", [False, True], ids=["sharded", "dtensor"])
def test_a_resumed_run_equals_the_whole_one(ranks, tmp_path, output_dtensor, exchange):
    options = {"output_dtensor": output_dtensor, "exchange": exchange}
    found = ranks("resumes", folder=str(tmp_path / "ck"), **options)

    for rank in found:
        for way in ("loaded in place", "load_state_dict"):
            assert rank[way]["num_tiers"]
            for part in ("rows", "state"):
                require_same(rank[way][part], rank["whole"][part])


def test_a_learning_rate_is_set_as_in_torchrec(ranks):
    found = ranks("schedules")

    for first, frozen, after in found:
        require_same(frozen["rows"], first["rows"])
        for name, values in first["dense"].items():
            assert torch.equal(values, frozen["dense"][name])
            assert not torch.equal(values, after["dense"][name])
        assert all(
            len(rows) < 2 or not torch.equal(rows, others)
            for name, pieces in first["rows"].items()
            for (_, rows), (_, others) in zip(pieces, after["rows"][name], strict=True)
        )
