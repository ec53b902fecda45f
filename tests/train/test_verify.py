"""Budgets: the least one, and `recsys verify`; dry runs, whose figures are in `tests/unit`."""

import pkgutil
import re

import pytest
import torch

from recsys.cli import main
from tests.commands import options, recsys, refused

DATA = "synthetic:criteo-kaggle"
TABLES = "synthetic.table_sizes=[900, 700, 1, 800]"


@pytest.fixture
def command(small_settings):
    """The words of a command on small tables, with more settings."""

    def build(name, *settings):
        return [name, DATA, *small_settings, *options(TABLES, *settings)]

    return build


@pytest.mark.filterwarnings("ignore:tables .* cold tier")
@pytest.mark.parametrize("settings", [(), ("cold_tier=file",), ("schedule=fae", "batch_size=16")])
def test_a_budget_below_the_least_is_refused_with_the_least(command, tmp_path, settings):
    folder = ("--run", tmp_path / "run")
    error = refused(*command("train", *settings, "budget=1KiB"), *folder)
    assert not list(tmp_path.iterdir())

    least = int(re.search(r"(\d+) bytes", error)[1])
    dry = command("train", *settings, f"budget='{least - 1}'")
    assert str(least) in refused(*dry, "--dry-run", *folder)
    recsys(*command("train", *settings, f"budget='{least}'"), *folder)


def test_a_dry_run_makes_no_folder_and_is_for_a_new_run_on_one_process(
    command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    dry = [*command("train"), "--dry-run"]

    recsys(*dry, *options("budget=30KiB"))
    recsys(*dry, "--run", "mine", *options("save_model=false"))
    refused(*dry, "--resume", "--run", "mine")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(*dry, "--run", "mine")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings",
    [
        (f"optimizer.name={name}", f"dense_optimizer.name={name.removeprefix('rowwise_')}")
        for name in ("sgd", "adagrad", "rowwise_adagrad", "adam")
    ],
    ids=lambda settings: settings[0],
)
def test_every_budget_equals_everything_resident(command, settings):
    recsys(*command("verify", *settings))


def test_rows_in_files_equal_everything_resident_even_where_all_would_fit(command, tmp_path):
    rows = ("optimizer.name=adam", "cold_tier=file", f"cold_path={tmp_path}")

    printed = recsys(*command("verify", *rows), "--budgets", "floor", "1MiB")

    assert printed.count("equal to the last bit") == 2
    assert not list(tmp_path.iterdir())


def test_what_differs_is_named_and_the_command_fails(command, monkeypatch, capsys):
    train = pkgutil.resolve_name("recsys.train.trials:_train")

    def wrong(config, source, max_steps):
        numbers, *rest = train(config, source, max_steps)
        if config.budget:
            numbers["loss of step 1"] += 1e-6
        return numbers, *rest

    monkeypatch.setattr("recsys.train.trials._train", wrong)

    assert main([*command("verify"), "--budgets", "half", "--steps", "3"]) == 1
    assert "loss of step 1" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_every_budget_equals_everything_resident_on_a_gpu(command, name):
    recsys(*command("verify", f"optimizer.name={name}", "device=cuda"))
