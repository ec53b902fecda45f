import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from recsys.config import TrainConfig
from recsys.errors import ConfigError
from recsys.train.run_folder import RunFolder, write_json


@pytest.fixture
def folder(tmp_path):
    found = RunFolder(tmp_path)
    found.append_history({"num_samples": 8, "train_seconds": 0.5, "train_loss": 0.7})
    found.append_history({"num_samples": 8, "validation": {"auc": 0.5, "logloss": 0.7}})
    write_json(found.record_file, RECORD)
    return found


RECORD = {
    "status": "finished",
    "config": {},
    "environment": {},
    "data": {"name": "store", "num_samples": 8, "table_sizes": {}},
    "metrics": {"test": {"auc": 0.5}, "validation": None},
    "throughput": {
        "samples_per_second": None,
        "num_samples": 8,
        "num_steps": 1,
        "train_seconds": 0.5,
    },
}


def test_a_configuration_is_written_as_it_is_read_in_every_locale(tmp_path):
    code = (
        "import sys; from recsys.config import TrainConfig; "
        "from recsys.train.run_folder import RunFolder; "
        "RunFolder.create(sys.argv[1], TrainConfig(data='gr\\xf6\\xdfe'))"
    )
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, tmp_path], env=os.environ | locale, check=True)

    assert RunFolder(tmp_path).read_config() == TrainConfig(data="gr\xf6\xdfe")


def test_a_history_and_a_record_are_read_as_written(folder):
    assert [entry["num_samples"] for entry in folder.read_history()] == [8, 8]
    assert folder.read_record() == RECORD


@pytest.mark.parametrize("line", ['{"num_samples": ', "[" * 90_000, "[]"])
def test_a_line_of_the_history_that_is_no_object_is_named(folder, line):
    with folder.history_file.open("a") as file:
        file.write(f"{line}\n")

    with pytest.raises(ConfigError, match=r"history\.jsonl line 3"):
        folder.read_history()


@pytest.mark.parametrize("damage", ["empty", "cut", "header"])
def test_a_damaged_model_is_refused_by_name(folder, damage):
    model = torch.nn.Linear(2, 1)
    save_file(model.state_dict(), folder.model_file)
    data = folder.model_file.read_bytes()
    folder.model_file.write_bytes(
        {"empty": b"", "cut": data[:-1], "header": b"\xff" * 8 + data[8:]}[damage]
    )

    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged .*train again"):
        folder.load_model(model)


def test_a_model_of_another_dtype_is_refused(folder):
    model = torch.nn.Linear(2, 1)
    save_file(model.double().state_dict(), folder.model_file)

    with pytest.raises(ConfigError, match=r"bias is F64 \[1\] in the file and F32"):
        folder.load_model(torch.nn.Linear(2, 1))
