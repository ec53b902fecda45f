import errno

import pytest
import torch
from safetensors.torch import load_file

from recsys.config import load_config
from recsys.errors import AlreadyExists, CheckpointError, ConfigError
from recsys.models.convert import from_classic
from recsys.train.exports.export import export_run, export_run_checkpoint, export_run_delta
from recsys.train.trainer import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = ["model.embedding_dim=4", "model.dense_arch=[8, 4]", "model.over_arch=[8, 1]"]
    settings += ["synthetic.num_samples=210", f"synthetic.table_sizes={[3] * 8 + [9] * 4}"]
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(load_config(None, settings, data="synthetic:criteo-kaggle"), folder, show_progress=False)
    return folder


def saved_state(run):
    return load_file(run / "model.safetensors")


@pytest.mark.parametrize(
    ("setting", "model"),
    [
        ("model.name=deepfm", "'deepfm' with interaction 'dot'"),
        ("model.interaction=masked_transformer", "'dlrm' with interaction 'masked_transformer'"),
    ],
)
def test_models_that_a_program_does_not_have_are_refused(small_settings, tmp_path, setting, model):
    config = load_config(None, [*small_settings[1::2], setting], data="synthetic:criteo-kaggle")
    train(config, tmp_path / "run", show_progress=False)

    for to, program in (("torchrec", "TorchRec"), ("classic", "facebookresearch/dlrm")):
        with pytest.raises(ConfigError, match=f"{program} has no model for model.name {model}"):
            export_run(tmp_path / "run", to, tmp_path / "model.pt")

    export_run(tmp_path / "run", "safetensors", tmp_path / "model.safetensors")


def test_a_deepfm_with_the_shapes_of_a_dlrm_is_no_classic_model(tmp_path):
    settings = ["synthetic.num_samples=60", f"synthetic.table_sizes={[3] * 7}"]
    settings += ["model.name=deepfm", "model.embedding_dim=4"]
    config = load_config(None, settings, data="synthetic:criteo-kaggle")
    train(config, tmp_path / "run", show_progress=False)

    with pytest.raises(ConfigError, match="facebookresearch/dlrm has no model for"):
        export_run(tmp_path / "run", "classic", tmp_path / "model.pt")


@pytest.mark.parametrize("to", ["torchrec", "safetensors"])
def test_an_exported_state_dict_has_the_runs_tensors(run, tmp_path, to):
    file = export_run(run, to, tmp_path / "new" / "model")

    found = torch.load(file) if to == "torchrec" else load_file(file)
    expected = saved_state(run)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_a_classic_checkpoint_has_what_the_classic_script_reads_for_inference(run, tmp_path):
    checkpoint = torch.load(export_run(run, "classic", tmp_path / "model.pt"))

    for key in ("epoch", "nepochs", "iter", "nbatches", "nbatches_test"):
        assert isinstance(checkpoint[key], int), key
    for key in ("train_acc", "train_loss", "test_acc", "test_loss", "total_loss", "total_accu"):
        assert isinstance(checkpoint[key], float), key
    assert 0 < checkpoint["test_acc"] < 1
    features = [f"cat_{column}" for column in range(12)]
    back = from_classic(checkpoint["state_dict"], features)
    for key, value in saved_state(run).items():
        assert torch.equal(back[key], value), key


def test_nothing_is_overwritten_and_nothing_left_behind(run, tmp_path, monkeypatch):
    file = tmp_path / "model.pt"
    file.write_text("mine")

    with pytest.raises(AlreadyExists, match="exists already"):
        export_run(run, "torchrec", file)
    assert file.read_text() == "mine"

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("torch.save", fail)
    with pytest.raises(OSError, match="disk full"):
        export_run(run, "torchrec", tmp_path / "other.pt")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("to", ["torchrec", "classic", "torch-export"])
def test_a_file_that_cannot_grow_raises_the_error_of_the_system(run, tmp_path, to):
    resource = pytest.importorskip("resource")  # there is none on Windows
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as raised:
            export_run(run, to, tmp_path / "model.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_and_a_run_without_a_model_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"must be one of .* got 'onnx'"):
        export_run(run, "onnx", tmp_path / "file")
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError, match="its run has not ended"):
        export_run(tmp_path, "torchrec", tmp_path / "file")
    (tmp_path / "run.json").touch()
    with pytest.raises(ConfigError, match="the run saved no model"):
        export_run(tmp_path, "torchrec", tmp_path / "file")


def test_checkpoints_of_several_processes_are_refused_by_name(tmp_path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "shards" / "after-00000000").mkdir(parents=True)

    with pytest.raises(CheckpointError, match="shards: checkpoints of several processes cannot"):
        export_run_checkpoint(tmp_path, tmp_path / "file")
    with pytest.raises(CheckpointError, match="shards: checkpoints of several processes cannot"):
        export_run_delta(tmp_path, tmp_path / "file", 1)
    assert not (tmp_path / "file").exists()
