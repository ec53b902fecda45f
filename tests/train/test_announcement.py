import re
import shutil

import pytest

from recsys._support.sizes import format_bytes
from recsys.train.loop.announcement import warn_of_full_disk
from recsys.train.parts.budget import MemoryNeeds
from recsys.train.parts.build import open_source
from recsys.train.trainer import train


def test_a_run_tells_what_its_tables_and_its_model_file_take(small_config, tmp_path, capsys):
    config = small_config("optimizer.name=rowwise_adagrad", "model.embedding_dim=4")

    record = train(config, tmp_path / "run")

    told, *_ = capsys.readouterr().err.splitlines()
    sizes = record["data"]["table_sizes"]
    num_rows = sum(sizes.values())
    assert told == (
        f"{len(sizes)} tables with {num_rows:,} rows take {format_bytes(num_rows * 20)} with "
        f"optimizer state; their rows in the model file take {format_bytes(num_rows * 16)}"
    )
    assert (tmp_path / "run/model.safetensors").stat().st_size >= num_rows * 16


def test_a_run_that_saves_no_model_does_not_speak_of_its_file(small_config, tmp_path, capsys):
    train(small_config("save_model=false"), tmp_path / "run")

    assert capsys.readouterr().err.splitlines()[0].endswith(" with optimizer state")


def test_a_disk_without_room_for_the_model_is_told_before_training(
    small_config, tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1023)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)

    message = f"^{re.escape(str(tmp_path / 'run'))} has 1023 B of free disk.* choose another disk"
    with pytest.warns(UserWarning, match=message):
        train(small_config(), tmp_path / "run", show_progress=False)

    train(small_config("save_model=false"), tmp_path / "other", show_progress=False)


def test_state_in_files_on_the_disk_of_the_model_counts(small_config, tmp_path, monkeypatch):
    config = small_config("budget=30KiB", "cold_tier=file", "optimizer.name=adagrad")
    needs = MemoryNeeds(config, open_source(config))
    both, settings = needs.everything, (config, open_source(config), tmp_path)

    def set_free(num_bytes):
        usage = shutil.disk_usage(tmp_path)._replace(free=num_bytes)
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)

    set_free(both - 1)
    with pytest.warns(UserWarning, match=r"free disk, .* beside the .* of rows and state in files"):
        warn_of_full_disk(*settings, str(tmp_path / "run.cold"))
    warn_of_full_disk(*settings, "")
    set_free(both)
    warn_of_full_disk(*settings, str(tmp_path / "run.cold"))
