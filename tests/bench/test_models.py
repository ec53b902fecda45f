"""`recsys bench models`, on small tables and few rounds."""

from itertools import product
from unittest.mock import MagicMock

import pytest
import torch

from recsys.bench import models
from recsys.bench.models import ALL_KINDS, bench_models
from recsys.bench.parts import harness
from recsys.bench.parts.plain_models import SHALLOW_KINDS
from recsys.embeddings.lookup.abstract_tables import AbstractTables
from recsys.errors import BudgetTooSmall, ConfigError


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    pytest.importorskip("torchrec", exc_type=ImportError)
    monkeypatch.setattr(models, "steps_of_turn", lambda _: 1)
    # What a process of its own does to its garbage is not to be done to this one, which has much.
    monkeypatch.setattr(harness, "gc", MagicMock(**{"get_freeze_count.return_value": 1}))
    monkeypatch.setattr(models, "in_own_process", lambda function, *args: function(*args))


def test_every_case_has_its_times_and_ratios():
    rows = list(
        bench_models(
            [8],
            ["sgd"],
            num_rounds=6,
            max_rows=50,
            table_counts=(1, 2),
            small_batch_sizes=(4,),
            sequence_batch_sizes=(4,),
        )
    )

    found = {(row.case, row.provider, row.metric) for row in rows}
    for whole in (
        "model=classic,B=8,D=16,optimizer=sgd",
        "model=tbsm,B=4,D=16,optimizer=sgd,T=3,ids=steps",
    ):
        assert {(whole, each, "time") for each in ("torch", "recsys", "no_tables")} <= found
        assert (whole, "recsys", "table_time_over_torch") in found
    for count in (1, 2):
        for ids in ("one-hot", "jagged"):
            for kind in SHALLOW_KINDS:
                case = f"model={kind},B=4,D=16,optimizer=sgd,T={count},ids={ids}"
                assert (case, "recsys", "speed_over_torch") in found
    assert [row.case for row in rows[-4:]] == [f"model={kind},D=16" for kind in SHALLOW_KINDS]
    assert [row.num_runs for row in rows[-4:]] == [4] * 4


def test_only_the_kinds_that_are_asked_for_are_measured():
    rows = list(
        bench_models(
            [8], ["sgd"], num_rounds=6, kinds=["tbsm"], max_rows=50, sequence_batch_sizes=(4,)
        )
    )

    assert {row.case for row in rows} == {"model=tbsm,B=4,D=16,optimizer=sgd,T=3,ids=steps"}


def test_with_a_share_of_memory_models_have_a_budget_too():
    rows = list(
        bench_models(
            [8],
            ["adagrad"],
            num_rounds=6,
            kinds=["bags"],
            max_rows=500,
            table_counts=(2,),
            small_batch_sizes=(4,),
            share=0.5,
        )
    )

    case = "model=bags,B=4,D=16,optimizer=adagrad,T=2,ids=one-hot"
    found = {(row.case, row.provider, row.metric) for row in rows}
    assert {(case, "in_slots", "time"), (case, "in_slots", "speed_over_torch")} <= found


def test_evaluation_is_measured_in_place_of_training():
    rows = list(
        bench_models(
            [8],
            ["sgd"],
            num_rounds=6,
            kinds=["bags", "classic"],
            max_rows=500,
            table_counts=(2,),
            small_batch_sizes=(4,),
            share=0.5,
            is_evaluation=True,
        )
    )

    found = {(row.case, row.provider) for row in rows if row.metric == "speed_over_torch"}
    for case in (
        "model=classic,B=8,D=16,optimizer=sgd,pass=evaluation",
        "model=bags,B=4,D=16,optimizer=sgd,pass=evaluation,T=2,ids=jagged",
    ):
        assert {(case, "recsys"), (case, "in_slots")} <= found


def test_a_step_of_evaluation_changes_nothing_and_sees_every_mini_batch():
    model = MagicMock(side_effect=lambda *_: seen.append(torch.is_grad_enabled()))
    seen, batches = [], [MagicMock(dense=number) for number in range(3)]

    step = models._evaluation(model, batches)
    for _ in range(4):
        step()

    assert [call.args[0] for call in model.call_args_list] == [0, 1, 2, 0]
    assert seen == [False] * 4
    model.eval.assert_called_once_with()


def test_a_share_that_holds_no_mini_batch_is_refused_with_its_case():
    message = r"bench models: model=bags,B=128,.*: a share of 0\.5 of its tables is too small"
    with pytest.raises(BudgetTooSmall, match=message):
        list(
            bench_models(
                [8],
                ["sgd"],
                num_rounds=1,
                kinds=["bags"],
                max_rows=100,
                table_counts=(1,),
                small_batch_sizes=(128,),
                share=0.5,
            )
        )


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_that_is_no_budget_is_refused(share):
    with pytest.raises(ConfigError, match="share must be at least 0 and below 1"):
        list(bench_models([8], ["sgd"], num_rounds=6, kinds=["bags"], share=share))


def test_table_time_is_a_step_less_that_of_the_model_without_tables():
    case = models._Case("classic", "sgd", 8, (50,))
    seconds = {"torch": [5.0] * 6, "recsys": [3.0] * 6, "no_tables": [1.0] * 6}

    [row] = [row for row in models._rows_of(case, seconds) if row.metric != "time"][1:]

    assert row.metric == "table_time_over_torch"
    assert row.median == 0.5


@pytest.mark.parametrize(
    ("kind", "is_jagged"),
    [("tbsm", False), *product((each for each in ALL_KINDS if each != "tbsm"), (False, True))],
)
def test_the_accelerated_model_computes_what_the_plain_one_does(kind, is_jagged, monkeypatch):
    trained = []
    monkeypatch.setattr(
        models, "_step", lambda *arguments: trained.append(arguments) or (lambda: None)
    )
    sizes = (50, 30, 20) if kind == "tbsm" else (50, 30)
    models._measure(models._Case(kind, "adagrad", 8, sizes, is_jagged), 6)
    trained = [each for each in trained if list(each[0].tables.parameters())]  # not constants
    (plain, optimizer, batches), (model, other, _) = trained
    assert not any(isinstance(each, AbstractTables) for each in plain.modules())
    assert any(isinstance(each, AbstractTables) for each in model.modules())

    for batch in batches[:3]:
        for each, its_optimizer in ((plain, optimizer), (model, other)):
            its_optimizer.zero_grad()
            each(batch.dense, batch.inputs).square().sum().backward()
            its_optimizer.step()

    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-6)


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigError, match="PyTorch sees no CUDA device; leave --device out"):
        list(bench_models([8], ["sgd"], num_rounds=6, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_may_be_on_a_gpu():
    rows = list(
        bench_models(
            [8], ["sgd"], num_rounds=6, kinds=["classic"], max_rows=500, share=0.8, device="cuda"
        )
    )

    case = "model=classic,B=8,D=16,optimizer=sgd,device=cuda"
    assert {row.case for row in rows} == {case}
    assert {row.provider for row in rows} == {"torch", "recsys", "in_slots", "no_tables"}
