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
        num_lookups, (num_chunks, num_long) = len(found.rows), found.listed[:2].tolist()
        chunks = found.listed[16 : 16 + 2 * num_lookups].view(2, num_lookups)
        assert sorted(chunks[:, :num_chunks].T.tolist()) == expected
        long_runs = found.listed[16 + 2 * num_lookups :][:num_long]
        begins = np.cumsum([0, *lengths])
        assert sorted(long_runs.tolist()) == [
            first for first, length in zip(begins, lengths, strict=False) if length > CHUNK
        ]
        assert num_long == sum(length > CHUNK for length in lengths)


def entry_of(rows, gradient):
    """One-hot lookups in the only table."""
    bags = TorchBags.from_tensors(rows, rows, None, len(rows), is_mean=False, is_one_hot=True)
    return LedgerEntry(Lookups.one(0, 2), bags, gradient)


def test_ids_may_be_a_column_of_a_matrix(triton_device):
    matrix = torch.tensor([[4, 9], [2, 9], [7, 9]], device=triton_device)
    space = TorchRowSpace([torch.zeros(10, 2, device=triton_device)])
    gradient = torch.zeros(3, 2, device=triton_device)

    found = find_runs(space, [entry_of(matrix[:, 0], gradient)])

    assert found.rows.tolist() == [2, 4, 7]


def test_gradients_that_were_converted_live_as_long_as_their_runs(triton_device):
    """Kernels that are still queued read them; only the first one is an argument."""
    space = TorchRowSpace([torch.zeros(10, 2, device=triton_device)])
    ledger = [
        entry_of(
            torch.arange(3, device=triton_device),
            torch.full((3, 2), number, dtype=torch.float64, device=triton_device),
        )
        for number in range(3)
    ]

    found = find_runs(space, ledger)

    assert [each.dtype for each in found.gradients] == [torch.float32] * 3
    assert [each[0, 0].item() for each in found.gradients] == [0, 1, 2]
