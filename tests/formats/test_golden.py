"""Files of 0.1.0 open as long as their formats have the same version."""

import json
import shutil
from pathlib import Path

import pytest

from recsys.datasets import Store
from tests.commands import recsys

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.filterwarnings("ignore:.*rows of mini-batches")
def test_a_run_goes_on_from_a_checkpoint_and_a_store_of_an_earlier_release(tmp_path):
    shutil.copytree(GOLDEN / "run", tmp_path / "run")

    recsys("train", GOLDEN / "store", "--run", tmp_path / "run", "--resume")

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    expected = json.loads((GOLDEN / "metrics.json").read_text())
    assert record["resumed"]
    for split, metrics in expected.items():
        assert record["metrics"][split] == pytest.approx(metrics, abs=1e-5)


def test_a_store_of_an_earlier_release_opens():
    assert Store(GOLDEN / "store").num_samples == 600
