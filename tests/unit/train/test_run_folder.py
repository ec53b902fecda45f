"""The files of a run: what is read as it was written, and what damage is refused by name."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from recsys.config import TrainConfig, load_config
from recsys.errors import ConfigError
from recsys.train.run_folder import RunFolder


def test_a_configuration_is_written_as_it_is_read_in_every_locale(tmp_path):
    code = (
        "import pathlib, sys; from recsys.config import TrainConfig; "
        "from recsys.train.run_folder import RunFolder; "
        "RunFolder(pathlib.Path(sys.argv[1])).write_config(TrainConfig(data='gr\\xf6\\xdfe'))"
    )
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, tmp_path], env=os.environ | locale, check=True)

    assert load_config(RunFolder(tmp_path).config_file) == TrainConfig(data="gr\xf6\xdfe")


def test_a_history_is_read_as_written_without_a_line_that_was_cut_off(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_history({"num_samples": 1, "a": [float("nan"), 1.0], "b": {"c": float("inf")}})
    folder.append_history({"num_samples": 2})
    whole = folder.history_file.read_text()

    folder.history_file.write_text(whole[:-4])

    assert folder.read_history() == [{"num_samples": 1, "a": [None, 1.0], "b": {"c": None}}]
    folder.continue_run(TrainConfig(), len(whole))
    assert folder.history_file.read_text() == whole[: whole.index("\n") + 1]
    for line in ('{"num_samples": ', "[" * 90_000, "[]"):
        folder.history_file.write_text(f"{whole}{line}\n")
        with pytest.raises(ConfigError, match=r"history\.jsonl line 3"):
            folder.read_history()


@pytest.mark.parametrize("damage", ["empty", "cut", "header", "dtype"])
def test_a_damaged_model_and_one_of_another_dtype_are_refused_by_name(tmp_path, damage):
    folder, model = RunFolder(tmp_path), torch.nn.Linear(2, 1)
    save_file(torch.nn.Linear(2, 1).double().state_dict(), folder.model_file)
    data = folder.model_file.read_bytes()
    damaged = {"empty": b"", "cut": data[:-1], "header": b"\xff" * 8 + data[8:], "dtype": data}
    folder.model_file.write_bytes(damaged[damage])

    with pytest.raises(ConfigError, match=r"bias is F64|model\.safetensors"):
        folder.load_model(model)
