import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from recsys.cli import main
from recsys.config import EvalConfig, load_config, replace
from recsys.datasets import write_store as write_store_of_frame
from recsys.datasets.store import Store
from recsys.datasets.synthetic import SyntheticCriteo
from recsys.errors import TrainingDiverged
from recsys.models.batch_train import BatchTrain
from recsys.report import format_run, write_report
from recsys.train.build import build_model
from recsys.train.evaluate import (
    evaluate_run,
    evaluate_split,
    open_saved_model,
    rank_items,
    with_ranking,
)
from recsys.train.metrics import evaluate_groups
from recsys.train.run_folder import RunFolder
from recsys.train.trainer import train
from tests.train.judged_stores import SMALL_MODEL, evaluate_logits, write_random_store, write_store

PLAIN = set(evaluate_logits(np.zeros(2, np.float32), np.array([0, 1])).as_dict())
OF_GROUPS = {"gauc", "num_groups", "num_groups_left_out"}
OF_RANKING = {"recall_at_k", "recall_standard_error", "ndcg_at_k", "ndcg_standard_error"}
OF_RANKING |= {"ranking_k", "num_rankings", "num_unknown_items"}


def run(store, folder, *settings):
    config = load_config(None, [*SMALL_MODEL, *settings], data=str(store.path))
    return train(config, folder, show_progress=False)


def logits_of(run_dir, split):
    """Logits, labels and numbers of the samples of a split, all in one mini-batch."""
    _, source, model = open_saved_model(run_dir)
    samples = np.array(source.splits[split])
    with torch.no_grad():
        _, (_, logits, labels) = model(source.read(samples))
    return logits.numpy(), labels.numpy(), samples


def test_a_run_on_data_with_groups_has_their_metrics(tmp_path):
    store = write_store(tmp_path / "store")

    record = run(store, tmp_path / "run")

    for split in ("test", "validation"):
        found = record["metrics"][split]
        assert set(found) == PLAIN | OF_GROUPS
        logits, labels, samples = logits_of(tmp_path / "run", split)
        assert {name: found[name] for name in OF_GROUPS} == asdict(
            evaluate_groups(logits, labels, store.groups[samples])
        )
        assert 0 < found["num_groups_left_out"] < 40
    saved = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (
        saved["metrics"]
        == record["metrics"]
        == RunFolder(tmp_path / "run").read_record()["metrics"]
    )
    assert RunFolder(tmp_path / "run").read_history()[-1]["test"] == record["metrics"]["test"]


def test_evaluations_on_the_way_have_gauc(tmp_path, monkeypatch):
    store, expected = write_store(tmp_path / "store"), []

    def evaluate_and_look(model, source, split, *arguments, **parts):
        samples = np.array(source.splits[split])
        with torch.no_grad():
            _, (_, logits, labels) = model(source.read(samples))
        first, groups = slice(60), source.groups[samples]
        own = evaluate_groups(logits.numpy()[first], labels.numpy()[first], groups[first])
        expected.append(asdict(own))
        return evaluate_split(model, source, split, *arguments, **parts)

    monkeypatch.setattr("recsys.train.trainer.evaluate_split", evaluate_and_look)
    run(store, tmp_path / "run", "eval.max_samples=60")

    *on_the_way, _ = [
        entry["validation"]
        for entry in RunFolder(tmp_path / "run").read_history()
        if "validation" in entry
    ]

    assert len({found["gauc"] for found in on_the_way}) > 1
    for found, own in zip(on_the_way, expected, strict=False):
        assert set(found) == PLAIN | OF_GROUPS
        assert {name: found[name] for name in OF_GROUPS} == own
        assert found["num_samples"] == 60


