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
from recsys.embeddings import Adagrad, Adam
from recsys.errors import ConfigError


def test_defaults_are_the_public_kaggle_recipe():
    config = TrainConfig()

    assert (config.optimizer.name, config.optimizer.lr) == ("sgd", 0.1)
    assert (config.batch_size, config.epochs, config.seed) == (128, 1, 0)
    assert config.model.dense_arch == (512, 256, 64, 16)
    assert config.model.over_arch == (512, 256, 1)


def test_settings_win_over_the_file_and_values_over_both(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        'seed = 1\nepochs = 2\ndata = "file"\n[optimizer]\nlr = 0.5\nname = "adagrad"\n'
    )

    config = load_config(file, ["optimizer.lr=1", "epochs = 3"], data="given")

    assert (config.seed, config.epochs, config.data) == (1, 3, "given")
    assert config.optimizer == OptimizerConfig(name="adagrad", lr=1.0)


def test_a_budget_may_be_a_number_of_bytes():
    assert load_config(None, ["budget=135050380"]) == load_config(None, ['budget="135050380"'])
    assert TrainConfig(budget=135050380) == TrainConfig(budget="135050380")
    assert TrainConfig(budget=0).budget == "0"  # the least budget, not none


def test_the_bottom_mlp_ends_in_the_embedding_dim_unless_it_is_set():
    config = load_config(None, ["model.embedding_dim=32"])

    assert config.model.dense_arch == (512, 256, 64, 32)
    defaults = {key.name: key.default for key in walk_keys()}
    assert defaults["model.dense_arch"] == "[512, 256, 64, embedding_dim]"
    assert defaults["optimizer.eps"] == "depends on name"


@pytest.mark.parametrize(
    "settings",
    [
        ["model.dense_arch=[8, 4]", "model.embedding_dim=4", "dense_optimizer.lr=0.5"],
        ["model.embedding_dim=32"],
        ["optimizer.name=adam"],
        ["model.table_dims.C3=8", "model.table_dims.C4=2", "model.pooling.C3=mean"],
        ["skip.drop_input.guard.every=1500", "skip.drop_input.share=0.4"],
        ["skip=importance", "schedule=hotline"],
        ["schedule.fae.rate=100", "budget=1MiB"],
        ["model.din.attention=[8]"],
        ["model.interaction=masked_transformer"],
        ["model.interaction.masked_transformer.kept=4"],
    ],
)
def test_what_is_written_is_what_was_read(tmp_path, settings):
    config = load_config(None, settings, data="some/store")
    file = tmp_path / "config.toml"

    file.write_text(to_toml(config))

    assert load_config(file) == config


@pytest.mark.parametrize(
    ("settings", "name", "lr"),
    [
        ([], "sgd", 0.1),
        (["optimizer.name=adagrad", "optimizer.lr=0.01"], "adagrad", 0.01),
        (["optimizer.name=adagrad", "dense_optimizer.lr=0.5"], "adagrad", 0.5),
        (["dense_optimizer.name=adagrad"], "adagrad", 0.1),
        (["optimizer.name=rowwise_adagrad"], "adagrad", 0.1),
    ],
)
def test_the_dense_part_takes_from_the_rows_what_is_not_set(settings, name, lr):
    dense = load_config(None, settings).resolved_dense_optimizer

    assert (dense.name, dense.lr) == (name, lr)


@pytest.mark.parametrize(
    ("settings", "rows", "dense"),
    [
        (["optimizer.name=sgd"], 1e-10, 1e-10),
        (["optimizer.name=adagrad"], 1e-10, 1e-10),
        (["optimizer.name=rowwise_adagrad"], 1e-10, 1e-10),
        (["optimizer.name=adam"], 1e-8, 1e-8),
        (["optimizer.name=partial_rowwise_adam"], 1e-8, 1e-8),
        (["optimizer.name=adam", "optimizer.eps=1e-10"], 1e-10, 1e-10),
        (["optimizer.name=adam", "dense_optimizer.lr=0.5"], 1e-8, 1e-8),
        (["optimizer.name=adam", "dense_optimizer.name=adagrad"], 1e-8, 1e-10),
        (["optimizer.name=sgd", "dense_optimizer.name=adam"], 1e-10, 1e-8),
        (["optimizer.eps=1e-5", "dense_optimizer.name=adam"], 1e-5, 1e-5),
        (["optimizer.name=adam", "dense_optimizer.eps=1e-5"], 1e-8, 1e-5),
    ],
)
def test_eps_is_torchs_default_of_the_optimizer_unless_it_is_set(settings, rows, dense):
    config = load_config(None, settings)

    assert (config.optimizer.eps, config.resolved_dense_optimizer.eps) == (rows, dense)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_the_default_eps_is_that_of_the_classes(name):
    ours = {"adagrad": Adagrad, "adam": Adam}[name](lr=0.1)
    torchs = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[name]([torch.zeros(1)])

    eps = OptimizerConfig(name=name).eps

    assert eps == ours.eps == torchs.defaults["eps"]


def test_the_dense_part_follows_when_the_rows_optimizer_is_replaced():
    config = replace(TrainConfig(), optimizer=OptimizerConfig(name="adagrad", lr=0.01))

    assert config.resolved_dense_optimizer == config.optimizer
    assert describe_config(config)["dense_optimizer"]["lr"] == 0.01


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], [1, 1, 1, 1, 1, 1]),
        (["warmup_steps=4"], [0.25, 0.5, 0.75, 1, 1, 1]),
        (["decay=linear"], [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
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
    assert schedule.is_constant == (not settings)


def test_a_file_may_begin_with_the_mark_of_utf_8(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("seed = 3", encoding="utf-8-sig")  # as editors on Windows write it

    assert load_config(file).seed == 3


def test_an_error_of_the_settings_does_not_name_the_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('seed = "x"\n')

    with pytest.raises(ConfigError, match=r"^seed "):
        load_config(file, ["seed=y"])
    assert load_config(file, ["seed=1"]).seed == 1


def test_every_key_is_described():
    keys = {key.name: key.meaning for key in walk_keys()}

    assert "optimizer.lr" in keys
    assert "model.dense_arch" in keys
    assert all(keys.values())


def test_tables_of_values_are_keys_of_their_own():
    settings = ["model.table_dims.C3=8", "model.table_dims.C4=2", "model.pooling.C3=mean"]

    config = load_config(None, settings)

    assert config.model.table_dims == {"C3": 8, "C4": 2}
    assert config.model.dim_of("C3") == 8
    assert config.model.dim_of("C5") == 16


def test_a_table_of_constants_chooses_its_model():
    model = load_config(None, ["model.tbsm.num_heads=2"]).model

    assert (model.name, model.tbsm.num_heads, model.tbsm.num_steps) == ("tbsm", 2, 20)
    assert load_config(None, ["model.name=din"]).model.din.attention == (80, 40)
