"""Programs of `torch.export`: equal to the model, of PyTorch alone, with float32 or int8 rows."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score

from recsys.cli import main
from recsys.config import load_config
from recsys.datasets import Schema
from recsys.datasets import write_store as write_frame
from recsys.errors import AlreadyExists, ConfigError, StoreError, WeightsError
from recsys.train.evaluate import open_saved_model
from recsys.train.export import _quantized, export_run
from recsys.train.trainer import train
from tests.train.test_models import CUSTOM, MODELS, POOLED, SMALL

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


def trained(settings, data, folder):
    train(load_config(None, [*SMALL, *settings], data=data), folder, show_progress=False)
    return folder


def inputs_of(source, samples):
    """The inputs of a program for data with bags, and the batch."""
    batch = source.read(samples)
    features = batch.sparse_features
    return (batch.dense_features, features.values(), features.offsets()), batch


def about(file):
    extra = {"recsys.json": ""}
    torch.export.load(file, extra_files=extra)
    return json.loads(extra["recsys.json"])


def require_same_logits(run, file, sizes):
    program = torch.export.load(file).module()
    _, source, model = open_saved_model(run)
    for size in sizes:
        inputs, batch = inputs_of(source, np.arange(5, 5 + size))
        with torch.no_grad():
            _, (_, expected, _) = model(batch)
        torch.testing.assert_close(program(*inputs), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.in_ci("masked_transformer")
@pytest.mark.parametrize("name", MODELS)
def test_a_program_gives_the_logits_of_the_model(table_store, tmp_path, name):
    run = trained(MODELS[name], str(table_store(has_weights=False)), tmp_path / "run")

    export_run(run, "torch-export", tmp_path / "model.pt2")

    require_same_logits(run, tmp_path / "model.pt2", (1, 7, 300))


@pytest.mark.parametrize("name", ["genre (main)", "a,b", "a;b", 'a"b', "a\\b", "a[b]"])
def test_a_table_that_a_loaded_program_would_not_find_is_refused(tmp_path, name):
    run = trained([], table_named(name, tmp_path), tmp_path / "run")

    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        export_run(run, "torch-export", tmp_path / "model.pt2")


def test_other_names_of_tables_become_a_program_that_can_be_loaded(tmp_path):
    run = trained([], table_named("ä %28:/'{}<|>#?!-b", tmp_path), tmp_path / "run")

    export_run(run, "torch-export", tmp_path / "model.pt2")

    torch.export.load(tmp_path / "model.pt2").module()


def table_named(name, folder):
    frame = pd.DataFrame({"y": [0, 1] * 30, name: ["u", "v", "w"] * 20})
    split = {"by": "fraction", "test": 0.2, "validation": 0.2}
    schema = {"label": "y", "categorical": {name: {}}, "split": split}
    return str(write_frame(frame, Schema.from_dict(schema), folder / "store").path)


@pytest.mark.outside_ci
def test_a_program_of_one_row_per_feature_takes_a_matrix_and_runs_without_recsys(tmp_path):
    data = "synthetic:criteo-kaggle"
    sizes = ["synthetic.num_samples=700", f"synthetic.table_sizes={[30] * 5}"]
    run = trained(sizes, data, tmp_path / "run")
    export_run(run, "torch-export", tmp_path / "model.pt2")
    _, source, model = open_saved_model(run)
    batch = source.read(np.arange(40))
    ids = batch.sparse_features.values().view(5, 40).t().contiguous()
    torch.save((batch.dense_features, ids), tmp_path / "inputs.pt")

    files = [str(tmp_path / name) for name in ("model.pt2", "inputs.pt", "out.pt")]
    subprocess.run([sys.executable, "-c", RUN_ALONE, *files], check=True, cwd=tmp_path)

    with torch.no_grad():
        _, (_, expected, _) = model(batch)
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), expected, rtol=1e-6, atol=1e-6)
    found = about(tmp_path / "model.pt2")
    assert [each["name"] for each in found["inputs"]] == ["dense_features", "ids"]
    assert [each["name"] for each in found["features"]] == [f"cat_{column}" for column in range(5)]
    assert found["rows"] == "float32"


ROWS = """user = self.embeddings(batch.sparse_features)["user"]
        rows, size = user.values(), batch.dense_features.shape[0]
        bags = torch.repeat_interleave(user.lengths(), output_size=rows.shape[0])
        pooled = rows.new_zeros(size, 4).index_add(0, bags, rows)"""


@pytest.fixture
def own_class(tmp_path, monkeypatch):
    """Writes a module with a class `Sum` of the user's own, and returns its `model.name`."""

    def write(attribute, pool):
        (tmp_path / "served.py").write_text(CUSTOM.format(attribute=attribute, pool=pool))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "served", raising=False)
        return "model.name=served:Sum"

    yield write
    sys.modules.pop("served", None)


