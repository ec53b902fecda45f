import gc
import json
from functools import partial

import numpy as np
import pytest

from recsys.bench.parts import harness
from recsys.bench.parts.harness import (
    median_of_ratios,
    ratio,
    rows_by_provider,
    summarize,
    take_turns,
    timed,
    write_rows,
)


def test_rows_are_medians_with_their_spread_and_carry_the_environment(tmp_path):
    values = np.arange(1.0, 12.0).tolist()
    row = summarize(
        bench="b", case="B=1", provider="recsys", metric="time", unit="ms", values=values
    )

    write_rows(tmp_path / "rows.json", [row])

    record = json.loads((tmp_path / "rows.json").read_text())
    assert (row.p20, row.median, row.p80, row.num_runs) == (3.0, 6.0, 9.0, 11)
    assert set(record["rows"][0]) == {
        "bench",
        "case",
        "provider",
        "metric",
        "unit",
        "median",
        "p20",
        "p80",
        "num_runs",
        "low",
        "high",
    }
    assert "torch" in record["environment"]


def test_every_provider_is_called_once_a_round_in_changing_order_and_warm_up_is_not_counted():
    calls = []

    def call(name):
        calls.append(name)
        return len(calls)

    results = take_turns({name: partial(call, name) for name in "abc"}, num_rounds=40)

    rounds = ["".join(calls[begin : begin + 3]) for begin in range(9, len(calls), 3)]
    assert len(calls) == 3 * (3 + 40)
    assert {"".join(sorted(turns)) for turns in rounds} == {"abc"}
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    for name, order in results.items():
        assert order == [number + 1 for number in range(9, len(calls)) if calls[number] == name]


def test_a_ratio_is_that_of_the_medians_with_an_interval_around_it():
    ours, theirs = [1.0, 2.0, 3.0, 2.0, 2.0, 2.0], [4.0, 4.0, 4.0, 4.0, 40.0, 4.0]

    row = ratio(bench="b", case="c", provider="p", metric="m", values=ours, baseline=theirs)

    assert row.median == 2.0
    assert row.low <= row.median <= row.high
    assert row.unit == "ratio"


def test_a_ratio_by_round_knows_that_the_machine_was_faster_in_some():
    names = {"bench": "b", "case": "c", "provider": "p", "metric": "m"}
    ours, theirs = [1.0, 10.0, 10.0], [2.0, 15.0, 40.0]

    row = ratio(**names, values=ours, baseline=theirs, is_by_round=True)
    steady = ratio(
        **names, values=ours * 3, baseline=[2 * each for each in ours] * 3, is_by_round=True
    )

    assert row.median == 2.0
    assert ratio(**names, values=ours, baseline=theirs).median == 1.5
    assert (steady.low, steady.median, steady.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(("num_runs", "has_interval"), [(1, False), (5, False), (6, True)])
def test_neither_a_median_nor_a_ratio_of_few_runs_has_an_interval(num_runs, has_interval):
    values = [float(number) for number in range(1, num_runs + 1)]
    names = {"bench": "b", "case": "c", "provider": "p", "metric": "m"}

    of_one = summarize(**names, unit="ms", values=values)
    of_two = ratio(**names, values=values, baseline=values[::-1])

    for row in (of_one, of_two):
        assert row.num_runs == num_runs
        assert [row.low is not None, row.high is not None] == [has_interval] * 2


def test_rounds_of_a_ratio_are_drawn_in_pairs():
    ours = [float(number) for number in range(1, 30)]

    row = ratio(
        bench="b",
        case="c",
        provider="p",
        metric="m",
        values=ours,
        baseline=[2 * value for value in ours],
    )

    assert (row.low, row.median, row.high) == (2.0, 2.0, 2.0)


def test_rounds_of_one_state_of_the_machine_say_no_more_than_one_of_them():
    names = {"bench": "b", "case": "c", "provider": "p", "metric": "m", "is_by_round": True}
    speeds = np.random.default_rng(0).uniform(1, 2, 20)
    ours, theirs = np.ones(20 * 32), np.repeat(speeds, 32)

    apart = ratio(**names, values=ours, baseline=theirs)
    together = ratio(**names, values=ours, baseline=theirs, num_per_block=32)
    once = ratio(**names, values=ours[::32], baseline=speeds)
    of_few = ratio(**names, values=ours[: 5 * 32], baseline=theirs[: 5 * 32], num_per_block=32)

    assert (together.low, together.median, together.high) == (once.low, once.median, once.high)
    assert together.high - together.low > apart.high - apart.low
    assert together.num_runs == 20 * 32
    with pytest.raises(ValueError, match="whole blocks of 32, got 33"):
        ratio(**names, values=ours[:33], baseline=theirs[:33], num_per_block=32)
    assert (of_few.low, of_few.high) == (None, None)


def test_the_interval_of_equal_values_is_a_point():
    row = summarize(bench="b", case="c", provider="p", metric="m", unit="ms", values=[3.0] * 9)

    assert (row.low, row.median, row.high) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_garbage_is_collected_as_before_when_turns_end_by_an_error(is_frozen):
    def fail():
        raise RuntimeError("no turn")

    if not is_frozen:
        gc.unfreeze()
    with pytest.raises(RuntimeError, match="no turn"):
        take_turns({"a": fail}, num_rounds=1)

    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()  # as before
    assert gc.isenabled()
    assert was_frozen is is_frozen


def test_every_provider_gets_a_row():
    rows = rows_by_provider(
        bench="b", case="c", metric="m", unit="u", values={"x": [1.0, 3.0], "y": [2.0, 2.0]}
    )

    assert [(row.provider, row.median, row.num_runs) for row in rows] == [
        ("x", 2.0, 2),
        ("y", 2.0, 2),
    ]


def test_a_median_of_ratios_is_over_the_cases_and_its_interval_over_their_rounds():
    names = {"bench": "b", "case": "c", "provider": "p", "metric": "m"}
    steady = [([1.0] * 8, [speed] * 8) for speed in (2.0, 3.0, 10.0)]
    noisy = [([1.0] * 8, [3.0, 1.0, 2.0, 4.0, 5.0, 3.0, 3.0, 2.5])] * 3

    of_steady = median_of_ratios(**names, pairs=steady)
    of_noisy = median_of_ratios(**names, pairs=noisy)
    of_few = median_of_ratios(**names, pairs=[*steady, ([1.0] * 5, [2.0] * 5)])

    assert (of_steady.low, of_steady.median, of_steady.high) == (3.0, 3.0, 3.0)
    assert (of_steady.num_runs, of_steady.p20, of_steady.p80) == (3, 2.4, pytest.approx(7.2))
    assert of_noisy.low < of_noisy.median == 3.0 < of_noisy.high
    alone = ratio(**names, values=noisy[0][0], baseline=noisy[0][1])
    assert alone.high - alone.low > of_noisy.high - of_noisy.low  # three say more than one
    assert (of_few.low, of_few.high) == (None, None)


def test_the_smaller_a_mini_batch_the_more_steps_a_turn_has():
    assert [harness.steps_of_turn(size) for size in (4, 1024, 8192, 10_000)] == [16, 8, 1, 1]


def test_what_is_timed_follows_calls_of_its_own_that_are_not(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock))
    calls = []

    seconds = timed(lambda: calls.append(len(calls)), num_before=2, num_timed=5)()

    assert seconds == 0.5
    assert calls == [0, 1, 2, 3, 4, 5, 6]
