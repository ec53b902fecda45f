import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.batch import JaggedIds
from recsys.datasets import BatchLoader, Store, SyntheticCriteo
from recsys.embeddings import PopularityProfile, TableConfig
from recsys.errors import ConfigError, IdOutOfRange, ProfileError
from tests.stores import write_store

SIZES = [30, 7, 1, 500]


@pytest.fixture(scope="module")
def source():
    return SyntheticCriteo(num_samples=3000, table_sizes=SIZES, seed=1)


@pytest.fixture(scope="module")
def store(source, tmp_path_factory):
    return Store(write_store(source, tmp_path_factory.mktemp("popularity") / "store"))


def bincounts(store, samples=slice(None)):
    return np.concatenate(
        [
            np.bincount(column, minlength=size)
            for column, size in zip(
                np.asarray(store.sparse[samples]).T, store.table_sizes.values(), strict=True
            )
        ]
    )


def bags(lists_by_feature, dtype=torch.int64):
    """`JaggedIds` from {feature: [rows of each sample]}."""
    lists = [rows for of_samples in lists_by_feature.values() for rows in of_samples]
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in lists])])
    values = torch.tensor([row for rows in lists for row in rows], dtype=dtype)
    return JaggedIds(list(lists_by_feature), values, torch.from_numpy(offsets).to(dtype))


def test_a_store_a_source_and_mini_batches_are_counted_as_numpy_counts(source, store, monkeypatch):
    for name in ("_BLOCK_SAMPLES", "_READ_SAMPLES"):
        monkeypatch.setattr(f"recsys.embeddings.popularity.counts.{name}", 700)
    from_batches = PopularityProfile(store.table_sizes)
    for split in ("train", "test", "validation"):
        for batch in BatchLoader(store, split, 128, shuffle=True):
            from_batches.add(batch)

    part = PopularityProfile.count(store, range(5, 2500))

    for whole in (PopularityProfile.count(source), from_batches):
        np.testing.assert_array_equal(whole.counts(), bincounts(store))
    np.testing.assert_array_equal(part.counts(), bincounts(store, slice(5, 2500)))
    assert part.counts("cat_1").tolist() == part.counts()[30:37].tolist()
    assert (part.num_samples, part.num_lookups) == (2495, 4 * 2495)
    assert part.num_rows_seen == np.count_nonzero(part.counts())


def test_every_value_of_every_bag_counts_in_every_table_that_looks_it_up():
    profile = PopularityProfile(
        [
            TableConfig(name="items", num_embeddings=4, embedding_dim=2, feature_names=("a", "b")),
            TableConfig(name="others", num_embeddings=3, embedding_dim=8, feature_names=("b",)),
        ]
    )

    profile.add(bags({"a": [[3, 3, 0], []], "unused": [[99], [98]], "b": [[], [2, 1]]}))

    assert profile.counts("items").tolist() == [1, 1, 1, 2]
    assert profile.counts("others").tolist() == [0, 1, 1]
    assert profile.num_samples == 2


def test_a_batch_with_a_bad_id_is_not_counted_at_all():
    profile = PopularityProfile({"a": 4, "b": 3})
    profile.add(bags({"a": [[1], [2]], "b": [[0], [0]]}))
    before = profile.counts().copy()

    with pytest.raises(IdOutOfRange, match=r"feature 'b', sample 1: id 3 is not in \[0, 3\)"):
        profile.add(bags({"a": [[3], [0]], "b": [[], [1, 3]]}))

    np.testing.assert_array_equal(profile.counts(), before)
    assert profile.num_samples == 2


