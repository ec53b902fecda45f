"""One torch optimizer that updates the rows of several modules, beside plain torch."""

import copy

import pytest
import torch
from torch import nn

from recsys.batch import JaggedIds
from recsys.embeddings.attach import Attachment
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tiers.budget import give_slots
from recsys.embeddings.update.translate import translate
from tests.unit.embeddings.model import TOO_MANY_ROWS

IDS = torch.tensor([[1, 2, 1], [0, 3, 3], [6, 1, 5]])
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, True),
    "sgd dense": (torch.optim.SGD, {"lr": 0.1}, False),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, True),
    "adagrad dense": (torch.optim.Adagrad, {"lr": 0.1}, False),
    "sparse adam": (torch.optim.SparseAdam, {"lr": 0.1}, True),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks are implicitly disabled", f"ignore:{TOO_MANY_ROWS}"
)


class Model:
    """Two bags on one table, a bag of its own and an embedding; the last in its own param group."""

    def __init__(self, kind, settings, is_sparse, *, slots=None, is_attached=True):
        torch.manual_seed(0)
        bags = [nn.EmbeddingBag(7, 4, mode="mean", sparse=is_sparse) for _ in range(3)]
        bags[1].weight = bags[0].weight
        self.modules = [*bags, nn.Embedding(7, 4, sparse=is_sparse)]
        self.weights = list(dict.fromkeys(each.weight for each in self.modules))
        groups = [{"params": self.weights[:2]}, {"params": self.weights[2:], "lr": 0.3}]
        self.linear = nn.Linear(4, 1)
        if kind is not torch.optim.SparseAdam:
            groups[0]["params"] = [*self.linear.parameters(), *groups[0]["params"]]
        self.optimizer = kind(groups, **settings)
        self.attached = None
        if is_attached:
            self.modules = [
                *(HotColdEmbeddingBag.from_torch(bag) for bag in bags),
                HotColdEmbedding.from_torch(self.modules[3]),
            ]
            tables = {}
            for number, module in enumerate(self.modules):
                [table] = module.tables()
                tables.setdefault(table.weight, table._replace(name=f"t{number}"))
            rule = translate(self.optimizer, [("t", 0)], lazy_adam=True)
            found = list(tables.values())
            self.attached = Attachment(self.modules, found, self.optimizer, rule)
            if slots is not None:
                formula = rule.formula(self.optimizer.param_groups[0])
                cost = 4 * 4 + sum(formula.state_sizes(4).values()) * 4 + 11
                give_slots(self.attached.groups, formula, 21 * 4 + 3 * slots * cost)

    def loss(self, number):
        pooled = [module(IDS) for module in self.modules[:3]]
        rows = self.modules[3](IDS[number % 3])
        return sum(self.linear(each).sin().sum() for each in (*pooled, rows)) * (number + 1)

    def train(self, steps=4, act=lambda model, number: None):
        for number in range(steps):
            self.optimizer.zero_grad()
            self.loss(number).backward()
            act(self, number)
            self.optimizer.step()
        return self

    def rows(self):
        return [weight.detach().clone() for weight in self.weights]

    def state(self):
        found = self.optimizer.state_dict()["state"]
        return [found[place] for place in sorted(found)]


def compare(ours, plain):
    torch.testing.assert_close(ours.rows(), plain.rows())
    for mine, other in zip(ours.state(), plain.state(), strict=True):
        assert set(mine) == set(other)
        for name, value in other.items():
            torch.testing.assert_close(mine[name], value)


