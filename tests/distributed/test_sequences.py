"""Collections without pooling compute the same under every budget, and as one process."""

import itertools

import pytest
import torch
from ranks_shared import (
    EPS,
    FEATURES,
    IS_STRESS,
    KEYS,
    KINDS,
    LR,
    NUM_STEPS,
    ROWS,
    SEQUENCE_DIM,
    SequenceArch,
    first_sequence_rows,
    global_batch,
    loss_of,
    pool_in_order,
)

from recsys import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    HotColdEmbeddingCollection,
    RowWiseAdagrad,
    TableConfig,
)
from tests.distributed.test_exactness import whole

torchrec = pytest.importorskip("torchrec")

FORMULAS = {
    "sgd": SGD(lr=LR),
    "adagrad": Adagrad(lr=LR, eps=EPS),
    "rowwise_adagrad": RowWiseAdagrad(lr=LR, eps=EPS),
}


def one_process(optimizer, bounds):
    """Losses by step and rank, rows, state and dense weights of one process, all resident."""
    tables = [
        TableConfig(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=SEQUENCE_DIM,
            feature_names=tuple(FEATURES[name]),
        )
        for name, num_rows in ROWS.items()
    ]
    collection = HotColdEmbeddingCollection(tables, optimizer=FORMULAS[optimizer])
    with torch.no_grad():
        for name, embedding in collection.embeddings.items():
            embedding.weight.copy_(first_sequence_rows(name))
    over = SequenceArch()
    dense_optimizer = torch.optim.SGD(over.parameters(), lr=LR)
    losses = []
    for step in range(NUM_STEPS):
        lengths, values, dense, labels, _ = global_batch(step, bounds[-1])
        dense_optimizer.zero_grad()
        ends = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
        rows = collection(JaggedIds(KEYS, torch.cat(values), ends))
        pooled = {name: pool_in_order(each.values(), each.lengths()) for name, each in rows.items()}
        of_ranks = []
        for begin, end in itertools.pairwise(bounds):
            its = {name: vectors[begin:end] for name, vectors in pooled.items()}
            of_ranks.append(loss_of(over(dense[begin:end], its), labels[begin:end]))
        sum(loss / len(of_ranks) for loss in of_ranks).backward()
        dense_optimizer.step()
        losses.append([float(loss.detach()) for loss in of_ranks])
    state = collection.row_optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "rows": {name: each.weight.detach() for name, each in collection.embeddings.items()},
        "state": {name: value for of_table in state.values() for name, value in of_table.items()},
        "dense": over.state_dict(),
    }


def require_equal(ranks, expected, near=0.0):
    def same(found, wanted):
        torch.testing.assert_close(found, wanted, rtol=0, atol=near)

    losses = [list(each) for each in zip(*(rank["losses"] for rank in ranks), strict=True)]
    same(torch.tensor(losses), torch.tensor(expected["losses"]))
    for part in ("rows", "state"):
        for name, values in expected[part].items():
            same(whole(ranks, part, name), values)
    for rank in ranks:
        for name, values in expected["dense"].items():
            same(rank["dense"][name], values)


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        ("row_wise", [0, 16, 32]),
        ("mixed", [0, 16, 32]),
        *((kind, [0, 8, 16, 24, 32]) for kind in KINDS if IS_STRESS),
    ],
)
def test_every_tier_computes_what_one_process_computes(ranks, kind, bounds, tmp_path):
    world = len(bounds) - 1
    optimizers = list(FORMULAS) if kind == "mixed" or IS_STRESS else ["adagrad"]
    found = ranks(
        "sequences",
        world,
        kind=kind,
        optimizers=optimizers,
        folder=str(tmp_path),
        bounds=bounds,
    )

    # More than two ranks add their dense gradients in another order.
    near = 0.0 if world == 2 else 1e-6
    for optimizer in optimizers:
        expected = one_process(optimizer, bounds)
        for tier in ("resident", "host", "file"):
            run = f"{optimizer} {tier}"
            require_equal([rank[run] for rank in found], expected, near)
            for rank in found:
                assert rank[run]["losses"] == rank[f"{optimizer} resident"]["losses"]
            assert any(rank[run]["num_tiers"] for rank in found) == (tier != "resident")


def test_a_rank_without_samples_is_an_error(failing_ranks):
    (first, _), (second, _) = failing_ranks("no_samples")

    assert "ValueError: an EmbeddingCollection needs samples on every rank" in first
    assert "RuntimeError" in second


@pytest.mark.parametrize("bounds", [[0, 16, 32], [0, 5, 32]])
def test_a_pipeline_computes_what_one_process_computes(ranks, bounds):
    found = ranks("sequences_in_a_pipeline", bounds=bounds)

    require_equal(found, one_process("adagrad", bounds))
    assert all(rank["num_ahead"] for rank in found)
