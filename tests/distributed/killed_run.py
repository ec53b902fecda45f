"""A rank of a run that is killed at a random moment, for `test_killed.py`.

    torchrun ... killed_run.py RUN SEED

Before the first restart, a rank drawn by the seed kills itself. An unset seed kills nothing.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from ranks_train import run_training

from recsys._support.plain_warnings import plain_warnings


def kill_later(generator):
    time.sleep(generator.uniform(0, 5))
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    run, seed = Path(sys.argv[1]), sys.argv[2]
    if seed != "none" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        generator = random.Random(int(seed))
        if generator.randrange(int(os.environ["WORLD_SIZE"])) == int(os.environ["RANK"]):
            threading.Thread(target=kill_later, args=(generator,), daemon=True).start()
    settings = ["checkpoint.every_steps=5", "budget=60KiB", "cold_tier=file"]
    with plain_warnings("killed_run"):
        run_training(run, settings, resume=True)


if __name__ == "__main__":
    main()
