"""TBSM beside its formulas, written anew for one sample and step at a time."""

import pytest
import torch

from recsys.models import TBSM
from tests.models.sequence_data import (
    DIM,
    HISTORIES,
    NUM_DENSE,
    Reference,
    make_batch,
    make_collection,
    require_equal,
)

NUM_STEPS = 3
OTHERS = ["user", "tags"]


def make_tbsm(num_dense=NUM_DENSE, num_steps=NUM_STEPS, histories=HISTORIES, **options):
    torch.manual_seed(0)
    return TBSM(
        make_collection(),
        num_dense,
        histories,
        num_steps,
        [6, DIM],
        [7, 1],
        **{"tower_layer_sizes": (6, 5), **options},
    )


def tower(reference, dense, fields):
    embedded = reference.perceptrons("tower.dense_arch", dense)
    vectors = [embedded, *fields]
    products = [
        (vectors[first] * vectors[second]).sum()
        for first in range(len(vectors))
        for second in range(first + 1, len(vectors))
    ]
    result = reference.top("tower.over_arch", torch.cat([embedded, torch.stack(products)]))
    return result / result.square().sum().sqrt()


def logits_of(reference, batch, num_heads=1, num_steps=NUM_STEPS):
    logits = []
    for sample in range(len(batch)):
        dense = batch.dense_features[sample].double()
        others = [reference.sum(batch, name, sample) for name in OTHERS]

        def vector(position, fields, dense=dense, others=others):
            at = torch.tensor([position / (num_steps + 1)], dtype=torch.float64)
            return tower(reference, torch.cat([dense, at]), [*fields, *others])

        rows = [reference.rows(batch, history, sample) for history in HISTORIES]
        steps, no_row = [], torch.zeros(DIM, dtype=torch.float64)
        for step in range(num_steps):
            back = num_steps - step  # 1 for the last step
            if all(len(each) < back for each in rows):
                steps.append(torch.zeros(5, dtype=torch.float64))
            else:
                fields = [each[-back] if len(each) >= back else no_row for each in rows]
                steps.append(vector(step + 1, fields))
        last = [reference.sum(batch, candidate, sample) for candidate in HISTORIES.values()]
        candidate = vector(num_steps + 1, last)
        contexts = []
        for head in range(num_heads):
            matrix = reference.parameters[f"heads.{head}.projection"]
            scores = torch.stack([step @ (matrix.T @ (matrix @ candidate)) for step in steps])
            coefficients = 1 / (1 + (-reference.top(f"heads.{head}.mlp", scores)).exp())
            context = torch.zeros(5, dtype=torch.float64)
            for coefficient, step in zip(coefficients, steps, strict=True):
                context = context + coefficient * step
            contexts.append(context)
        logits.append(reference.top("over_arch", torch.cat([*contexts, candidate])))
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("lengths", "category_lengths"),
    [
        ([3, 0, 1, 8, 2], None),
        ([0, 0], None),
        ([3, 3, 3], None),
        ([7, 9], None),
        ([3, 0, 1, 5], [0, 2, 4, 5]),
    ],
    ids=["mixed", "empty", "full", "too long", "other lengths"],
)
@pytest.mark.parametrize(("num_dense", "num_heads"), [(0, 1), (NUM_DENSE, 2)])
def test_logits_and_gradients_are_those_of_the_formulas(
    lengths, category_lengths, num_dense, num_heads
):
    model = make_tbsm(num_dense, num_heads=num_heads)
    batch = make_batch(lengths, num_dense=num_dense, category_lengths=category_lengths)
    reference = Reference(model)

    require_equal(model, batch, reference, logits_of(reference, batch, num_heads))


def test_default_sizes_are_upstreams():
    model = TBSM(make_collection(), 0, HISTORIES, 20, [DIM], [60, 1])

    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}

    assert shapes["tower.dense_arch._mlp.0._linear.weight"] == (DIM, 1)
    assert shapes["tower.over_arch.model.1.weight"] == (15, 15)
    assert shapes["heads.0.projection"] == (15, 15)
    assert shapes["heads.0.mlp.model.0._mlp.0._linear.weight"] == (15, 20)
    assert shapes["heads.0.mlp.model.0._mlp.1._linear.weight"] == (15, 15)
    assert shapes["heads.0.mlp.model.1.weight"] == (20, 15)
    assert shapes["over_arch.model.0._mlp.0._linear.weight"] == (60, 30)