@pytest.mark.in_ci("unpooled")
@pytest.mark.parametrize(("attribute", "pool"), [("", POOLED), ("unpooled = True", ROWS)])
def test_a_class_of_ones_own_becomes_a_program(own_class, table_store, tmp_path, attribute, pool):
    name, store = own_class(attribute, pool), str(table_store(has_weights=False))
    run = trained([name], store, tmp_path / "run")

    export_run(run, "torch-export", tmp_path / "model.pt2")

    require_same_logits(run, tmp_path / "model.pt2", (1, 50))


@pytest.mark.in_ci("len(batch)")
@pytest.mark.parametrize("change", ["if pooled.sum() > 0 else -pooled", "* len(batch)"])
def test_a_class_that_cannot_be_traced_is_refused(own_class, table_store, tmp_path, change):
    pool = f"{POOLED}\n        pooled = pooled {change}"
    run = trained([own_class("", pool)], str(table_store(has_weights=False)), tmp_path / "run")

    with pytest.raises(ConfigError, match=r"torch\.export cannot trace Sum: .*tensor\.shape"):
        export_run(run, "torch-export", tmp_path / "model.pt2")

    assert not list(tmp_path.glob("model.pt2*"))


@pytest.mark.in_ci("int8")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_program_has_no_operation_of_recsys_and_refuses_what_are_not_bags(
    table_store, tmp_path, quantize
):
    run = trained(
        ["model.pooling.item=mean"], str(table_store(has_weights=False)), tmp_path / "run"
    )
    export_run(run, "torch-export", tmp_path / "model.pt2", quantize)

    program = torch.export.load(tmp_path / "model.pt2")

    operations = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert {each.namespace for each in operations if hasattr(each, "namespace")} <= {
        "aten",
        "higher_order",
    }
    dense, values, offsets = inputs_of(open_saved_model(run).source, np.arange(9))[0]
    call = program.module()
    call(dense, values, offsets)
    for bad in (values + 400, values - 400):
        with pytest.raises((IndexError, RuntimeError), match="range"):
            call(dense, bad, offsets)
    with pytest.raises(RuntimeError, match="assertion failed"):
        call(dense, values[:-1], offsets)
    with pytest.raises(AssertionError, match="Guard failed"):
        call(dense, values, offsets[:-1])


@pytest.mark.outside_ci
def test_int8_rows_change_auc_by_less_than_a_thousandth(tmp_path):
    settings = [
        "model.embedding_dim=16",
        "model.dense_arch=[8, 16]",
        "synthetic.num_samples=30000",
        "synthetic.table_sizes=[1000, 500, 200]",
        "batch_size=128",
    ]
    run = trained(settings, "synthetic:criteo-kaggle", tmp_path / "run")

    export_run(run, "torch-export", tmp_path / "model.pt2", "int8")

    program = torch.export.load(tmp_path / "model.pt2").module()
    _, source, model = open_saved_model(run)
    batch = source.read(np.array(source.splits["test"]))
    ids = batch.sparse_features.values().view(3, -1).t().contiguous()
    with torch.no_grad():
        logits = model(batch)[1][1], program(batch.dense_features, ids)
    plain, rounded = (roc_auc_score(batch.labels.numpy(), each.numpy()) for each in logits)
    assert plain > 0.6
    assert abs(rounded - plain) < 1e-3


