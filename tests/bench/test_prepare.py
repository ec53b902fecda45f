import pytest

from recsys.bench import prepare
from recsys.bench.parts.harness import ratio
from recsys.datasets.criteo.kaggle import prepare_criteo_kaggle


def test_the_long_text_is_good_and_brings_new_ids_with_every_repetition(raw_line, tmp_path):
    raw, text = tmp_path / "raw.txt", tmp_path / "long.txt"
    lines = [raw_line(categories=["aaaaaaaa"] * 25 + [f"{line + 2**31:08x}"]) for line in range(10)]
    raw.write_text("\n".join(lines) + "\n")

    sizes = prepare.write_long_text(raw, text, prepare.Size(35, num_ids=None, num_runs=1))

    report = prepare_criteo_kaggle([text], tmp_path / "store", show_progress=False)
    assert sizes == (text.stat().st_size, 40) == (4 * raw.stat().st_size, report.num_samples)
    # One popular id in each of 25 columns; ten new ones per repetition in the last.
    assert report.num_rows == 25 + 40


def test_the_long_text_has_as_many_ids_as_asked_for(raw_line, tmp_path):
    raw, text = tmp_path / "raw.txt", tmp_path / "long.txt"
    raw.write_text("".join(raw_line(categories=[f"{n:08x}"] * 26) + "\n" for n in range(10)))

    prepare.write_long_text(raw, text, prepare.Size(50, num_ids=300, num_runs=1))

    report = prepare_criteo_kaggle([text], tmp_path / "store", show_progress=False)
    assert report.num_rows == 300


@pytest.mark.usefixtures("quick_workers")
def test_both_providers_are_measured_into_rows(raw_line, tmp_path):
    raw = tmp_path / "raw.txt"
    raw.write_text("".join(raw_line(categories=[f"{n:08x}"] * 26) + "\n" for n in range(50)))

    rows = prepare.bench_prepare(raw, prepare.Size(500, num_ids=None, num_runs=1))

    assert [(row.provider, row.metric, row.unit) for row in rows] == [
        ("recsys", "throughput", "MB/s"),
        ("pandas", "throughput", "MB/s"),
        ("recsys", "peak_memory", "bytes"),
        ("pandas", "peak_memory", "bytes"),
        ("recsys", "speed_over_pandas", "ratio"),
    ]
    ours, theirs, *_, speed = rows
    assert speed.median == pytest.approx(ours.median / theirs.median)
    assert all(row.median > 0 and row.num_runs == 1 for row in rows)
    assert {row.case.split(",")[1:] == ["lines=500", "ids=13000"] for row in rows} == {True}


def test_the_size_measured_by_default_has_runs_enough_for_an_interval():
    size = prepare.SIZES["gigabyte"]
    times = [float(number) for number in range(1, size.num_runs + 1)]

    row = ratio(bench="b", case="c", provider="p", metric="m", values=times, baseline=times)

    assert row.low is not None