@pytest.mark.parametrize("slots", [None, 1, 3], ids=["resident", "one slot", "three slots"])
@pytest.mark.parametrize(("kind", "settings", "is_sparse"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_rows_and_state_are_torchs(kind, settings, is_sparse, slots):
    plain = Model(kind, settings, is_sparse, is_attached=False).train()
    compare(Model(kind, settings, is_sparse, slots=slots).train(), plain)


def accumulate(model, number):
    model.loss(number + 1).backward()


def clip(model, number):
    nn.utils.clip_grad_norm_(model.weights, 0.1)


def change_rate(model, number):
    for group in model.optimizer.param_groups:
        group["lr"] *= 0.5


def evaluate(model, number):
    with torch.no_grad():
        model.loss(number)


def replace_grads(model, number):
    for weight in model.weights:
        weight.grad = weight.grad * 2


@pytest.mark.parametrize("act", [accumulate, clip, change_rate, evaluate, replace_grads])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.filterwarnings("ignore:.*(its gradient has all rows|are left to torch)")
def test_what_users_do_between_backward_and_step_counts(is_sparse, act):
    if act is clip and is_sparse:
        pytest.skip("torch clips no sparse gradients")
    both = [
        Model(torch.optim.Adagrad, {"lr": 0.1}, is_sparse, is_attached=is_attached).train(act=act)
        for is_attached in (True, False)
    ]
    compare(*both)


@pytest.mark.parametrize("slots", [None, 2])
def test_a_state_is_loaded_and_tables_are_given_back(slots):
    kind, settings, is_sparse = OPTIMIZERS["adagrad"]
    plain = Model(kind, settings, is_sparse, is_attached=False).train(2)
    ours = Model(kind, settings, is_sparse, slots=slots).train(1)
    ours.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    with torch.no_grad():
        for mine, other in zip(ours.weights, plain.weights, strict=True):
            mine.copy_(other)
    ours.linear.load_state_dict(plain.linear.state_dict())
    compare(ours.train(2), plain.train(2))
    for model in (ours, plain):
        model.optimizer.zero_grad()
        model.loss(0).backward()
    ours.attached.release()
    assert all(type(weight) is nn.Parameter for weight in ours.weights)
    torch.testing.assert_close(
        [weight.grad.to_dense() for weight in ours.weights],
        [weight.grad.to_dense() for weight in plain.weights],
    )
    for model in (ours, plain):
        model.optimizer.step()
    compare(ours.train(2), plain.train(2))


@pytest.mark.parametrize(("first", "message"), [(0, "are left to torch"), (2, "has all rows")])
@pytest.mark.parametrize("name", ["sgd", "sgd dense", "adagrad dense"])
def test_a_penalty_of_a_whole_table_counts_and_is_said_once(name, first, message):
    def penalize(model, number):
        if number >= first:
            (model.weights[0].square().sum() * 0.01).backward()

    plain = Model(*OPTIMIZERS[name], is_attached=False).train(act=penalize)
    ours = Model(*OPTIMIZERS[name])
    with pytest.warns(UserWarning, match="t0.*" + message) as said:
        ours.train(act=penalize)
    assert len(said) == 1
    compare(ours, plain)
    assert (type(ours.weights[0]) is nn.Parameter) == (first == 0)
    assert type(ours.weights[1]) is not nn.Parameter


def test_what_cannot_be_done_is_refused_by_name():
    ours = Model(*OPTIMIZERS["sgd"])
    with pytest.raises(ValueError, match="'t2'"):
        ours.weights[1].register_hook(print)
    with pytest.raises(ValueError, match="'weight'"):
        HotColdEmbeddingBag.from_torch(ours.modules[0])
    loss = ours.loss(0)
    ours.optimizer.param_groups[1]["params"] = []
    ours.loss(0).backward()
    with pytest.raises(ValueError, match="'t3'"):
        ours.optimizer.step()
    ours.attached.release()
    loss.backward()
    assert ours.weights[1].grad is not None


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_scaler_unscales_and_skips_steps_as_in_torch(is_sparse):
    both = []
    for is_attached in (True, False):
        # torch's own fused step takes no sparse gradients
        settings = {"lr": 0.1, "fused": is_attached}
        model = Model(torch.optim.SGD, settings, is_sparse, is_attached=is_attached)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, factor in enumerate((1.0, torch.inf, 1.0)):
            model.optimizer.zero_grad()
            scaler.scale(model.loss(number) * factor).backward()
            scaler.unscale_(model.optimizer)
            scaler.step(model.optimizer)
            scaler.update()
        both.append(model)
    compare(*both)


def test_an_optimizer_outlives_its_modules():
    ours = Model(*OPTIMIZERS["sgd"])
    ours.modules = ours.attached = None
    weight = ours.weights[0]
    weight.square().sum().backward()
    before = weight.detach().clone()
    ours.optimizer.step()
    torch.testing.assert_close(weight.detach(), 0.8 * before)


def test_a_refused_attachment_leaves_the_modules_to_torch():
    plain = nn.EmbeddingBag(7, 4, mode="sum", sparse=True, dtype=torch.float16)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours = HotColdEmbeddingBag.from_torch(plain)
    with pytest.raises(ValueError, match="float16"):
        Attachment([ours], ours.tables(), optimizer, translate(optimizer, [("t", 0)]))
    assert type(ours.weight) is nn.Parameter
    assert not optimizer._optimizer_step_pre_hooks


def test_a_frozen_table_needs_no_param_group():
    bags = [HotColdEmbeddingBag(7, 4, mode="sum", sparse=True) for _ in range(2)]
    bags[0].weight.requires_grad = False
    optimizer = torch.optim.SGD([bags[1].weight], lr=1.0)
    tables = [
        table._replace(name=str(number))
        for number, bag in enumerate(bags)
        for table in bag.tables()
    ]
    Attachment(bags, tables, optimizer, translate(optimizer, [("1", 0)]))
    before = [bag.weight.detach().clone() for bag in bags]
    sum(bag(IDS).sum() for bag in bags).backward()
    optimizer.step()
    assert torch.equal(bags[0].weight, before[0])
    assert not torch.equal(bags[1].weight, before[1])


def test_a_late_dense_gradient_is_added_to_a_sparse_one():
    ours, plain = (Model(*OPTIMIZERS["sgd dense"], is_attached=each) for each in (True, False))
    late = ours.loss(0), plain.loss(0)
    ours.attached.release()
    for model, loss in zip((ours, plain), late, strict=True):
        model.weights[1].grad = torch.ones(7, 4).to_sparse(1)
        loss.backward()
    torch.testing.assert_close(ours.weights[1].grad.to_dense(), plain.weights[1].grad.to_dense())


def test_a_collection_and_a_bag_share_a_group():
    tables = [TableConfig(name=name, num_embeddings=7, embedding_dim=4) for name in ("a", "b")]
    found = []
    for is_attached in (True, False):
        torch.manual_seed(0)
        rows = HotColdEmbeddingBagCollection(tables)
        bag = HotColdEmbeddingBag(7, 4, mode="sum", sparse=True)
        optimizer = torch.optim.SGD([*rows.parameters(), bag.weight], lr=1.0)
        if is_attached:
            known = [*rows.tables(), bag.tables()[0]]
            Attachment([rows, bag], known, optimizer, translate(optimizer, [("a", 0)]))
        ids = JaggedIds.from_one_hot(["a", "b"], IDS[:2])
        for _ in range(2):
            optimizer.zero_grad()
            (rows(ids).values().square().sum() + bag(IDS).square().sum()).backward()
            optimizer.step()
        found.append([table.detach().clone() for table in (*rows.table_weights(), bag.weight)])
    torch.testing.assert_close(*found)
