"""What training refuses before it begins: the error, and the name that it gives."""

import pytest
import torch

from recsys.errors import BudgetTooSmall, ConfigError
from recsys.train import Callback, EarlyStopping, train
from tests.commands import options, refused
from tests.conftest import SMALL_SETTINGS

FAE = ("schedule=fae", "budget='5000'", "batch_size=16", "num_threads=1")


def run(config, folder, **options):
    train(config, folder / "run", show_progress=False, **options)


# What is done with the configuration of some settings in a folder.
REFUSALS = [
    (
        "another metric",
        lambda config, _: config("early_stopping.patience=1", "early_stopping.metric=recall"),
        ConfigError,
        "early_stopping.metric",
    ),
    (
        "patience below 0",
        lambda config, _: config("early_stopping.patience=-1"),
        ConfigError,
        "early_stopping.patience",
    ),
    (
        "min_delta below 0",
        lambda config, _: config("early_stopping.patience=1", "early_stopping.min_delta=-0.1"),
        ConfigError,
        "early_stopping.min_delta",
    ),
    (
        "a metric without patience",
        lambda config, _: config("early_stopping.metric=logloss"),
        ConfigError,
        "patience",
    ),
    (
        "min_delta without patience",
        lambda config, _: config("early_stopping.min_delta=0.1"),
        ConfigError,
        "patience",
    ),
    ("patience of 0", lambda *_: EarlyStopping(0), ConfigError, "patience"),
    ("recall", lambda *_: EarlyStopping(1, metric="recall"), ConfigError, "metric"),
    (
        "gauc without groups",
        lambda config, folder: run(
            config("early_stopping.patience=1", "early_stopping.metric=gauc"), folder
        ),
        ConfigError,
        "'gauc'",
    ),
    (
        "an unknown callback",
        lambda config, _: config('callbacks=["tensorbord"]'),
        ConfigError,
        "'tensorbord'",
    ),
    (
        "a file of a callback",
        lambda config, _: config('callbacks=["folder/my_file.py:Mine"]'),
        ConfigError,
        "'folder/my_file.py:Mine'",
    ),
    ("a class alone", lambda config, _: config('callbacks=[":Mine"]'), ConfigError, "':Mine'"),
    ("no name", lambda config, _: config('callbacks=[""]'), ConfigError, "callbacks"),
    (
        "one callback",
        lambda config, _: config('callbacks="tensorboard"'),
        ConfigError,
        "callbacks",
    ),
    ("numbers", lambda config, _: config("callbacks=[1]"), ConfigError, "callbacks"),
    (
        "a class as a callback",
        lambda config, folder: run(config(), folder, callbacks=[Callback]),
        TypeError,
        "Callback",
    ),
    (
        "a function as a callback",
        lambda config, folder: run(config(), folder, callbacks=[print]),
        TypeError,
        "Callback",
    ),
    (
        "two orders",
        lambda config, _: config("shuffle=false", "schedule=fae", "budget=1MiB"),
        ConfigError,
        "shuffle",
    ),
    (
        "fae without a budget",
        lambda config, folder: run(config("schedule=fae"), folder),
        ConfigError,
        "budget",
    ),
    (
        "fae of 2500 bytes",
        lambda config, folder: run(config(*FAE, "budget='2500'"), folder),
        BudgetTooSmall,
        "budget",
    ),
    (
        "fae of 200 %",
        lambda config, folder: run(config(*FAE, "schedule.fae.rate=200"), folder),
        ConfigError,
        "schedule.fae.rate",
    ),
    (
        "other synthetic data",
        lambda config, folder: run(config(data="synthetic:x"), folder),
        ConfigError,
        "synthetic:x",
    ),
    ("a dictionary", lambda _, folder: run({"data": "store"}, folder), TypeError, "dict"),
    ("a name of data", lambda _, folder: run("store", folder), TypeError, "str"),
    (
        "too few samples",
        lambda config, folder: run(config("synthetic.num_samples=8"), folder),
        ConfigError,
        "validation part",
    ),
    (
        "files without a budget",
        lambda config, folder: run(config("cold_tier=file"), folder),
        ConfigError,
        "budget",
    ),
]
DRY = "train synthetic:criteo-kaggle --run run --dry-run"
COMMANDS = [
    (f"{DRY} --set callbacks=['no_such_module:Mine']", "no_such_module"),
    (f"{DRY} --set plan=nosuch --set budget=1MiB", "nosuch"),
    ("train synthetic:criteo-kaggle --run . --dry-run", "not empty"),
    ("train . --run run --dry-run", "meta.json"),
    ("verify synthetic:criteo-kaggle --set schedule=fae --set budget=5000", "order"),
    ("verify synthetic:criteo-kaggle --set schedule=hotline", "'hotline'"),
    ("verify synthetic:criteo-kaggle --set embeddings=torch", "'torch'"),
    ("verify synthetic:criteo-kaggle --set skip=random_drop", "random_drop"),
    ("verify synthetic:criteo-kaggle --steps 0", "max_steps"),
    ("evaluate .", "config.toml"),
]
if not torch.cuda.is_available():
    COMMANDS.append((f"{DRY} --set device=cuda", "CUDA"))


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name_before_a_run_has_a_folder(small_config, tmp_path, act, error, name):
    with pytest.raises(error) as raised:
        act(small_config, tmp_path)

    assert name in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "name"), COMMANDS)
def test_a_command_is_refused_by_name(tmp_path, monkeypatch, words, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").touch()
    settings = [] if words.startswith("evaluate") else options(*SMALL_SETTINGS)

    assert name in refused(*words.split(), *settings)
    assert not (tmp_path / "run").exists()
