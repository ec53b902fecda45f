"""What is particular to distinct rows; `test_exactness.py` has what both exchanges promise."""

import pytest
import torch
from ranks_one_process import OneProcess
from ranks_shared import DIM, FEATURES, IS_STRESS, KEYS, OUTPUTS, ROWS, global_batch, part

torchrec = pytest.importorskip("torchrec")

WORLDS = {2: [0, 16, 32], **({4: [0, 8, 16, 24, 32]} if IS_STRESS else {})}


@pytest.mark.parametrize("kind", ["row_wise", "mixed"])
@pytest.mark.parametrize(
    ("bounds", "options"),
    [
        *((bounds, {}) for bounds in WORLDS.values()),
        *((bounds, {"is_weighted": True}) for bounds in WORLDS.values()),
        *((bounds, {"is_mean": True}) for bounds in WORLDS.values()),
        ([0, 0, 32], {"is_mean": True}),
        ([0, 5, 32], {"is_weighted": True}),
    ],
)
def test_vectors_are_those_of_one_process(ranks, kind, bounds, options):
    found = ranks("looks_up", len(bounds) - 1, kind=kind, bounds=bounds, **options)

    is_weighted = options.get("is_weighted", False)
    pooling = "mean" if options.get("is_mean") else "sum"
    whole = OneProcess("table_wise", "sgd", is_weighted=is_weighted, pooling=pooling)
    lengths, values, _, _, weights = global_batch(0, 32, is_weighted)
    expected = whole.pooled(lengths, values, weights, bounds)
    for number, of_rank in enumerate(found):
        begin, end = bounds[number], bounds[number + 1]
        for vectors in of_rank:
            for name in OUTPUTS:
                assert torch.equal(vectors[name], expected[name][begin:end]), name


def test_a_distinct_id_and_its_row_travel_once_each_way(ranks):
    world, bounds = 2, [0, 16, 32]
    lengths, values, *_ = global_batch(0)
    num_asked = [dict.fromkeys(ROWS, 0) for _ in range(world)]  # rows that are on the other rank
    for rank in range(world):
        ids, its_lengths, _ = part(lengths, values, bounds[rank], bounds[rank + 1])
        its = dict(
            zip(KEYS, ids.split(its_lengths.view(len(KEYS), -1).sum(1).tolist()), strict=True)
        )
        for name, features in FEATURES.items():
            distinct = torch.cat([its[feature] for feature in features]).unique()
            block = -(-ROWS[name] // world)
            num_asked[rank][name] = int((distinct // block != rank).sum())

    found = ranks("counts_bytes", kind="row_wise", exchange="rows")

    for rank, sent in enumerate(found):
        of_ids = [num_bytes for dtype, num_bytes in sent if dtype == torch.int32]
        of_rows = [num_bytes for dtype, num_bytes in sent if dtype == torch.float32]
        own, other = num_asked[rank], num_asked[1 - rank]
        # How many ids there are of each table, and the ids: 4 bytes each.
        assert of_ids == [4 * len(ROWS), 4 * sum(own.values())]
        # The rows that the other rank asked for, then the gradients of those that this one got.
        assert of_rows == [
            sum(4 * DIM[name] * count[name] for name in ROWS) for count in (other, own)
        ]
