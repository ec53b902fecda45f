import json

import numpy as np
import pytest

from recsys.datasets import SyntheticCriteo
from recsys.errors import ConfigError, IdOutOfRange
from recsys.train.judge.popular_samples import PopularSamples
from recsys.train.metrics.metrics import evaluate_logits
from recsys.train.trainer import train

SIZES = (30, 7, 1, 500)


def source_of(num_samples=7_000):
    return SyntheticCriteo(num_samples=num_samples, table_sizes=SIZES)


def rows_of(batch):
    """The rows of every sample, (B, 4), numbered over all tables."""
    values = batch.sparse_features.values().numpy().reshape(len(SIZES), -1).T
    return values + np.cumsum([0, *SIZES[:-1]])


def popularity_of(source, batch):
    """Training lookups of the least looked-up row of every sample."""
    train_rows = rows_of(source.read(np.array(source.splits["train"])))
    counts = np.bincount(train_rows.reshape(-1), minlength=sum(SIZES))
    return counts[rows_of(batch)].min(axis=1)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.9])
def test_a_popular_sample_has_more_popular_rows_than_any_other(share):
    source = source_of()
    test = source.read(np.array(source.splits["test"]))

    are_popular = PopularSamples(source, share).are_popular(test)

    popularity = popularity_of(source, test)
    assert popularity[are_popular].min() > popularity[~are_popular].max()


@pytest.mark.parametrize("share", [0.1, 0.4, 0.9])
def test_of_the_training_samples_the_given_share_is_popular_or_a_little_less(share):
    source = source_of(70_000)

    are_popular = PopularSamples(source, share).are_popular(
        source.read(np.array(source.splits["train"]))
    )

    assert share - 0.08 < are_popular.mean() <= share


def test_with_a_share_of_one_all_counted_samples_are_popular():
    source = source_of()

    are_popular = PopularSamples(source, 1.0).are_popular(
        source.read(np.array(source.splits["train"]))
    )

    assert are_popular.all()


def test_popularity_is_counted_in_training_samples_at_equal_distances(monkeypatch):
    monkeypatch.setattr("recsys.train.judge.popular_samples._MOST_COUNTED", 100)
    monkeypatch.setattr("recsys.train.judge.popular_samples._READ_SAMPLES", 30)
    source, read = source_of(), []

    class Watched:
        splits, table_sizes = source.splits, source.table_sizes

        def read(self, samples):
            read.extend(samples.tolist())
            return source.read(samples)

    PopularSamples(Watched(), 0.5)

    assert read == [6_000 * number // 100 for number in range(100)]


def test_metrics_are_those_of_either_kind_of_samples():
    source = source_of()
    popular = PopularSamples(source, 0.3)
    test = np.array(source.splits["test"])
    logits = np.random.default_rng(0).normal(size=len(test)).astype(np.float32)
    whole = source.read(test)
    are_popular, labels = popular.are_popular(whole), whole.labels.numpy()

    for begin in range(0, len(test), 64):
        part = slice(begin, begin + 64)
        popular.add(source.read(test[part]), logits[part], labels[part])

    found = popular.results()
    for name, chosen in (("test_popular", are_popular), ("test_other", ~are_popular)):
        expected = evaluate_logits(logits[chosen], labels[chosen]).as_dict()
        assert found[name] == pytest.approx(expected)


def test_a_kind_without_samples_has_no_metrics():
    source = source_of()
    popular = PopularSamples(source, 1.0)
    batch = source.read(np.array(source.splits["train"][:50]))

    popular.add(batch, np.zeros(50, np.float32), batch.labels.numpy())

    found = popular.results()
    assert found["test_popular"]["num_samples"] == 50
    assert found["test_other"] is None


def test_an_id_that_is_no_row_is_refused():
    source = source_of()
    batch = source.read(np.arange(10))
    batch.sparse_features.values()[3] = 10**6

    with pytest.raises(IdOutOfRange, match="sample 3: id 1000000 is not in"):
        PopularSamples(source, 0.5).are_popular(batch)


def test_a_run_measures_popular_test_samples_on_request_and_nothing_else_changes(
    small_config, tmp_path
):
    expected = train(small_config("num_threads=1"), tmp_path / "plain", show_progress=False)
    config = small_config("num_threads=1", "eval.popular_share=0.3")

    record = train(config, tmp_path / "run", show_progress=False)

    assert list(expected["metrics"]) == ["test", "validation"]
    assert list(record["metrics"]) == ["test", "validation", "test_popular", "test_other"]
    for split in ("test", "validation"):
        assert record["metrics"][split] == expected["metrics"][split]
    parts = [record["metrics"][name] for name in ("test_popular", "test_other")]
    whole = record["metrics"]["test"]
    assert sum(part["num_samples"] for part in parts) == whole["num_samples"]
    assert all(part["num_samples"] for part in parts)
    losses = [part["logloss"] * part["num_samples"] for part in parts]
    assert sum(losses) / whole["num_samples"] == pytest.approx(whole["logloss"])
    saved = json.loads((tmp_path / "run" / "run.json").read_text())
    assert saved["metrics"] == json.loads(json.dumps(record["metrics"]))


def test_popular_samples_are_the_same_for_every_seed_and_optimizer(small_config, tmp_path):
    found = []
    for number, settings in enumerate([("seed=1",), ("seed=2", "optimizer.lr=0.01")]):
        config = small_config("num_threads=1", "eval.popular_share=0.3", *settings)
        record = train(config, tmp_path / str(number), show_progress=False)
        found.append(record["metrics"]["test_popular"]["num_samples"])

    assert found[0] == found[1]


@pytest.mark.parametrize("share", ["-0.1", "1.5"])
def test_a_share_that_is_none_is_refused(small_config, share):
    with pytest.raises(ConfigError, match=r"eval\.popular_share must be in \[0, 1\]"):
        small_config(f"eval.popular_share={share}")
