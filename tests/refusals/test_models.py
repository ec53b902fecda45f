"""Sizes and inputs that models refuse: what is done, the error, and the name that it gives."""

import dataclasses

import pytest
import torch

from recsys import DLRM, Batch, DLRMTrain, JaggedIds
from recsys.embeddings import HotColdEmbeddingBagCollection, TableConfig
from recsys.models import DIN, TBSM, DCNv2, DeepFM, MaskedTransformerArch
from tests.models.sequence_data import (
    HISTORIES,
    NUM_DENSE,
    make_batch,
    make_collection,
    make_tables,
)


def tables(*dims):
    """A table for each dim."""
    return HotColdEmbeddingBagCollection(
        [
            TableConfig(
                name=f"t_cat_{place}",
                num_embeddings=7,
                embedding_dim=dim,
                feature_names=(f"cat_{place}",),
            )
            for place, dim in enumerate(dims)
        ]
    )


def make_din(histories=HISTORIES, over_arch=(7, 1), **options):
    return DIN(make_collection(), NUM_DENSE, histories, over_arch, **options)


def make_tbsm(**changes):
    arguments = {
        "histories": HISTORIES,
        "num_steps": 3,
        "dense_arch_layer_sizes": [6, 4],
        "over_arch_layer_sizes": [7, 1],
    }
    return TBSM(make_collection(), NUM_DENSE, **arguments | changes)


def cross_net(num_layers, rank):
    DCNv2(tables(4), 5, [8, 4], [8, 1], num_layers, rank)


def one_dense_row(num_dense):
    ids = JaggedIds.from_one_hot(["cat_0"], torch.zeros(1, 6, dtype=torch.int64))
    DLRM(tables(4), num_dense, [4], [8, 1])(torch.ones(1, num_dense), ids)


def train_with_weights(loss_fn):
    model = DLRMTrain(DLRM(tables(4), 5, [4], [8, 1]))
    model.loss_fn = loss_fn
    ids = JaggedIds.from_one_hot(["cat_0"], torch.zeros(1, 6, dtype=torch.int64))
    batch = Batch(torch.ones(6, 5), ids, torch.ones(6))
    model(batch)
    model(dataclasses.replace(batch, weights=torch.ones(6)))


def look_up_with_weights():
    batch = make_batch([2])
    ids = batch.sparse_features
    weights = torch.ones(len(ids.values()))
    weighted = JaggedIds(ids.keys(), ids.values(), ids.offsets(), weights)
    make_tbsm()(batch.dense_features, weighted)


REFUSALS = [
    (
        "cross net, no layer",
        lambda: DCNv2(tables(4), 5, [8, 4], [8, 1], 0, 3),
        ValueError,
        "at least 1",
    ),
    (
        "cross net, no rank",
        lambda: DCNv2(tables(4), 5, [8, 4], [8, 1], 2, 0),
        ValueError,
        "at least 1",
    ),
    ("deepfm, one factor", lambda: DeepFM(tables(1), 5, [8, 1], [8, 1]), ValueError, "end in 2"),
    ("deepfm, two logits", lambda: DeepFM(tables(4), 5, [8, 4], [8, 2]), ValueError, "end in 1"),
    ("dlrm, another dim", lambda: DLRM(tables(4), 5, [8, 5], [9, 1]), ValueError, "embedding_dim"),
    ("dlrm, one size", lambda: DLRM(tables(4), 5, [8, 4], [1]), ValueError, "at least 2"),
    *[
        (
            f"{make.__name__}, a dense vector of another width",
            lambda make=make, more=more: make(tables(3, 3, 3), 5, [8, 4], [16, 8, 1], *more),
            ValueError,
            "embedding_dim 3",
        )
        for make, more in ((DLRM, ()), (DeepFM, ()), (DCNv2, (2, 3)))
    ],
    (
        "an interaction without a width",
        lambda: DLRM(tables(4), 5, [8, 4], [8, 1], interaction=torch.nn.Identity()),
        TypeError,
        "out_features",
    ),
    ("one dense row", lambda: one_dense_row(5), ValueError, "dense_features"),
    ("one row without dense", lambda: one_dense_row(0), ValueError, "dense_features"),
    ("weights, loss", lambda: train_with_weights(torch.nn.MSELoss()), TypeError, "MSELoss"),
    (
        "weights of a loss beside those of samples",
        lambda: train_with_weights(torch.nn.BCEWithLogitsLoss(weight=torch.ones(6))),
        TypeError,
        "BCEWithLogitsLoss without weight",
    ),
    *[
        (
            f"transformer, {name} {value}",
            lambda name=name, value=value: MaskedTransformerArch(3, 4, **{name: value}),
            ValueError,
            name,
        )
        for name, value in {
            "num_layers": 0,
            "num_heads": 0,
            "feedforward": 0,
            "kept": 0,
            "mask": "some",
        }.items()
    ],
    ("transformer, dim", lambda: MaskedTransformerArch(3, 0), ValueError, "embedding_dim"),
    (
        "transformer, heads of a part",
        lambda: MaskedTransformerArch(3, 4, num_heads=3),
        ValueError,
        "num_heads",
    ),
    (
        "transformer, vectors",
        lambda: MaskedTransformerArch(3, 4)(torch.ones(5, 4), torch.ones(5, 2, 4)),
        ValueError,
        "(5, 2, 4)",
    ),
    (
        "din, bags",
        lambda: DIN(HotColdEmbeddingBagCollection(make_tables()), NUM_DENSE, HISTORIES, [7, 1]),
        TypeError,
        "embedding_collection",
    ),
    ("din, logits", lambda: make_din(over_arch=[7, 2]), ValueError, "over_arch_layer_sizes"),
    ("din, one size", lambda: make_din(over_arch=[1]), ValueError, "over_arch_layer_sizes"),
    (
        "din, attention",
        lambda: make_din(attention_layer_sizes=()),
        ValueError,
        "attention_layer_sizes",
    ),
    ("din, histories", lambda: make_din({"tags": "user"}), ValueError, "history"),
    *[
        (
            f"tbsm, {name}",
            lambda name=name, value=value: make_tbsm(**{name: value}),
            ValueError,
            name,
        )
        for name, value in {
            "num_steps": 0,
            "num_heads": 0,
            "dense_arch_layer_sizes": [6, 5],
            "tower_layer_sizes": [5],
            "over_arch_layer_sizes": [7, 2],
            "histories": {},
        }.items()
    ],
    *[
        (
            f"histories {histories}",
            lambda histories=histories: make_din(histories),
            ValueError,
            name,
        )
        for histories, name in (
            ({}, "histories"),
            ({"past": "item"}, "'past'"),
            ({"item_history": "next"}, "'next'"),
            ({"item_history": "category"}, "'t_category'"),
            ({"item": "item"}, "'item'"),
        )
    ],
    ("weights of lookups", look_up_with_weights, ValueError, "sparse_features"),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(act, error, name):
    with pytest.raises(error) as raised:
        act()

    assert name in str(raised.value)