@pytest.mark.outside_ci
@pytest.mark.parametrize("name", ["dlrm", "din"])
def test_a_program_of_int8_rows_is_small_and_almost_as_good(table_store, tmp_path, name):
    more = ["model.embedding_dim=16", "model.dense_arch=[8, 16]", "model.pooling.tag=mean"]
    settings = [*MODELS[name], *more[: 3 if name == "dlrm" else 2], "epochs=3"]
    store = table_store(num_samples=3000, has_weights=False)
    run = trained(settings, str(store), tmp_path / "run")

    command = ["export", str(run), "--to", "torch-export", "--quantize", "int8"]
    assert main([*command, "--out", str(tmp_path / "model.pt2")]) == 0

    num_rows = 400 + 90 + 12
    found = about(tmp_path / "model.pt2")
    assert (found["rows"], found["table_bytes"]) == ("int8", num_rows * 20)
    assert found["features"][1] == {
        "name": "tags",
        "table": "tag",
        "num_embeddings": 12,
        "kind": "multi",
    }
    assert found["histories"] == {"history": "item"}
    program = torch.export.load(tmp_path / "model.pt2")
    tensors = program.state_dict
    rows = {key: each for key, each in tensors.items() if each.dtype == torch.int8}
    assert sum(len(each) for each in rows.values()) == num_rows
    _, source, model = open_saved_model(run)
    inputs, batch = inputs_of(source, np.arange(100))
    with torch.no_grad():
        _, (_, expected, _) = model(batch)
    torch.testing.assert_close(program.module()(*inputs), expected, rtol=0, atol=0.05)


def test_int8_rows_are_within_half_a_scale(monkeypatch):
    monkeypatch.setattr("recsys.train.export._BLOCK_BYTES", 100)
    torch.manual_seed(0)
    weight = torch.randn(33, 5) * torch.logspace(-6, 3, 33).unsqueeze(1)
    weight[4] = 0

    rows, scales = _quantized(weight)

    assert (rows.dtype, rows.shape, scales.shape) == (torch.int8, (33, 5), (33,))
    found = rows.float() * scales.unsqueeze(1)
    assert torch.equal(found[4], weight[4])
    differences = (found - weight).abs()
    assert (differences <= 0.5001 * scales.unsqueeze(1)).all()
    expected = [
        round(value / (max(map(abs, weight[7].tolist())) / 127)) for value in weight[7].tolist()
    ]
    assert rows[7].tolist() == expected


def test_a_row_that_is_not_finite_is_named():
    weight = torch.ones(9, 3)
    weight[6, 1] = torch.nan

    with pytest.raises(WeightsError, match="row 6 must be finite"):
        _quantized(weight)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(table_store, tmp_path, monkeypatch):
    store = table_store(has_weights=False)
    run = trained([], str(store), tmp_path / "run")
    (tmp_path / "there.pt2").write_text("")
    before = sorted(path.name for path in tmp_path.iterdir())

    for name, quantize, error, named in (
        ("model", None, ConfigError, ".pt2"),
        ("there.pt2", None, AlreadyExists, "there.pt2"),
    ):
        with pytest.raises(error, match=named):
            export_run(run, "torch-export", tmp_path / name, quantize)
    with monkeypatch.context() as full_disk:
        full_disk.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=99))
        with pytest.raises(OSError, match="No space"):
            export_run(run, "torch-export", tmp_path / "model.pt2")
    monkeypatch.setattr("torch.export.save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_run(run, "torch-export", tmp_path / "model.pt2")

    assert sorted(path.name for path in tmp_path.iterdir()) == before
    store.rename(tmp_path / "moved")
    with pytest.raises(StoreError, match=str(store)):
        export_run(run, "torch-export", tmp_path / "model.pt2")


def test_int8_rows_are_for_programs_alone(tmp_path):
    command = ["export", str(tmp_path), "--to", "safetensors", "--quantize", "int8"]

    assert main([*command, "--out", str(tmp_path / "model")]) == 2
