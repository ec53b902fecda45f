import resource
from dataclasses import replace

import numpy as np
import pytest
import torch

from recsys.datasets.loader import BatchLoader
from recsys.datasets.splits import classic_splits, day_splits
from recsys.datasets.store import Store, StoreWriter
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.datasets.torchrec_npy import read_torchrec_npy, write_torchrec_npy
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError

NUM_SAMPLES, SIZES = 53, [3 + column % 5 for column in range(26)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("recsys.datasets.interchange.npy_blocks.BLOCK_SAMPLES", 7)


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, SIZES, (NUM_SAMPLES, 26))
    rows[5] = np.array(SIZES) - 1
    with StoreWriter(tmp_path / "store") as writer:
        writer.append(
            rng.integers(0, 2, NUM_SAMPLES).astype(np.int8),
            rng.integers(0, 10_000, (NUM_SAMPLES, 13)).astype(np.int32),
            rows.astype(np.int32),
        )
        writer.finish(
            dense_names=[f"int_{column}" for column in range(13)],
            ids={f"cat_{n}": np.arange(size, dtype=np.uint32) for n, size in enumerate(SIZES)},
            splits=classic_splits(NUM_SAMPLES),
            about={"convention": "classic", "sources": []},
        )
    return Store(tmp_path / "store")


def torchrec_batches(files, batch_size, **options):
    pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    dense, sparse, labels = ([str(file)] for file in files)
    state = np.random.get_state()  # noqa: NPY002  # their class seeds numpy's global generator
    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train", dense, sparse, labels, batch_size, rank=0, world_size=1, **options
    )
    np.random.set_state(state)  # noqa: NPY002
    return list(pipe)


def assert_batches_equal(theirs, ours):
    assert len(theirs) == len(ours)
    for their, our in zip(theirs, ours, strict=True):
        features = their.sparse_features
        assert torch.equal(their.dense_features, our.dense_features)
        assert their.dense_features.dtype == torch.float32
        assert features.keys() == our.sparse_features.keys()
        assert torch.equal(features.values().long(), our.sparse_features.values())
        assert torch.equal(features.offsets().long(), our.sparse_features.offsets())
        assert torch.equal(their.labels.float(), our.labels)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize("mmap_mode", [False, True])
@pytest.mark.parametrize("split", ["train", "test", "validation"])
def test_batches_of_torchrecs_data_pipe_are_ours(store, tmp_path, split, mmap_mode):
    files = write_torchrec_npy(store, tmp_path / "npy", split, split=split)

    theirs = torchrec_batches(files, 4, mmap_mode=mmap_mode)

    assert_batches_equal(theirs, list(BatchLoader(store, split, 4, shuffle=False)))


def test_a_store_comes_back_with_equal_batches_splits_and_sizes(store, tmp_path):
    write_torchrec_npy(store, tmp_path, "all")

    back = Store(read_torchrec_npy(tmp_path, ["all"], tmp_path / "back"))

    assert back.splits == store.splits
    assert back.table_sizes == store.table_sizes
    assert back.meta["dense_names"] == store.meta["dense_names"]
    assert (back.ids, back.meta["convention"]) == (None, "torchrec")
    np.testing.assert_array_equal(back.sparse, store.sparse)
    np.testing.assert_array_equal(back.labels, store.labels)
    everything = np.arange(NUM_SAMPLES)
    found, expected = back.read(everything), store.read(everything)
    assert torch.equal(found.dense_features, expected.dense_features)
    assert [source["name"] for source in back.meta["sources"]] == [
        "all_dense.npy",
        "all_sparse.npy",
        "all_labels.npy",
    ]


def test_synthetic_data_is_written_as_it_is_read(tmp_path):
    data = SyntheticCriteo(num_samples=60, table_sizes=[9] * 26)

    files = write_torchrec_npy(data, tmp_path, "synthetic")

    ours = [data.read(np.arange(start, min(start + 25, 60))) for start in (0, 25, 50)]
    assert_batches_equal(torchrec_batches(files, 25), ours)


class WithHalves:
    """Data whose labels are no integers."""

    def __init__(self, data):
        self._data = data

    def __getattr__(self, name):
        return getattr(self._data, name)

    def read(self, samples):
        return replace(self._data.read(samples), labels=torch.full((len(samples),), 0.5))


class WithLargeTables(WithHalves):
    """Data with rows that 32-bit integers cannot hold."""

    def __init__(self, data):
        super().__init__(data)
        self.table_sizes = dict.fromkeys(data.table_sizes, 2**31 + 1)

    def read(self, samples):
        return self._data.read(samples)


