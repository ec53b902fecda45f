"""What training refuses before it begins, and metrics: the error, and the name that it gives."""

import numpy as np
import pytest
import torch

from recsys.errors import AlreadyExists, BudgetTooSmall, ConfigError, StoreError
from recsys.train import Callback, EarlyStopping, train
from recsys.train.build import open_source
from recsys.train.evaluate import evaluate_run
from recsys.train.metrics import auc
from recsys.train.trials import dry_run, verify_budgets
from tests.train.judged_stores import evaluate_logits

FAE = ("schedule=fae", "budget='5000'", "batch_size=16", "num_threads=1")
ZEROS, LABELS = np.zeros(4, np.float32), np.array([0, 1, 0, 1])


def run(config, folder, **options):
    train(config, folder / "run", show_progress=False, **options)


def dry_run_in(config, folder):
    (folder / "full").mkdir()
    (folder / "full" / "notes").touch()
    dry_run(config, folder / "full")


def judge(logits, labels):
    evaluate_logits(np.array(logits, np.float32), np.array(labels))


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
        "a callback twice",
        lambda config, _: config('callbacks=["tensorboard","own:Mine","tensorboard"]'),
        ConfigError,
        "'tensorboard'",
    ),
    (
        "one callback",
        lambda config, _: config('callbacks="tensorboard"'),
        ConfigError,
        "callbacks",
    ),
    ("numbers", lambda config, _: config("callbacks=[1]"), ConfigError, "callbacks"),
    (
        "a callback of no module",
        lambda config, folder: dry_run(config('callbacks=["no_such_module:Mine"]'), folder / "run"),
        ConfigError,
        "no_such_module",
    ),
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
        "verify fae",
        lambda config, _: verify_budgets(config(*FAE)),
        ConfigError,
        "order",
    ),
    (
        "verify torch",
        lambda config, _: verify_budgets(config("embeddings=torch")),
        ConfigError,
        "'torch'",
    ),
    (
        "verify no step",
        lambda config, _: verify_budgets(config(), max_steps=0),
        ConfigError,
        "max_steps",
    ),
    (
        "verify hotline",
        lambda config, _: verify_budgets(config("schedule=hotline")),
        ConfigError,
        "'hotline'",
    ),
    (
        "verify what skips",
        lambda config, _: verify_budgets(config("skip=random_drop")),
        ConfigError,
        "random_drop",
    ),
    (
        "other synthetic data",
        lambda config, _: open_source(config(data="synthetic:x")),
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
    ("a folder of no run", lambda _, folder: evaluate_run(folder), ConfigError, "config.toml"),
    (
        "files without a budget",
        lambda config, folder: run(config("cold_tier=file"), folder),
        ConfigError,
        "budget",
    ),
    (
        "a dry run in a full folder",
        lambda config, folder: dry_run_in(config(), folder),
        AlreadyExists,
        "full",
    ),
    (
        "a dry run of no store",
        lambda config, folder: dry_run(config(data=str(folder)), folder / "run"),
        StoreError,
        "store",
    ),
    (
        "a dry run of no plan",
        lambda config, folder: dry_run(config("plan=nosuch", "budget=1MiB"), folder / "run"),
        FileNotFoundError,
        "nosuch",
    ),
    ("a score of NaN", lambda *_: auc(np.array([0.5, np.nan]), LABELS[:2]), ValueError, "NaN"),
    ("more labels", lambda *_: auc(np.zeros(2), np.zeros(3)), ValueError, "(N,)"),
    ("no samples", lambda *_: judge([], []), ValueError, "one sample"),
    ("a label of -1", lambda *_: judge(ZEROS, [0, 1, -1, -1]), ValueError, "labels"),
    ("a label of NaN", lambda *_: judge(ZEROS, [0, 1, np.nan, 0]), ValueError, "labels"),
    ("a label of 0.5", lambda *_: judge(ZEROS, [0, 1, 0.5, 0.5]), ValueError, "labels"),
    ("a label of 2", lambda *_: judge(ZEROS, [0, 1, 2, 2]), ValueError, "labels"),
    ("an area of 2", lambda *_: auc(ZEROS, np.array([0, 1, 2, 2])), ValueError, "labels"),
]
if not torch.cuda.is_available():
    REFUSALS.append(
        (
            "a dry run on no GPU",
            lambda config, folder: dry_run(config("device=cuda"), folder / "run"),
            ConfigError,
            "CUDA",
        )
    )


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name_before_a_run_has_a_folder(small_config, tmp_path, act, error, name):
    with pytest.raises(error) as raised:
        act(small_config, tmp_path)

    assert name in str(raised.value)
    assert not (tmp_path / "run").exists()
