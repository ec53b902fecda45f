"""DIN beside its formulas, written anew for one sample at a time."""

from functools import partial

import pytest
import torch

from recsys.models import DIN
from tests.models import formulas
from tests.models.sequence_data import (
    HISTORIES,
    NUM_DENSE,
    make_batch,
    make_collection,
    rows_of,
    sum_of,
)

NAMES = ["item_history", "item", "category_history", "category", "user", "tags"]


def make_din(num_dense=NUM_DENSE, histories=HISTORIES, **options):
    torch.manual_seed(0)
    return DIN(
        make_collection(), num_dense, histories, [7, 5, 1], attention_layer_sizes=(6, 3), **options
    )


def logit_of(weights, sample, batch, histories):
    vectors = {name: sum_of(weights, batch, name, sample) for name in NAMES}
    for number, (history, candidate) in enumerate(histories.items()):
        c = vectors[candidate]
        interest = torch.zeros(len(c), dtype=torch.float64)
        for h in rows_of(weights, batch, history, sample):
            step = torch.cat([h, c, h - c, h * c])
            interest = interest + formulas.over_arch(weights, step, f"attention.{number}.mlp") * h
        vectors[history] = interest
    joined = [batch.dense_features[sample].double(), *(vectors[name] for name in NAMES)]
    return formulas.over_arch(weights, torch.cat(joined))


@pytest.mark.parametrize(
    ("lengths", "category_lengths", "histories"),
    [
        ([3, 0, 1, 8, 5], None, HISTORIES),
        ([0, 0], None, HISTORIES),
        ([4, 4, 4], None, HISTORIES),
        ([1, 1, 1], None, HISTORIES),
        ([3, 0, 1, 5], [0, 2, 4, 5], HISTORIES),
        ([2, 0, 5], None, {"category_history": "category"}),  # the other one is summed
    ],
    ids=["mixed", "empty", "equal", "one step", "other lengths", "one history"],
)
@pytest.mark.parametrize("num_dense", [0, NUM_DENSE])
def test_logits_and_gradients_are_those_of_the_formulas(
    lengths, category_lengths, histories, num_dense
):
    model = make_din(num_dense, histories)
    batch = make_batch(lengths, num_dense=num_dense, category_lengths=category_lengths)

    formula = partial(logit_of, batch=batch, histories=histories)
    formulas.require_formula(model, batch, formula, tolerance=2e-6)


def test_it_runs_over_torchrecs_collection_and_on_its_jagged_tensors():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    ours, batch = make_din(), make_batch([3, 0, 2])
    configs = [
        torchrec.EmbeddingConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.feature_names),
        )
        for table in ours.embedding_collection.embedding_configs()
    ]
    theirs = torchrec.EmbeddingCollection(tables=configs)
    over_theirs = DIN(theirs, NUM_DENSE, HISTORIES, [7, 5, 1], attention_layer_sizes=(6, 3))
    over_theirs.load_state_dict(ours.state_dict())
    kjt = batch.sparse_features.to_torchrec()

    expected = ours(batch.dense_features, batch.sparse_features)

    assert torch.equal(ours(batch.dense_features, kjt), expected)
    assert torch.equal(over_theirs(batch.dense_features, kjt), expected)
