"""The page on models: its tables, from files of results, and its code."""

import json
import re
import runpy
import sys
from statistics import mean

import pandas as pd
import pytest

from recsys.ablate.run import ablate
from recsys.config import load_config
from recsys.datasets import write_store
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.report.paired import make_differences
from recsys.train.exports.program import export_program
from recsys.train.trainer import train
from tests.doc_tables import cells_of

ABLATION = """
synthetic.samples_per_day = 100
[ablate]
seeds = [0, 1]
baseline = "dot"
[[ablate.variations]]
name = "dot"
[[ablate.variations]]
name = "dcn_v2"
model.name = "dcn_v2"
"""


@pytest.fixture
def tables(pytestconfig, monkeypatch):
    folder = pytestconfig.rootpath / "docs" / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return runpy.run_path(str(folder / "tables_of_models.py"))


@pytest.fixture
def file(ablation, tmp_path):
    results = tmp_path / "models.json"
    ablate(
        ablation(ABLATION), tmp_path / "out", results=results, show_progress=False, run_cell=train
    )
    return results


def metrics_of(file, variation):
    record = json.loads(file.read_text())
    return [
        cell["run"]["metrics"]["test"] for cell in record["cells"] if cell["variation"] == variation
    ]


def test_models_are_compared_in_pairs_of_equal_seeds(tables, file):
    record = json.loads(file.read_text())
    (entry,) = (
        each
        for each in make_differences(record["cells"], record["config"])
        if (each["variation"], each["metric"]) == ("dcn_v2", "auc")
    )

    caption, header, dot, dcn = cells_of(tables["compared_table"](str(file)))

    assert "seeds 0, 1;" in caption
    assert header == [
        "model", "test AUC", "less that of dot", "test logloss", "test calibration"
    ]  # fmt: skip
    for line, variation in ((dot, "dot"), (dcn, "dcn_v2")):
        aucs = [test["auc"] for test in metrics_of(file, variation)]
        assert line[:2] == [variation, f"{mean(aucs):.4f} ({min(aucs):.4f} to {max(aucs):.4f})"]
    assert dot[2] == ""
    assert dcn[2] == f"{entry['mean']:+.5f} ({entry['low']:+.5f} to {entry['high']:+.5f})"


def test_days_are_shown_if_they_are_whole(tables, file):
    by_day = [test["auc_by_day"] for test in metrics_of(file, "dcn_v2")]
    first, *_, last = sorted(by_day[0])

    caption, header, _, dcn = cells_of(tables["days_table"](str(file)))

    assert "100 samples each" in caption
    assert header == ["model", *(f"day {number}" for number in range(1, len(by_day[0])))]
    assert last != first
    assert dcn[1] == f"{mean(found[first] for found in by_day):.4f}"


def test_int8_rows_are_told_by_their_largest_change_either_way(tables, tmp_path):
    def model(seed, change):
        return {
            "embedding_dim": 16,
            "seed": seed,
            "table_bytes": {"float32": 64 * 2**20, "int8": 20 * 2**20},
            "test": {
                "float32": {"auc": 0.75, "logloss": 0.5},
                "int8": {"auc": 0.75 + change, "logloss": 0.5 - change},
            },
        }

    file = tmp_path / "quantized.json"
    environment = {"cpu": "a processor", "num_threads": 1, "torch": "2"}
    models = [model(0, 0.0002), model(1, -0.0001)]
    file.write_text(json.dumps({"environment": environment, "models": models}))

    caption, _, line = cells_of(tables["quantized_table"](str(file)))

    assert "seeds 0, 1," in caption
    assert line == [
        "16", "64.0", "0.312", "0.7500", "-0.000100 to +0.000200", "-0.000200 to +0.000100"
    ]  # fmt: skip


@pytest.fixture
def snippets(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "models.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.in_ci("recent")
@pytest.mark.parametrize(
    ("name", "data", "sizes"),
    [("wide:Wide", "criteo-kaggle", [20] * 5), ("recent:Recent", "taobao", [20, 30, 10])],
)
def test_classes_of_the_page_train_and_serve_as_it_says(
    snippets, tmp_path, monkeypatch, name, data, sizes
):
    wide, recent, serve, _ = snippets
    monkeypatch.chdir(tmp_path)
    for module, code in (("wide", wide), ("recent", recent)):
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.delitem(sys.modules, module, raising=False)
    settings = [
        f"model.name={name}",
        "synthetic.num_samples=700",
        f"synthetic.table_sizes={sizes}",
        "num_threads=1",
    ]
    config = load_config(None, settings, data=f"synthetic:{data}")

    train(config, tmp_path / "run", show_progress=False)
    export_program(tmp_path / "run", tmp_path / "model.pt2")
    found = {}
    exec(compile(serve, "docs/models.md", "exec"), found)

    assert found["probabilities"].shape == (2,)
    assert ("ids" in found) == (data == "criteo-kaggle")
    for module in ("wide", "recent"):
        sys.modules.pop(module, None)


def test_rows_of_values_are_read_as_the_page_says(snippets, tmp_path):
    (tmp_path / "clicks.csv").write_text("click,site\n" + "1,a\n0,b\n" * 20)
    schema = {"label": "click", "categorical": {"site": {}}, "split": {"by": "fraction"}}
    write_store(pd.read_csv(tmp_path / "clicks.csv"), Schema.from_dict(schema), tmp_path / "store")
    found = {}
    exec(compile(snippets[-1], "docs/models.md", "exec"), found)

    assert found["rows_of_values"](tmp_path / "store", 0) == {"a": 1, "b": 2}