def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(tmp_path):
    store = write_store(tmp_path / "store")
    settings = ("checkpoint.every_steps=5", "eval.every_steps=3")
    whole = run(store, tmp_path / "whole", *settings)
    config = load_config(None, [*SMALL_MODEL, *settings], data=str(store.path))
    train(config, tmp_path / "run", show_progress=False)
    (tmp_path / "run" / "run.json").unlink()

    resumed = train(config, tmp_path / "run", resume=True, checkpoint=None, show_progress=False)

    assert resumed["resumed"]
    assert resumed["metrics"] == whole["metrics"]


def test_a_saved_model_evaluates_to_the_metrics_of_its_run(tmp_path):
    store = write_store(tmp_path / "store", is_ranked=True)
    record = run(store, tmp_path / "run")

    found = evaluate_run(tmp_path / "run")
    status = main(["evaluate", str(tmp_path / "run"), "--json", str(tmp_path / "found.json")])

    assert status == 0
    assert {split: each.as_dict() for split, each in found.items()} == record["metrics"]
    assert json.loads((tmp_path / "found.json").read_text())["metrics"] == record["metrics"]


def test_a_model_is_evaluated_on_another_store(tmp_path):
    run(write_store(tmp_path / "store"), tmp_path / "run")
    other = write_store(tmp_path / "other", seed=1, num_samples=1400)

    found = evaluate_run(tmp_path / "run", str(other.path))

    _, _, model = open_saved_model(tmp_path / "run")
    expected = evaluate_split(model, other, "test", batch_size=64)
    assert found["test"].auc == expected.auc
    assert found["test"].groups == expected.groups
    assert found["test"].num_samples == 200
    assert found["test"].groups.num_groups > 0


def test_a_run_with_a_budget_on_a_gpu_is_evaluated_on_the_cpu(tmp_path, monkeypatch):
    from recsys.train.build import build_model

    run(write_store(tmp_path / "store"), tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    folder.write_config(replace(folder.read_config(), device="cuda", budget="6KiB"))
    table_devices = []

    def build(*arguments, table_device):
        table_devices.append(table_device)
        return build_model(*arguments, table_device=table_device)

    monkeypatch.setattr("recsys.train.evaluate.build_model", build)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    with pytest.warns(UserWarning, match="no room for all tables.* on 'cpu'"):
        config, _, model = open_saved_model(tmp_path / "run")

    assert (config.device, table_devices) == ("cpu", ["meta"])
    assert {each.device.type for each in model.state_dict().values()} == {"cpu"}


@pytest.mark.usefixtures("whole_pictures")
def test_data_of_positives_alone_is_judged_by_rankings_and_has_no_auc(tmp_path):
    store = write_store(tmp_path / "store", is_ranked=True)

    record = run(store, tmp_path / "run", "eval.ranking_k=5", "eval.ranking_groups=0")

    _, _, model = open_saved_model(tmp_path / "run")

    for split in ("test", "validation"):
        found = record["metrics"][split]
        assert set(found) == PLAIN | OF_GROUPS | OF_RANKING
        assert (found["auc"], found["gauc"], found["num_groups"]) == (None, None, 0)
        with torch.no_grad():
            expected = rank_items(model, store, split, k=5, most_questions=0, batch_size=10_000)
        assert {name: found[name] for name in OF_RANKING} == pytest.approx(asdict(expected))
        assert 0 < found["recall_at_k"] < 1


@pytest.mark.parametrize(("is_ranked", "metric"), [(False, "gauc"), (True, "recall_at_k")])
def test_reports_show_metrics_of_groups_and_rankings(tmp_path, is_ranked, metric):
    record = run(
        write_store(tmp_path / "store", is_ranked=is_ranked), tmp_path / "run", "eval.ranking_k=7"
    )

    for found in (write_report(tmp_path / "run").read_text(), format_run(record, tmp_path / "run")):
        assert f"{record['metrics']['test'][metric]:.4f}" in found
        assert ("recall at 7" in found) == is_ranked


@pytest.mark.outside_ci
@pytest.mark.parametrize(("come_again", "k"), [(True, 6), (False, 4)])
def test_rankings_of_random_items_are_at_the_level_of_chance(tmp_path, come_again, k):
    store = write_random_store(tmp_path / "store", come_again=come_again)
    run(
        store,
        tmp_path / "run",
        "optimizer.name=adagrad",
        "optimizer.lr=0.1",
        "epochs=10",
        "eval.every_steps=500",
    )
    _, source, model = open_saved_model(tmp_path / "run")
    source.meta["ranking"]["repeats"] = come_again
    config = EvalConfig(ranking_k=k, ranking_groups=0)

    found = evaluate_split(model, source, "test", batch_size=1000)
    ranking = with_ranking(found, model, source, "test", config).ranking

    # It knows what each user had in training, which says nothing of the test part.
    assert evaluate_split(model, source, "train", batch_size=1000).auc > 0.7
    # k of 60 candidates, or of the 40 that are new. Each of 1,000 answers is found with this chance
    # whatever the ranking, so the standard deviation of the mean is 0.0095.
    assert ranking.num_rankings == 1000
    assert ranking.recall_at_k == pytest.approx(0.1, abs=0.035)


def test_a_store_like_another_of_positives_alone_is_not_ranked(tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"user": rng.integers(0, 20, 300).astype(str), "item": rng.integers(0, 30, 300).astype(str)}
    )
    (tmp_path / "schema.toml").write_text(
        'group = "user"\n[categorical.user]\n[categorical.item]\n[negatives]\nitem = "item"\n'
    )
    write_store_of_frame(frame, tmp_path / "schema.toml", tmp_path / "store")
    run(Store(tmp_path / "store"), tmp_path / "run")
    write_store_of_frame(frame[:50], None, tmp_path / "new", like=tmp_path / "store")

    with pytest.warns(UserWarning, match="new has no training part: what its groups chose before"):
        found = evaluate_run(tmp_path / "run", str(tmp_path / "new"))

    assert found["test"].num_samples == 50
    assert found["test"].ranking is None


