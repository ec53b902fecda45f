import operator
from collections import defaultdict

import numpy as np
import pytest
import torch

from recsys.bench import lookup
from recsys.bench.lookup import bench_lookup, step_bytes
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.errors import ConfigError, MissingDependency


class InThisProcess:
    """Stands in for a worker: the same object, the same calls, no process."""

    made = ()

    def __init__(self, provider, case, make, *arguments):
        self.provider, self.case = provider, case
        self.object = make(*arguments)
        self.calls = []
        type(self).made = (*type(self).made, self)

    def wait(self):
        pass

    def call(self, method, *arguments):
        self.calls.append(method)
        return getattr(self.object, method)(*arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.case = "left"


@pytest.fixture
def in_this_process(monkeypatch):
    """Workers in this process, with one thread, two steps per turn and a short stream."""
    pytest.importorskip("fbgemm_gpu")
    monkeypatch.setattr(lookup, "set_num_threads", lambda _: torch.set_num_threads(1))
    monkeypatch.setattr(lookup, "steps_of_turn", lambda _: 2)
    monkeypatch.setattr(InThisProcess, "made", ())
    monkeypatch.setattr(lookup, "Worker", InThisProcess)
    for name in ("settle", "end_turn"):
        monkeypatch.setattr(lookup, name, lambda: None)
    monkeypatch.setattr(lookup, "_STREAM_FLOATS", 1 << 10)
    # A worker may freeze its garbage; the process of the tests must not.
    monkeypatch.setattr(lookup, "freeze_garbage", lambda: None)
    return InThisProcess


def cells(rows):
    found = {(row.case, row.provider, row.metric): row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.outside_ci
@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
def test_providers_in_processes_of_their_own_are_measured():
    pytest.importorskip("fbgemm_gpu")

    rows = cells(list(bench_lookup([4], [4], ["sgd"], num_rounds=2, table_sizes=[50, 3])))

    times = [key[1] for key in rows if key[2] == "time"]
    assert times == ["recsys", "kernels", "floor", "fbgemm", "torch"]
    assert all(row.median > 0 for row in rows.values())


OURS = ("recsys", "kernels", "floor")


def speeds_over(others):
    return {(ours, f"speed_over_{other}") for ours in OURS for other in others}


def test_every_case_has_its_rows(in_this_process):
    rows = list(
        bench_lookup(
            [4, 8],
            [4, 20],
            ["sgd", "rowwise_adagrad", "adagrad"],
            num_rounds=2,
            table_sizes=[50, 3],
        )
    )

    expected = set()
    for optimizer in ("sgd", "rowwise_adagrad", "adagrad"):
        others = ["fbgemm"] if optimizer == "rowwise_adagrad" else ["fbgemm", "torch"]
        for of_tables in (f"D={dim},optimizer={optimizer}" for dim in (4, 20)):
            for case in (f"B={size},{of_tables}" for size in (4, 8)):
                expected |= {(case, name, "time", "ms") for name in [*OURS, *others]}
                expected |= {(case, *each, "ratio") for each in speeds_over(others)}
                expected |= {(case, "recsys", "bandwidth_share", "ratio")}
                expected |= {(case, "stream", "bandwidth", "GB/s")}
            expected |= {(of_tables, n, "peak_memory", "bytes") for n in ["recsys", *others]}
    expected |= {
        (f"B={size}", *each, "ratio")
        for size in (4, 8)
        for each in speeds_over(["fbgemm", "torch"])
    }
    found = [(row.case, row.provider, row.metric, row.unit) for row in rows]
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert {row.bench for row in rows} == {"lookup"}


def test_ratios_are_those_of_the_medians_and_the_summary_their_median(in_this_process):
    rows = list(bench_lookup([4], [4, 8, 12], ["adagrad"], num_rounds=6, table_sizes=[50, 3]))

    found = cells(rows)
    for other in ("fbgemm", "torch"):
        speeds = []
        for case in (f"B=4,D={dim},optimizer=adagrad" for dim in (4, 8, 12)):
            ours, theirs = (found[case, name, "time"].median for name in ("recsys", other))
            speed = found[case, "recsys", f"speed_over_{other}"]
            assert speed.median == pytest.approx(theirs / ours)
            assert speed.num_runs == 6
            assert speed.low <= speed.median <= speed.high
            speeds.append(speed.median)
        summary = found["B=4", "recsys", f"speed_over_{other}"]
        assert summary.median == sorted(speeds)[1]
        assert summary.num_runs == 3


def test_the_bytes_of_a_step_are_these():
    # Two tables, three samples: rows 7, 7, 1 and 0, 2, 4 -> 6 lookups of 5 distinct rows.
    num_lookups, num_distinct, dim = 6, 5, 4
    row = 4 * dim
    rows_read = pooled_written = gradient_read = num_lookups * row
    moved_rows = 2 * num_distinct * row

    no_state = rows_read + pooled_written + gradient_read + moved_rows

    assert step_bytes(num_lookups, num_distinct, dim, "sgd") == no_state
    assert (
        step_bytes(num_lookups, num_distinct, dim, "rowwise_adagrad")
        == no_state + 2 * num_distinct * 4
    )
    assert step_bytes(num_lookups, num_distinct, dim, "adagrad") == no_state + moved_rows


def test_the_bandwidth_share_is_of_the_bytes_of_what_was_looked_up(in_this_process, monkeypatch):
    seconds, bandwidth, num_rounds = 0.5, 1e6, 3
    monkeypatch.setattr(
        lookup,
        "_measure",
        lambda workers, *_: (
            {name: [seconds] * num_rounds for name in [*workers, "kernels", "floor"]}
            | {"stream": [bandwidth] * 3}
        ),
    )

    rows = cells(list(bench_lookup([600], [4], ["sgd"], num_rounds=3, table_sizes=[50, 3])))

    # A turn is two untimed and two timed steps; three turns warm up.
    turns = np.arange(6 * 4 * 600).reshape(6, 2, 2, 600)
    source = SyntheticCriteo(num_samples=turns.size, table_sizes=[50, 3])
    shares = []
    for _, timed in turns[3:]:
        num_distinct = []
        for numbers in timed:
            ids = source.read(numbers).sparse_features.values().view(2, -1)
            num_distinct.append(sum(len(set(of_feature.tolist())) for of_feature in ids))
        num_bytes = step_bytes(2 * 600, np.mean(num_distinct), 4, "sgd")
        shares.append(num_bytes / seconds / bandwidth)
    row = rows["B=600,D=4,optimizer=sgd", "recsys", "bandwidth_share"]
    assert row.median == pytest.approx(np.median(shares))
    assert rows["B=600,D=4,optimizer=sgd", "stream", "bandwidth"].median == bandwidth / 1e9


def test_all_providers_look_up_the_same_ids_each_mini_batch_once(in_this_process, monkeypatch):
    seen = defaultdict(list)

    def make_steps(self, batches):
        seen[type(self._module).__name__] += [batch.values().clone() for batch in batches]

    monkeypatch.setattr(lookup._Provider, "_make_steps", make_steps)
    num_batches = 5 * 2 * 2  # rounds with those that warm up; untimed and timed; two steps
    source = SyntheticCriteo(num_samples=num_batches * 600, table_sizes=[1000, 3])

    list(bench_lookup([600], [4], ["sgd"], num_rounds=2, table_sizes=[1000, 3]))

    expected = [
        source.read(np.arange(600 * number, 600 * (number + 1))).sparse_features.values()
        for number in range(num_batches)
    ]
    assert len(seen) == 3
    for values in seen.values():
        assert len(values) == len(expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(values, expected, strict=True))


def test_no_provider_makes_the_offsets_of_its_mini_batches_in_its_steps(
    in_this_process, monkeypatch
):
    made = []

    def make_steps(self, batches):
        made.extend(batch._offsets is not None for batch in batches)

    monkeypatch.setattr(lookup._Provider, "_make_steps", make_steps)

    list(bench_lookup([4], [4], ["sgd"], num_rounds=1, table_sizes=[5]))

    assert len(made) == 3 * 4 * 2 * 2  # providers, turns, untimed and timed, two steps
    assert all(made)


def test_the_bare_kernels_move_the_rows_of_the_module_by_its_formula(in_this_process, optimizer):
    """Beside a second provider that makes the same steps by module and optimizer."""
    ids = np.random.default_rng(0).integers(0, 5, (3, 2, 3, 2, 8))
    both = [lookup._Provider("recsys", [50, 5], 4, optimizer) for _ in range(2)]
    for each in both:
        each.prepare(ids)
        assert each._bare_kernels

    one, other = both
    other._gradient = one._gradient
    one.turn_of_kernels()
    next(other._turns)  # of kernels, the first turn is that of a third of the run later
    other.turn()

    for found, expected in zip(
        one._module.table_weights(), other._module.table_weights(), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dim", [16, 20])
def test_the_floor_touches_the_rows_that_are_moved_and_no_others(in_this_process, optimizer, dim):
    rng = np.random.default_rng(0)
    rows = [rng.permutation(size)[:8] for _ in range(3 * 2 * 2) for size in (50, 9)]
    both = [lookup._Provider("recsys", [50, 9], dim, optimizer) for _ in range(2)]
    for each in both:
        each.prepare(np.stack(rows).reshape(3, 2, 2, 2, 8))
        assert each._bare_kernels

    one, other = both
    other._gradient = one._gradient
    one.turn_of_floor()
    for _ in range(2):
        next(other._turns)
    before = [weight.detach().clone() for weight in other._module.table_weights()]
    other.turn()

    for found, expected, then in zip(
        one._module.table_weights(), other._module.table_weights(), before, strict=True
    ):
        assert torch.equal((found != then).any(1), (expected != then).any(1))
        if optimizer == "sgd":
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)
        states, moved = (
            each._optimizer.state[table] for each, table in ((one, found), (other, expected))
        )
        for name in moved:
            assert torch.equal(states[name] != 0, moved[name] != 0)


@pytest.fixture(params=["sgd", "rowwise_adagrad", "adagrad"])
def optimizer(request):
    return request.param


def test_tables_of_large_dims_are_capped_and_ids_go_modulo(in_this_process, monkeypatch):
    monkeypatch.setattr(lookup, "_MAX_ROWS", 7)
    given = {}

    class Watched(in_this_process):
        def call(self, method, *arguments):
            if method == "prepare":
                given[self.case] = arguments[0]
            return super().call(method, *arguments)

    monkeypatch.setattr(lookup, "Worker", Watched)

    list(bench_lookup([64], [16, 20], ["sgd"], num_rounds=1, table_sizes=[1000, 5]))

    whole, capped = (given[f"B=64,D={dim},optimizer=sgd"] for dim in (16, 20))
    assert whole[..., 0, :].max() > 7
    assert np.array_equal(capped, np.stack([whole[..., 0, :] % 7, whole[..., 1, :] % 5], axis=-2))
    sizes = {
        worker.case: [len(weight) for weight in worker.object._module.table_weights()]
        for worker in in_this_process.made
        if worker.provider == "recsys"
    }
    assert set(map(tuple, sizes.values())) <= {(1000, 5), (7, 5)}


def test_turns_are_taken_in_an_order_drawn_anew(in_this_process, monkeypatch):
    turns = []

    class Watched(in_this_process):
        def call(self, method, *arguments):
            if method == "turn":
                turns.append(self.provider)
            return super().call(method, *arguments)

    monkeypatch.setattr(lookup, "Worker", Watched)

    list(bench_lookup([2], [4], ["sgd"], num_rounds=20, table_sizes=[10, 3]))

    rounds = [tuple(turns[begin : begin + 4]) for begin in range(0, len(turns), 4)]
    assert len(rounds) == 3 + 20
    assert {frozenset(of_round) for of_round in rounds} == {
        frozenset({"recsys", "fbgemm", "torch", "stream"})
    }
    assert len(set(rounds)) > 10


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        (name, optimizer)
        for optimizer, others in lookup._OTHERS.items()
        for name in ("recsys", *others)
    ],
)
def test_a_turn_moves_the_rows_looked_up(in_this_process, name, optimizer):
    provider = lookup._Provider(name, [6, 2], 4, optimizer)
    before = [weight.detach().clone() for weight in provider._module.table_weights()]
    ids = torch.tensor([[[1, 1, 4], [0, 0, 0]]])  # one step of three samples
    provider.prepare(torch.stack([ids, ids])[None].numpy())

    assert provider.turn() > 0

    after = provider._module.table_weights()
    moved = [
        (old != new).any(dim=1).nonzero().squeeze(1).tolist()
        for old, new in zip(before, after, strict=True)
    ]
    assert moved == [[1, 4], [0]]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
def test_a_provider_that_cannot_have_such_tables_says_so_with_its_case():
    with pytest.raises((ConfigError, MissingDependency), match=r"^provider 'fbgemm', case D=6,"):
        list(bench_lookup([4], [6], ["rowwise_adagrad"], num_rounds=1, table_sizes=[5]))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
def test_a_worker_that_fails_ends_the_benchmark_with_its_place_and_traceback(monkeypatch):
    monkeypatch.setattr(lookup, "_Provider", operator.index)  # takes no tables

    with pytest.raises(ChildProcessError, match=r"^provider 'recsys', case D=4,") as caught:
        list(bench_lookup([4], [4], ["rowwise_adagrad"], num_rounds=1, table_sizes=[5]))

    assert "Traceback" in str(caught.value)
    assert "TypeError" in str(caught.value)
