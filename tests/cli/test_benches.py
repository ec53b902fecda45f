"""`recsys bench NAME` shows rows as they are measured, and keeps them if it is stopped."""

import json

from recsys.bench import counting
from recsys.bench.parts.harness import summarize
from recsys.cli import main


def of_case(case):
    return summarize("count", case, "recsys", "time", "ms", [2.0, 4.0])


def test_rows_are_told_when_they_are_measured_and_kept_when_a_benchmark_is_stopped(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "rows.json"
    records = []

    def bench(*_, **__):
        yield of_case("B=1")
        records.append(json.loads(file.read_text()))
        yield of_case("B=2")
        raise KeyboardInterrupt

    monkeypatch.setattr(counting, "bench_counting", bench)

    assert main(["bench", "count", "--json", str(file)]) == 130

    records.append(json.loads(file.read_text()))
    assert [[row["case"] for row in record["rows"]] for record in records] == [
        ["B=1"],
        ["B=1", "B=2"],
    ]
    assert all(record["unfinished"] is True for record in records)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["B=1  recsys  time  3.00 ms", "B=2  recsys  time  3.00 ms"]


def test_the_record_of_a_whole_benchmark_says_nothing_of_an_end(tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.json"
    monkeypatch.setattr(counting, "bench_counting", lambda *_, **__: [of_case("B=1")])

    assert main(["bench", "count", "--json", str(file)]) == 0

    assert sorted(json.loads(file.read_text())) == ["command", "environment", "rows"]
    assert "B=1" in capsys.readouterr().out
