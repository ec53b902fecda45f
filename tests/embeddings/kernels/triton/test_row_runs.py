import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.kernels.triton.row_runs import CHUNK, find_runs
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Lookups

few = settings(max_examples=max(6, settings.default.max_examples // 6))
lengths_of_runs = st.lists(
    st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 130, 500]), min_size=1, max_size=9
)


def runs_of(device, lengths, seed, num_unknown=0):
    """One-hot lookups in any order; some ids are no row of the table."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = torch.cat([rows, torch.full((num_unknown,), len(lengths))])
    rows = rows[torch.randperm(len(rows), generator=generator)]
    values = rows.to(device)
    bags = TorchBags.from_tensors(values, values, None, len(rows), is_mean=False, is_one_hot=True)
    space = TorchRowSpace([torch.zeros(len(lengths), 2, device=device)])
    gradient = torch.zeros(len(rows), 2, device=device)
    return find_runs(space, [LedgerEntry(Lookups.one(0, 2), bags, gradient)])


@few
@given(lengths=lengths_of_runs, seed=st.integers(0, 99), num_unknown=st.sampled_from([0, 3, 40]))
def test_runs_are_cut_into_chunks_counted_from_their_first_lookup(
    triton_device, lengths, seed, num_unknown
):
    found = runs_of(triton_device, lengths, seed, num_unknown)

    runs = [length for length in (*lengths, num_unknown) if length]
    expected = [
        [first + begin, first + min(begin + CHUNK, length)]
        for first, length in zip(np.cumsum([0, *runs]).tolist(), runs, strict=False)
        for begin in range(0, length, CHUNK)
    ]
    if found is None:
        assert not expected
    else:
        num_chunks, num_long = found.counts.tolist()
        assert sorted(found.chunks[:, :num_chunks].T.tolist()) == expected
        assert num_long == sum(length > CHUNK for length in lengths)
