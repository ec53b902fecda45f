"""A budget below the least one is refused before training."""

import re
import warnings

import pytest

from recsys.cli import main
from recsys.errors import BudgetTooSmall
from recsys.train.trainer import train
from recsys.train.trials import dry_run

TABLES = "synthetic.table_sizes=[900, 700, 1, 800]"


@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize("start", [dry_run, train])
def test_a_budget_below_the_least_is_refused_with_the_least(small_config, tmp_path, tier, start):
    settings = TABLES, f"cold_tier={tier}"
    with pytest.raises(BudgetTooSmall) as found:
        start(small_config(*settings, "budget=1KiB"), tmp_path / "run")
    assert not list(tmp_path.iterdir())

    least = re.search(r"(\d+) bytes", str(found.value))[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most rows are used in cold memory
        start(small_config(*settings, f"budget={least}"), tmp_path / "run")


def test_a_command_with_a_budget_that_is_too_small_fails(small_settings, tmp_path, capsys):
    command = ["train", "synthetic:criteo-kaggle", *small_settings, "--set", TABLES]

    assert main([*command, "--set", "budget=1KiB", "--run", str(tmp_path / "run")]) == 2

    assert "budget must be at least" in capsys.readouterr().err
