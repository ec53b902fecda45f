import copy
import dataclasses
from math import sqrt

import pytest
import torch

from recsys import DLRM, Batch, DLRMTrain, JaggedIds, PooledEmbeddings
from recsys.embeddings import HotColdEmbeddingBagCollection, TableConfig
from recsys.models import DCNv2
from recsys.models.dlrm import SparseArch, initialize_classic
from recsys.train.build import TorchEmbeddingBags

SIZES = {"cat_0": 11, "cat_1": 1, "cat_2": 7}


def make_tables(dim=4):
    return [
        TableConfig(
            name=f"t_{feature}", num_embeddings=size, embedding_dim=dim, feature_names=(feature,)
        )
        for feature, size in SIZES.items()
    ]


def make_dlrm(dim=4):
    return DLRM(TorchEmbeddingBags(make_tables(dim)), 5, [8, dim], [16, 8, 1])


def make_batch(batch_size=6):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3, (len(SIZES) * batch_size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.cat(
        [
            torch.randint(0, size, (int(lengths[n * batch_size : (n + 1) * batch_size].sum()),))
            for n, size in enumerate(SIZES.values())
        ]
    )
    labels = torch.randint(0, 2, (batch_size,), generator=generator).float()
    dense = torch.rand(batch_size, 5, generator=generator)
    return Batch(dense, JaggedIds(list(SIZES), values, offsets), labels)


def pair_of(kind, draw_parameters=None):
    """Our model and TorchRec's with the same weights: "dlrm", or "dcn" with weights drawn anew."""
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
        for table in make_tables()
    ]
    torch.manual_seed(0)
    tables, sizes = EmbeddingBagCollection(tables=configs), (5, [8, 4], [16, 8, 1])
    if kind == "dlrm":
        ours, theirs = make_dlrm(), torchrec_dlrm.DLRM(tables, *sizes)
    else:
        ours = DCNv2(TorchEmbeddingBags(make_tables()), *sizes, 2, 3)
        theirs = draw_parameters(torchrec_dlrm.DLRM_DCN(tables, *sizes, 2, 3))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.fixture
def torchrec_pair():
    return pair_of("dlrm")


@pytest.mark.parametrize(("kind", "tolerance"), [("dlrm", 1e-6), ("dcn", 1e-5)])
def test_keys_shapes_logits_and_gradients_are_torchrecs(formulas, kind, tolerance):
    ours, theirs = pair_of(kind, formulas.draw_parameters)
    batch = make_batch()
    kjt = batch.sparse_features.to_torchrec()

    our_logits = ours(batch.dense_features, batch.sparse_features)
    their_logits = theirs(batch.dense_features, kjt)
    our_logits.square().sum().backward()
    their_logits.square().sum().backward()

    shapes, expected_shapes = (
        {key: tuple(value.shape) for key, value in model.state_dict().items()}
        for model in (ours, theirs)
    )
    assert shapes == expected_shapes
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-6, atol=1e-6)
    found, expected = (
        {name: value.grad.to_dense() for name, value in model.named_parameters()}
        for model in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)


def test_it_runs_over_torchrecs_collection_and_on_its_jagged_tensors(torchrec_pair):
    ours, theirs = torchrec_pair
    batch = make_batch()
    kjt = batch.sparse_features.to_torchrec()
    over_theirs = DLRM(theirs.sparse_arch.embedding_bag_collection, 5, [8, 4], [16, 8, 1])
    over_theirs.load_state_dict(theirs.state_dict())

    expected = ours(batch.dense_features, batch.sparse_features)

    torch.testing.assert_close(ours(batch.dense_features, kjt), expected, rtol=0, atol=0)
    torch.testing.assert_close(
        over_theirs(batch.dense_features, kjt), expected, rtol=1e-6, atol=1e-6
    )


def test_training_modules_of_both_libraries_take_either_batch(torchrec_pair):
    from torchrec.datasets.utils import Batch as TorchRecBatch
    from torchrec.models.dlrm import DLRMTrain as TorchRecDLRMTrain

    ours, theirs = torchrec_pair
    batch = make_batch()
    their_batch = TorchRecBatch(
        batch.dense_features, batch.sparse_features.to_torchrec(), batch.labels
    )

    our_loss, (detached, logits, labels) = DLRMTrain(ours)(their_batch)
    their_loss, (_, their_logits, their_labels) = TorchRecDLRMTrain(theirs)(their_batch)

    torch.testing.assert_close(our_loss, their_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits, their_logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(labels, their_labels)
    assert (our_loss.requires_grad, detached.requires_grad, logits.requires_grad) == (
        True,
        False,
        False,
    )


def test_columns_are_found_by_name_when_a_collection_returns_them_in_another_order():
    class Reversed(TorchEmbeddingBags):
        def forward(self, features):
            pooled = super().forward(features)
            columns = dict(reversed(pooled.to_dict().items()))
            values = torch.cat(list(columns.values()), dim=1)
            return PooledEmbeddings(list(columns), pooled.length_per_key()[::-1], values)

    plain, batch = make_dlrm(), make_batch()
    turned = DLRM(Reversed(make_tables()), 5, [8, 4], [16, 8, 1])
    turned.load_state_dict(plain.state_dict())

    logits = turned(batch.dense_features, batch.sparse_features)

    assert torch.equal(logits, plain(batch.dense_features, batch.sparse_features))


def test_classic_initialisation_has_the_variances_of_the_classic_script():
    torch.manual_seed(0)
    layer = torch.nn.Linear(400, 600)

    initialize_classic(layer)

    assert layer.weight.std().item() == pytest.approx(sqrt(2 / 1000), rel=0.02)
    assert layer.bias.std().item() == pytest.approx(sqrt(1 / 600), rel=0.1)
    assert abs(layer.weight.mean().item()) < 1e-3


def test_hooks_of_a_collection_see_what_they_see_elsewhere():
    tables = [TableConfig(name=name, num_embeddings=9, embedding_dim=4) for name in "ab"]
    collection = HotColdEmbeddingBagCollection(tables)
    ids, seen = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2], [3, 4]])), []
    arch = SparseArch(collection)
    expected = arch(ids)

    collection.register_forward_hook(lambda _module, _args, output: seen.append(output))

    assert torch.equal(arch(ids), expected)
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


@pytest.mark.parametrize("batch_size", [1, 6])
def test_without_dense_features_the_bottom_mlp_runs_on_one_row(batch_size):
    batch, seen = make_batch(batch_size), []
    once = DLRM(TorchEmbeddingBags(make_tables()), 0, [8, 4], [16, 8, 1])
    for_each = copy.deepcopy(once)
    for_each.dense_arch._is_constant = False
    once.dense_arch.model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))

    inputs = batch.dense_features[:, :0], batch.sparse_features
    logits = [model(*inputs) for model in (once, for_each)]
    for each in logits:
        each.square().sum().backward()

    assert seen == [(1, 0)]
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-6)
    expected = {name: value.grad.to_dense() for name, value in for_each.named_parameters()}
    for name, parameter in once.named_parameters():
        gradient = parameter.grad.to_dense()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)
