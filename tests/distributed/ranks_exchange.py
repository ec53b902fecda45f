"""Cases of the two exchanges of row-wise tables."""

import torch
import torch.distributed as dist
from ranks_cases import BOUNDS
from ranks_models import of_rank, shard, train
from ranks_shared import OUTPUTS
from torchrec import KeyedJaggedTensor


def looks_up(rank, world, bounds=None, **options):
    """The pooled vectors of this rank's samples, by output: in training, and in evaluation."""
    bounds, is_weighted = bounds or BOUNDS[world], options.get("is_weighted", False)
    model = shard(world, exchange="rows", tiers={"budget": 30_000}, **options)
    _, features, _ = of_rank(0, bounds[rank], bounds[rank + 1], bounds[-1], is_weighted)
    collection, found = model.module.ebc, []
    for mode in (True, False):
        model.train(mode)
        with torch.set_grad_enabled(mode):
            vectors = collection(features)
            found.append({name: vectors[name].detach().clone() for name in OUTPUTS})
    return found


def counts_bytes(rank, world, kind, exchange):
    """The bytes that this rank sends to others in one step, as (dtype, bytes) of each collective.

    Only of `all_to_all_single`, by which TorchRec moves ids, rows and vectors.
    """
    model, sent, send = shard(world, kind, exchange=exchange), [], dist.all_to_all_single

    def counted(output, input, output_split_sizes=None, input_split_sizes=None, **options):
        to_self = len(input) // world if input_split_sizes is None else input_split_sizes[rank]
        per_item = input.nbytes // max(1, len(input))
        sent.append((input.dtype, (len(input) - to_self) * per_item))
        return send(output, input, output_split_sizes, input_split_sizes, **options)

    dist.all_to_all_single = counted
    try:
        train(model, BOUNDS[world], num_steps=1)
    finally:
        dist.all_to_all_single = send
    return sent


def has_other_forms(rank, world, form_of_first, **options):
    """Outputs if a mini-batch of rank 1 has other dtypes, weights or another order of features.

    Args:
        form_of_first: The form of its first mini-batch; then all forms come, one after the other.
    """
    model = shard(world, **options)
    dense, features, _ = of_rank(0, 16 * rank, 16 * rank + 16, 32)
    keys, values, lengths = features.keys(), features.values(), features.lengths()
    forms = {
        "plain": features,
        "order": features.permute([2, 0, 4, 1, 3]),
        "ids": KeyedJaggedTensor(keys, values.int(), lengths=lengths),
        "lengths": KeyedJaggedTensor(keys, values, lengths=lengths.int()),
        "weights": KeyedJaggedTensor(keys, values, torch.ones(len(values)), lengths=lengths),
    }
    with torch.no_grad():
        return [
            model(dense, forms[form] if rank == 1 else features) for form in (form_of_first, *forms)
        ]
