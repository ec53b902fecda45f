"""What embeddings refuse: what is done, the error, and the name that it gives."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbedding,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    StalenessTracker,
    TableConfig,
)
from recsys.errors import BudgetTooSmall, ConfigError, MalformedBags

IDS = torch.tensor([[1, 2], [3, 8]])
NESTED = torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 1, 3]))
OPTIMIZED = {"optimizer": SGD(lr=0.1)}
TABLES = [
    TableConfig(name="users", num_embeddings=9, embedding_dim=4, feature_names=("user", "friend"))
]
MAKERS = {
    "bag": partial(HotColdEmbeddingBag, 9, 4),
    "embedding": partial(HotColdEmbedding, 9, 4),
    "bags": partial(HotColdEmbeddingBagCollection, TABLES),
    "embeddings": partial(HotColdEmbeddingCollection, TABLES),
    "from_torch": partial(HotColdEmbeddingBag.from_torch, nn.EmbeddingBag(9, 4)),
}
NO_FORMULAS = [
    ("sgd", "'sgd'"),
    (SGD, "class SGD"),
    (torch.optim.SGD, "class SGD"),
    (torch.optim.SGD([torch.zeros(1)], lr=0.1), "type SGD"),
    (0.1, "float"),
]


def accelerate(optimizer):
    recsys.accelerate(nn.Sequential(nn.EmbeddingBag(9, 4)), optimizer=optimizer, always=True)


def bag(budget=None, **settings):
    return HotColdEmbeddingBag(
        99, 4, auto_apply=False, budget=budget, **{"mode": "sum"} | OPTIMIZED | settings
    )


def look_up(ids, offsets=None, **settings):
    bag(**settings)(ids, offsets)


def look_up_after(change):
    """Change a bag, and look up in it."""
    module = bag()
    change(module)
    module(IDS)


def table(**settings):
    return TableConfig(**{"name": "t", "num_embeddings": 10, "embedding_dim": 4} | settings)


def keyed(make=HotColdEmbeddingBagCollection, **parts):
    """Look up two features of a `KeyedJaggedTensor`, made of its keys, values and `parts`."""
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    features = torchrec.KeyedJaggedTensor(["user", "friend"], torch.arange(3), **parts)
    make(TABLES, **OPTIMIZED)(features)


def no_features():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    HotColdEmbeddingCollection(TABLES)(torchrec.KeyedJaggedTensor.empty())


def differentiate_twice():
    weights = torch.ones(2, 2, requires_grad=True)
    pooled = bag()(IDS, None, weights).square().sum()
    (gradient,) = torch.autograd.grad(pooled, weights, create_graph=True)
    gradient.sum().backward()


def share_memory_in_files():
    model = nn.ModuleList(nn.EmbeddingBag(100, 8, mode="sum", sparse=True) for _ in range(2))
    model[1].weight.data = model[0].weight.data
    recsys.accelerate(model, **OPTIMIZED, budget="4KiB", cold_tier="file", cold_path="rows")


def give_two_optimizers():
    model = nn.ModuleList([nn.EmbeddingBag(100, 8, mode="sum", sparse=True)])
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    recsys.accelerate(model, **OPTIMIZED)


def save_a_part():
    model = nn.ModuleDict({"one": nn.EmbeddingBag(9, 4), "other": nn.EmbeddingBag(9, 4)})
    recsys.accelerate(model, **OPTIMIZED)
    recsys.save_checkpoint("folder", model=nn.ModuleList([model["one"]]))


USERS = JaggedIds.from_one_hot(["user", "friend"], IDS)
LENGTHS = torch.tensor([1, 1, 1])
OFFSETS = torch.tensor([0, 1, 2, 2, 3])
SHARED = {
    "lengths": LENGTHS,
    "stride_per_key_per_rank": [[2], [1]],
    "inverse_indices": (["user", "friend"], torch.tensor([[0, 1], [0, 0]])),
}
REFUSALS = [
    *[
        (f"{kind} by {optimizer}", partial(make, optimizer=optimizer), TypeError, name)
        for kind, make in MAKERS.items()
        for optimizer, name in NO_FORMULAS
    ],
    ("accelerate by a name", lambda: accelerate("sgd"), TypeError, "'sgd'"),
    ("accelerate by a class", lambda: accelerate(torch.optim.SGD), TypeError, "class SGD"),
    *[
        (f"{kind} by the name of a plan", partial(make, plan="a", **OPTIMIZED), TypeError, "plan")
        for kind, make in MAKERS.items()
        if kind != "from_torch"
    ],
    *[
        (f"half a budget of {kind}", partial(make, budget=0.5, **OPTIMIZED), ValueError, "budget")
        for kind, make in MAKERS.items()
        if kind != "from_torch"
    ],
    (
        "a budget without an optimizer",
        partial(MAKERS["bags"], budget="1KiB"),
        ValueError,
        "optimizer=",
    ),
    ("less than the row map", lambda: bag(395), BudgetTooSmall, "budget"),
    ("less than one row", lambda: bag(10), BudgetTooSmall, "budget"),
    ("another tier", lambda: bag(999, cold_tier="disk"), ConfigError, "cold_tier"),
    ("a folder of no files", lambda: bag(cold_path="rows"), ConfigError, "cold_path"),
    ("files without a folder", lambda: bag(999, cold_tier="file"), ConfigError, "cold_path"),
    (
        "files without a budget",
        lambda: bag(cold_tier="file", cold_path="rows"),
        ConfigError,
        "budget=",
    ),
    *[
        (f"a table of {wrong}", partial(table, **wrong), ConfigError, "table 't'")
        for wrong in (
            *({"feature_names": names} for names in ("user", ("user", "user"), (1,))),
            *({"num_embeddings": number} for number in (10.5, "10", True, 0)),
            {"embedding_dim": 0},
        )
    ],
    ("float16 of a table", lambda: table(data_type="fp16"), ValueError, "data_type"),
    *[
        (f"lr {lr} of {kind}", partial(kind, lr=lr), ValueError, "lr")
        for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, PartialRowWiseAdam)
        for lr in (-0.1, math.inf, math.nan)
    ],
    *[
        (f"a negative eps of {kind}", partial(kind, lr=0.1, eps=-1), ValueError, "eps")
        for kind in (Adagrad, RowWiseAdagrad, Adam, PartialRowWiseAdam)
    ],
    *[
        (f"betas {betas} of {kind}", partial(kind, lr=0.1, betas=betas), ValueError, "betas")
        for kind in (Adam, PartialRowWiseAdam)
        for betas in ((0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9), (0.9,))
    ],
    ("mode", lambda: bag(mode="max"), ValueError, "mode"),
    ("max_norm", lambda: bag(max_norm=1.0), ValueError, "max_norm"),
    (
        "max_norm of an embedding",
        lambda: HotColdEmbedding(9, 4, max_norm=1.0, **OPTIMIZED),
        ValueError,
        "max_norm",
    ),
    (
        "scale_grad_by_freq",
        lambda: HotColdEmbedding(9, 4, scale_grad_by_freq=True, **OPTIMIZED),
        ValueError,
        "scale_grad_by_freq",
    ),
    (
        "max_norm of from_torch",
        lambda: HotColdEmbedding.from_torch(nn.Embedding(9, 4, max_norm=1.0), **OPTIMIZED),
        ValueError,
        "max_norm",
    ),
    ("float16", lambda: bag(dtype=torch.float16), ValueError, "float16"),
    ("float16 later", lambda: look_up_after(nn.Module.half), ValueError, "float16"),
    ("a padding row that is none", lambda: bag(padding_idx=99), AssertionError, "padding_idx"),
    ("padding before all rows", lambda: bag(padding_idx=-100), AssertionError, "padding_idx"),
    (
        "no memory",
        lambda: look_up_after(lambda module: module.weight.untyped_storage().resize_(0)),
        ValueError,
        "memory",
    ),
    (
        "columns first",
        lambda: HotColdEmbedding(9, 4, _weight=torch.rand(4, 9).t(), **OPTIMIZED),
        ValueError,
        "contiguous",
    ),
    ("a lookup on meta", lambda: bag(device="meta")(IDS.to("meta")), ValueError, "meta"),
    ("a lookup in meta", lambda: bag(device="meta")(IDS), ValueError, "meta"),
    (
        "a lookup of bags in meta",
        lambda: HotColdEmbeddingBagCollection(TABLES, device="meta", **OPTIMIZED)(USERS),
        ValueError,
        "meta",
    ),
    *[
        (
            f"{num_samples} bags of {dtype}",
            partial(look_up, torch.ones(num_samples, 3, dtype=dtype)),
            MalformedBags,
            str(dtype),
        )
        for num_samples in (0, 2)
        for dtype in (torch.bool, torch.float32, torch.complex64)
    ],
    (
        "ids of numbers",
        lambda: HotColdEmbedding(9, 4, **OPTIMIZED)(torch.ones(2)),
        MalformedBags,
        "float32",
    ),
    *[
        (
            f"offsets {offsets} and a {mode}",
            partial(look_up, torch.arange(3), torch.tensor(offsets), mode=mode),
            MalformedBags,
            name,
        )
        for offsets, name in (
            ([0, 2, 1], "sample 2"),
            ([0, -1], "sample 1"),
            ([-1, 2], "offsets[0]"),
        )
        for mode in ("sum", "mean")
    ],
    ("features of several batch sizes", lambda: keyed(**SHARED), ValueError, "inverse_indices"),
    (
        "features of several batch sizes, not pooled",
        lambda: keyed(
            HotColdEmbeddingCollection, lengths=LENGTHS, stride_per_key_per_rank=[[2], [1]]
        ),
        ValueError,
        "stride_per_key_per_rank",
    ),
    (
        "lengths and offsets that differ",
        lambda: keyed(lengths=torch.tensor([1, 1, 1, 0]), offsets=OFFSETS),
        MalformedBags,
        "lengths and offsets",
    ),
    (
        "lengths of features that differ",
        lambda: keyed(offsets=OFFSETS, length_per_key=[1, 2]),
        MalformedBags,
        "length_per_key",
    ),
    (
        "bags beyond the ids",
        lambda: keyed(HotColdEmbeddingCollection, offsets=torch.tensor([0, 1, 1, 1, 9])),
        MalformedBags,
        "9",
    ),
    ("no features", no_features, KeyError, "['user', 'friend']"),
    (
        "a feature missing",
        lambda: HotColdEmbeddingCollection(TABLES)(JaggedIds.from_one_hot(["user"], IDS[:1])),
        KeyError,
        "['friend']",
    ),
    ("a table twice", lambda: HotColdEmbeddingCollection(TABLES * 2), ValueError, "'users'"),
    ("no tables", lambda: HotColdEmbeddingCollection([]), ValueError, "table"),
    (
        "two dims",
        lambda: HotColdEmbeddingCollection([*TABLES, table(embedding_dim=8)]),
        ValueError,
        "{'users': 4, 't': 8}",
    ),
    ("a part of a model to save", save_a_part, ConfigError, "not in this model"),
    ("nothing to follow", lambda: StalenessTracker(nn.Linear(2, 2)), ValueError, "recsys"),
    (
        "rows of torch's to follow",
        lambda: StalenessTracker(nn.ModuleDict({"own": HotColdEmbeddingBagCollection(TABLES)})),
        ValueError,
        "'own'",
    ),
    (
        "frozen rows to follow",
        lambda: StalenessTracker(
            nn.ModuleDict({"own": bag(), "fixed": HotColdEmbeddingBag(9, 4).requires_grad_(False)})
        ),
        ValueError,
        "'fixed'",
    ),
    *[
        (
            f"{share} of the rows to follow",
            lambda share=share: StalenessTracker(bag(), share=share),
            ConfigError,
            "share",
        )
        for share in (-0.1, 1.5, math.nan, True, "0.2")
    ],
    (
        "parameters to add",
        lambda: bag().row_optimizer.add_param_group({"params": [nn.Parameter()]}),
        ValueError,
        "parameters",
    ),
    ("jit.script", lambda: torch.jit.script(bag()), ValueError, "type annotation"),
    ("double backward", differentiate_twice, RuntimeError, "once_differentiable"),
    ("nested ids", lambda: bag()(NESTED), MalformedBags, "input"),
    (
        "nested ids of an embedding",
        lambda: HotColdEmbedding(9, 4, **OPTIMIZED)(NESTED),
        MalformedBags,
        "input",
    ),
    ("tables on one memory, in files", share_memory_in_files, ValueError, "'0' and '1'"),
    ("a second optimizer", give_two_optimizers, ValueError, "apply_optimizer_in_backward"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(act, error, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(error) as raised:
        act()

    assert name in str(raised.value)


@pytest.mark.parametrize(
    "convert", [nn.Module.double, lambda module: module.load_state_dict(module.state_dict())]
)
def test_a_table_is_not_swapped_for_another_parameter(monkeypatch, convert):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)

    with pytest.raises(RuntimeError, match="swap"):
        convert(bag())


LEFT = {
    "mode": nn.EmbeddingBag(9, 4, mode="max"),
    "max_norm": nn.Embedding(9, 4, max_norm=1.0),
    "scale_grad_by_freq": nn.EmbeddingBag(9, 4, mode="sum", scale_grad_by_freq=True),
    "float16": nn.EmbeddingBag(9, 4, mode="sum", dtype=torch.float16),
}


@pytest.mark.filterwarnings("ignore:.* is not replaced")
@pytest.mark.parametrize("setting", LEFT)
def test_accelerate_leaves_such_a_module_to_torch_and_says_why(setting):
    model = nn.ModuleDict({"left": LEFT[setting], "taken": nn.EmbeddingBag(9, 4, mode="sum")})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = recsys.accelerate(model, optimizer=optimizer, always=True)

    assert model["left"] is LEFT[setting]
    assert isinstance(model["taken"], HotColdEmbeddingBag)
    assert setting in result.left_alone["left"]
