import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import RowWiseAdagrad
from recsys.embeddings.update.translate import translate

TABLE = [("users", 0)]


def weight():
    return nn.Parameter(torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4))


def test_torchrecs_rowwise_adagrad_is_ours():
    pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.optim import RowWiseAdagrad as Theirs

    table = weight()
    optimizer = Theirs([table], lr=0.3, eps=1e-3, lr_decay=0.5)
    translation = translate(optimizer, TABLE)
    settings = optimizer.param_groups[0]

    assert translation.formula(settings) == RowWiseAdagrad(lr=0.3, eps=1e-3)
    assert translation.learning_rate(settings, 3) == 0.15
    assert translation.state_names == {"momentum1": "sum"}


REFUSED = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "with momentum=0.9 updates rows"),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        "with momentum=0.9 updates rows",
    ),
    "decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, "with weight_decay=0.1 updates"),
    "maximize": (
        torch.optim.SparseAdam,
        {"maximize": True},
        r"maximize=True .*\(negate the loss\)",
    ),
    "differentiable": (torch.optim.Adagrad, {"differentiable": True}, "outside autograd"),
    "adam": (torch.optim.Adam, {}, "torch.optim.Adam updates rows that were not looked up"),
    "adamw": (torch.optim.AdamW, {}, "torch.optim.AdamW updates rows that were not looked up"),
    "subclass": (type("Mine", (torch.optim.SGD,), {}), {"lr": 0.1}, "Mine is not SGD, Adagrad"),
    "lbfgs": (torch.optim.LBFGS, {}, "torch.optim.LBFGS is not SGD, Adagrad, SparseAdam"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_formula_is_refused_by_name(case):
    kind, settings, message = REFUSED[case]

    with pytest.raises(ValueError, match=f"table 'users': .*{message}.*without optimizer="):
        translate(kind([weight()], **settings), TABLE)


def test_a_wrapper_of_torchrec_is_refused_for_the_optimizer_inside_which_works():
    pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.warmup import WarmupOptimizer

    def trained(budget):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(400, 4, mode="sum", sparse=True))
        inside = torch.optim.Adagrad(model.parameters(), lr=0.1)
        wrapper = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda _: inside)
        for each in (wrapper, CombinedOptimizer([wrapper]), WarmupOptimizer(wrapper, [])):
            with pytest.raises(
                ValueError, match=f"table '0': torchrec.{type(each).__name__} wraps other .*inside"
            ):
                recsys.accelerate(model, optimizer=each, budget="4KiB")
        if budget is not None:
            recsys.accelerate(model, optimizer=inside, budget=budget, always=True)
        for step in range(3):
            inside.zero_grad()
            model(torch.arange(8).view(2, 4) + step).square().sum().backward()
            inside.step()
        return inside.state_dict()["state"][0]["sum"], model[0].weight

    for found, expected in zip(trained("4KiB"), trained(None), strict=True):
        torch.testing.assert_close(found, expected)
