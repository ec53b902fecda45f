"""TBSM beside its formulas, written anew for one sample and step at a time."""

from functools import partial

import pytest
import torch

from recsys.models import TBSM
from tests.models import formulas
from tests.models.sequence_data import (
    DIM,
    HISTORIES,
    NUM_DENSE,
    make_batch,
    make_collection,
    rows_of,
    sum_of,
)

NUM_STEPS = 3
OTHERS = ["user", "tags"]


def make_tbsm(num_dense, num_heads):
    torch.manual_seed(0)
    sizes = {"tower_layer_sizes": (6, 5), "num_heads": num_heads}
    return TBSM(make_collection(), num_dense, HISTORIES, NUM_STEPS, [6, DIM], [7, 1], **sizes)


def tower(weights, dense, fields):
    embedded = formulas.perceptrons(weights, "tower.dense_arch", dense)
    products = torch.stack(formulas.products_of_pairs([embedded, *fields]))
    result = formulas.over_arch(weights, torch.cat([embedded, products]), "tower.over_arch")
    return result / result.square().sum().sqrt()


def logit_of(weights, sample, batch, num_heads):
    dense = batch.dense_features[sample].double()
    others = [sum_of(weights, batch, name, sample) for name in OTHERS]

    def vector(position, fields):
        at = torch.tensor([position / (NUM_STEPS + 1)], dtype=torch.float64)
        return tower(weights, torch.cat([dense, at]), [*fields, *others])

    rows = [rows_of(weights, batch, history, sample) for history in HISTORIES]
    steps, no_row = [], torch.zeros(DIM, dtype=torch.float64)
    for step in range(NUM_STEPS):
        back = NUM_STEPS - step  # 1 for the last step
        if all(len(each) < back for each in rows):
            steps.append(torch.zeros(5, dtype=torch.float64))
        else:
            fields = [each[-back] if len(each) >= back else no_row for each in rows]
            steps.append(vector(step + 1, fields))
    last = [sum_of(weights, batch, candidate, sample) for candidate in HISTORIES.values()]
    candidate = vector(NUM_STEPS + 1, last)
    contexts = []
    for head in range(num_heads):
        matrix = weights[f"heads.{head}.projection"]
        scores = torch.stack([step @ (matrix.T @ (matrix @ candidate)) for step in steps])
        coefficients = formulas.over_arch(weights, scores, f"heads.{head}.mlp").sigmoid()
        contexts.append(coefficients @ torch.stack(steps))
    return formulas.over_arch(weights, torch.cat([*contexts, candidate]))


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
    model = make_tbsm(num_dense, num_heads)
    batch = make_batch(lengths, num_dense=num_dense, category_lengths=category_lengths)

    formula = partial(logit_of, batch=batch, num_heads=num_heads)
    formulas.require_formula(model, batch, formula, tolerance=2e-6)


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
