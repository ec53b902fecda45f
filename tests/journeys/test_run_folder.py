"""Journey 10: what a run shows while it trains, what it leaves, and whom it tells."""

import json
import re
import sys
from unittest.mock import MagicMock

import pytest

from recsys.cli import main
from recsys.train import Callback
from tests.commands import options, recsys
from tests.journeys.journey import SYNTHETIC, auc_of, history_of, record_of


class Tell(Callback):
    """A callback of one's own: it keeps what it is told beside the run."""

    def on_train_start(self, run_dir, record):
        self.file, self.aucs = run_dir.with_suffix(".told"), []

    def on_validation_end(self, evaluation):
        self.aucs.append(evaluation["validation"]["auc"])

    def on_fit_end(self, record):
        self.file.write_text(json.dumps([record["status"], self.aucs]))


@pytest.fixture
def packages(monkeypatch):
    """MLflow and Weights & Biases, or what keeps the calls that they get."""
    found = {name: MagicMock() for name in ("mlflow", "wandb")}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def losses_of_tensorboard(folder):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(folder))
    found.Reload()
    return [event.value for event in found.Scalars("train/loss")]


def test_a_run_is_shown_kept_and_told(tmp_path, packages, capfd):
    run = tmp_path / "run"
    names = ["tensorboard", "mlflow", "wandb", f"{__name__}:Tell"]
    settings = (f"callbacks={json.dumps(names)}", "eval.every_steps=10", "budget=30KiB")
    words = ["--run", str(run), *options(*SYNTHETIC, *settings)]

    assert main(["train", "synthetic:criteo-kaggle", *words]) == 0
    printed, progress = capfd.readouterr()
    recsys("report", run)

    record, page = record_of(run), (run / "report.html").read_text()
    (stages,) = re.findall(r"(?m)^stages +(.*)$", printed)
    shares = {name: int(share) for name, share in re.findall(r"([a-z]+) (\d+)%", stages)}
    seconds = record["throughput"]["train_seconds"]
    for stage in ("forward", "backward"):
        share = 100 * record["stalls"][f"{stage}_seconds"] / seconds
        assert shares[stage] == pytest.approx(share, abs=1)
    assert len(re.findall(r"\d+%\|", progress)) > 1
    assert f"{auc_of(run):.4f}" in page

    history = history_of(run)
    losses = [line["train_loss"] for line in history if "train_loss" in line]
    aucs = [line["validation"]["auc"] for line in history if "validation" in line]
    status, told = json.loads((tmp_path / "run.told").read_text())
    assert status == "finished"
    assert len(told) >= 2
    assert told == aucs[: len(told)]
    assert losses_of_tensorboard(run / "tensorboard") == pytest.approx(losses)
    logged = packages["wandb"].init.return_value.log.call_args_list
    kept = packages["mlflow"].log_metrics.call_args_list
    for calls in (logged, kept):
        assert [
            call.args[0]["train/loss"] for call in calls if "train/loss" in call.args[0]
        ] == losses
