"""What a dry run says is what the run then takes; a dry run allocates and writes nothing."""

import os
import re
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys._support.sizes import parse_bytes
from recsys.cli import main
from recsys.train.dry_run import dry_run
from recsys.train.parts.budget import MemoryNeeds
from recsys.train.parts.build import open_source
from recsys.train.trainer import train

DATA = "synthetic:criteo-kaggle"
TABLES = "synthetic.table_sizes=[900, 700, 1, 800]"


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor in memory that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        found = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        sizes = [each.nbytes for each in found if not each.is_meta]
        self.num_bytes = max([self.num_bytes, *sizes])
        return result


@pytest.mark.in_ci("30KiB-host-sgd", "30KiB-file-adam", "1MiB-host-rowwise_adagrad")
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("cold_tier", ["host", "file"])
@pytest.mark.parametrize("budget", ["30KiB", "1MiB"])
def test_the_figures_are_those_of_the_run(small_config, tmp_path, optimizer, cold_tier, budget):
    settings = [TABLES, f"optimizer.name={optimizer}", f"budget={budget}"]
    settings += [f"cold_tier={cold_tier}", "checkpoint.every_steps=5"]
    if cold_tier == "file":
        settings.append(f"cold_path={tmp_path / 'cold'}")
    config, run_dir = small_config(*settings), tmp_path / "run"

    told = dry_run(config, run_dir)
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="no cold tier") if told.tables.all_fits else nullcontext():
        record = train(config, run_dir, show_progress=False)

    tiers = record["tiers"]
    assert told.tables.all_fits == (tiers is None) == (budget == "1MiB" and cold_tier == "host")
    if tiers is not None:
        assert told.tables.num_slots == tiers["num_slots"]
        assert told.tables.fast_bytes == tiers["hot_bytes"]
        assert told.tables.num_rows == tiers["num_rows"]
    else:
        assert told.tables.fast_bytes == told.tables.everything_bytes
    in_files = cold_tier == "file"
    assert told.tables.disk_bytes == (told.tables.everything_bytes if in_files else 0)
    needs = MemoryNeeds(config, open_source(config))
    assert told.tables.everything_bytes == needs.everything


@pytest.mark.filterwarnings("ignore:staleness")
@pytest.mark.parametrize(
    "settings",
    [
        ["schedule=fae", "budget=30KiB"],
        [
            "skip.observe.staleness.window=33",
            "skip.observe.staleness.max_rows=20",
            "batch_size=8",
            "budget=60KiB",
            "cold_tier=file",
        ],
        ["model.name=dcn_v2", "budget=30KiB"],
        ["embeddings=torch", "optimizer.name=adagrad"],
    ],
)
def test_schedules_policies_models_and_providers_are_sized_as_they_run(
    small_config, tmp_path, settings
):
    config = small_config(TABLES, "synthetic.num_samples=2100", *settings)

    told = dry_run(config, tmp_path / "run")
    record = train(config, tmp_path / "run", show_progress=False)

    skipped = record["skipped"]
    assert told.tracker_bytes == (skipped["staleness"]["memory_bytes"] if skipped else 0)
    hot_bytes = told.tables.fast_bytes
    if record["tiers"] is not None:
        assert hot_bytes == record["tiers"]["hot_bytes"]
        assert told.tables.num_slots == record["tiers"]["num_slots"]
    else:
        assert hot_bytes == told.tables.everything_bytes


def test_a_store_with_bags_is_sized_as_it_runs(small_config, table_store, tmp_path):
    config = small_config("budget=15KiB", "cold_tier=file", data=str(table_store()))

    told = dry_run(config, tmp_path / "run")
    record = train(config, tmp_path / "run", show_progress=False)

    assert told.tables.fast_bytes == record["tiers"]["hot_bytes"]
    assert told.enough_bytes > told.tables.floor_bytes  # bags may have any rows


def test_enough_budget_is_never_more_than_everything(small_config, tmp_path):
    settings = ["synthetic.table_sizes=[9, 7, 1, 8]", "budget=1200", "batch_size=4"]

    told = dry_run(small_config(*settings), tmp_path / "run")
    in_files = dry_run(small_config(*settings, "cold_tier=file"), tmp_path / "run")

    everything = told.tables.everything_bytes
    assert told.enough_bytes == everything
    enough = small_config(*settings, f"budget={told.enough_bytes}")
    assert dry_run(enough, tmp_path / "run").tables.all_fits
    assert in_files.enough_bytes > everything  # rows in files need the row map, too


@pytest.mark.parametrize("sizes", ["[3000, 500, 200]", "[3000, 500, 201]", "[3000, 507, 233]"])
@pytest.mark.parametrize("batch_size", [64, 96, 900])
def test_budgets_are_enough_as_they_are_printed(small_config, tmp_path, sizes, batch_size):
    settings = [f"synthetic.table_sizes={sizes}", f"batch_size={batch_size}", "budget=1MiB"]

    told = dry_run(small_config(*settings), tmp_path / "run")

    printed = dict(re.findall(r"^(least budget|enough budget) +(\S+ \S+)  ", str(told), re.M))
    exact = {"least budget": told.tables.floor_bytes, "enough budget": told.enough_bytes}
    assert set(printed) == set(exact)
    for name, num_bytes in exact.items():
        assert num_bytes <= parse_bytes(printed[name]) <= 1.02 * num_bytes


def test_a_terabyte_of_synthetic_tables_is_sized_without_its_memory(
    small_config, tmp_path, monkeypatch
):
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: type(real)((*real[:4], 2**50, *real[5:])))
    sizes = [80_000_000] * 26
    config = small_config(
        f"synthetic.table_sizes={sizes}",
        "model.embedding_dim=128",
        "model.dense_arch=[8, 128]",
        "budget=9GiB",
        "cold_tier=file",
        "optimizer.name=rowwise_adagrad",
    )

    with LargestTensor() as largest:
        told = dry_run(config, tmp_path / "run")

    assert told.tables.everything_bytes == sum(sizes) * (128 * 4 + 4) == told.tables.disk_bytes
    assert told.tables.fast_bytes <= 9 * 2**30 < told.tables.fast_bytes + 1024
    assert largest.num_bytes < 2**24
    assert not list(tmp_path.iterdir())


def test_the_command_makes_no_folder_and_is_for_a_new_run_on_one_process(
    small_settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command = ["train", DATA, *small_settings, "--set", TABLES, "--dry-run"]

    assert main([*command, "--set", "budget=30KiB"]) == 0
    assert main([*command, "--run", "mine", "--set", "save_model=false"]) == 0
    assert main([*command, "--set", "budget=1KiB"]) == 2
    assert main([*command, "--resume", "--run", "mine"]) == 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*command, "--run", "mine"]) == 2
    assert not list(tmp_path.iterdir())
