"""Looking ahead changes no bit: not of a loss, not of a row, not of its optimizer's state."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.pipeline import LookAhead, Sequential, TrainPipeline, train_pipeline

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]


@pytest.fixture(autouse=True, scope="module")
def is_soon_deeper():
    """Short runs that have found too little room try again, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_pipeline, "_STEPS_UNTIL_DEEPER", 1)
        yield


@pytest.mark.filterwarnings("ignore:schedule=LookAhead")
@given(
    sizes=st.lists(st.integers(60, 400), min_size=1, max_size=4),
    dims=st.lists(st.sampled_from([1, 3, 4, 8]), min_size=4, max_size=4),
    optimizer=st.sampled_from(OPTIMIZERS),
    depth=st.integers(1, 8),
    num_more=st.sampled_from([60, 20, 3, 0]),
    seeds=st.lists(st.integers(0, 30), min_size=3, max_size=12),
    share=st.sampled_from([1.0, 0.3, 0.05]),
    auto_apply=st.booleans(),
    is_slow=st.booleans(),
)
def test_look_ahead_is_sequential_is_resident(
    small, sizes, dims, optimizer, depth, num_more, seeds, share, auto_apply, is_slow
):
    tables = small.make_tables(sizes, dims[: len(sizes)])
    batches = [small.make_batch(tables, seed, share=share) for seed in seeds]
    budget = small.budget_for(tables, optimizer, batches, num_more)
    row_bytes = [dim + sum(optimizer.state_sizes(dim).values()) for dim in dims]
    assume(budget < 4 * sum(n * size for n, size in zip(sizes, row_bytes, strict=False)))
    runs = []
    for schedule in (None, Sequential(), LookAhead(depth)):
        options = {} if schedule is None else {"budget": budget}
        model = small.Model(tables, optimizer, auto_apply=auto_apply, **options)
        dense = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        if schedule is None:
            losses = small.run_plain(model, dense, batches)
        else:
            for tiers in model.embeddings.tiers():
                if is_slow:
                    tiers.residency._cold = small.WatchedStore(tiers.residency._cold)
            pipeline = TrainPipeline(model, dense, schedule=schedule)
            losses = small.run(pipeline, iter(batches))
        runs.append((model, losses))
        assert small.num_claimed(model) == 0

    (resident, expected), *others = runs
    for model, losses in others:
        assert losses == expected
        small.require_equal(resident, model)
