import pytest
import torch
from safetensors.torch import load_file

from recsys.train.trainer import train
from tests.fake_graphs import capture_on_cpu


def run(config, folder):
    record = train(config, folder, show_progress=False)
    return record["metrics"], load_file(folder / "model.safetensors")


def require_equal(found, expected):
    assert found[0] == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.in_ci("bf16-dlrm", "fp32-deepfm")
@pytest.mark.parametrize("model", ["dlrm", "dcn_v2", "deepfm"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_whose_dense_part_is_captured_is_the_same_run(
    small_config, tmp_path, monkeypatch, model, precision
):
    made = capture_on_cpu(monkeypatch)
    settings = (f"model.name={model}", f"precision={precision}", "budget=8KiB", "num_threads=1")
    expected = run(small_config(*settings, "capture=false"), tmp_path / "plain")

    found = run(small_config(*settings), tmp_path / "captured")

    require_equal(found, expected)
    assert len(made) == 1


@pytest.mark.parametrize("settings", [("schedule.name=hotline", "budget=8KiB"), ()])
def test_what_is_never_captured_is_not_told(small_config, tmp_path, monkeypatch, settings):
    """Under Hotline parts of mini-batches are trained on; without settings, on the CPU."""
    made = []
    if settings:
        made = capture_on_cpu(monkeypatch)

    run(small_config(*settings), tmp_path / "run")  # where a warning is an error

    assert not made


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_is_captured_and_about_the_same(small_config, tmp_path):
    expected = run(small_config("device=cuda", "capture=false"), tmp_path / "plain")

    found = run(small_config("device=cuda"), tmp_path / "captured")

    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4)
