"""Keys become a configuration, and a configuration becomes the keys that it was made of."""

import pytest
import torch

from recsys.config import (
    OptimizerConfig,
    TrainConfig,
    describe_config,
    load_config,
    replace,
    to_toml,
    walk_keys,
)
from recsys.embeddings.staleness.settings import Staleness
from recsys.errors import ConfigError
from recsys.pipeline import DropInput, Observe, Paper, RandomDrop
from recsys.pipeline.skip.policies import Guard

FAE = ("schedule.fae.rate=100", "schedule.fae.adaptive=false", "budget=1MiB")


def test_settings_win_over_the_file_and_values_over_both(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        'seed = 1\nepochs = 2\ndata = "file"\n[optimizer]\nlr = 0.5\nname = "adagrad"\n',
        encoding="utf-8-sig",  # as editors on Windows write it
    )

    config = load_config(file, ["optimizer.lr=1", "epochs = 3"], data="given")

    assert (config.seed, config.epochs, config.data) == (1, 3, "given")
    assert config.optimizer == OptimizerConfig(name="adagrad", lr=1.0)


def test_a_budget_may_be_a_number_of_bytes():
    assert load_config(None, ["budget=135050380"]) == load_config(None, ['budget="135050380"'])
    assert TrainConfig(budget=0).budget == "0"  # the least budget, not none


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["model.dense_arch=[8, 4]", "model.embedding_dim=4", "dense_optimizer.lr=0.5"],
        ["model.table_dims.C3=8", "model.table_dims.C4=2", "model.pooling.C3=mean"],
        ["skip.drop_input.guard.every=1500", "skip.drop_input.share=0.4"],
        ["skip=importance", "schedule=hotline"],
        ["schedule.fae.rate=100", "budget=1MiB"],
        ["model.name=din", "model.din.attention=[8]"],
        ["model.interaction.masked_transformer.kept=4"],
    ],
)
def test_what_is_written_is_what_was_read(tmp_path, settings):
    config = load_config(None, settings, data="some/store")
    file = tmp_path / "config.toml"

    file.write_text(to_toml(config))

    assert load_config(file) == config


@pytest.mark.parametrize(
    ("settings", "name", "lr", "rows_eps", "eps"),
    [
        ([], "sgd", 0.1, 1e-10, 1e-10),
        (["optimizer.name=rowwise_adagrad"], "adagrad", 0.1, 1e-10, 1e-10),
        (["optimizer.name=partial_rowwise_adam"], "adam", 0.1, 1e-8, 1e-8),
        (["optimizer.name=adam", "dense_optimizer.lr=0.5"], "adam", 0.5, 1e-8, 1e-8),
        (["optimizer.name=adam", "dense_optimizer.name=adagrad"], "adagrad", 0.1, 1e-8, 1e-10),
        (["dense_optimizer.name=adam"], "adam", 0.1, 1e-10, 1e-8),
        (["optimizer.eps=1e-5", "dense_optimizer.name=adam"], "adam", 0.1, 1e-5, 1e-5),
        (["optimizer.name=adam", "dense_optimizer.eps=1e-5"], "adam", 0.1, 1e-8, 1e-5),
    ],
)
def test_the_dense_part_takes_from_the_rows_what_is_not_set(settings, name, lr, rows_eps, eps):
    config = load_config(None, settings)

    dense = config.resolved_dense_optimizer
    assert (dense.name, dense.lr, config.optimizer.eps, dense.eps) == (name, lr, rows_eps, eps)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_the_default_eps_is_torchs(name):
    torchs = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[name]([torch.zeros(1)])

    assert OptimizerConfig(name=name).eps == torchs.defaults["eps"]


def test_the_dense_part_follows_when_the_rows_optimizer_is_replaced():
    config = replace(TrainConfig(), optimizer=OptimizerConfig(name="adagrad", lr=0.01))

    assert config.resolved_dense_optimizer == config.optimizer
    assert describe_config(config)["dense_optimizer"]["lr"] == 0.01


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], [1, 1, 1, 1, 1, 1]),
        (["warmup_steps=4"], [0.25, 0.5, 0.75, 1, 1, 1]),
        (["decay=linear", "warmup_steps=2"], [0.5, 1, 1, 0.75, 0.5, 0.25]),
        (["decay=linear", "decay_start=2", "decay_steps=2"], [1, 1, 1, 0.5, 0, 0]),
        (["decay=linear", "decay_steps=2", "final=0.5"], [1, 0.75, 0.5, 0.5, 0.5, 0.5]),
        (["decay=cosine", "decay_steps=4"], [1, 0.853553, 0.5, 0.146447, 0, 0]),
    ],
)
def test_learning_rates_rise_and_fall_as_told(settings, expected):
    schedule = load_config(None, [f"lr_schedule.{setting}" for setting in settings]).lr_schedule

    factors = [schedule.factor(step, num_steps=6) for step in range(6)]

    assert factors == pytest.approx(expected, abs=1e-6)


def test_a_setting_mends_a_value_of_the_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('seed = "x"\n')

    with pytest.raises(ConfigError, match=r"config.toml with epochs=2: seed"):
        load_config(file, ["epochs=2"])
    assert load_config(file, ["seed=1"]).seed == 1


def test_every_key_is_described():
    assert all(key.meaning and key.accepts and key.resume for key in walk_keys())


def policy_of(*settings):
    return load_config(None, settings).skip.settings(7)


def test_keys_become_policies():
    assert policy_of() is None
    assert policy_of(
        "skip.drop_input.staleness.window=200", "skip.drop_input.guard.every=300"
    ) == DropInput(staleness=Staleness(window=200), guard=Guard(every=300))
    assert policy_of("skip.drop_input.guard.every=0") == DropInput(guard=Guard(every=0))
    assert policy_of("skip.paper.target=0.1", *FAE) == Paper(target=0.1, seed=7)
    assert policy_of("skip.random_drop.refill=false") == RandomDrop(0.2, 7, refill=False)
    assert policy_of("skip.random_drop.seed=3") == RandomDrop(0.2, 3)


def test_the_last_policy_wins():
    assert policy_of("skip.drop_input.share=0.3", "skip=observe") == Observe()
    assert policy_of("skip=observe", "skip.observe.share=0.3") == Observe(share=0.3)
    assert policy_of("skip.observe.share=0.3", "skip=observe") == Observe(share=0.3)
    assert policy_of("skip=observe", "skip=none") is None
