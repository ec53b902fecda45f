import re
from dataclasses import replace

import pytest
import torch

from recsys.config import (
    OptimizerConfig,
    TrainConfig,
    describe_config,
    describe_keys,
    load_config,
    to_toml,
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


def test_the_bottom_mlp_ends_in_the_embedding_dim_unless_it_is_set(tmp_path):
    config = load_config(None, ["model.embedding_dim=32"])

    assert config.model.dense_arch == (512, 256, 64, 32)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "config.toml") == config
    with pytest.raises(ConfigError, match="dense_arch must end in embedding_dim 32, got"):
        load_config(None, ["model.embedding_dim=32", "model.dense_arch=[8, 16]"])
    defaults = {name: default for name, default, _ in describe_keys()}
    assert defaults["model.dense_arch"] == "[512, 256, 64, embedding_dim]"
    assert defaults["optimizer.eps"] == "depends on name"


def test_what_is_written_is_what_was_read(tmp_path):
    settings = ["model.dense_arch=[8, 4]", "model.embedding_dim=4", "dense_optimizer.lr=0.5"]
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


def test_a_configuration_read_back_has_the_eps_that_it_had(tmp_path):
    config = load_config(None, ["optimizer.name=adam"])
    (tmp_path / "config.toml").write_text(to_toml(config))

    assert load_config(tmp_path / "config.toml") == config


def test_rows_with_rowwise_adagrad_go_with_a_dense_part_with_adagrad():
    settings = ["optimizer.name=rowwise_adagrad", "embeddings=fbgemm"]

    config = load_config(None, settings)

    assert config.resolved_dense_optimizer.name == "adagrad"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimiser.lr=1", "unknown key optimiser; did you mean optimizer?"),
        ("lr=1", "unknown key lr; did you mean optimizer.lr, dense_optimizer.lr or skip."),
        ("embedding_dim=8", "unknown key embedding_dim; did you mean model.embedding_dim?"),
        ("depth=4", "unknown key depth; did you mean schedule.depth?"),
        ("optimizer=adagrad", "got 'adagrad'; did you mean optimizer.name=adagrad?"),
        ("model=dcn_v2", "got 'dcn_v2'; did you mean model.name=dcn_v2?"),
        ("skip=observe", "got 'observe'; did you mean skip.policy=observe?"),
        ("optimizer.learning_rate=1", "unknown key optimizer.learning_rate; keys are"),
        ("batch_size=big", "batch_size must be an integer, got 'big'"),
        ("batch_size=1.5", "batch_size must be an integer, got 1.5"),
        ("batch_size=true", "batch_size must be an integer, got True"),
        ("batch_size=0", "batch_size must be at least 1, got 0"),
        ("optimizer=1", "optimizer must be a table of keys, got 1"),
        ("optimizer.name=lamb", "optimizer.name must be one of 'sgd', 'adagrad'"),
        ("optimizer.lr=-1", "optimizer.lr must be finite and at least 0, got -1.0"),
        ("optimizer.lr=nan", "optimizer.lr must be finite and at least 0, got nan"),
        ("optimizer.lr=inf", "optimizer.lr must be finite and at least 0, got inf"),
        ("optimizer.eps=inf", "optimizer.eps must be finite and at least 0, got inf"),
        ("dense_optimizer.lr=-1", "dense_optimizer.lr must be finite and at least 0, got -1.0"),
        ("seed=9223372036854775808", "seed must be less than 2**63"),
        (
            "dense_optimizer.name=rowwise_adagrad",
            "dense_optimizer.name must be one of ('sgd', 'adagrad', 'adam')",
        ),
        ("optimizer.betas=[0.9]", "optimizer.betas must be two numbers in [0, 1), got [0.9]"),
        (
            "optimizer.betas=[0.9, 1]",
            "optimizer.betas must be two numbers in [0, 1), got [0.9, 1.0]",
        ),
        ("optimizer.betas=0.9", "optimizer.betas must be a list of numbers, got 0.9"),
        ("cold_tier=disk", "cold_tier must be one of 'host', 'file'; got 'disk'"),
        ("cold_path=rows", "cold_path is for cold_tier 'file', got 'rows' with 'host'"),
        ("budget=0.5", "budget must be a number of bytes such as 256MiB or 2GiB, got '0.5'"),
        ("budget=much", "budget must be a number of bytes such as 256MiB or 2GiB, got 'much'"),
        ("embeddings=mine", "embeddings must be one of 'recsys', 'torch', 'fbgemm'; got 'mine'"),
        ("device=tpu", "device must be one of"),
        ("lr_schedule.final=2", "lr_schedule.final must be in [0, 1], got 2.0"),
        ("lr_schedule.decay=step", "lr_schedule.decay must be one of 'none', 'linear', 'cosine'"),
        ("lr_schedule.decay_start=5", "lr_schedule.decay_start means nothing with decay 'none'"),
        ("lr_schedule.decay_steps=5", "lr_schedule.decay_steps means nothing with decay 'none'"),
        ("lr_schedule.final=0.5", "lr_schedule.final means nothing with decay 'none', got 0.5"),
        ("precision=fp8", "precision must be one of 'fp32', 'bf16'; got 'fp8'"),
        ("eval.split=train", "eval.split must be one of 'validation', 'test'; got 'train'"),
        ("save_model=1", "save_model must be true or false, got 1"),
        ("model.dense_arch=[8]", "model.dense_arch must end in embedding_dim 16, got [8]"),
        ("model.dense_arch=8", "model.dense_arch must be a list of integers, got 8"),
        ("model.dense_arch=[]", "model.dense_arch must be positive sizes, got []"),
        ("model.over_arch=[1]", "model.over_arch must have two sizes or more and end in 1"),
        ("synthetic.table_sizes=[0]", "synthetic.table_sizes must be positive, got [0]"),
        ("synthetic.drift=-0.1", "synthetic.drift must be in [0, 1e+06], got -0.1"),
        ("synthetic.drift=nan", "synthetic.drift must be in [0, 1e+06], got nan"),
        ("seed", "a setting must be key=value, got 'seed'"),
        ("seed.x=1", "seed must be an integer, got {'x': 1}"),
        ("seed=" + "9" * 5000, "seed must be an integer, got '999"),
        ("optimizer.lr=" + "9" * 400, "optimizer.lr must be less than 2**63, and not below"),
        ("model.dense_arch=[" + "9" * 400 + "]", "model.dense_arch must be less than 2**63"),
        ("seed=" + "[" * 9000, "seed must be an integer, got '[[["),
        ("seed=1\nepochs=2", "seed must be an integer, got '1\\nepochs=2'"),
        ("a" + ".a" * 5000 + "=1", "must be in at most 16 tables, got 5000"),
        ("budget=" + "9" * 400 + "GiB", "budget must be at most 9223372036854775807 bytes"),
    ],
)
def test_a_bad_setting_is_refused_by_name(setting, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])

    assert message in str(caught.value)


