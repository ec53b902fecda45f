"""Which samples are hot: against each sample's rows, one by one."""

import numpy as np

from recsys.datasets import SyntheticCriteo
from recsys.embeddings import SGD, PopularityProfile, TableConfig, plan_hot_rows

PART = range(100, 600)


def test_a_sample_is_hot_if_all_of_its_rows_are():
    source = SyntheticCriteo(num_samples=700, table_sizes=[30, 7, 1, 500])
    tables = [
        TableConfig(name=f"t_{name}", num_embeddings=size, embedding_dim=1, feature_names=(name,))
        for name, size in source.table_sizes.items()
    ]
    profile = PopularityProfile.count(source, range(300))
    plan = plan_hot_rows(profile, tables, 2700, SGD(lr=0.1), window_lookups=1, small_share=0)

    found = plan.find_hot_samples(source, PART)

    sparse = source.read(np.arange(PART.start, PART.stop)).sparse_features
    expected = np.ones(len(PART), bool)
    for table in tables:
        [feature] = table.feature_names
        expected &= np.isin(sparse[feature].values(), plan.pinned_rows(table.name))
    assert 0 < found.sum() < len(PART)
    assert found.tolist() == expected.tolist()
