"""A budget that is too small is refused before training, by a value that works."""

import re

import pytest

from recsys.cli import main
from recsys.errors import BudgetTooSmall
from recsys.train.parts.budget import require_budget
from recsys.train.parts.build import open_source
from recsys.train.trainer import train

TABLES = "synthetic.table_sizes=[900, 700, 1, 800]"
SEQUENTIAL = "schedule.name=sequential"  # there is no room to look ahead


def named_budget(error):
    return re.search(r"set budget=(\w+), which holds every", str(error))[1]


@pytest.mark.filterwarnings("ignore::UserWarning")  # too few steps to skip in
@pytest.mark.parametrize(
    "more",
    [
        ("optimizer.name=sgd", "cold_tier=host"),
        ("optimizer.name=sgd", "cold_tier=file"),
        ("optimizer.name=adagrad", "cold_tier=host"),
        ("optimizer.name=adagrad", "cold_tier=file"),
        ("skip.policy=observe",),  # which takes of the budget
    ],
)
def test_a_budget_that_is_too_small_names_one_that_trains(small_config, tmp_path, more):
    settings = (TABLES, *more)
    with pytest.raises(BudgetTooSmall, match="budget='1KiB'") as found:
        train(small_config(*settings, "budget=1KiB"), tmp_path / "run", show_progress=False)
    assert not list(tmp_path.iterdir())

    config = small_config(*settings, f"budget={named_budget(found.value)}", SEQUENTIAL)
    record = train(config, tmp_path / "run", show_progress=False)

    assert record["status"] == "finished"
    if "skip.policy=observe" not in more:
        assert record["tiers"]["num_slots"] < record["tiers"]["num_rows"]


def test_a_budget_for_bags_that_is_too_small_names_one_that_trains(
    small_config, table_store, tmp_path
):
    store = str(table_store())
    with pytest.raises(BudgetTooSmall) as found:
        train(small_config("budget=100", data=store), tmp_path / "run", show_progress=False)

    settings = (f"budget={named_budget(found.value)}", "cold_tier=file", SEQUENTIAL)
    config = small_config(*settings, data=store)
    assert train(config, tmp_path / "run", show_progress=False)["status"] == "finished"


def test_everything_resident_needs_no_room_for_mini_batches(small_config):
    config = small_config(TABLES, f"budget={2401 * 4 * 4}")

    require_budget(config, open_source(config))


def test_a_budget_that_a_later_mini_batch_exceeds_is_told_with_one_that_suffices(
    small_settings, tmp_path, capsys
):
    command = ["train", "synthetic:criteo-kaggle", *small_settings, "--set", TABLES]
    assert main([*command, "--set", "budget=1KiB", "--run", str(tmp_path / "none")]) == 2
    least = int(re.search(r"\((\d+) bytes\)", capsys.readouterr().err)[1])  # of the first one

    assert main([*command, "--set", f"budget={least}", "--run", str(tmp_path / "first")]) == 2
    said = capsys.readouterr().err
    enough = re.search(r"budget=(\S+) holds every mini-batch", said)[1]

    more = ["--set", f"budget={enough}", "--run", str(tmp_path / "run")]
    assert main([*command, *more]) == 0