def test_a_decay_that_begins_within_warm_up_is_refused():
    settings = ["decay='linear'", "warmup_steps=100", "decay_start=99"]

    with pytest.raises(ConfigError, match=r"decay_start must be at least warmup_steps 100, .*99"):
        load_config(None, [f"lr_schedule.{setting}" for setting in settings])


def test_a_key_below_a_value_is_refused():
    with pytest.raises(ConfigError, match=r"key seed\.x: seed is a value, not a table"):
        load_config(None, ["seed=1", "seed.x=1"])


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


def test_a_file_that_is_no_toml_is_named(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("seed = ")

    with pytest.raises(ConfigError, match=r"config\.toml is not TOML"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read"):
        load_config(tmp_path / "missing.toml")


def test_an_error_names_the_file_unless_the_settings_have_the_same_fault(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('cold_path = "rows"\n')

    with pytest.raises(ConfigError, match=r"config\.toml: cold_path is for cold_tier 'file'"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"^seed must be an integer"):
        load_config(file, ["seed=x"])
    file.write_text('seed = "x"\n')
    with pytest.raises(ConfigError, match=r"config\.toml: seed must be an integer"):
        load_config(file, ["epochs=2"])
    assert load_config(file, ["seed=1"]).seed == 1


def test_every_key_is_described():
    keys = {key: meaning for key, _, meaning in describe_keys()}

    assert "optimizer.lr" in keys
    assert "model.dense_arch" in keys
    assert all(keys.values())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "schedule.name=belady",
            "schedule.name must be one of 'sequential', 'lookahead'",
        ),
        ("schedule.pinned_share=2", r"schedule.pinned_share must be in \[0, 1\], got 2"),
        ("schedule.learning_share=0.1", "learning_share means nothing with name '', got 0.1"),
        ("schedule.permutation_seed=1", "permutation_seed means nothing without permute_within_ba"),
        ("schedule.depth=-1", "schedule.depth must be at least 0, got -1"),
        ("schedule.rate=200", r"schedule.rate must be in \(0, 100\], got 200"),
        ("schedule.factor=1", "schedule.factor must be finite and above 1, got 1.0"),
        ("schedule.rate=20", "rate means nothing with name '', got 20.0; set name to 'fae'"),
    ],
)
def test_a_schedule_that_is_none_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [setting])


