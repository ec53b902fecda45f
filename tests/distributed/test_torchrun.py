"""The command of docs/distributed.md: `torchrun` starts `recsys train` on several processes."""

import shutil
import subprocess
import sysconfig

import pytest

pytest.importorskip("torchrec")

from ranks_train import SETTINGS

TORCHRUN = shutil.which("torchrun", path=sysconfig.get_path("scripts"))


@pytest.mark.outside_ci
@pytest.mark.slow
@pytest.mark.skipif(TORCHRUN is None, reason="torchrun is not installed beside this Python")
def test_torchrun_trains_the_run_that_ranks_train(ranks, tmp_path):
    expected, found = tmp_path / "expected", tmp_path / "found"
    ranks("trains_a_run", run=str(expected))
    command = f"{TORCHRUN} --standalone --nproc-per-node 2 -m -- recsys train"
    settings = [part for each in SETTINGS for part in ("--set", each)]

    ended = subprocess.run(
        [*command.split(), "synthetic:criteo-kaggle", "--run", found, "--resume", *settings],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("normalized entropy") == 1  # of the first process alone
    model = "model.safetensors"
    assert (found / model).read_bytes() == (expected / model).read_bytes()
