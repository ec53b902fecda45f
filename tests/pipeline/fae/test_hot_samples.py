"""Which samples are hot: against each sample's rows, one by one."""

import numpy as np
import pytest

from recsys.config import ModelConfig
from recsys.datasets import SyntheticCriteo
from recsys.embeddings import SGD, PopularityProfile, plan_hot_rows
from recsys.train.build import tables_of

PART = range(100, 600)


@pytest.fixture(scope="module")
def source():
    return SyntheticCriteo(num_samples=700, table_sizes=[30, 7, 1, 500])


def plan_of(source, num_bytes=2700):
    profile = PopularityProfile.count(source, range(300))
    tables = tables_of(profile.table_sizes, profile.features, ModelConfig(embedding_dim=1))
    return plan_hot_rows(profile, tables, num_bytes, SGD(lr=0.1), window_lookups=1, small_share=0)


def hot_one_by_one(plan, source):
    sparse = source.read(np.arange(PART.start, PART.stop)).sparse_features
    values = dict(zip(sparse.keys(), sparse.values().view(-1, len(PART)).tolist(), strict=True))
    found = np.ones(len(PART), bool)
    for table, features in plan.profile.features.items():
        pinned = set(plan.pinned_rows(table).tolist())
        for feature in features:
            found &= [row in pinned for row in values[feature]]
    return found


def test_a_sample_is_hot_if_all_of_its_rows_are(source):
    plan = plan_of(source)

    found = plan.find_hot_samples(source, PART)

    assert 0 < found.sum() < len(PART)
    assert found.tolist() == hot_one_by_one(plan, source).tolist()