@pytest.mark.parametrize(
    ("change", "fault"),
    [(WithHalves, "labels that are no integers"), (WithLargeTables, r"more than 2\*\*31 rows")],
)
def test_numbers_that_the_files_cannot_hold_are_refused(tmp_path, change, fault):
    data = change(SyntheticCriteo(num_samples=60, table_sizes=[9] * 26))

    with pytest.raises(ConfigError, match=f"this data has .*{fault}; prepare it without"):
        write_torchrec_npy(data, tmp_path, "x")

    assert list(tmp_path.iterdir()) == []


def write_day(folder, prefix, num_samples, *, seed=0, **changes):
    rng = np.random.default_rng(seed)
    arrays = {
        "dense": rng.normal(size=(num_samples, 13)).astype(np.float32),
        "sparse": rng.integers(0, 2**32, (num_samples, 26)),
        "labels": rng.integers(0, 2, (num_samples, 1)).astype(np.int32),
    }
    for name, array in arrays.items():
        changed = changes[name](array) if name in changes else array
        np.save(folder / f"{prefix}_{name}.npy", changed)
    return arrays


def test_days_are_one_data_set_split_as_torchrec_does_and_taken_modulo_as_its_hashes(tmp_path):
    days = [write_day(tmp_path, f"day_{day}", 10 + day, seed=day) for day in range(3)]

    store = Store(
        read_torchrec_npy(
            tmp_path, [f"day_{day}" for day in range(3)], tmp_path / "store", table_sizes=SIZES
        )
    )

    sparse = np.concatenate([day["sparse"] for day in days]) % SIZES
    np.testing.assert_array_equal(store.sparse, sparse)
    np.testing.assert_array_equal(store.dense, np.concatenate([day["dense"] for day in days]))
    assert list(store.table_sizes.values()) == SIZES
    files = [tmp_path / f"day_0_{name}.npy" for name in ("dense", "sparse", "labels")]
    theirs = torchrec_batches(files, 10, hashes=SIZES)
    assert_batches_equal(theirs, [store.read(np.arange(10))])


def test_a_position_in_ids_taken_modulo_is_none_in_ids_taken_modulo_others(tmp_path):
    write_day(tmp_path, "day_0", 20)
    first, same, other = (
        BatchLoader(
            Store(read_torchrec_npy(tmp_path, ["day_0"], tmp_path / name, table_sizes=sizes)),
            "train",
            4,
            shuffle=True,
        )
        for name, sizes in (("a", SIZES), ("b", SIZES), ("c", SIZES[::-1]))
    )
    state = first.state_dict()

    same.load_state_dict(state)
    with pytest.raises(ConfigError, match="loader state: data is"):
        other.load_state_dict(state)


@pytest.mark.parametrize("last_day", [8, 9])
def test_the_last_days_halves_are_torchrecs_val_and_test_stages(tmp_path, last_day):
    pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    write_day(tmp_path, "day_1", last_day)
    paths = [[str(tmp_path / f"day_1_{name}.npy")] for name in ("dense", "sparse", "labels")]
    sizes = {}
    for stage in ("val", "test"):
        pipe = InMemoryBinaryCriteoIterDataPipe(stage, *paths, 100, rank=0, world_size=1)
        (batch,) = pipe
        sizes[stage] = len(batch.labels)

    splits = day_splits([10, last_day])

    assert splits == {
        "train": range(10),
        "validation": range(10, 10 + sizes["val"]),
        "test": range(10 + sizes["val"], 10 + last_day),
    }
    assert len(splits["test"]) == sizes["test"]


def test_labels_without_a_second_axis_and_arrays_in_columns_are_read(tmp_path):
    day = write_day(
        tmp_path,
        "day",
        20,
        labels=lambda labels: labels[:, 0],
        dense=np.asfortranarray,
        sparse=lambda sparse: np.asfortranarray(sparse % 100).astype(np.int32),
    )

    store = Store(read_torchrec_npy(tmp_path, ["day"], tmp_path / "store"))

    np.testing.assert_array_equal(store.labels, day["labels"][:, 0])
    np.testing.assert_array_equal(store.dense, day["dense"])
    np.testing.assert_array_equal(store.sparse, day["sparse"] % 100)
    assert list(store.table_sizes.values()) == [
        int(column.max()) + 1 for column in (day["sparse"] % 100).T
    ]


def test_ids_of_32_bits_that_are_negative_are_taken_modulo_as_torchrec_does(tmp_path):
    write_day(tmp_path, "day", 20, sparse=lambda ids: ids.astype(np.uint32).view(np.int32))
    ids = np.load(tmp_path / "day_sparse.npy")
    assert ids.min() < 0

    store = Store(read_torchrec_npy(tmp_path, ["day"], tmp_path / "store", table_sizes=SIZES))

    np.testing.assert_array_equal(store.sparse, ids % np.array(SIZES))
    files = [tmp_path / f"day_{name}.npy" for name in ("dense", "sparse", "labels")]
    theirs = torchrec_batches(files, 20, hashes=SIZES)
    assert_batches_equal(theirs, [store.read(np.arange(20))])


