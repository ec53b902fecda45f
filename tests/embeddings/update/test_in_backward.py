import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import recsys
from recsys.embeddings import (
    SGD,
    Adagrad,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    PartialRowWiseAdam,
)

INDICES, OFFSETS = torch.tensor([0, 3, 3, 1]), torch.tensor([0, 2, 2])


def bag(**options):
    torch.manual_seed(0)
    return nn.EmbeddingBag(**({"num_embeddings": 5, "embedding_dim": 4, "mode": "sum"} | options))


def train(module, num_steps=2):
    for _ in range(num_steps):
        module(INDICES, OFFSETS).square().sum().backward()


MARKS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, {}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}, {}),
    "sparse adam": (torch.optim.SparseAdam, {"lr": 0.1}, {"sparse": True}),
    "rowwise": ("RowWiseAdagrad", {"lr": 0.1, "eps": 1e-4}, {}),
}


def marked(name, num_rows=5):
    kind, settings, options = MARKS[name]
    if isinstance(kind, str):
        pytest.importorskip("torchrec", exc_type=ImportError)
        import torchrec.optim

        kind = getattr(torchrec.optim, kind)
    module = bag(num_embeddings=num_rows, **options)
    _apply_optimizer_in_backward(kind, [module.weight], settings)
    return module


@pytest.mark.parametrize("name", MARKS)
def test_accelerate_reads_marks_once_and_restore_leaves_rows_without_an_optimizer(name):
    plain, model = (nn.ModuleList([marked(name), nn.Linear(2, 2)]) for _ in range(2))
    train(plain[0])
    train(model[0])

    result = recsys.accelerate(model)
    train(plain[0])
    train(model[0])
    recsys.restore(model)
    before = model[0].weight.detach().clone()
    train(model[0])

    assert "rows are updated at the end of each backward" in repr(result)
    torch.testing.assert_close(before, plain[0].weight.detach(), rtol=1e-6, atol=1e-7)
    assert type(model[0]) is nn.EmbeddingBag
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is not None
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    assert recsys.accelerate(model, optimizer=other, always=True).replacements


def test_an_optimizer_besides_the_mark_is_refused():
    with pytest.raises(ValueError, match=r"optimizer= must be None, got SGD; leave out one"):
        HotColdEmbeddingBag.from_torch(marked("adagrad"), optimizer=SGD(lr=0.1))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (torch.optim.Adam, {}, "torch.optim.Adam updates rows .*apply SGD, Adagrad, SparseAdam"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "must have lr_decay 0, got 0.1"),
        ("Adam", {"lr": 0.5}, "torchrec.optim.Adam adds eps in"),
        ("SGD", {"lr": 0.5, "weight_decay": 0.1}, r"\['lr'\] are translated, got .*weight_decay"),
    ],
)
def test_a_mark_without_a_formula_is_refused(kind, settings, message):
    theirs = collection()
    import torchrec.optim

    kind = getattr(torchrec.optim, kind) if isinstance(kind, str) else kind
    _apply_optimizer_in_backward(kind, theirs.parameters(), settings)

    with pytest.raises(ValueError, match=f"table 'users': .*{message}"):
        HotColdEmbeddingBagCollection.from_torchrec(theirs)


def collection():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    torch.manual_seed(0)
    return torchrec.EmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                name=name,
                num_embeddings=9,
                embedding_dim=4,
                feature_names=[feature],
            )
            for name, feature in (("users", "user"), ("goods", "item"))
        ],
        is_weighted=True,
    )


def kjt():
    from torchrec import KeyedJaggedTensor

    lengths, weights = torch.tensor([2, 1, 0, 3]), torch.linspace(0.5, 2, 6)
    values = torch.tensor([0, 4, 4, 8, 1, 1])
    return KeyedJaggedTensor.from_lengths_sync(["user", "item"], values, lengths, weights)


def test_torchrecs_marks_are_the_collections_optimizer():
    kind, settings, _ = MARKS["adagrad"]
    plain, taken = collection(), collection()
    for each in (plain, taken):
        _apply_optimizer_in_backward(kind, each.parameters(), settings)

    ours = HotColdEmbeddingBagCollection.from_torchrec(taken)
    for each in (plain, ours):
        for _ in range(3):
            each(kjt()).values().square().sum().backward()

    assert ours.row_optimizer.param_groups[0]["lr"] == 0.1
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "settings", "formula"),
    [
        ("SGD", {"lr": 0.5}, SGD(lr=0.5)),
        ("Adagrad", {"lr": 0.5}, Adagrad(lr=0.5, eps=1e-8)),
        ("PartialRowWiseAdam", {"beta1": 0.8}, PartialRowWiseAdam(lr=0.01, betas=(0.8, 0.999))),
    ],
)
def test_torchrecs_placeholders_stand_for_fbgemms_formulas(name, settings, formula):
    theirs = collection()
    import torchrec.optim

    _apply_optimizer_in_backward(getattr(torchrec.optim, name), theirs.parameters(), settings)

    ours = HotColdEmbeddingBagCollection.from_torchrec(theirs)

    [group] = ours.row_optimizer.param_groups
    assert {key: group[key] for key in vars(formula)} == vars(formula)


def test_marks_must_be_alike():
    theirs = collection()
    first, second = theirs.parameters()
    _apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.5})
    _apply_optimizer_in_backward(torch.optim.SGD, [second], {"lr": 0.1})

    with pytest.raises(ValueError, match=r"tables 'users' and 'goods': .* the same optimizer"):
        HotColdEmbeddingBagCollection.from_torchrec(theirs)
