"""Ranks of a run of which one is killed at a random moment, for `test_killed.py`.

Before the first restart, a rank drawn by the seed kills itself.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path

from ranks_train import run_training
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from recsys._support.user_warnings import plain_warnings
from recsys.train.loop.progress import Progress


def settings_of(run):
    settings = "checkpoint.every_steps=5", "budget=60KiB", "cold_tier=file"
    return [*settings, f"cold_path={run}.rows"]


def kill_later(seconds, mark):
    time.sleep(seconds)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def mark_of(run):
    """The file that a rank makes just before it is killed."""
    return Path(f"{run}.killed")


def kill_soon_after(step, seconds, mark):
    """Let this process be killed some time after a step; step 0 is before the run."""
    thread = threading.Thread(target=kill_later, args=(seconds, mark), daemon=True)
    if not step:
        thread.start()
        return
    add = Progress.add

    def add_and_kill(progress, *arguments):
        add(progress, *arguments)
        if progress.num_steps == step:
            thread.start()

    Progress.add = add_and_kill


def launch(run, seed):
    """Start two ranks as `torchrun --nproc-per-node 2 --max-restarts 3 --standalone` does.

    They are forks, so that they need not import anew.
    """
    config = LaunchConfig(
        *(1, 1, 2),
        max_restarts=3,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"killed-{seed}",
        start_method="fork",
    )
    elastic_launch(config, be_rank)(run, seed)


def be_rank(run, seed):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        generator = random.Random(seed)
        if generator.randrange(int(os.environ["WORLD_SIZE"])) == int(os.environ["RANK"]):
            kill_soon_after(generator.randrange(23), generator.uniform(0, 0.1), mark_of(run))
    with plain_warnings("killed_run"):
        run_training(run, settings_of(run), resume=True)