def test_a_model_is_in_training_mode_after_an_evaluation_that_failed(tmp_path):
    store = write_store(tmp_path / "store", is_ranked=True)
    model, _ = build_model(load_config(None, SMALL_MODEL, data=str(store.path)), store)
    found = evaluate_split(model, store, "test", batch_size=100)
    with torch.no_grad():
        next(model.model.over_arch.parameters()).fill_(torch.nan)

    with pytest.raises(TrainingDiverged, match=r"test: .* logits are not finite"):
        evaluate_split(model, store, "test", batch_size=100)
    assert model.training
    with pytest.raises(TrainingDiverged, match=r"test, ranking: .* scores are not finite"):
        with_ranking(found, model, store, "test", EvalConfig())
    assert model.training


class Always(torch.nn.Module):
    """Returns the same number for every sample."""

    def __init__(self, number):
        super().__init__()
        self.number = torch.nn.Parameter(torch.tensor(float(number)))

    def forward(self, batch):
        return self.number.expand(len(batch.labels))


@pytest.mark.parametrize(
    ("number", "is_told"), [(0.25, True), (-1.1, False), (1.1, False)], ids=["share", "low", "high"]
)
def test_a_model_that_returns_probabilities_is_told(number, is_told, recwarn):
    source = SyntheticCriteo(num_samples=2000)

    evaluate_split(BatchTrain(Always(number)), source, "test", batch_size=64)

    told = [str(each.message) for each in recwarn]
    assert [each for each in told if "forward ends with a sigmoid" in each] == told
    assert bool(told) == is_told


class Noisy(torch.nn.Module):
    """Adds noise to every prediction, in evaluation mode as well."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return self.bias + torch.randn(len(batch.labels))


def test_an_evaluation_leaves_the_random_numbers_of_training_as_they_are():
    source = SyntheticCriteo(num_samples=2000)
    before = torch.get_rng_state()

    found = evaluate_split(BatchTrain(Noisy()), source, "test", batch_size=64)

    assert 0.3 < found.auc < 0.7
    assert torch.equal(torch.get_rng_state(), before)
