"""DLRM and DCN V2 beside TorchRec's, and training on mini-batches of both libraries."""

import dataclasses

import pytest
import torch

from recsys import DLRM, DLRMTrain, PooledEmbeddings
from recsys.embeddings import HotColdEmbeddingBagCollection
from recsys.models import DCNv2
from tests.models import formulas

SIZES = {"dlrm": (5, [8, 4], [16, 8, 1]), "dcn": (5, [8, 4], [16, 8, 1], 2, 3)}


def make_dlrm(kind=HotColdEmbeddingBagCollection):
    return DLRM(kind(formulas.make_tables()), *SIZES["dlrm"])


def make_batch():
    batch = formulas.make_batch()
    return dataclasses.replace(batch, dense_features=batch.dense_features.float())


def pair_of(kind):
    """Our model and TorchRec's with the same weights."""
    pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models import dlrm as torchrec_dlrm

    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.feature_names),
        )
        for table in formulas.make_tables()
    ]
    make, their = {
        "dlrm": (DLRM, torchrec_dlrm.DLRM),
        "dcn": (DCNv2, torchrec_dlrm.DLRM_DCN),
    }[kind]
    ours = make(HotColdEmbeddingBagCollection(formulas.make_tables()), *SIZES[kind])
    theirs = their(EmbeddingBagCollection(tables=configs), *SIZES[kind])
    ours.load_state_dict(formulas.draw_parameters(theirs).state_dict())
    return ours, theirs


@pytest.mark.parametrize("kind", ["dlrm", "dcn"])
def test_keys_shapes_logits_and_gradients_are_torchrecs(kind):
    ours, theirs = pair_of(kind)
    batch = make_batch()
    kjt = batch.sparse_features.to_torchrec()

    results = []
    for model, ids in ((ours, batch.sparse_features), (theirs, kjt)):
        logits = model(batch.dense_features, ids)
        logits.square().sum().backward()
        found = {"logits": logits.detach()}
        results.append(found | {n: v.grad.to_dense() for n, v in model.named_parameters()})

    shapes, expected_shapes = (
        {key: tuple(value.shape) for key, value in model.state_dict().items()}
        for model in (ours, theirs)
    )
    assert shapes == expected_shapes
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    over_theirs = type(ours)(theirs.sparse_arch.embedding_bag_collection, *SIZES[kind])
    over_theirs.load_state_dict(theirs.state_dict())
    for model in (ours, over_theirs):
        found = model(batch.dense_features, kjt)
        torch.testing.assert_close(found, results[0]["logits"], rtol=1e-6, atol=1e-6)


def test_training_modules_of_both_libraries_take_either_batch():
    ours, theirs = pair_of("dlrm")
    from torchrec.datasets.utils import Batch as TorchRecBatch
    from torchrec.models.dlrm import DLRMTrain as TorchRecDLRMTrain

    batch = make_batch()
    their_batch = TorchRecBatch(
        batch.dense_features, batch.sparse_features.to_torchrec(), batch.labels
    )

    our_loss, (detached, logits, labels) = DLRMTrain(ours)(their_batch)
    their_loss, (_, their_logits, their_labels) = TorchRecDLRMTrain(theirs)(their_batch)

    torch.testing.assert_close(our_loss, their_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits, their_logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(labels, their_labels)
    assert our_loss.requires_grad
    assert not detached.requires_grad
    assert not logits.requires_grad


def test_columns_are_found_by_name_when_a_collection_returns_them_in_another_order():
    class Reversed(HotColdEmbeddingBagCollection):
        def forward(self, features):
            pooled = super().forward(features)
            columns = dict(reversed(pooled.to_dict().items()))
            values = torch.cat(list(columns.values()), dim=1)
            return PooledEmbeddings(list(columns), pooled.length_per_key()[::-1], values)

    plain, batch = make_dlrm(), make_batch()
    turned = make_dlrm(Reversed)
    turned.load_state_dict(plain.state_dict())

    logits = turned(batch.dense_features, batch.sparse_features)

    assert torch.equal(logits, plain(batch.dense_features, batch.sparse_features))


def test_hooks_of_a_collection_see_what_they_see_elsewhere():
    model, ids, seen = make_dlrm(), make_batch().sparse_features, []
    expected = model.sparse_arch(ids)
    collection = model.sparse_arch.embedding_bag_collection

    collection.register_forward_hook(lambda _module, _args, output: seen.append(output))

    assert torch.equal(model.sparse_arch(ids), expected)
    assert isinstance(seen[0], PooledEmbeddings)


def test_weights_multiply_the_losses_of_samples_and_b_divides_their_sum():
    model, batch = DLRMTrain(make_dlrm()), make_batch()
    plain, (_, logits, labels) = model(batch)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, labels.float(), reduction="none"
    )
    weights = torch.rand(len(losses))

    weighted, _ = model(dataclasses.replace(batch, weights=weights))

    torch.testing.assert_close(weighted.detach(), (losses * weights).sum() / len(losses))
    torch.testing.assert_close(plain.detach(), losses.mean())
    assert model.uses_sample_weights
