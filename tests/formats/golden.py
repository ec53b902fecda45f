"""Writes what test_golden.py opens: a store, a run that was stopped, the metrics of a whole one.

python tests/formats/golden.py        in the root of a clone, with the code of a release
"""

import json
import os
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

from recsys.config import load_config
from recsys.train import Callback, train
from tests.commands import recsys

GOLDEN = Path("tests/formats/golden")  # a run records the path of its store
NUM_ROWS, STOP = 600, 5
SETTINGS = (
    "model.embedding_dim=4",
    "model.dense_arch=[8, 4]",
    "model.over_arch=[8, 1]",
    "optimizer.name=adagrad",
    "optimizer.lr=0.1",
    "batch_size=64",
    "num_threads=1",
    "epochs=3",
    "budget=3KiB",
    "checkpoint.every_steps=2",
    "checkpoint.every_seconds=0",
)


class Stop(Callback):
    """Ctrl-C after a few steps."""

    def on_report(self, report):
        if report["step"] == STOP:
            os.kill(os.getpid(), signal.SIGINT)


def write_table(file):
    lines = ["clicked,user,item,price,when"]
    for row in range(NUM_ROWS):
        user, item, price = row * 7 % 83, row * row % 97, row % 11
        clicked = int((user + item) % 5 < 2)
        lines.append(f"{clicked},u{user},i{item},{price},{1_600_000_000 + 60 * row}")
    file.write_text("\n".join(lines) + "\n")


def main():
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    with TemporaryDirectory() as folder:
        table, schema = Path(folder) / "clicks.csv", Path(folder) / "schema.toml"
        write_table(table)
        schema.write_text(recsys("inspect", table))
        recsys("prepare", "table", table, "--schema", schema, "--out", GOLDEN / "store")
        config = load_config(None, [*SETTINGS, f"data={GOLDEN / 'store'}"])
        record = train(config, Path(folder) / "whole", show_progress=False)
    (GOLDEN / "metrics.json").write_text(json.dumps(record["metrics"], indent=1) + "\n")
    train(config, GOLDEN / "run", show_progress=False, callbacks=[Stop()])


if __name__ == "__main__":
    main()
