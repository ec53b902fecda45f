"""Models in training: histories, dims and poolings, keys, and what cannot be built."""

import pytest

from recsys.config import load_config
from recsys.datasets import Store
from recsys.errors import ConfigError
from tests.train.resumed_runs import evaluated, load_model, require_equal, run

SMALL = (
    "model.embedding_dim=4",
    "model.dense_arch=[8, 4]",
    "model.over_arch=[8, 1]",
    "batch_size=16",
    "optimizer.name=adagrad",
    "optimizer.lr=0.1",
    "num_threads=1",
)
MODELS = {
    "dlrm": ("model.name=dlrm",),
    "masked_transformer": (
        "model.interaction=masked_transformer",
        "model.interaction.masked_transformer.kept=2",
    ),
    "dcn_v2": ("model.name=dcn_v2", "model.dcn_v2.low_rank_dim=3"),
    "deepfm": ("model.name=deepfm",),
    "din": ("model.name=din", "model.din.attention=[6]"),
    "tbsm": ("model.name=tbsm", "model.tbsm.num_steps=3", "model.tbsm.tower=[6, 5]"),
}
POOLED = "pooled = self.embeddings(batch.sparse_features).values()"
CUSTOM = """
import torch


class Sum(torch.nn.Module):
    {attribute}

    def __init__(self, embeddings, num_dense):
        super().__init__()
        self.embeddings = embeddings
        self.head = torch.nn.Linear(num_dense, 1)

    def forward(self, batch):
        {pool}
        return self.head(batch.dense_features) + pooled.sum(1, keepdim=True)
"""


@pytest.mark.slow(but=("hotline-din", "observe.staleness.window=33-din", "fae-tbsm"))
@pytest.mark.parametrize("name", ["din", "tbsm"])
@pytest.mark.parametrize(
    "more",
    [
        ("schedule=hotline", "budget=12KiB"),
        ("schedule=fae", "budget=12KiB"),
        (
            "skip.observe.staleness.window=33",
            "skip.observe.staleness.patience=1",
            "epochs=3",
        ),
        ("skip.random_drop.share=0.3",),
        (
            "skip.importance.share=0.3",
            "skip.importance.warm_up=10",
            "skip.importance.guard.every=0",
        ),
    ],
    ids=lambda more: more[0],
)
def test_sequences_train_with_every_schedule_and_policy(table_store, tmp_path, name, more):
    settings = [*SMALL, *MODELS[name], *more]

    record = run(load_config(None, settings, data=str(table_store())), tmp_path / "run")

    assert record["status"] == "finished"
    assert 0 < record["metrics"]["validation"]["logloss"] < 2


def test_tables_may_have_dims_and_poolings_of_their_own(table_store, tmp_path):
    own = ["model.table_dims.user=2", "model.table_dims.tag=8", "model.pooling.tag=mean"]
    data = str(table_store())
    sums, means, tiered = (
        run(load_config(None, [*SMALL, *settings], data=data), tmp_path / name)
        for name, settings in (
            ("sums", own[:2]),
            ("means", own),
            ("tiered", [*own, "budget=12KiB"]),
        )
    )

    assert tiered["metrics"] == means["metrics"] == evaluated(tmp_path / "means")
    assert means["metrics"] != sums["metrics"]
    require_equal(load_model(tmp_path / "tiered"), load_model(tmp_path / "means"))
    dims = {key.split(".t_")[1]: value.shape[1] for key, value in tables_of(tmp_path / "means")}
    assert dims == {"item.weight": 4, "user.weight": 2, "tag.weight": 8}


def tables_of(folder):
    return [(key, value) for key, value in load_model(folder).items() if ".t_" in key]


ROWS_ALONE = ("unpooled = True", "pooled = torch.ones(3, 3)")
# Code of the user, settings, and the name in the error.
REFUSALS = [
    (None, ["model.name=nowhere:Sum"], "module nowhere"),
    ("", ["model.name=own_code:Missing"], "Missing"),
    ("import json", ["model.name=own_code:json"], "json"),
    ("import torch\nclass M(torch.nn.Module):\n    pass", ["model.name=own_code:M"], r"M\("),
    (ROWS_ALONE, ["model.name=own_code:Sum", "model.table_dims.user=8"], "own_code:Sum"),
    (ROWS_ALONE, ["model.name=own_code:Sum", "model.pooling.user=mean"], "own_code:Sum"),
    (("pass", "return torch.ones(5, 2)"), ["model.name=own_code:Sum"], "Sum: forward"),
    (("pass", "return (torch.ones(16),)"), ["model.name=own_code:Sum"], "Sum: forward"),
    (None, ["model.name=din", "embeddings=torch"], "embeddings"),
    (None, ["model.table_dims.users=8"], "model.table_dims.users"),
    (
        None,
        [
            "model.interaction=masked_transformer",
            "model.interaction.masked_transformer.num_heads=3",
        ],
        "num_heads",
    ),
]


@pytest.mark.parametrize(("code", "settings", "name"), REFUSALS)
def test_a_model_that_cannot_be_built_is_refused_by_name(
    table_store, tmp_path, own_class, code, settings, name
):
    if code is not None:
        own_class(*code) if isinstance(code, tuple) else own_class(code=code)
    config = load_config(None, [*SMALL, *settings], data=str(table_store()))

    with pytest.raises((ConfigError, ValueError), match=name):
        run(config, tmp_path / "run")


def test_histories_are_the_sequences_that_share_a_table_with_a_candidate(table_store, tmp_path):
    assert Store(table_store()).histories == {"history": "item"}
    tags, past = ("tags", "tag"), ("past", "item", "sequence")
    data = table_store("other", features=(("user", "user"), tags, past))
    assert Store(data).histories == {}

    with pytest.raises(ConfigError, match=r"model\.name 'din'"):
        run(load_config(None, [*SMALL, "model.name=din"], data=str(data)), tmp_path / "run")


def test_dlrm_has_the_keys_of_torchrecs(table_store, tmp_path):
    run(load_config(None, list(SMALL), data=str(table_store())), tmp_path / "run")

    assert set(load_model(tmp_path / "run")) == {
        *(
            f"sparse_arch.embedding_bag_collection.embedding_bags.t_{table}.weight"
            for table in ("item", "user", "tag")
        ),
        *(
            f"{layer}.{kind}"
            for layer in (
                "dense_arch.model._mlp.0._linear",
                "dense_arch.model._mlp.1._linear",
                "over_arch.model.0._mlp.0._linear",
                "over_arch.model.1",
            )
            for kind in ("weight", "bias")
        ),
    }
