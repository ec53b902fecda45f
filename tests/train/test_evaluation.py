"""Evaluations: with groups, with rankings, of other data, on the way and at the end."""

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet
from sklearn.metrics import roc_auc_score

from recsys.config import load_config, replace, to_toml
from recsys.datasets import Schema
from recsys.datasets import write_store as write_store_of_frame
from recsys.errors import TrainingDiverged
from tests.commands import recsys
from tests.train.judged_stores import SMALL_MODEL, write_store
from tests.train.resumed_runs import evaluated, history, record_of, run

OF_GROUPS = {"gauc", "num_groups", "num_groups_left_out"}
OF_RANKING = {"recall_at_k", "recall_standard_error", "ndcg_at_k", "ndcg_standard_error"}
OF_RANKING |= {"ranking_k", "num_rankings", "num_unknown_items"}


def run_on(store, folder, *settings, **options):
    config = load_config(None, [*SMALL_MODEL, *settings], data=str(store.path))
    return run(config, folder, **options)


def gauc_of(store, folder, split):
    """GAUC from its definition and the predictions, and its numbers of groups."""
    file = folder / f"{split}.parquet"
    recsys("predict", folder, store.path, "--out", file)
    scores = parquet.read_table(file).column("score").to_numpy()
    samples = np.array(store.splits[split])
    groups, labels, scores = store.groups[samples], store.labels[samples], scores[samples]
    own = [groups == group for group in np.unique(groups)]
    both = [each for each in own if 0 < labels[each].mean() < 1]
    aucs = [roc_auc_score(labels[each], scores[each]) for each in both]
    return np.average(aucs, weights=[each.sum() for each in both]), len(both), len(own) - len(both)


def test_a_run_on_data_with_groups_has_their_metrics(tmp_path):
    store, folder = write_store(tmp_path / "store"), tmp_path / "run"

    metrics = run_on(store, folder, "eval.max_samples=60")["metrics"]

    for split in ("test", "validation"):
        assert set(metrics[split]) >= OF_GROUPS
        gauc, num_groups, num_left_out = gauc_of(store, folder, split)
        assert metrics[split]["gauc"] == pytest.approx(gauc, abs=1e-6)
        assert metrics[split]["num_groups"] == num_groups
        assert metrics[split]["num_groups_left_out"] == num_left_out > 0
    lines = history(folder)
    assert lines[-1]["test"] == metrics["test"]
    on_the_way = [line["validation"] for line in lines[:-1] if "validation" in line]
    assert {found["num_samples"] for found in on_the_way} == {60}
    assert len({found["gauc"] for found in on_the_way}) > 1
    recsys("report", folder)
    assert f"{metrics['test']['gauc']:.4f}" in (folder / "report.html").read_text()


def test_data_of_positives_alone_is_judged_by_rankings_and_has_no_auc(tmp_path):
    store, folder = write_store(tmp_path / "store", is_ranked=True), tmp_path / "run"

    metrics = run_on(store, folder, "eval.ranking_k=7", "eval.ranking_groups=0")["metrics"]

    for found in metrics.values():
        assert set(found) >= OF_GROUPS | OF_RANKING
        assert (found["auc"], found["gauc"], found["num_groups"]) == (None, None, 0)
        assert 0 < found["recall_at_k"] < 1
    assert evaluated(folder) == metrics
    recsys("report", folder)
    page = (folder / "report.html").read_text()
    assert "recall at 7" in page
    assert f"{metrics['test']['recall_at_k']:.4f}" in page


def test_a_model_is_evaluated_on_another_store(tmp_path):
    run_on(write_store(tmp_path / "store"), tmp_path / "run")
    other = write_store(tmp_path / "other", seed=1, num_samples=1400)

    found = evaluated(tmp_path / "run", "--data", other.path)["test"]

    gauc, num_groups, _ = gauc_of(other, tmp_path / "run", "test")
    assert (found["num_samples"], found["num_groups"]) == (200, num_groups)
    assert found["gauc"] == pytest.approx(gauc, abs=1e-6)


def test_a_run_with_a_budget_on_a_gpu_is_evaluated_on_the_cpu(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    record = run_on(write_store(tmp_path / "store"), folder)
    config = replace(load_config(folder / "config.toml"), device="cuda", budget="6KiB")
    (folder / "config.toml").write_text(to_toml(config))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    with pytest.warns(UserWarning, match="no room for all tables.* on 'cpu'"):
        assert evaluated(folder) == record["metrics"]


def test_a_store_like_another_of_positives_alone_is_not_ranked(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"user": rng.integers(0, 20, 300).astype(str), "item": rng.integers(0, 30, 300).astype(str)}
    )
    columns = {"user": {}, "item": {}}
    schema = {"group": "user", "categorical": columns, "negatives": {"item": "item"}}
    store = write_store_of_frame(frame, Schema.from_dict(schema), tmp_path / "store")
    run_on(store, tmp_path / "run")
    write_store_of_frame(frame[:50], None, tmp_path / "new", like=tmp_path / "store")

    with pytest.warns(UserWarning, match="no training part"):
        found = evaluated(tmp_path / "run", "--data", tmp_path / "new")["test"]

    assert found["num_samples"] == 50
    assert "recall_at_k" not in found


OWN = """
import torch

class Sum(torch.nn.Module):
    def __init__(self, embeddings, num_dense):
        super().__init__()
        self.embeddings = embeddings
        self.number = torch.nn.Parameter(torch.tensor({number}))

    def forward(self, batch):
        zeros = self.embeddings(batch.sparse_features).values().sum(1) * 0
        return zeros + self.number {more}
"""


@pytest.fixture
def own_config(own_class, small_config):
    """A configuration of a model that returns a number for each sample, and more settings."""

    def build(number, more="", *settings):
        code = OWN.replace("{number}", number).replace("{more}", more)
        return small_config(own_class(code=code), *settings)

    return build


@pytest.mark.parametrize("number", ["0.25", "-1.1", "1.1"])
def test_a_model_that_returns_probabilities_is_reported(own_config, tmp_path, recwarn, number):
    run(own_config(number, "", "optimizer.lr=1e-9"), tmp_path / "run")

    found = [each for each in recwarn if "forward ends with a sigmoid" in str(each.message)]
    assert bool(found) == (number == "0.25")


def test_an_evaluation_leaves_the_random_numbers_of_training_as_they_are(own_config, tmp_path):
    losses = []
    for every in (4, 14):
        config = own_config("0.25", "+ torch.rand(len(batch))", f"eval.every_steps={every}")
        run(config, tmp_path / str(every))
        lines = history(tmp_path / str(every))
        losses.append([line["train_loss"] for line in lines if "train_loss" in line])

    assert losses[0] == losses[1]


def test_logits_that_are_not_finite_end_the_run(own_config, tmp_path):
    with pytest.raises(TrainingDiverged, match=r"validation: .* logits are not finite"):
        run(own_config("0.25", "/ self.training", "eval.every_steps=4"), tmp_path / "run")

    assert record_of(tmp_path / "run")["status"] == "diverged"
