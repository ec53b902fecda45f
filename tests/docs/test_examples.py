"""The programs of `examples`, with small sizes; what they print is read as users read it.

`tests/docs/test_frameworks.py` runs those of `examples/frameworks`, `tests/convergence` and
`tests/distributed` the two measurements.
"""

import json
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.forks import Fork


@pytest.fixture
def example(pytestconfig, monkeypatch, tmp_path):
    """Loads an example by name; it runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda name: runpy.run_path(str(pytestconfig.rootpath / "examples" / f"{name}.py"))


def numbers_after(text, printed):
    return [float(number) for number in re.findall(rf"{text} (\d+\.\d+)", printed)]


def test_the_quickstart_learns_and_loads_what_it_saved(example, capsys, tmp_path):
    example("quickstart")["main"](num_samples=21_000)

    trained, loaded = numbers_after("test AUC", capsys.readouterr().out)
    assert trained == loaded > 0.65
    assert torch.load(tmp_path / "quickstart.pt")


def test_one_line_keeps_the_losses(example, capsys):
    example("swap_one_line")["main"](num_batches=8)

    printed = capsys.readouterr().out
    (difference,) = re.findall(r"largest difference of a loss: (\S+)", printed)
    assert float(difference) < 1e-5
    assert re.search(r"seconds: [\d.]+ plain, [\d.]+ accelerated", printed)


@pytest.mark.filterwarnings("ignore")  # they are TorchRec's
def test_both_ways_into_torchrec_keep_the_losses(example, capsys):
    pytest.importorskip("torchrec")

    example("swap_into_torchrec")["main"](num_samples=5600)

    printed = capsys.readouterr().out
    first, last = numbers_after("first loss", printed), numbers_after(", last", printed)
    assert len(first) == len(last) == 3
    assert max(first) - min(first) < 1e-5
    assert max(last) - min(last) < 1e-5
    assert last[0] < first[0]


def test_each_raw_file_is_prepared_once_and_trained(example, capsys, tmp_path, raw_line):
    def write(name, step):
        lines = [
            raw_line(label=str(number % 2), categories=[f"{number * step % 7:08x}"] * 26)
            for number in range(700)
        ]
        (tmp_path / name).write_text("\n".join(lines) + "\n")

    main = example("train_criteo")["main"]
    stores = []
    write("a.txt", 1)
    write("b.txt", 2)

    for name in ("a.txt", "a.txt", "b.txt"):
        main([name, "--adagrad"])
        stores.append(
            {file: file.stat().st_mtime_ns for file in tmp_path.glob("criteo/*/meta.json")}
        )
    write("a.txt", 3)
    main(["a.txt", "--adagrad"])

    printed = capsys.readouterr().out
    runs = re.findall(r"^saved in (.*)$", printed, re.MULTILINE)
    data = [json.loads((tmp_path / run / "run.json").read_text())["config"]["data"] for run in runs]
    assert [Path(each).name[:6] for each in data] == ["a.txt-", "a.txt-", "b.txt-", "a.txt-"]
    assert len(set(runs)) == 4
    assert data[0] == data[1]
    assert len(set(data)) == 3
    assert stores[0] == stores[1]
    aucs = numbers_after("test AUC", printed)
    assert aucs[0] == aucs[1]


def test_the_first_lines_of_kaggle_are_trained_on_a_budget(example, capsys, kaggle_10k):
    example("train_criteo")["main"]([str(kaggle_10k), "--adagrad", "--budget", "4MiB"])

    printed = capsys.readouterr().out
    assert 0.5 < numbers_after("test AUC", printed)[0] < 0.8
    assert 0.4 < numbers_after("test logloss", printed)[0] < 0.7
    assert re.search(r"^[\d,]+ samples/s in training$", printed, re.MULTILINE)


def train_with_little_memory(script):
    warnings.simplefilter("error")
    main = runpy.run_path(script)["main"]
    main(num_rows=400_000, num_steps=100, limit_bytes=64 * 2**20)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_table_larger_than_the_allowed_memory_is_trained(pytestconfig, tmp_path, monkeypatch):
    script = pytestconfig.rootpath / "examples" / "larger_than_memory.py"
    monkeypatch.chdir(tmp_path)

    fork = Fork(train_with_little_memory, str(script))  # the limit is for good
    printed, said = fork.end()

    assert fork.process.exitcode == 0, said
    assert "nn.EmbeddingBag: " in printed
    assert "98 MiB of rows, and as much of state, are in files" in printed
    (used,) = re.findall(r"(\d+) MiB of memory were used for them, 64 allowed", printed)
    assert 0 < int(used) < 64
    assert list(tmp_path.iterdir()) == []
