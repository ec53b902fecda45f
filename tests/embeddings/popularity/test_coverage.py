import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.batch import JaggedIds
from recsys.datasets import Store, SyntheticCriteo
from recsys.embeddings import PopularityProfile
from tests.stores import write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    source = SyntheticCriteo(num_samples=3000, table_sizes=[30, 7, 1, 500], seed=1)
    return Store(write_store(source, tmp_path_factory.mktemp("coverage") / "store"))


def expected_coverage(store, num_rows, counted, measured):
    """By plain numpy: rows of all tables ranked together, then looked for one by one."""
    sizes = np.array(list(store.table_sizes.values()))
    rows_BF = np.asarray(store.sparse, np.int64) + np.cumsum(sizes) - sizes
    counts = np.bincount(rows_BF[counted].reshape(-1), minlength=sizes.sum())
    hot = sorted(np.flatnonzero(counts), key=lambda row: (-counts[row], row))[:num_rows]
    is_hot = np.isin(rows_BF[measured], hot)
    distinct = np.unique(rows_BF[measured])
    return {
        "num_rows": len(hot),
        "num_lookups": is_hot.size,
        "lookup_hit_rate": is_hot.mean(),
        "num_distinct_rows": len(distinct),
        "num_distinct_hot_rows": np.isin(distinct, hot).sum(),
        "num_samples": len(is_hot),
        "hot_sample_share": is_hot.all(axis=1).mean(),
    }


@given(
    st.lists(st.integers(0, 600), min_size=1, max_size=4),
    st.integers(1, 2999),
    st.sampled_from([400, 2**21]),
)
def test_coverage_is_what_looking_for_every_lookup_finds(store, nums_rows, cut, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recsys.embeddings.popularity.counts._BLOCK_SAMPLES", block)
        profile = PopularityProfile.count(store, range(cut))

        found = profile.coverages(nums_rows, store, range(cut, 3000))

    for coverage, num_rows in zip(found, nums_rows, strict=True):
        expected = expected_coverage(store, num_rows, slice(cut), slice(cut, None))
        assert vars(coverage) == pytest.approx(expected)


def test_a_sample_is_hot_when_all_its_lookups_are_and_when_it_has_none():
    profile = PopularityProfile({"a": 4, "b": 4})
    offsets = np.array([0, 2, 4, 4, 5, 5, 5])
    values = np.array([1, 1, 1, 2, 3])
    ids = JaggedIds(["a", "b"], torch.from_numpy(values), torch.from_numpy(offsets))
    profile.add(ids)

    coverage = profile.coverage(1, [ids])

    # Row 1 of "a" alone is hot: sample 0 has it twice and 3 of "b", sample 1 also 2, sample 2 none.
    assert (coverage.lookup_hit_rate, coverage.hot_sample_share) == (3 / 5, 1 / 3)
    assert (coverage.num_distinct_rows, coverage.num_distinct_hot_rows) == (3, 1)
