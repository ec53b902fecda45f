"""Keys of the configuration that are refused, each with the name that the message must contain."""

import pytest

from recsys.config import load_config
from recsys.errors import ConfigError

FAE = ("schedule.fae.rate=100", "schedule.fae.adaptive=false", "budget=1MiB")

REFUSALS = [
    (["optimiser.lr=1"], "optimiser"),
    (["lr=1"], "lr"),
    (["embedding_dim=8"], "embedding_dim"),
    (["depth=4"], "depth"),
    (["optimizer=adagrad"], "optimizer.name=adagrad"),
    (["optimizer.learning_rate=1"], "optimizer.learning_rate"),
    (["batch_size=big"], "batch_size"),
    (["batch_size=true"], "batch_size"),
    (["batch_size=0"], "batch_size"),
    (["optimizer=1"], "optimizer"),
    (["optimizer.name=lamb"], "optimizer.name"),
    (["optimizer.lr=-1"], "optimizer.lr"),
    (["optimizer.lr=nan"], "optimizer.lr"),
    (["dense_optimizer.lr=-1"], "dense_optimizer.lr"),
    (["seed=9223372036854775808"], "seed"),
    (["dense_optimizer.name=rowwise_adagrad"], "dense_optimizer.name"),
    (["optimizer.betas=[0.9]"], "optimizer.betas"),
    (["optimizer.betas=[0.9, 1]"], "optimizer.betas"),
    (["optimizer.betas=0.9"], "optimizer.betas"),
    (["cold_tier=disk"], "cold_tier"),
    (["cold_path=rows"], "cold_path"),
    (["budget=0.5"], "budget"),
    (["budget=much"], "budget"),
    (["embeddings=mine"], "embeddings"),
    (["device=tpu"], "device"),
    (["lr_schedule.final=2"], "lr_schedule.final"),
    (["lr_schedule.decay=step"], "lr_schedule.decay"),
    (["lr_schedule.decay_start=5"], "lr_schedule.decay_start"),
    (["lr_schedule.decay_steps=5"], "lr_schedule.decay_steps"),
    (["lr_schedule.final=0.5"], "lr_schedule.final"),
    (["precision=fp8"], "precision"),
    (["eval.split=train"], "eval.split"),
    (["save_model=1"], "save_model"),
    (["model.dense_arch=[8]"], "model.dense_arch"),
    (["model.dense_arch=8"], "model.dense_arch"),
    (["model.dense_arch=[]"], "model.dense_arch"),
    (["model.over_arch=[1]"], "model.over_arch"),
    (["synthetic.table_sizes=[0]"], "synthetic.table_sizes"),
    (["model.name=sasrec", "schedule=hotline"], "hotline"),
    (["model.name=two_tower", "model.table_dims.user=4"], "table_dims"),
    (["seed"], "seed"),
    (["seed.x=1"], "seed"),
    (["seed=" + "9" * 5000], "seed"),
    (["optimizer.lr=" + "9" * 400], "optimizer.lr"),
    (["model.dense_arch=[" + "9" * 400 + "]"], "model.dense_arch"),
    (["seed=" + "[" * 9000], "seed"),
    (["a" + ".a" * 5000 + "=1"], "a is not a key"),
    (["budget=" + "9" * 400 + "GiB"], "budget"),
    (["schedule=belady"], "schedule"),
    (["schedule.belady.depth=1"], "schedule.belady"),
    (["schedule.hotline.pinned_share=2"], "schedule.hotline.pinned_share"),
    (["schedule.sequential.depth=3"], "schedule.sequential.depth"),
    (["schedule.lookahead.learning_share=0.1"], "schedule.lookahead.learning_share"),
    (["schedule.lookahead.depth=0"], "schedule.lookahead.depth"),
    (["schedule={lookahead = {}, auto = {}}"], "schedule.lookahead"),
    (["schedule.fae.rate=200"], "schedule.fae.rate"),
    (["permutation_seed=-1"], "permutation_seed"),
    (["schedule=fae", "permutation_seed=1"], "permutation_seed"),
    (["model.table_dims=3"], "model.table_dims"),
    (["model.table_dims.C3=four"], "model.table_dims.C3"),
    (["model.table_dims.C3=0"], "model.table_dims.C3"),
    (["model.pooling.C3=max"], "model.pooling.C3"),
    (["model.name=./wide.py:Wide"], "./wide.py:Wide"),
    (["model.tbsm.tower=[3]"], "model.tbsm.tower"),
    (["model.din.attention=[]"], "model.din.attention"),
    (["model.name=dlrm", "model.dcn_v2.num_layers=5"], "model.dcn_v2"),
    (["model.name=tbsm", "model.din.attention=[8]"], "model.din"),
    (["model.name=a:B", "model.tbsm.num_heads=2"], "model.tbsm"),
    (["model.din.attention=[8]"], "model.din"),
    (["model.interaction=cross"], "model.interaction"),
    (["model.interaction.dot.mask=causal"], "model.interaction.dot.mask"),
    (["row_dtype=float16"], "row_dtype"),
    (["skip=drop"], "skip"),
    (["skip.share=0.3"], "skip.share"),
    (["skip.drop_input.keep=0.5"], "skip.drop_input.keep"),
    (["skip.drop_input.seed=1"], "skip.drop_input.seed"),
    (["skip.observe.guard.steps=20"], "skip.observe.guard"),
    (["skip.random_drop.staleness.patience=3"], "skip.random_drop.staleness"),
    (["skip.drop_input.target=0.1"], "skip.drop_input.target"),
    (["skip.paper.share=0.3", *FAE], "skip.paper.share"),
    (["skip.drop_input.guard.every=81"], "every"),
    (["skip.drop_input.guard.steps=2"], "skip.drop_input.guard.steps"),
    (["skip.drop_input.staleness.window=32"], "skip.drop_input.staleness.window"),
    (
        ["skip.drop_input.staleness={window = 40, min_updates = 41}"],
        "min_updates",
    ),
    (["skip.importance.bits=30"], "skip.importance.bits"),
    (["skip.importance.share=0.8", "skip.importance.least=0.5"], "least"),
    (["skip=importance", "embeddings=torch"], "embeddings"),
    (["skip.drop_input.guard.every=500"], "every"),
    (["skip.drop_input.share=1"], "skip.drop_input.share"),
    (["skip.subsample.share=0.8"], "share"),
    (["skip.paper.highest_threshold=0.01", *FAE], "highest_threshold"),
    (["skip=drop_input", "embeddings=torch"], "embeddings"),
    (["skip=drop_input", "schedule=fae"], "skip"),
    (["skip=paper"], "skip"),
    (["skip=paper", "schedule=fae"], "schedule.fae.rate"),
    (
        ["lr_schedule.decay=linear", "lr_schedule.warmup_steps=100", "lr_schedule.decay_start=99"],
        "decay_start",
    ),
    (["seed=1", "seed.x=1"], "seed"),
    (["model.embedding_dim=32", "model.dense_arch=[8, 16]"], "dense_arch"),
    (["model.name=dcn_v2", "model.interaction=masked_transformer"], "'masked_transformer'"),
    (["model.name=din", "model.table_dims.item=8"], "table_dims"),
    (["model.pooling.tags=mean", "embeddings=torch"], "model.pooling.tags"),
]
FILES = [
    ("a file that is no TOML", "seed = "),
    ("a file nested deeply", "x = " + "[" * 9000),
    ("keys that do not go together", 'cold_path = "rows"'),
    ("a value of another type", 'seed = "x"'),
]


@pytest.mark.parametrize(("settings", "name"), REFUSALS, ids=[str(case)[:60] for case in REFUSALS])
def test_a_key_is_refused_by_name(settings, name):
    with pytest.raises(ConfigError) as raised:
        load_config(None, settings, data="store")

    assert name in str(raised.value)


@pytest.mark.parametrize("text", [text for _, text in FILES], ids=[name for name, _ in FILES])
def test_a_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "c.toml").write_text(text)

    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "c.toml")

    assert "c.toml" in str(raised.value)
