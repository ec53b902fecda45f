"""What a dry run says is what the run then takes; a dry run allocates and writes nothing."""

import os
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys.cli import main
from recsys.train.trainer import train
from recsys.train.trials import dry_run

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
    with pytest.warns(UserWarning, match="no cold tier") if told.all_fits else nullcontext():
        record = train(config, run_dir, show_progress=False)

    tiers = record["tiers"]
    assert told.all_fits == (tiers is None) == (budget == "1MiB" and cold_tier == "host")
    if tiers is not None:
        assert told.num_slots == tiers["num_slots"]
        assert told.fast_bytes == tiers["hot_bytes"]
        assert told.num_rows == tiers["num_rows"]
    else:
        assert told.fast_bytes == told.everything_bytes
    in_files = cold_tier == "file"
    assert told.disk_bytes == (told.everything_bytes if in_files else 0)


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

    hot_bytes = told.fast_bytes
    if record["tiers"] is not None:
        assert hot_bytes == record["tiers"]["hot_bytes"]
        assert told.num_slots == record["tiers"]["num_slots"]
    else:
        assert hot_bytes == told.everything_bytes


def test_a_store_with_bags_is_sized_as_it_runs(small_config, table_store, tmp_path):
    config = small_config("budget=15KiB", "cold_tier=file", data=str(table_store()))

    told = dry_run(config, tmp_path / "run")
    record = train(config, tmp_path / "run", show_progress=False)

    assert told.fast_bytes == record["tiers"]["hot_bytes"]


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

    assert told.everything_bytes == sum(sizes) * (128 * 4 + 4) == told.disk_bytes
    assert told.fast_bytes <= 9 * 2**30 < told.fast_bytes + 1024
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
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*command, "--run", "mine"]) == 2
    assert not list(tmp_path.iterdir())
