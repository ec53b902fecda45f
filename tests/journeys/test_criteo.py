"""Journey 1: from raw Criteo data to an AUC in two commands."""

import gzip
import re
import subprocess
import sys

import pytest

from tests.commands import options, recsys
from tests.journeys.journey import SMALL, auc_of, criteo_lines


def write_raw(path, seed):
    path.write_bytes(gzip.compress("\n".join(criteo_lines(seed)).encode() + b"\n"))
    return path


def printed_auc(printed):
    return [float(found) for found in re.findall(r"(?mi)^auc\s.*?(0\.\d+)", printed)]


def test_two_commands_lead_from_a_raw_kaggle_file_to_an_auc(tmp_path):
    raw = write_raw(tmp_path / "train.txt.gz", 0)
    store, run = tmp_path / "store", tmp_path / "run"
    commands = (
        ["prepare", "criteo-kaggle", raw, "--out", store],
        ["train", store, "--run", run, *options(*SMALL, "epochs=3")],
    )

    for words in commands:
        ended = subprocess.run(
            [sys.executable, "-m", "recsys", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr

    assert auc_of(run) > 0.65
    assert printed_auc(ended.stdout)[0] == pytest.approx(auc_of(run), abs=1e-4)
    assert printed_auc(recsys("evaluate", run))[0] == pytest.approx(auc_of(run), abs=1e-4)


def test_days_of_criteo_1tb_become_a_store_to_train_on(tmp_path):
    days = [write_raw(tmp_path / f"day_{day}.gz", day) for day in range(3)]
    store, run = tmp_path / "store", tmp_path / "run"

    recsys("prepare", "criteo-1tb", *days, "--out", store, "--max-ind-range", 250)
    recsys("train", store, "--run", run, *options(*SMALL))

    assert auc_of(run) > 0.65