def test_a_bad_id_of_a_store_is_named_by_its_sample(source, tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.embeddings.popularity.counts._BLOCK_SAMPLES", 700)
    path = write_store(source, tmp_path / "store")
    rows = np.memmap(path / "sparse.bin", "<i4", mode="r+").reshape(-1, 4)
    rows[996, 1] = -1
    rows.flush()

    with pytest.raises(IdOutOfRange, match=r"'cat_1', sample 996: id -1 is not in \[0, 7\)"):
        PopularityProfile.count(Store(path), range(5, 3000))


def test_counts_grow_to_64_bits_before_they_overflow():
    counts = np.array([2**32 - 2, 0, 7], np.uint32)
    profile = PopularityProfile.from_about(PopularityProfile({"a": 3}).about(), counts)
    profile.add(bags({"a": [[0]]}))
    assert profile.counts().tolist() == [2**32 - 1, 0, 7]
    assert profile.counts().dtype == np.uint32

    profile.add(bags({"a": [[0, 1]]}))

    assert profile.counts().tolist() == [2**32, 1, 7]
    assert profile.num_lookups == 2**32 + 8


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 45), st.data())
def test_a_few_ranked_rows_are_the_first_of_all_whatever_the_weights(counts, num_rows, data):
    cut = data.draw(st.integers(0, len(counts) - 1))
    sizes = {"a": cut or 1, "b": len(counts) - cut}
    profile = PopularityProfile(sizes)
    lists = [
        np.repeat(np.arange(len(part)), part).tolist() for part in (counts[:cut], counts[cut:])
    ]
    profile.add(bags({"a": [lists[0]], "b": [lists[1]]}))
    weights = data.draw(st.sampled_from([None, {"a": 1.0, "b": 0.5}, {"b": 3, "a": 0.1}]))

    ranked = profile.ranked_rows(weights=weights)

    scale = np.repeat(
        [1, 1] if weights is None else [weights["a"], weights["b"]], [*sizes.values()]
    )
    keys = profile.counts() * scale
    expected = sorted(np.flatnonzero(keys), key=lambda row: (-keys[row], row))
    assert ranked.tolist() == expected
    assert profile.ranked_rows(num_rows, weights).tolist() == expected[:num_rows]


def table_of(name, *features):
    return TableConfig(name=name, num_embeddings=3, embedding_dim=4, feature_names=features)


@pytest.mark.parametrize(
    "tables",
    [
        {"a": 3, "b": 3, "c": 3},
        # A feature that several tables look up is counted once.
        [table_of("wide", "a"), table_of("deep", "a", "b"), table_of("own", "b")],
    ],
)
def test_a_table_of_several_features_takes_the_sum_of_their_counts(tables):
    profile = PopularityProfile(tables)
    profile.add(bags({"a": [[0, 1]], "b": [[1, 1]], "c": [[2]]}))
    both, one = table_of("both", "a", "b"), table_of("one", "a")

    found = profile.for_tables([both, one])

    assert found.counts("both").tolist() == [1, 3, 0]
    assert found.counts("one").tolist() == [1, 1, 0]
    with pytest.raises(ProfileError, match=r"'one' \(features \['a'\]\) is not in the profile"):
        profile.for_tables([both]).for_tables([one])


def sized(name, size):
    return TableConfig(name=name, num_embeddings=size, embedding_dim=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda p: p.coverage(1, SyntheticCriteo(num_samples=7)),
            "its feature 'a' is not in the data",
        ),
        (lambda p: p.add(bags({"a": [[0]]})), "table 'b': its feature 'b' is not in the data"),
        (lambda p: p.for_tables([sized("c", 4)]), "table 'c' .* is not in the profile"),
        (lambda p: p.for_tables([sized("a", 9)]), "table 'a' has 9 rows, but the profile's 'a'"),
    ],
)
def test_other_tables_are_refused_by_name(call, message):
    profile = PopularityProfile({"a": 4, "b": 3})
    profile.add(bags({"a": [[0]], "b": [[0]]}))

    with pytest.raises(ProfileError, match=message):
        call(profile)

    assert profile.num_lookups == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PopularityProfile({}), "there must be at least one table"),
        (lambda: PopularityProfile([sized("a", 1), sized("a", 2)]), r"distinct, got \['a', 'a'\]"),
        (lambda: PopularityProfile({"a": 0}), "table 'a': num_embeddings .* got 0 and"),
        (lambda: PopularityProfile({"a": 5.7}), r"table 'a': num_embeddings .* got 5\.7"),
        (lambda: PopularityProfile({"a": 1}).ranked_rows(-1), "num_rows must be at least 0"),
        (
            lambda: PopularityProfile({"a": 1}).ranked_rows(weights={}),
            r"tables \['a'\], got",
        ),
        (lambda: PopularityProfile({"a": 1}).coverage(-1), "none negative"),
        (lambda: PopularityProfile({"a": 1}).coverage(1), "there must be lookups to measure"),
        (lambda: PopularityProfile({"a": 1}).coverages([]), "got 0, the least"),
        (lambda: PopularityProfile({"a": 1}).coverage(1, [], range(3)), "samples= needs a source"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_samples_outside_of_the_source_are_refused(store):
    for samples in (range(3001), range(-1, 5), range(0, 10, 2)):
        with pytest.raises(ConfigError, match=r"must be a range of step 1 within \[0, 3000\)"):
            PopularityProfile.count(store, samples)
