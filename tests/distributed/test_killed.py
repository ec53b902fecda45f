"""A rank that is killed at a random moment: under `torchrun --max-restarts` the run goes on."""

from pathlib import Path

import pytest
from ranks_shared import IS_STRESS

pytest.importorskip("torchrec")

from killed_run import launch, mark_of, settings_of  # imports TorchRec

from tests.forks import Fork

SEEDS = range(20) if IS_STRESS else range(1)


@pytest.mark.outside_ci
@pytest.mark.slow
def test_a_killed_run_ends_as_an_uninterrupted_one(ranks, tmp_path):
    whole = str(tmp_path / "whole")
    ranks("trains_a_run", run=whole, settings=settings_of(whole))
    expected = (tmp_path / "whole" / "model.safetensors").read_bytes()

    for seed in SEEDS:
        run = tmp_path / f"run-{seed}"
        fork = Fork(launch, run, seed)
        _, messages = fork.end()
        assert fork.process.exitcode == 0, messages[-3000:]
        assert mark_of(run).exists()
        assert "warning" not in messages, messages
        assert (run / "model.safetensors").read_bytes() == expected, seed
        assert not list(Path(f"{run}.rows").iterdir())
