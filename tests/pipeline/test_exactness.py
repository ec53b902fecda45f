"""Looking ahead changes no bit: not of a loss, not of a row, not of its optimizer's state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.pipeline import Hotline, LookAhead, Sequential, TrainPipeline

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]


@pytest.mark.filterwarnings("ignore:schedule=", "ignore:tables", "ignore:budget=")
@given(
    sizes=st.lists(st.integers(60, 400), min_size=1, max_size=4),
    dims=st.lists(st.sampled_from([1, 3, 4, 8]), min_size=4, max_size=4),
    optimizer=st.sampled_from(OPTIMIZERS),
    schedule=st.one_of(
        st.just(Sequential()),
        st.builds(LookAhead, st.integers(1, 8)),
        st.just(Hotline(learning_steps=99)),  # has counted, but not split yet
    ),
    num_more=st.sampled_from([60, 20, 3, 0, -3, -1000]),
    tier=st.sampled_from(["host", "file"]),
    seeds=st.lists(st.integers(0, 30), min_size=3, max_size=12),
    share=st.sampled_from([1.0, 0.3, 0.05]),
    auto_apply=st.booleans(),
    is_slow=st.booleans(),
)
def test_every_schedule_and_budget_is_resident(
    small,
    tmp_path_factory,
    sizes,
    dims,
    optimizer,
    schedule,
    num_more,
    tier,
    seeds,
    share,
    auto_apply,
    is_slow,
):
    tables = small.make_tables(sizes, dims[: len(sizes)])
    batches = [small.make_batch(tables, seed, share=share) for seed in seeds]
    options = {"budget": small.budget_for(tables, optimizer, batches, num_more), "cold_tier": tier}
    if tier == "file":
        options["cold_path"] = tmp_path_factory.mktemp("rows")
    resident = small.Model(tables, optimizer, auto_apply=auto_apply)
    expected = small.run_plain(resident, small.dense_optimizer(resident), batches)

    model = small.Model(tables, optimizer, auto_apply=auto_apply, **options)
    pipeline = TrainPipeline(model, small.dense_optimizer(model), schedule=schedule)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if is_slow:
            small.watch_fetches(monkeypatch)
        losses = small.run(pipeline, iter(batches))

    assert losses == expected
    small.require_equal(resident, model)