def test_a_depth_without_looking_ahead_is_refused():
    with pytest.raises(ConfigError, match=r"schedule\.depth means nothing with name 'sequential'"):
        load_config(None, ["schedule.name=sequential", "schedule.depth=3"])


def test_a_configuration_nested_deeply_is_refused(tmp_path):
    (tmp_path / "c.toml").write_text("x = " + "[" * 9000)

    with pytest.raises(ConfigError, match=r"c\.toml is not TOML: it is nested more than 64 levels"):
        load_config(tmp_path / "c.toml")


def test_tables_of_values_are_keys_of_their_own(tmp_path):
    settings = ["model.table_dims.C3=8", "model.table_dims.C4=2", "model.pooling.C3=mean"]

    config = load_config(None, settings)
    (tmp_path / "config.toml").write_text(to_toml(config))

    assert config.model.table_dims == {"C3": 8, "C4": 2}
    assert config.model.dim_of("C3") == 8
    assert config.model.dim_of("C5") == 16
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.table_dims=3", "model.table_dims must be a table of integers by name, got 3"),
        ("model.table_dims.C3=four", "model.table_dims.C3 must be an integer, got 'four'"),
        ("model.table_dims.C3=0", "model.table_dims.C3 must be at least 1, got 0"),
        ("model.pooling.C3=max", "model.pooling.C3 must be 'sum' or 'mean', got 'max'"),
        ("model.name=wide", "model.name must be one of 'dlrm', .* or module:Class; got 'wide'"),
        ("model.name=./wide.py:Wide", "got './wide.py:Wide'; a module is named as in an import"),
        ("model.tbsm.tower=[3]", r"model.tbsm.tower must be two positive sizes or more, got \[3\]"),
        ("model.din.attention=[]", r"model.din.attention must be positive sizes, got \[\]"),
    ],
)
def test_keys_of_models_say_what_they_accept(setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [setting])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.dcn.num_layers=5"], "model.dcn.* are for name 'dcn_v2', got name 'dlrm'"),
        (
            ["model.name=tbsm", "model.din.attention=[8]"],
            "model.din.* are for name 'din', got name 'tbsm'",
        ),
        (
            ["model.name=a:B", "model.tbsm.num_heads=2"],
            "model.tbsm.* are for name 'tbsm', got name",
        ),
        (
            ["model.transformer.mask=causal"],
            "model.transformer.* are for interaction 'masked_transformer', got 'dot'",
        ),
    ],
)
def test_keys_that_no_model_would_read_are_refused(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(None, ["model.dense_arch=[8, 16]", *settings])


def test_models_refuse_what_is_for_others():
    with pytest.raises(ConfigError, match="interaction 'masked_transformer' is for name 'dlrm'"):
        load_config(None, ["model.name=dcn_v2", "model.interaction=masked_transformer"])
    with pytest.raises(ConfigError, match="table_dims and pooling are for models that pool"):
        load_config(None, ["model.name=din", "model.table_dims.item=8"])


@pytest.mark.parametrize("embeddings", ["torch", "fbgemm"])
def test_bags_are_averaged_by_recsys_alone(embeddings):
    settings = ["model.pooling.tags=mean", f"embeddings={embeddings}"]

    with pytest.raises(ConfigError, match=rf"model.pooling.tags 'mean' .* got '{embeddings}'"):
        load_config(None, settings, data="store")
