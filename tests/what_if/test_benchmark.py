"""The script that measures predictions, and the table made of it, on runs of a blink."""

import json
import runpy

import pytest

from recsys.train.trainer import train


@pytest.mark.outside_ci
@pytest.mark.slow
def test_the_benchmark_predicts_each_run_from_each_base_once_trained(
    pytestconfig, tmp_path, monkeypatch, small_settings, capsys
):
    folder = pytestconfig.rootpath / "docs" / "benchmarks"
    script = runpy.run_path(str(folder / "what_if.py"))
    tables = runpy.run_path(str(folder / "tables.py"))
    names = script["main"].__globals__
    tiers = "synthetic.table_sizes=[900, 700, 1, 800]"
    settings = [each for each in small_settings[1::2] if not each.startswith("data=")]
    runs = {
        "host": ["budget=20KiB"],
        "file": ["budget=20KiB", "cold_tier=file"],
        "budget": ["budget=30KiB"],
    }
    monkeypatch.setitem(names, "_SETTINGS", {"D=4, B=128": ([*settings, tiers], runs)})
    monkeypatch.setitem(names, "train_in_own_process", train)  # a process takes seconds to start
    arguments = ["synthetic:criteo-kaggle", "--json", str(tmp_path / "what_if.json")]
    arguments += ["--rounds", "1", "--runs", str(tmp_path / "runs")]

    script["main"](arguments)
    trained = {each: each.stat().st_mtime_ns for each in tmp_path.glob("runs/*/*/run.json")}
    script["main"](arguments)

    assert len(trained) == 3
    assert all(file.stat().st_mtime_ns == time for file, time in trained.items())
    text = (tmp_path / "what_if.json").read_text()
    found = json.loads(text)["settings"]
    assert str(tmp_path) not in text
    assert [each["name"] for each in found] == ["D=4, B=128, host", "D=4, B=128, file"]
    changes = [[line["change"] for line in each["predictions"]] for each in found]
    assert changes == [
        ["cold_tier=file", "budget=30KiB"],
        ["cold_tier=host", "budget=30KiB, cold_tier=host"],
    ]
    monkeypatch.setitem(
        tables["what_if_table"].__globals__, "read_record", lambda _: json.loads(text)
    )
    lines = tables["TABLES"]["what_if"]().splitlines()
    for each in (line for setting in found for line in setting["predictions"]):
        [line] = [line for line in lines if f"| {each['change']} |" in line and "D=4" in line][:1]
        assert "%" in line
    error = found[0]["predictions"][1]["error"]
    assert any(
        "| budget=30KiB | " in line and f"**{100 * error:+.1f} %**" in line for line in lines
    )
    assert "cold_tier=file" in capsys.readouterr().out
