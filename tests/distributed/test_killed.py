"""A rank that is killed at a random moment: under `torchrun --max-restarts` the run goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks_shared import IS_STRESS

pytest.importorskip("torchrec")

from killed_run import settings_of  # imports TorchRec

HERE = Path(__file__).parent
SEEDS = range(20) if IS_STRESS else range(1)


def launch(run, seed):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--standalone", "--", str(HERE / "killed_run.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    found = subprocess.run(
        [*command, str(run), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stderr


@pytest.mark.slow
def test_a_killed_run_ends_as_an_uninterrupted_one(ranks, tmp_path):
    whole = str(tmp_path / "whole")
    ranks("trains_a_run", run=whole, settings=settings_of(whole))
    expected = (tmp_path / "whole" / "model.safetensors").read_bytes()

    for seed in SEEDS:
        run = tmp_path / f"run-{seed}"
        messages = launch(run, seed)
        assert "exitcode: -9" in messages, messages
        assert "not synced" not in messages, messages
        assert "warning" not in messages, messages
        assert (run / "model.safetensors").read_bytes() == expected, seed
        assert sorted(path.name for path in Path(f"{run}.rows").iterdir()) == [
            f"model.sparse_arch.embedding_bag_collection.collection.rank-{rank}-of-2"
            for rank in range(2)
        ]
