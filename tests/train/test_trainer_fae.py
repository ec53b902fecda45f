"""`recsys train` with FAE's schedule: a plain run, in another order."""

import re

import pytest
import torch
from safetensors.torch import load_file

from recsys.config import load_config
from recsys.errors import BudgetTooSmall
from recsys.pipeline import FAE as Constants  # noqa: N811  # its class
from recsys.pipeline import HotColdLoader
from recsys.pipeline.fae import ShuffleScheduler
from recsys.train.build import build_loader, build_model, choose_plan, open_source
from recsys.train.trainer import train

FAE = ("schedule=fae", "budget='5000'", "batch_size=16", "num_threads=1")


def run(config, folder):
    return train(config, folder, show_progress=False)


@pytest.mark.in_ci("adagrad")
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_run_is_a_plain_one_over_the_samples_in_its_order(small_config, tmp_path, optimizer):
    settings = [
        *FAE,
        f"optimizer.name={optimizer}",
        "schedule.fae.adaptive=false",
        "schedule.fae.rate=20",
    ]
    config = small_config(*settings, "epochs=2", "budget='6000'")
    record = run(config, tmp_path / "fae")
    plain = small_config(f"optimizer.name={optimizer}", "batch_size=16", "num_threads=1")
    source = open_source(config)
    loader = build_loader(config, source, choose_plan(config, source))
    model, optimizers = build_model(plain, source)

    for _ in range(2):
        for batch in loader:
            loss, _ = model(batch)
            for each in optimizers:
                each.zero_grad()
            (loss * (len(batch) / 16)).backward()
            for each in optimizers:
                each.step()

    assert 0 < record["schedule"]["hot_sample_share"] < 1
    assert record["tiers"]["fetched_bytes"] > 0
    found = load_file(tmp_path / "fae" / "model.safetensors")
    for name, expected in model.model.state_dict().items():
        assert torch.equal(found[name], expected), name


def test_the_validation_loss_steers_the_rate(small_config, tmp_path, monkeypatch):
    settings = [*FAE, "schedule.fae.rate=8", "schedule.fae.patience=1"]
    losses = []
    observe = HotColdLoader.observe
    monkeypatch.setattr(
        HotColdLoader, "observe", lambda self, loss: (losses.append(loss), observe(self, loss))
    )
    record = run(small_config(*settings), tmp_path / "run")

    scheduler = ShuffleScheduler(Constants(rate=8, patience=1))
    for loss in losses:
        scheduler.observe(loss)
    assert record["schedule"]["num_swaps"] == len(losses) > 3
    assert record["schedule"]["rate"] == scheduler.rate != 8
    assert losses[-1] < losses[0] < 0.7  # of the validation part, while the model learns
    assert record["metrics"]["test"]["num_samples"] == 150


def test_a_fixed_rate_asks_for_no_loss(small_config, tmp_path):
    record = run(small_config(*FAE, "schedule.fae.adaptive=false"), tmp_path / "run")

    assert record["schedule"] | {"hot_sample_share": None} == {
        "name": "fae",
        "hot_sample_share": None,
        "rate": 50.0,
        "num_swaps": 0,
    }


def test_where_all_rows_fit_all_samples_are_hot(small_config, tmp_path):
    with pytest.warns(UserWarning, match="no cold tier is needed"):
        record = run(small_config(*FAE, "budget=1MiB"), tmp_path / "run")

    assert record["schedule"]["hot_sample_share"] == 1


def test_the_least_budget_for_histories_holds_their_rows(table_store, tmp_path):
    settings = ["schedule=fae", "model.embedding_dim=4", "num_threads=1", "batch_size=64"]
    data = str(table_store(num_samples=1500))
    with pytest.raises(BudgetTooSmall, match="must be at least") as raised:
        run(load_config(None, [*settings, "budget=1KiB"], data=data), tmp_path / "small")
    least = re.search(r"at least (\d+) bytes", str(raised.value)).group(1)

    config = load_config(None, [*settings, f"budget='{least}'"], data=data)

    record = run(config, tmp_path / "run")

    assert record["schedule"]["hot_sample_share"] == 0  # nothing is left to pin rows
