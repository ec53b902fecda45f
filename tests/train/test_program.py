"""Programs of `torch.export`: equal to the model, of PyTorch alone, with float32 or int8 rows."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from recsys.config import load_config
from recsys.datasets import Schema, Store
from recsys.datasets import write_store as write_frame
from recsys.train import train
from tests.commands import recsys, refused
from tests.train.test_models import MODELS, POOLED, SMALL

# Runs a program on the arrays of a file, without recsys and numba.
RUN_ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("recsys", "numba", "torchrec", "fbgemm_gpu"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import torch
program, inputs, out = sys.argv[1:]
found = torch.export.load(program).module()(*torch.load(inputs))
torch.save(found, out)
"""


TO_PROGRAM = ("--to", "torch-export")
NUM_ROWS = 400 + 90 + 12


def trained(settings, data, folder):
    train(load_config(None, [*SMALL, *settings], data=str(data)), folder, show_progress=False)
    return folder


def about(file):
    extra = {"recsys.json": ""}
    torch.export.load(file, extra_files=extra)
    return json.loads(extra["recsys.json"])


def scores_of(program, store, size):
    """What a program for data with bags computes for the first samples of a store."""
    batch = store.read(np.arange(size))
    ids = batch.sparse_features
    return program(batch.dense_features, ids.values(), ids.offsets()).sigmoid().detach().numpy()


def require_scores(run, file, data, sizes=(1, 7, 300), tolerance=1e-6):
    """Require a program to compute what `recsys predict` predicts."""
    recsys("predict", run, data, "--out", file.with_suffix(".parquet"))
    expected = parquet.read_table(file.with_suffix(".parquet")).column("score").to_numpy()
    program = torch.export.load(file).module()
    for size in sizes:
        found = scores_of(program, Store(data), size)
        np.testing.assert_allclose(found, expected[:size], rtol=0, atol=tolerance)


@pytest.mark.slow(but=("masked_transformer",))
@pytest.mark.parametrize("name", MODELS)
def test_a_program_gives_the_predictions_of_the_model(table_store, tmp_path, name):
    data, file = table_store(has_weights=False), tmp_path / "model.pt2"
    run = trained(MODELS[name], data, tmp_path / "run")

    recsys("export", run, *TO_PROGRAM, "--out", file)

    require_scores(run, file, data)


def table_named(name, folder):
    frame = pd.DataFrame({"y": [0, 1] * 30, name: ["u", "v", "w"] * 20})
    split = {"by": "fraction", "test": 0.2, "validation": 0.2}
    schema = {"label": "y", "categorical": {name: {}}, "split": split}
    return write_frame(frame, Schema.from_dict(schema), folder / "store").path


@pytest.mark.parametrize("name", ["genre (main)", 'a"b', "a[b]"])
def test_a_table_that_a_loaded_program_would_not_find_is_refused(tmp_path, name):
    run = trained([], table_named(name, tmp_path), tmp_path / "run")

    assert repr(name) in refused("export", run, *TO_PROGRAM, "--out", tmp_path / "model.pt2")


def test_other_names_of_tables_become_a_program_that_can_be_loaded(tmp_path):
    run = trained([], table_named("ä %28:/'{}<|>#?!-b", tmp_path), tmp_path / "run")

    recsys("export", run, *TO_PROGRAM, "--out", tmp_path / "model.pt2")

    torch.export.load(tmp_path / "model.pt2").module()


@pytest.mark.slow
def test_a_program_of_one_row_per_feature_takes_a_matrix_and_runs_without_recsys(tmp_path):
    settings = ["synthetic.num_samples=700", f"synthetic.table_sizes={[30] * 5}"]
    run = trained(settings, "synthetic:criteo-kaggle", tmp_path / "run")
    recsys("export", run, *TO_PROGRAM, "--out", tmp_path / "model.pt2")
    inputs = torch.randn(40, 13), torch.randint(30, (40, 5))
    torch.save(inputs, tmp_path / "inputs.pt")

    files = [str(tmp_path / name) for name in ("model.pt2", "inputs.pt", "out.pt")]
    subprocess.run([sys.executable, "-c", RUN_ALONE, *files], check=True, cwd=tmp_path)

    expected = torch.export.load(tmp_path / "model.pt2").module()(*inputs)
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), expected, rtol=1e-6, atol=1e-6)
    found = about(tmp_path / "model.pt2")
    assert [each["name"] for each in found["inputs"]] == ["dense_features", "ids"]
    assert [each["name"] for each in found["features"]] == [f"cat_{column}" for column in range(5)]
    assert found["rows"] == "float32"


ROWS = """user = self.embeddings(batch.sparse_features)["user"]
        rows, size = user.values(), batch.dense_features.shape[0]
        bags = torch.repeat_interleave(user.lengths(), output_size=rows.shape[0])
        pooled = rows.new_zeros(size, 4).index_add(0, bags, rows)"""


@pytest.mark.slow(but=("unpooled",))
@pytest.mark.parametrize(("attribute", "pool"), [("", POOLED), ("unpooled = True", ROWS)])
def test_a_class_of_ones_own_becomes_a_program(own_class, table_store, tmp_path, attribute, pool):
    data, file = table_store(has_weights=False), tmp_path / "model.pt2"
    run = trained([own_class(attribute, pool)], data, tmp_path / "run")

    recsys("export", run, *TO_PROGRAM, "--out", file)

    require_scores(run, file, data)