def test_ids_beyond_64_bits_are_refused_with_table_sizes_too(tmp_path):
    write_day(tmp_path, "day", 20, sparse=lambda ids: np.full(ids.shape, 2**63, np.uint64))

    with pytest.raises(
        DatasetFormatError, match=r"in \[-9223372036854775808, .*; write the ids an"
    ):
        read_torchrec_npy(tmp_path, ["day"], tmp_path / "store", table_sizes=SIZES)


def with_nan(dense):
    dense[9, 2] = np.nan
    return dense


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"day_sparse\.npy, sample \d+, column \d+: .* if these are raw ids, pass table_s"),
        ({"sparse": lambda x: x - 2**40}, r"day_sparse\.npy, sample 0, column 0: .* got -\d+"),
        ({"labels": lambda x: x - 1}, r"day_labels\.npy, sample \d+: .* got -1; .* writes -1 for"),
        ({"labels": lambda x: x[1:]}, r"day_labels\.npy: must have 20 samples as dense, got \(19"),
        ({"labels": lambda x: x.repeat(2, 1)}, r"must be \(20, 1\), got \(20, 2\)"),
        (
            {"dense": with_nan, "sparse": lambda x: x % 9},
            r"day_dense\.npy, sample 9, column 2: must be a finite .* got nan",
        ),
        ({"dense": lambda x: x[:0]}, r"day_dense\.npy: must have at least one sample"),
        ({"sparse": lambda x: x[:, 0]}, r"day_sparse\.npy: must be \(N, columns\), got \(20,\)"),
        ({"sparse": lambda x: x.astype(str)}, "must hold numbers"),
    ],
)
def test_files_that_break_the_format_are_refused_and_leave_nothing(tmp_path, changes, message):
    write_day(tmp_path, "day", 20, **changes)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(DatasetFormatError, match=message):
        read_torchrec_npy(tmp_path, ["day"], tmp_path / "store")

    assert sorted(tmp_path.iterdir()) == before


def test_days_of_other_widths_and_files_that_are_no_arrays_are_refused(tmp_path):
    write_day(tmp_path, "day_0", 5, sparse=lambda x: x % 9)
    write_day(tmp_path, "day_1", 5, sparse=lambda x: x[:, 1:] % 9)
    with pytest.raises(DatasetFormatError, match=r"day_1_sparse\.npy: must have 26 columns as bef"):
        read_torchrec_npy(tmp_path, ["day_0", "day_1"], tmp_path / "store")

    (tmp_path / "day_0_dense.npy").write_text("text")
    with pytest.raises(DatasetFormatError, match=r"day_0_dense\.npy: is not a complete array"):
        read_torchrec_npy(tmp_path, ["day_0"], tmp_path / "store")


def test_arguments_that_cannot_be_carried_out_are_refused(store, tmp_path):
    write_day(tmp_path, "day", 5)
    for sizes in ([1, 2], [0] * 26, [1.5] * 26, [True] * 26):
        with pytest.raises(ConfigError, match=r"table_sizes must be 26 integers .* got") as caught:
            read_torchrec_npy(tmp_path, ["day"], tmp_path / "a", table_sizes=sizes)
        assert str(sizes) in str(caught.value)
    for prefixes in ([], "day"):
        with pytest.raises(ConfigError, match=r"prefixes must be a list of at least one day, got"):
            read_torchrec_npy(tmp_path, prefixes, tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"day_7_dense\.npy must be a file"):
        read_torchrec_npy(tmp_path, ["day_7"], tmp_path / "a")
    with pytest.raises(ConfigError, match=r"npy input .*day_dense\.npy must be named once"):
        read_torchrec_npy(tmp_path, ["day", "./day"], tmp_path / "a")
    with pytest.raises(ConfigError, match="split must be one of"):
        write_torchrec_npy(store, tmp_path, "x", split="val")
    with pytest.raises(AlreadyExists, match="day_dense"):
        write_torchrec_npy(store, tmp_path, "day")
    assert not (tmp_path / "a").exists()


def test_nothing_is_left_behind_when_writing_fails(store, tmp_path, monkeypatch):
    def fail(samples):
        raise OSError("disk gone")

    monkeypatch.setattr(store, "read", fail)

    with pytest.raises(OSError, match="disk gone"):
        write_torchrec_npy(store, tmp_path / "npy", "train")

    assert list((tmp_path / "npy").iterdir()) == []


def test_no_file_appears_when_the_end_of_another_cannot_be_written(tmp_path):
    """Files of this size are written when they are closed, the labels' first."""
    data = SyntheticCriteo(num_samples=50, table_sizes=[9] * 26)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_torchrec_npy(data, tmp_path, "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert list(tmp_path.iterdir()) == []
