"""Keys of the configuration that are refused, each with the name that the message must contain."""

import pytest

from recsys.config import load_config
from recsys.errors import ConfigError

DROP = "skip.policy=drop_input"
FAE = ("schedule.name=fae", "schedule.rate=100", "schedule.adaptive=false", "budget=1MiB")

REFUSALS = [
    (["optimiser.lr=1"], "optimiser"),
    (["lr=1"], "lr"),
    (["embedding_dim=8"], "embedding_dim"),
    (["depth=4"], "depth"),
    (["optimizer=adagrad"], "'adagrad'"),
    (["model=dcn_v2"], "'dcn_v2'"),
    (["skip=observe"], "'observe'"),
    (["optimizer.learning_rate=1"], "optimizer.learning_rate"),
    (["batch_size=big"], "batch_size"),
    (["batch_size=1.5"], "batch_size"),
    (["batch_size=true"], "batch_size"),
    (["batch_size=0"], "batch_size"),
    (["optimizer=1"], "optimizer"),
    (["optimizer.name=lamb"], "optimizer.name"),
    (["optimizer.lr=-1"], "optimizer.lr"),
    (["optimizer.lr=nan"], "optimizer.lr"),
    (["optimizer.lr=inf"], "optimizer.lr"),
    (["optimizer.eps=inf"], "optimizer.eps"),
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
    (["seed"], "seed"),
    (["seed.x=1"], "seed"),
    (["seed=" + "9" * 5000], "seed"),
    (["optimizer.lr=" + "9" * 400], "optimizer.lr"),
    (["model.dense_arch=[" + "9" * 400 + "]"], "model.dense_arch"),
    (["seed=" + "[" * 9000], "seed"),
    (["seed=1\nepochs=2"], "seed"),
    (["a" + ".a" * 5000 + "=1"], "16 tables"),
    (["budget=" + "9" * 400 + "GiB"], "budget"),
    (["schedule.name=belady"], "schedule.name"),
    (["schedule.pinned_share=2"], "schedule.pinned_share"),
    (["schedule.learning_share=0.1"], "learning_share"),
    (["schedule.permutation_seed=1"], "permutation_seed"),
    (["schedule.depth=-1"], "schedule.depth"),
    (["schedule.rate=200"], "schedule.rate"),
    (["schedule.factor=1"], "schedule.factor"),
    (["schedule.rate=20"], "rate"),
    (["model.table_dims=3"], "model.table_dims"),
    (["model.table_dims.C3=four"], "model.table_dims.C3"),
    (["model.table_dims.C3=0"], "model.table_dims.C3"),
    (["model.pooling.C3=max"], "model.pooling.C3"),
    (["model.name=wide"], "model.name"),
    (["model.name=./wide.py:Wide"], "'./wide.py:Wide'"),
    (["model.tbsm.tower=[3]"], "model.tbsm.tower"),
    (["model.din.attention=[]"], "model.din.attention"),
    (["model.name=dlrm", "model.dcn_v2.num_layers=5"], "model.dcn_v2"),
    (["model.name=tbsm", "model.din.attention=[8]"], "model.din"),
    (["model.name=a:B", "model.tbsm.num_heads=2"], "model.tbsm"),
    (["model.din.attention=[8]", "model.tbsm.num_heads=2"], "model.tbsm"),
    (["model.interaction=cross"], "model.interaction"),
    (["model.interaction.dot.mask=causal"], "model.interaction.dot.mask"),
    (["row_dtype=float16"], "row_dtype"),
    (["skip.policy=drop"], "skip.policy"),
    (["skip.share=0.3"], "skip.share"),
    ([DROP, "skip.keep=0.5"], "skip.keep"),
    ([DROP, "skip.seed=1"], "skip.seed"),
    (["skip.policy=observe", "skip.guard.logloss=0.1"], "skip.guard.logloss"),
    (["skip.policy=random_drop", "skip.staleness.patience=3"], "skip.staleness.patience"),
    ([DROP, "skip.paper.target=0.1"], "skip.paper.target"),
    (["skip.policy=paper", *FAE, "skip.share=0.3"], "skip.share"),
    ([DROP, "skip.guard.every=0", "skip.guard.steps=60"], "skip.guard.steps"),
    ([DROP, "skip.guard.every=81"], "skip.guard.every"),
    ([DROP, "skip.guard.steps=2"], "skip.guard.steps"),
    ([DROP, "skip.staleness.window=32"], "skip.staleness.window"),
    (
        [DROP, "skip.staleness.window=40", "skip.staleness.min_updates=41"],
        "skip.staleness.min_updates",
    ),
    ([DROP, "skip.importance.lr=0.1"], "skip.importance.lr"),
    ([DROP, "skip.weighted=true"], "skip.weighted"),
    (["skip.policy=importance", "skip.importance.bits=30"], "bits"),
    (["skip.policy=importance", "skip.share=0.8", "skip.importance.least=0.5"], "least"),
    (["skip.policy=importance", "embeddings=torch"], "embeddings"),
    ([DROP, "skip.guard.every=500"], "skip.guard.every"),
    (["skip.policy=paper", *FAE, "skip.share=0.4"], "skip.share"),
    ([DROP, "skip.share=1"], "skip.share"),
    (["skip.policy=subsample", "skip.share=0.8"], "skip.share"),
    (["skip.policy=paper", *FAE, "skip.paper.first_threshold=0.2"], "first_threshold"),
    ([DROP, "embeddings=torch"], "embeddings"),
    ([DROP, "schedule.name=fae"], "skip.policy"),
    (["skip.policy=paper"], "skip.policy"),
    (["skip.policy=paper", "schedule.name=fae"], "skip.policy"),
    (
        ["lr_schedule.decay=linear", "lr_schedule.warmup_steps=100", "lr_schedule.decay_start=99"],
        "decay_start",
    ),
    (["seed=1", "seed.x=1"], "seed.x"),
    (["schedule.name=sequential", "schedule.depth=3"], "schedule.depth"),
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
    ("no file", None),
]


@pytest.mark.parametrize(("settings", "name"), REFUSALS, ids=[str(case)[:60] for case in REFUSALS])
def test_a_key_is_refused_by_name(settings, name):
    with pytest.raises(ConfigError) as raised:
        load_config(None, settings, data="store")

    assert name in str(raised.value)


@pytest.mark.parametrize("text", [text for _, text in FILES], ids=[name for name, _ in FILES])
def test_a_file_is_refused_by_name(tmp_path, text):
    if text is not None:
        (tmp_path / "c.toml").write_text(text)

    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "c.toml")

    assert "c.toml" in str(raised.value)