@pytest.mark.slow(but=("len(batch)",))
@pytest.mark.parametrize("change", ["if pooled.sum() > 0 else -pooled", "* len(batch)"])
def test_a_class_that_cannot_be_traced_is_refused(own_class, table_store, tmp_path, change):
    name = own_class("", f"{POOLED}\n        pooled = pooled {change}")
    run = trained([name], table_store(has_weights=False), tmp_path / "run")

    assert "cannot trace Sum" in refused("export", run, *TO_PROGRAM, "--out", tmp_path / "a.pt2")
    assert not list(tmp_path.glob("a.pt2*"))


def test_a_program_has_no_operation_of_recsys_and_refuses_what_are_not_bags(table_store, tmp_path):
    data = table_store(has_weights=False)
    run = trained(["model.pooling.item=mean"], data, tmp_path / "run")
    recsys("export", run, *TO_PROGRAM, "--quantize", "int8", "--out", tmp_path / "model.pt2")

    program = torch.export.load(tmp_path / "model.pt2")

    operations = {node.target for node in program.graph.nodes if node.op == "call_function"}
    found = {each.namespace for each in operations if hasattr(each, "namespace")}
    assert found <= {"aten", "higher_order"}
    batch, call = Store(data).read(np.arange(9)), program.module()
    ids = batch.sparse_features
    for change in (400, -400):
        with pytest.raises((IndexError, RuntimeError), match="range"):
            call(batch.dense_features, ids.values() + change, ids.offsets())
    with pytest.raises(RuntimeError, match="assertion failed"):
        call(batch.dense_features, ids.values()[:-1], ids.offsets())
    with pytest.raises(AssertionError, match="Guard failed"):
        call(batch.dense_features, ids.values(), ids.offsets()[:-1])


@pytest.mark.parametrize("name", ["dlrm", "din"])
def test_int8_rows_are_within_half_a_scale_and_small(table_store, tmp_path, name):
    data, file = table_store(has_weights=False), tmp_path / "model.pt2"
    run = trained([*MODELS[name], "epochs=3"], data, tmp_path / "run")
    weights = load_file(run / "model.safetensors")
    (key,) = (key for key in weights if "t_user" in key)
    weights[key] *= torch.logspace(-6, 0, 90).unsqueeze(1)
    weights[key][4] = 0
    save_file(weights, run / "model.safetensors")

    recsys("export", run, *TO_PROGRAM, "--quantize", "int8", "--out", file)

    found = about(file)
    assert (found["rows"], found["table_bytes"]) == ("int8", NUM_ROWS * 8)
    tags = {"name": "tags", "table": "tag", "num_embeddings": 12, "kind": "multi"}
    assert found["features"][1] == tags
    assert found["histories"] == {"history": "item"}
    tensors = torch.export.load(file).state_dict
    assert sum(len(each) for each in tensors.values() if each.dtype == torch.int8) == NUM_ROWS
    (rows,) = (each for name, each in tensors.items() if "t_user" in name and each.ndim == 2)
    largest = weights[key].abs().amax(1, keepdim=True)
    expected = (weights[key] / (largest / 127)).round().nan_to_num()
    assert torch.equal(rows.float(), expected)
    require_scores(run, file, data, tolerance=0.02)


def test_a_row_that_is_not_finite_is_named(table_store, tmp_path):
    run = trained([], table_store(has_weights=False), tmp_path / "run")
    weights = load_file(run / "model.safetensors")
    next(value for key, value in weights.items() if "t_user" in key)[6, 1] = torch.nan
    save_file(weights, run / "model.safetensors")

    out = ("--quantize", "int8", "--out", tmp_path / "model.pt2")
    assert "row 6" in refused("export", run, *TO_PROGRAM, *out)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(table_store, tmp_path, monkeypatch):
    store = table_store(has_weights=False)
    run = trained([], store, tmp_path / "run")
    (tmp_path / "there.pt2").write_text("")
    before = sorted(path.name for path in tmp_path.iterdir())

    def fail(*_, **__):
        raise OSError("disk full")

    for name, *options in (
        (".pt2", *TO_PROGRAM, "--out", tmp_path / "model"),
        ("there.pt2", *TO_PROGRAM, "--out", tmp_path / "there.pt2"),
        ("quantize", "--to", "safetensors", "--quantize", "int8", "--out", tmp_path / "model"),
    ):
        assert name in refused("export", run, *options)
    with monkeypatch.context() as full_disk:
        full_disk.setattr("torch.export.save", fail)
        refused_by_disk = refused("export", run, *TO_PROGRAM, "--out", tmp_path / "model.pt2")
    assert "disk full" in refused_by_disk

    assert sorted(path.name for path in tmp_path.iterdir()) == before
    store.rename(tmp_path / "moved")
    assert str(store) in refused("export", run, *TO_PROGRAM, "--out", tmp_path / "model.pt2")


@pytest.mark.filterwarnings("ignore:.* not at its end")
def test_an_exported_state_dict_has_the_runs_tensors(table_store, tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")  # there is none on Windows
    run = trained([], table_store(), tmp_path / "run")
    export, file = ("export", run, "--to", "safetensors", "--out"), tmp_path / "new" / "model"

    recsys(*export, file)

    assert file.read_bytes() == (run / "model.safetensors").read_bytes()
    assert str(file) in refused(*export, file)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert "too large" in refused(*export, tmp_path / "other")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "other").exists()
    (run / "model.safetensors").unlink()
    assert "saved no model" in refused(*export, tmp_path / "other")
    (run / "run.json").unlink()
    assert "has not ended" in refused(*export, tmp_path / "other")
