import numpy as np
import pytest
import torch

from recsys.bench.gpu.samples import NUM_CYCLED, MiniBatches, Stream, coverage_of, num_distinct
from recsys.datasets.synthetic.samples import SyntheticCriteo

SIZES = (900, 3, 70)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stream():
    return Stream(SIZES, num_fill_samples=100)


def test_mini_batches_follow_the_samples_that_fill_slots(stream):
    source = SyntheticCriteo(num_samples=1000, table_sizes=SIZES)
    batches = MiniBatches(stream, 16, CPU)

    fills = list(batches.fill(30, most=3))
    found = [batches.batch(number) for number in range(3)]

    values = [each.values().view(3, -1) for each in fills]
    assert [each.shape[1] for each in values] == [30, 30, 30]
    expected = source.read(np.arange(90)).sparse_features.values().view(3, 90)
    assert torch.equal(torch.cat(values, 1), expected)
    for number, batch in enumerate(found):
        expected = source.read(np.arange(100 + 16 * number, 116 + 16 * number))
        assert torch.equal(batch.sparse_features.values(), expected.sparse_features.values())
        assert batch.sparse_features.keys() == expected.sparse_features.keys()
        assert torch.equal(batch.dense_features, expected.dense_features)
        assert torch.equal(batch.labels, expected.labels)


def test_some_mini_batches_are_used_again_and_again(stream):
    batches = MiniBatches(stream, 16, CPU)

    assert batches.cycled(NUM_CYCLED + 1) is batches.cycled(1)
    assert torch.equal(
        batches.cycled(1).sparse_features.values(), batches.batch(1).sparse_features.values()
    )


def test_distinct_rows_are_counted_by_table(stream):
    rows = torch.tensor([[5, 5, 1, 7], [0, 0, 0, 0], [2, 1, 2, 1]])
    batches = MiniBatches(stream, 16, CPU)

    assert num_distinct(rows) == 3 + 1 + 2
    of_some = [
        sum(len(set(row)) for row in batches.batch(n).sparse_features.values().view(3, -1).tolist())
        for n in range(NUM_CYCLED)
    ]
    assert batches.mean_distinct == sum(of_some) / NUM_CYCLED
    assert batches.most_distinct > max(of_some[:3]) * 0.9


def test_coverage_is_of_later_lookups_by_rows_that_were_popular_before(stream):
    found = coverage_of(stream, [0.5, 0.01])

    source = SyntheticCriteo(num_samples=1000, table_sizes=SIZES)
    before, later = (
        source.read(np.arange(begin, begin + 100)).sparse_features.values().view(3, 100)
        + torch.tensor([[0], [900], [903]])
        for begin in (0, 100)
    )
    counts = torch.bincount(before.flatten(), minlength=973)
    popular = counts.argsort(descending=True, stable=True)[: int(0.01 * 973)]
    assert found["0.01"] == torch.isin(later, popular).double().mean().item()
    seen = counts.nonzero().flatten()  # fewer than half of the rows
    assert found["0.5"] == torch.isin(later, seen).double().mean().item()
