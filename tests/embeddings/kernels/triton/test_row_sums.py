import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.kernels.triton.row_runs import CHUNK, find_runs
from recsys.embeddings.kernels.triton.row_sums import sum_runs
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Lookups

few = settings(max_examples=max(6, settings.default.max_examples // 6))
lengths_of_runs = st.lists(
    st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 130, 500]), min_size=1, max_size=9
)


def summed(device, lengths, seed):
    """One-hot lookups in any order."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = rows[torch.randperm(len(rows), generator=generator)]
    gradient = torch.randint(-9, 9, (len(rows), 2), generator=generator).float()
    values = rows.to(device)
    bags = TorchBags.from_tensors(values, values, None, len(rows), is_mean=False, is_one_hot=True)
    space = TorchRowSpace([torch.zeros(len(lengths), 2, device=device)])
    runs = find_runs(space, [LedgerEntry(Lookups.one(0, 2), bags, gradient.to(device))])
    return sum_runs(space, runs), torch.zeros(len(lengths), 2).index_add_(0, rows, gradient)


@few
@given(lengths=lengths_of_runs.filter(any), seed=st.integers(0, 99))
def test_sums_are_where_the_module_says(triton_device, lengths, seed):
    found, expected = summed(triton_device, lengths, seed)

    first = 0
    for row, length in enumerate(lengths):
        if length > 1:
            place = first // 2 + (length > CHUNK)
            assert torch.equal(found[place].cpu(), expected[row])
        first += length
