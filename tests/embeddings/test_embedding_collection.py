"""`HotColdEmbeddingCollection` beside TorchRec's `EmbeddingCollection`, and without TorchRec."""

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import recsys
from recsys import JaggedIds
from recsys.embeddings import SGD, Adagrad, HotColdEmbeddingCollection, TableConfig
from recsys.errors import IdOutOfRange
from recsys.pipeline import Hotline, LookAhead, Sequential, TrainPipeline

pytestmark = pytest.mark.filterwarnings("ignore:tables .* were used in cold memory")
SIZES = {"users": 40, "goods": 30}
FEATURES = {"users": ("user", "friend"), "goods": ("item", "user")}  # both look up "user"
NAMES = ["user@users", "friend", "item", "user@goods"]


def configs(dim=4):
    return [
        TableConfig(name=name, num_embeddings=size, embedding_dim=dim, feature_names=FEATURES[name])
        for name, size in SIZES.items()
    ]


def light(seed=0, size=3, most=4):
    """Jagged ids of three features; some samples have none."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most, (3 * size,), generator=generator)
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.randint(0, 30, (int(offsets[-1]),), generator=generator)
    return JaggedIds(["item", "user", "friend"], values, offsets)


def torchrec_pair(**ours):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    theirs = torchrec.EmbeddingCollection(
        tables=[
            torchrec.EmbeddingConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
            )
            for table in configs()
        ]
    )
    own = HotColdEmbeddingCollection(theirs.embedding_configs(), **ours)
    own.load_state_dict(theirs.state_dict())
    return own, theirs


def loss_of(found):
    return sum(
        (position + 1) * each.values().sin().square().sum()
        for position, each in enumerate(found.values())
    )


@pytest.mark.parametrize("need_indices", [False, True])
@given(seed=st.integers(0, 1000), size=st.integers(1, 4))
def test_results_are_torchrecs(need_indices, seed, size):
    own, theirs = torchrec_pair(need_indices=need_indices, optimizer=SGD(lr=0.1))
    theirs._need_indices = need_indices
    features = light(seed, size).to_torchrec()

    found, expected = own(features), theirs(features)

    assert list(found) == list(expected) == NAMES
    for mine, other in zip(found.values(), expected.values(), strict=True):
        assert type(mine) is type(other)
        assert torch.equal(mine.values(), other.values())
        assert torch.equal(mine.lengths(), other.lengths())
        assert torch.equal(mine.offsets(), other.offsets())
        if need_indices:
            assert torch.equal(mine.weights(), other.weights())
    assert list(own.state_dict()) == list(theirs.state_dict())
    for name in ("embedding_dim", "embedding_names_by_table", "need_indices"):
        assert getattr(own, name)() == getattr(theirs, name)()
    assert own.device == theirs.device


@pytest.mark.parametrize("is_light", [True, False])
@pytest.mark.parametrize("is_tiered", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "kind"), [(SGD(lr=0.1), torch.optim.SGD), (Adagrad(lr=0.1), torch.optim.Adagrad)]
)
def test_steps_are_those_of_torchs_tables_and_optimizer(optimizer, kind, is_tiered, is_light):
    budget = 1000 if is_tiered else None
    own, theirs = torchrec_pair(optimizer=optimizer, budget=budget)
    steps = kind(theirs.parameters(), lr=0.1)

    for seed in range(4):
        features = light(seed)
        steps.zero_grad()
        loss_of(theirs(features.to_torchrec())).backward()
        loss_of(own(features if is_light else features.to_torchrec())).backward()
        steps.step()

    for mine, other in zip(own.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-5, atol=1e-6)


def test_light_ids_give_rows_by_feature_without_torchrec():
    own = HotColdEmbeddingCollection(configs(), need_indices=True, optimizer=SGD(lr=0.1))
    values = torch.tensor([3, 5, 5, 0, 29])
    ids = JaggedIds(["item", "user", "friend"], values, torch.tensor([0, 2, 2, 3, 4, 4, 5]))

    found = own(ids)

    goods = own.embeddings["goods"].weight
    assert torch.equal(found["item"].values(), goods[[3, 5]])
    assert found["item"].lengths().tolist() == [2, 0]
    assert found["item"].offsets().tolist() == [0, 2, 2]
    assert found["item"].weights_or_none().tolist() == [3, 5]
    assert [each.tolist() for each in found["user@goods"].to_dense()] == [
        goods[[5]].tolist(),
        goods[[0]].tolist(),
    ]


@pytest.mark.parametrize("budget", [None, 1000])
def test_a_value_that_is_no_row_is_named_by_feature_and_sample(budget):
    own = HotColdEmbeddingCollection(configs(), optimizer=SGD(lr=0.1), budget=budget)
    ids = JaggedIds(
        ["item", "user", "friend"], torch.tensor([1, 35, 2]), torch.tensor([0, 1, 1, 1, 2, 3, 3])
    )

    own.prefetch(ids)
    with pytest.raises(IdOutOfRange, match="feature 'user', sample 1: id 35"):
        own(ids)


def test_rows_in_files_are_trained_as_those_in_memory(tmp_path):
    plain = HotColdEmbeddingCollection(configs(), optimizer=Adagrad(lr=0.1))
    own = HotColdEmbeddingCollection(
        configs(),
        optimizer=Adagrad(lr=0.1),
        budget=1400,
        cold_tier="file",
        cold_path=tmp_path / "rows",
    )
    own.load_state_dict(plain.state_dict())

    for seed in range(4):
        for each in (own, plain):
            loss_of(each(light(seed))).backward()
    own.sync()

    for mine, theirs in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    states = [each.row_optimizer.state_dict()["state"] for each in (own, plain)]
    assert list(states[0]) == ["embeddings.users.weight", "embeddings.goods.weight"]
    for mine, theirs in zip(*(each.values() for each in states), strict=True):
        assert list(mine) == list(theirs)
        assert all(torch.equal(*pair) for pair in zip(mine.values(), theirs.values(), strict=True))


def test_tables_without_memory_are_filled_by_loading_and_then_trained():
    plain = HotColdEmbeddingCollection(configs(), optimizer=SGD(lr=0.1))
    device = torch.device("meta")
    empty = HotColdEmbeddingCollection(configs(), device, optimizer=SGD(lr=0.1))

    state = {name: value.clone() for name, value in plain.state_dict().items()}
    empty.load_state_dict(state, assign=True)
    for each in (plain, empty):
        loss_of(each(light())).backward()

    assert all(map(torch.equal, plain.parameters(), empty.parameters()))


def test_rows_that_two_features_share_are_equal_to_the_last_bit_in_two_tiers():
    generator = torch.Generator().manual_seed(0)
    tables = [
        TableConfig(name="goods", num_embeddings=90, embedding_dim=4, feature_names=("a", "b")),
        TableConfig(name="users", num_embeddings=90, embedding_dim=4, feature_names=("c",)),
    ]
    offsets = torch.arange(0, 31, 10)
    steps = [
        (torch.randint(0, 8, (30,), generator=generator), torch.randn(30, 4, generator=generator))
        for _ in range(4)
    ]
    found = []

    for budget in (None, 2000):
        torch.manual_seed(0)
        own = HotColdEmbeddingCollection(tables, optimizer=Adagrad(lr=0.1), budget=budget)
        for ids, factors in steps:
            rows = own(JaggedIds(["a", "b", "c"], ids, offsets))
            (torch.cat([each.values() for each in rows.values()]) * factors).sum().backward()
        found.append([each.detach().clone() for each in own.parameters()])

    assert all(map(torch.equal, *found))


class Model(nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.sequences = collection
        self.top = nn.Linear(4, 1)

    def forward(self, batch):
        found = self.sequences(batch)
        loss = sum(self.top(each.values()).square().sum() for each in found.values())
        return loss, loss.detach()


@pytest.mark.parametrize("schedule", [LookAhead(depth=2), Hotline(learning_steps=2)])
def test_schedules_know_what_it_looks_up_and_change_nothing(schedule):
    batches = [light(seed, most=3) for seed in range(12)]
    found = []
    for settings, its_schedule in (({}, Sequential()), ({"budget": 2000}, schedule)):
        torch.manual_seed(0)
        model = Model(HotColdEmbeddingCollection(configs(), optimizer=Adagrad(lr=0.1), **settings))
        dense = torch.optim.SGD(model.top.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipeline = TrainPipeline(model, dense, schedule=its_schedule)
            losses = [loss.item() for loss, _ in pipeline.steps(batches)]
        texts = [str(each.message) for each in caught]
        assert not any("splits no mini-batch" in text for text in texts)
        assert not any("it is not known which ids" in text for text in texts)
        found.append((losses, [each.detach().clone() for each in model.sequences.parameters()]))

    if isinstance(schedule, LookAhead):
        assert found[0][0] == found[1][0]
        assert all(map(torch.equal, found[0][1], found[1][1]))
    else:  # floats are summed in another order
        assert pipeline.popular_split.num_split > 0
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
        torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_accelerate_exchanges_torchrecs_and_restore_puts_it_back():
    _, theirs = torchrec_pair()
    model = nn.ModuleDict({"sequences": theirs})
    plain = copy.deepcopy(model)
    ours, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))

    result = recsys.accelerate(model, optimizer=ours, always=True)
    for each, optimizer in ((model, ours), (plain, others)):
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(each["sequences"](light(seed).to_torchrec())).backward()
            optimizer.step()

    assert type(model["sequences"]) is HotColdEmbeddingCollection
    assert result.replacements == {"sequences": "HotColdEmbeddingCollection"}
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-5, atol=1e-6)
    recsys.restore(model)
    assert model["sequences"] is theirs
    assert theirs.embeddings["users"].weight is next(iter(model.parameters()))


def test_from_torchrec_takes_over_configs_and_parameters():
    _, theirs = torchrec_pair()

    own = HotColdEmbeddingCollection.from_torchrec(theirs, optimizer=SGD(lr=0.1))

    assert all(map(lambda mine, other: mine is other, own.parameters(), theirs.parameters()))
    assert own.embedding_configs() == theirs.embedding_configs()
