"""Cases of the two exchanges of row-wise tables."""

import torch
import torch.distributed as dist
from ranks_cases import BOUNDS
from ranks_models import CPU, of_rank, one_table, pieces, shard, train
from ranks_shared import LR, OUTPUTS
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from recsys.distributed import HotColdEmbeddingBagCollectionSharder


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


class OneTable(nn.Module):
    """A model of one table of 4 columns, looked up by the feature "u"."""

    def __init__(self, num_rows):
        super().__init__()
        self.ebc = one_table("user", num_rows, "u")

    def forward(self, features):
        return self.ebc(features)["u"]


def shard_one_table(world, num_rows, exchange):
    model = OneTable(num_rows)
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": LR})
    sharder = HotColdEmbeddingBagCollectionSharder({"row_wise_exchange": exchange})
    plan = construct_module_sharding_plan(
        model.ebc, {"user": row_wise()}, sharder, world, world, "cpu"
    )
    return DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )


def bags_of(ids, length):
    lengths = torch.full((len(ids) // length,), length)
    return KeyedJaggedTensor(keys=["u"], values=ids, lengths=lengths)


def looks_up_rows_of_the_next_rank(rank, world):
    """Vectors, and this rank's rows after a step, if no id is of the rank that looks it up."""
    model = shard_one_table(world, 5 * world, "rows")
    ids = torch.tensor([0, 4, 4, 1]) + (rank + 1) % world * 5
    vectors = model(bags_of(ids, 1))
    vectors.sum().backward()
    [(first, rows)] = pieces(model.state_dict()["ebc.embedding_bags.user.weight"])
    return vectors.detach(), first, rows


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
