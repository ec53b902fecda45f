import errno

import pytest
import torch
from safetensors.torch import load_file

from recsys.config import load_config
from recsys.errors import AlreadyExists, ConfigError
from recsys.train.export import export_run
from recsys.train.trainer import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = ["model.embedding_dim=4", "model.dense_arch=[8, 4]", "model.over_arch=[8, 1]"]
    settings += ["synthetic.num_samples=210", f"synthetic.table_sizes={[3] * 8 + [9] * 4}"]
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(load_config(None, settings, data="synthetic:criteo-kaggle"), folder, show_progress=False)
    return folder


def test_an_exported_state_dict_has_the_runs_tensors(run, tmp_path):
    found = load_file(export_run(run, "safetensors", tmp_path / "new" / "model"))

    expected = load_file(run / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_nothing_is_overwritten_and_nothing_left_behind(run, tmp_path, monkeypatch):
    file = tmp_path / "model.pt"
    file.write_text("mine")

    with pytest.raises(AlreadyExists, match="exists already"):
        export_run(run, "safetensors", file)
    assert file.read_text() == "mine"

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("torch.export.save", fail)
    with pytest.raises(OSError, match="disk full"):
        export_run(run, "torch-export", tmp_path / "other.pt2")
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_grow_raises_the_error_of_the_system(run, tmp_path):
    resource = pytest.importorskip("resource")  # there is none on Windows
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as raised:
            export_run(run, "safetensors", tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_model_is_refused(tmp_path):
    for file, name in (("config.toml", "has not ended"), ("run.json", "saved no model")):
        (tmp_path / file).touch()
        with pytest.raises(ConfigError, match=name):
            export_run(tmp_path, "safetensors", tmp_path / "file")
