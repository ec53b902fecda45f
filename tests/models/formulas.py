"""What tests of models share: tables, mini-batches, and the formulas, sample by sample."""

import torch

from recsys import Batch, JaggedIds
from recsys.embeddings import TableConfig

SIZES = {"cat_0": 11, "cat_1": 1, "cat_2": 7}
TABLE = "sparse_arch.embedding_bag_collection.embedding_bags.t_{}.weight"


def make_tables(dims=(4, 4, 4)):
    return [
        TableConfig(
            name=f"t_{feature}", num_embeddings=size, embedding_dim=dim, feature_names=(feature,)
        )
        for (feature, size), dim in zip(SIZES.items(), dims, strict=True)
    ]


def make_batch(kind="bags", num_dense=5, batch_size=6):
    """In float64; "bags" of 1 to 3 rows, those of sample 0 empty, or "one-hot"."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.ones(len(SIZES), batch_size, dtype=torch.int64)
    if kind == "bags":
        lengths = torch.randint(1, 4, lengths.shape, generator=generator)
        lengths[:, 0] = 0
    values = [
        torch.randint(0, size, (int(count),), generator=generator)
        for size, count in zip(SIZES.values(), lengths.sum(1), strict=True)
    ]
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    ids = JaggedIds(list(SIZES), torch.cat(values), offsets)
    if kind == "one-hot":
        ids = JaggedIds.from_one_hot(list(SIZES), torch.stack(values))
    dense = torch.rand(batch_size, num_dense, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 2, (batch_size,), generator=generator).float()
    return Batch(dense, ids, labels)


def draw_parameters(model):
    """Normal numbers everywhere, also where initial values are 0 or 1, which hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn / 2)
    return model


def perceptrons(weights, prefix, vector):
    """Linear layers, each with a ReLU, on one vector."""
    layer = 0
    while f"{prefix}._mlp.{layer}._linear.weight" in weights:
        name = f"{prefix}._mlp.{layer}._linear"
        vector = (weights[f"{name}.weight"] @ vector + weights[f"{name}.bias"]).clamp(min=0)
        layer += 1
    return vector


def over_arch(weights, vector, name="over_arch"):
    """An MLP whose last layer is linear on one vector."""
    hidden = perceptrons(weights, f"{name}.model.0", vector)
    return weights[f"{name}.model.1.weight"] @ hidden + weights[f"{name}.model.1.bias"]


def vectors_of(weights, batch, sample):
    """The dense vector of a sample, then the sum of each bag's rows, projected where they are."""
    features = batch.sparse_features
    vectors = [perceptrons(weights, "dense_arch.model", batch.dense_features[sample])]
    for number, name in enumerate(features.keys()):
        first = number * features.stride() + sample
        rows = features.values()[features.offsets()[first] : features.offsets()[first + 1]]
        vector = weights[TABLE.format(name)][rows].sum(0)
        projection = f"sparse_arch.projections.t_{name}.weight"
        vectors.append(weights[projection] @ vector if projection in weights else vector)
    return vectors


def products_of_pairs(vectors):
    return [
        vectors[first] @ vectors[second]
        for first in range(len(vectors))
        for second in range(first + 1, len(vectors))
    ]


def gradients_of(logits, parameters):
    """Gradients of a loss in which every logit has another weight."""
    (logits * torch.arange(1.0, logits.numel() + 1).view_as(logits).sin()).sum().backward()
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad.to_dense()
        for name, value in parameters.items()
    }


def require_formula(model, batch, formula, tolerance=1e-9):
    """Require a model's logits and gradients to be those of a formula for one sample's logit.

    The formula is computed in float64. It gets the weights by name, and the sample's number.
    Gradients may differ by the tolerance times the largest of their tensor, or times 1.
    """
    weights = {
        name: value.detach().double().clone().requires_grad_()
        for name, value in model.named_parameters()
    }
    expected = torch.stack([formula(weights, sample) for sample in range(len(batch))])
    dtype = next(model.parameters()).dtype

    found = model(batch.dense_features.to(dtype), batch.sparse_features)

    assert found.shape == (len(batch), 1)
    assert expected.std() > 0
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    of_formula = gradients_of(expected, weights)
    for name, gradient in gradients_of(found, dict(model.named_parameters())).items():
        scale = max(1.0, of_formula[name].abs().max().item()) if gradient.numel() else 1.0
        difference = (gradient - of_formula[name]).abs()
        assert (difference <= tolerance * scale).all(), (name, difference.max(), scale)
