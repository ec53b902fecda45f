"""The code of the page on models."""

import re
import sys

import numpy as np
import pandas as pd
import pytest

from recsys.config import load_config
from recsys.datasets import write_store
from recsys.datasets.tabular.schema import Schema
from recsys.train.export import export_run
from recsys.train.trainer import train


@pytest.fixture
def snippets(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "models.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def store_with_history(folder):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "click": rng.integers(0, 2, 700),
            "user": rng.integers(0, 20, 700),
            "item": rng.integers(0, 30, 700),
            "item_history": [rng.integers(0, 30, rng.integers(1, 21)) for _ in range(700)],
        }
    )
    schema = {
        "label": "click",
        "categorical": {"user": {"values": "integer"}, "item": {"values": "integer"}},
        "sequence": {"item_history": {"values": "integer", "table": "item", "max_length": 20}},
    }
    return write_store(frame, Schema.from_dict(schema), folder / "data").path


@pytest.mark.slow(but=("recent",))
@pytest.mark.parametrize(("name", "has_history"), [("wide:Wide", False), ("recent:Recent", True)])
def test_classes_of_the_page_train_and_serve_as_it_says(
    snippets, tmp_path, monkeypatch, name, has_history
):
    wide, recent, serve, _ = snippets
    monkeypatch.chdir(tmp_path)
    for module, code in (("wide", wide), ("recent", recent)):
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.delitem(sys.modules, module, raising=False)
    settings = [
        f"model.name={name}",
        "num_threads=1",
    ]
    data = str(store_with_history(tmp_path)) if has_history else "synthetic:criteo-kaggle"
    if not has_history:
        settings += ["synthetic.num_samples=700", "synthetic.table_sizes=[20, 20, 20, 20, 20]"]
    config = load_config(None, settings, data=data)

    train(config, tmp_path / "run", show_progress=False)
    export_run(tmp_path / "run", "torch-export", tmp_path / "model.pt2")
    found = {}
    exec(compile(serve, "docs/models.md", "exec"), found)

    assert found["probabilities"].shape == (2,)
    assert ("ids" in found) != has_history
    for module in ("wide", "recent"):
        sys.modules.pop(module, None)


def test_rows_of_values_are_read_as_the_page_says(snippets, tmp_path):
    (tmp_path / "clicks.csv").write_text("click,site\n" + "1,a\n0,b\n" * 20)
    schema = {"label": "click", "categorical": {"site": {}}, "split": {"by": "fraction"}}
    write_store(pd.read_csv(tmp_path / "clicks.csv"), Schema.from_dict(schema), tmp_path / "store")
    found = {}
    exec(compile(snippets[-1], "docs/models.md", "exec"), found)

    assert found["rows_of_values"](tmp_path / "store", 0) == {"a": 1, "b": 2}
