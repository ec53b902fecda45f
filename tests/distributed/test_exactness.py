"""Ranks compute the same numbers under every budget, and the same as one process."""

import pytest
import torch
from ranks_one_process import OneProcess, one_process
from ranks_shared import KINDS, ROWS, WORLDS

torchrec = pytest.importorskip("torchrec")

# Each kind of plan with each exchange of row-wise tables.
PLANS = [(kind, "pooled") for kind in KINDS] + [("row_wise", "rows"), ("mixed", "rows")]
EXCHANGES = ("pooled", "rows")


def whole(ranks, part, name):
    """A tensor from the parts of all ranks."""
    pieces = sorted(
        (piece for rank in ranks for piece in rank[part].get(name, [])), key=lambda each: each[0]
    )
    return torch.cat([rows for _, rows in pieces])


def losses_of(ranks):
    """The losses of each step, rank by rank."""
    return [list(each) for each in zip(*(rank["losses"] for rank in ranks), strict=True)]


def require_equal(ranks, expected_losses, expected, near=0.0):
    """Compare losses of every rank and step, rows, state and dense weights with one process."""

    def same(found, wanted):
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=near * max(1, float(wanted.abs().max()))
        )

    same(torch.tensor(losses_of(ranks)), torch.tensor(expected_losses))
    for name in ROWS:
        same(whole(ranks, "rows", name), expected.rows()[name])
    for name, values in expected.state().items():
        same(whole(ranks, "state", name), values)
    for rank in ranks:
        for name, values in expected.over.state_dict().items():
            same(rank["dense"][name], values)


def require_same(run, other):
    """Two runs of one rank, to the last bit."""
    assert run.get("losses") == other.get("losses")
    for part in ("rows", "state"):
        assert run[part].keys() == other[part].keys()
        for name, pieces in run[part].items():
            for (first, values), (other_first, others) in zip(
                pieces, other[part][name], strict=True
            ):
                assert first == other_first
                assert torch.equal(values, others), name
    for name, values in run["dense"].items():
        assert torch.equal(values, other["dense"][name]), name


SOME = [  # each kind of plan, each exchange and each optimizer
    ("sgd", "table_wise", "pooled"),
    ("adagrad", "row_wise", "pooled"),
    ("rowwise_adagrad", "mixed", "pooled"),
    ("sgd", "mixed", "rows"),
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("optimizer", "kind", "exchange"), SOME)
def test_every_budget_and_tier_computes_what_one_process_computes(
    ranks, optimizer, kind, exchange, world, tmp_path
):
    options = {"kind": kind, "optimizer": optimizer, "exchange": exchange}
    found = ranks("budgets", world, folder=str(tmp_path), **options)

    runs = list(found[0])
    assert len(runs) == 7
    for run in runs[1:]:
        for rank in found:
            require_same(rank["resident"], rank[run])
        has_tiers = any(rank[run]["num_tiers"] for rank in found)
        assert has_tiers == (run.endswith("file") or "everything" not in run), run
    expected = one_process(kind, optimizer, world, exchange=exchange)
    bounds = [32 * rank // world for rank in range(world + 1)]
    losses = expected.train(bounds)
    # More than two ranks add their dense gradients in another order.
    near = 0.0 if world == 2 else 1e-6
    require_equal([rank["resident"] for rank in found], losses, expected, near)


def test_a_rank_without_tables_takes_part(ranks):
    found = ranks("trains", owners=[0, 0, 0, 0, 0], optimizer="adagrad", tiers={"budget": 20_000})

    expected = OneProcess("table_wise", "adagrad")
    require_equal(found, expected.train([0, 16, 32]), expected)
    assert not any(found[1]["rows"].values())


@pytest.mark.parametrize("bounds", [[0, 0, 16], [0, 16, 16], [0, 5, 16]])
@pytest.mark.parametrize(("kind", "exchange"), PLANS)
def test_ranks_may_have_fewer_samples_or_none(ranks, kind, exchange, bounds):
    found = ranks("trains", bounds=bounds, kind=kind, optimizer="adagrad", exchange=exchange)

    expected = one_process(kind, "adagrad", exchange=exchange)
    require_equal(found, expected.train(bounds), expected)


@pytest.mark.parametrize(("kind", "exchange"), PLANS)
def test_bags_may_have_weights(ranks, kind, exchange):
    options = {"kind": kind, "exchange": exchange, "is_weighted": True}

    found = ranks("trains", tiers={"budget": 14_000}, optimizer="rowwise_adagrad", **options)

    expected = one_process(kind, "rowwise_adagrad", exchange=exchange, is_weighted=True)
    require_equal(found, expected.train([0, 16, 32]), expected)


def test_tables_of_a_rank_may_be_pooled_by_their_mean(ranks):
    found = ranks("trains", is_mean=True, tiers={"budget": 16_000})

    expected = OneProcess("table_wise", "sgd", pooling="mean")
    require_equal(found, expected.train([0, 16, 32]), expected)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_each_rank_pins_its_own_rows_of_a_plan(ranks, exchange):
    found = ranks("pins", exchange=exchange)

    expected = one_process("mixed", "adagrad", exchange=exchange)
    require_equal(found, expected.train([0, 16, 32]), expected)
    assert all(rank["num_pinned"] > 0 for rank in found)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_pipelines_compute_what_a_loop_computes(ranks, exchange):
    found = ranks("pipelines", exchange=exchange)

    for rank in found:
        assert rank["ours"].pop("num_ahead") > 0
        assert rank["theirs"].pop("num_ahead") == 0
        for name in ("theirs", "ours"):
            require_same(rank["loop"], rank[name])


@pytest.mark.parametrize(("optimizer", "kind", "exchange"), SOME)
def test_outputs_and_a_step_are_near_those_of_fbgemm(ranks, kind, exchange, optimizer):
    found = ranks("beside_fbgemm", kind=kind, optimizer=optimizer, exchange=exchange)

    for rank in found:
        ours, theirs = rank["ours"], rank["theirs"]
        assert ours["keys"] == theirs["keys"]
        torch.testing.assert_close(ours["outputs"], theirs["outputs"], rtol=0, atol=1e-6)
        require_same(ours["before"], theirs["before"])
        for part in ("rows", "state"):
            for name, pieces in theirs["after"][part].items():
                for (_, expected), (_, values) in zip(
                    pieces, ours["after"][part][name], strict=True
                ):
                    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-7)
