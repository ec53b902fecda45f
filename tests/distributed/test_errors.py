"""Errors on one rank, and plans that are refused."""

import pytest
import torch
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)

torchrec = pytest.importorskip("torchrec")

from torchrec.distributed import DistributedModelParallel  # noqa: E402
from torchrec.distributed.fp_embeddingbag import (  # noqa: E402
    FeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec.distributed.sharding_plan import (  # noqa: E402
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan  # noqa: E402
from torchrec.modules.embedding_configs import PoolingType  # noqa: E402
from torchrec.modules.feature_processor_ import PositionWeightedModule  # noqa: E402
from torchrec.modules.fp_embedding_modules import (  # noqa: E402
    FeatureProcessedEmbeddingBagCollection,
)
from torchrec.optim import RowWiseAdagrad  # noqa: E402

from recsys.distributed import HotColdEmbeddingBagCollectionSharder  # noqa: E402


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "mixed"])
def test_a_bad_id_on_one_rank_ends_every_rank(failing_ranks, kind):
    (first, first_seconds), (second, second_seconds) = failing_ranks("bad_ids", kind=kind)

    assert "IdOutOfRange: table 't0', feature 'f0', sample" in second
    assert "RuntimeError" in first
    assert max(first_seconds, second_seconds) < 30


@pytest.mark.parametrize("form_of_first", ["plain", "order", "lengths"])
@pytest.mark.parametrize(
    "options",
    [
        {"owners": [0, 0, 0, 0, 0]},
        {"kind": "row_wise", "exchange": "pooled"},
        {"kind": "row_wise", "exchange": "rows"},
    ],
    ids=["table_wise", "pooled", "rows"],
)
def test_a_rank_may_have_other_dtypes_and_another_order_of_features(ranks, options, form_of_first):
    for expected, *found in ranks("has_other_forms", form_of_first=form_of_first, **options):
        assert len(found) == 5
        assert all(torch.equal(each, expected) for each in found)


class Holder(torch.nn.Module):
    def __init__(self, is_weighted=False, **settings):
        super().__init__()
        config = {
            "name": "user",
            "num_embeddings": 20,
            "embedding_dim": 8,
            "feature_names": ["u"],
        }
        self.ebc = torchrec.EmbeddingBagCollection(
            tables=[torchrec.EmbeddingBagConfig(**(config | settings))],
            is_weighted=is_weighted,
            device=torch.device("cpu"),
        )


def shard(model, how, fused_params=None, wrapped_by=lambda sharder: sharder):
    sharder = HotColdEmbeddingBagCollectionSharder(fused_params)
    collection = getattr(model.ebc, "_embedding_bag_collection", model.ebc)
    plan = construct_module_sharding_plan(collection, {"user": how}, sharder, 1, 1, "cpu")
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[wrapped_by(sharder)],
    )


def processed(feature_processors):
    """A model whose bags get their weights by a feature processor, and one input."""
    model = Holder(is_weighted=True)
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.5})
    model.ebc = FeatureProcessedEmbeddingBagCollection(model.ebc, feature_processors)
    features = torchrec.KeyedJaggedTensor(
        keys=["u"], values=torch.tensor([3, 5, 3]), lengths=torch.tensor([2, 0, 1])
    )
    return model, features


def by_position():
    """The first id of a bag counts 2, the second one 3."""
    processor = PositionWeightedModule(max_feature_length=2)
    with torch.no_grad():
        processor.position_weight.copy_(torch.tensor([2.0, 3.0]))
    return {"u": processor}


@pytest.mark.parametrize(
    ("how", "settings", "match"),
    [
        (column_wise(ranks=[0]), {}, "must be one of .* got 'column_wise'.*divided by columns"),
        (data_parallel(), {}, "must be one of .* got 'data_parallel'; change the plan$"),
        (table_wise(rank=0, compute_kernel="fused_uvm"), {}, "compute kernel must be 'fused'"),
        (table_wise(rank=0, compute_kernel="dense"), {}, "compute kernel must be 'fused'"),
        (table_wise(rank=0), {"data_type": torchrec.types.DataType.FP16}, "data_type must be"),
        (row_wise(), {"enable_embedding_update": True}, "enable_embedding_update must be False"),
    ],
)
def test_a_plan_is_refused_by_name(process_group, how, settings, match):
    model = Holder(**settings)
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1})

    with pytest.raises(ValueError, match=f"table 'user': .*{match}"):
        shard(model, how)


def test_parts_of_means_are_refused(process_group):
    model = Holder(pooling=PoolingType.MEAN)
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1})

    with pytest.raises(ValueError, match=r"table 'user': .* pooled by its sum, got MEAN with"):
        shard(model, row_wise(), {"row_wise_exchange": "pooled"})


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TorchRec's arguments of DDP
def test_pooled_parts_have_the_weights_of_feature_processors(process_group):
    model, features = processed(by_position())
    before = model.ebc._embedding_bag_collection.embedding_bags["user"].weight.detach().clone()
    options = {"wrapped_by": FeatureProcessedEmbeddingBagCollectionSharder}
    sharded = shard(model, row_wise(), {"row_wise_exchange": "pooled"}, **options)

    vectors = sharded.module.ebc(features).to_dict()["u"]
    vectors.sum().backward()

    expected = torch.stack([2 * before[3] + 3 * before[5], 0 * before[0], 2 * before[3]])
    torch.testing.assert_close(vectors, expected)
    gradient = model.ebc._feature_processors["u"].position_weight.grad
    torch.testing.assert_close(gradient, torch.stack([2 * before[3].sum(), before[5].sum()]))


@pytest.mark.parametrize("exchange", ["rows", "pooled"])
def test_one_rank_looks_up_all_rows_and_ignores_weights(process_group, exchange):
    model = Holder()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.5})
    before = model.ebc.embedding_bags["user"].weight.detach().clone()
    sharded = shard(model, row_wise(), {"row_wise_exchange": exchange}).module.ebc
    features = torchrec.KeyedJaggedTensor(
        keys=["u"],
        values=torch.tensor([3, 0, 3]),
        lengths=torch.tensor([2, 0, 1]),
        weights=torch.tensor([2.0, 3.0, 4.0]),  # the collection has is_weighted=False
    )

    vectors = sharded(features)["u"]
    vectors.sum().backward()

    assert torch.equal(vectors, torch.stack([before[3] + before[0], 0 * before[0], before[3]]))
    rows = sharded.state_dict()["embedding_bags.user.weight"].local_shards()[0].tensor
    before[3] -= 0.5 * 2
    before[0] -= 0.5
    torch.testing.assert_close(rows, before)


@pytest.mark.parametrize(
    ("optimizer", "settings", "match"),
    [
        (None, {}, "rows need an optimizer, got none"),
        (torch.optim.Adam, {"lr": 0.1}, "the optimizer must be one of .* got 'adam'"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "fused_params has momentum=0.9"),
    ],
)
def test_an_optimizer_is_refused_by_name(process_group, optimizer, settings, match):
    model = Holder()
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, model.ebc.parameters(), settings)

    with pytest.raises(ValueError, match=f"table 'user': {match}"):
        shard(model, table_wise(rank=0, compute_kernel="fused"))
