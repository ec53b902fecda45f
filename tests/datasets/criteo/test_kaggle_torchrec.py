"""`--convention torchrec`, beside TorchRec's own functions."""

import numpy as np
import pytest

from recsys.datasets.criteo.kaggle import prepare_criteo_kaggle
from recsys.datasets.store import Store
from recsys.errors import ConfigError


def write_raw(raw_line, file, num_lines, seed):
    rng = np.random.default_rng(seed)
    missing = rng.random((num_lines, 39)) < 0.2
    integers = rng.integers(-3, 2 ** rng.integers(2, 27, (num_lines, 13)))
    ids = rng.integers(0, 2**32, (num_lines, 26)) % (2 ** rng.integers(3, 33, (num_lines, 26)))
    file.write_text(
        "".join(
            raw_line(
                str(line % 2),
                ["" if missing[line, n] else str(integers[line, n]) for n in range(13)],
                ["" if missing[line, 13 + n] else f"{ids[line, n]:08x}" for n in range(26)],
            )
            + "\n"
            for line in range(num_lines)
        )
    )


def by_torchrec(raws, folder):
    """What TorchRec's two steps make of raw files: dense, contiguous sparse, labels."""
    pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.datasets.criteo import BinaryCriteoUtils

    outs = [
        [str(folder / f"{raw.stem}_{name}.npy") for name in ("dense", "sparse", "labels")]
        for raw in raws
    ]
    for raw, out in zip(raws, outs, strict=True):
        BinaryCriteoUtils.tsv_to_npys(str(raw), *out)
    BinaryCriteoUtils.sparse_to_contiguous(
        [out[1] for out in outs], str(folder), frequency_threshold=0
    )
    dense, labels = (np.concatenate([np.load(out[n]) for out in outs]) for n in (0, 2))
    sparse = [np.load(folder / f"{raw.stem}_sparse_contig_freq.npy") for raw in raws]
    return dense, np.concatenate(sparse), labels[:, 0]


@pytest.mark.filterwarnings("ignore")  # TorchRec's data pipes are deprecated by torch
def test_stores_hold_bit_for_bit_what_torchrec_makes_of_the_same_files(
    raw_line, tmp_path, monkeypatch
):
    monkeypatch.setattr("recsys.datasets.store_writer._REWRITTEN_SAMPLES", 97)
    raws = [tmp_path / f"day_{day}.txt" for day in range(3)]
    for day, raw in enumerate(raws):
        write_raw(raw_line, raw, 400 + day, seed=day)
    dense, sparse, labels = by_torchrec(raws, tmp_path)

    prepare_criteo_kaggle(raws, tmp_path / "store", convention="torchrec", show_progress=False)

    store = Store(tmp_path / "store")
    np.testing.assert_array_equal(store.dense.view(np.int32), dense.view(np.int32))
    np.testing.assert_array_equal(store.sparse, sparse)
    np.testing.assert_array_equal(store.labels, labels)
    np.testing.assert_array_equal(store.read(np.arange(1203)).dense_features, dense)
    assert list(store.table_sizes.values()) == (sparse.max(axis=0) + 1).tolist()
    assert store.splits == {
        "train": range(801),
        "validation": range(801, 1002),
        "test": range(1002, 1203),
    }


def test_the_shift_is_each_files_own_and_reserved_rows_have_no_id(raw_line, tmp_path):
    raws = [tmp_path / "a.txt", tmp_path / "b.txt"]
    raws[0].write_text("\n".join([raw_line("0", ["-3"] + ["5"] * 12, ["a"] * 26)] * 3))
    raws[1].write_text("\n".join([raw_line("1", ["5"] * 13, ["b"] * 26)] * 4))

    prepare_criteo_kaggle(raws, tmp_path / "store", convention="torchrec", show_progress=False)

    store = Store(tmp_path / "store")
    assert [source["smallest_integer"] for source in store.meta["sources"]] == [-3, 5]
    np.testing.assert_array_equal(store.dense[0, :2], np.log(np.float32([2, 10])))
    np.testing.assert_array_equal(store.dense[3, :2], np.log(np.float32([2, 2])))
    assert store.meta["num_reserved_rows"] == 2
    assert store.sparse[:, 0].tolist() == [2, 2, 2, 3, 3, 3, 3]
    assert store.ids[:4].tolist() == [0, 0, 0xA, 0xB]


def test_a_single_file_is_split_in_seven_parts_and_not_as_the_classic_one_fingerprinted(
    raw_line, tmp_path
):
    raw = tmp_path / "raw.txt"
    write_raw(raw_line, raw, 70, seed=0)

    stores = {}
    for convention in ("classic", "torchrec"):
        prepare_criteo_kaggle(
            [raw], tmp_path / convention, convention=convention, show_progress=False
        )
        stores[convention] = Store(tmp_path / convention)

    assert stores["torchrec"].splits == stores["classic"].splits
    assert stores["torchrec"].fingerprint != stores["classic"].fingerprint
    np.testing.assert_array_equal(stores["torchrec"].sparse, stores["classic"].sparse + 2)


def test_an_unknown_convention_is_refused(tmp_path):
    (tmp_path / "raw.txt").touch()

    with pytest.raises(ConfigError, match=r"convention must be one of .* got 'bars'"):
        prepare_criteo_kaggle([tmp_path / "raw.txt"], tmp_path / "store", convention="bars")


def test_a_file_whose_lines_are_all_left_out_has_no_smallest_integer(raw_line, tmp_path):
    raws = [tmp_path / "bad.txt", tmp_path / "good.txt"]
    raws[0].write_text("oops\n")
    raws[1].write_text("\n".join([raw_line("1", ["7"] * 13)] * 4))

    prepare_criteo_kaggle(
        raws, tmp_path / "store", convention="torchrec", skip_bad_lines=True, show_progress=False
    )

    store = Store(tmp_path / "store")
    assert [source.get("smallest_integer") for source in store.meta["sources"]] == [None, 7]
    np.testing.assert_array_equal(store.dense, np.log(np.full((4, 13), 2, np.float32)))
