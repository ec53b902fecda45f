"""A model built the classic way, accelerated, on the real sample and on synthetic data."""

import pytest
import torch

import recsys
from recsys.datasets import BatchLoader, Store, SyntheticCriteo

NUM_POINTS = 20


@pytest.fixture(params=["synthetic", "real"])
def data(request):
    if request.param == "real":
        return Store(request.getfixturevalue("kaggle_137k_store"))
    return SyntheticCriteo(num_samples=15_000, table_sizes=[2000, 300, 7, 1, 20_000])


@pytest.fixture
def small(classic, data):
    """A classic model of the data's tables, and its optimizer."""

    def build(optimizer=torch.optim.SGD, dtype=torch.float32, **settings):
        torch.manual_seed(0)
        model = classic.ClassicDLRM(
            list(data.table_sizes.values()), 4, dense_arch=(16,), over_arch=(16,)
        ).to(dtype)
        return model, optimizer(model.parameters(), **({"lr": 0.1} | settings))

    return build


def test_a_step_from_the_same_state_agrees_at_20_points_of_a_run(classic, data, small):
    model, optimizer = small()
    batches = list(BatchLoader(data, "train", 512, shuffle=True, seed=0, drop_last=True))
    batches = batches[: len(batches) // NUM_POINTS * NUM_POINTS]
    reports = []

    for number, batch in enumerate(batches):
        if number % (len(batches) // NUM_POINTS) == 0:
            report = recsys.verify(model, [batch], loss=classic.loss_of, optimizer=optimizer)
            reports.append(report)
        optimizer.zero_grad()
        classic.loss_of(model, batch).backward()
        optimizer.step()

    assert len(reports) == NUM_POINTS
    for report in reports:
        assert report.ok, str(report)
        assert (report.rtol, report.atol) == (1e-5, 1e-7)


def test_the_example_finds_the_same_auc_both_ways(classic):
    source = SyntheticCriteo(num_samples=7000, table_sizes=[30, 7, 1, 500])

    found = classic.train_and_test(source, 0, 256, dim=4, dense_arch=[8], over_arch=[8])

    assert found["seed"] == 0
    assert found["plain"]["auc"] == pytest.approx(found["accelerated"]["auc"], abs=1e-3)
    assert found["accelerated"]["seconds"] > 0
