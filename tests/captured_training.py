"""Training with and without a captured dense part, for tests on the CPU and on a GPU."""

import copy
from types import SimpleNamespace

import torch
from torch import nn

from recsys import DLRM, Batch, DLRMTrain, JaggedIds
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.table import TableConfig
from recsys.models import DCNv2, DeepFM, MaskedTransformerArch
from recsys.pipeline import TrainPipeline

SIZES = {"cat_0": 300, "cat_1": 260, "cat_2": 5}
B, D = 8, 4  # samples, embedding_dim
DENSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def make_tables(dim=D, scale=1):
    return [
        TableConfig(
            name=f"t_{feature}",
            num_embeddings=size * scale,
            embedding_dim=dim,
            feature_names=(feature,),
        )
        for feature, size in SIZES.items()
    ]


def make_batch(seed, num_samples=B, weights=None, device="cpu", scale=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples,)
    ids = [torch.randint(0, scale * size, shape, generator=generator) for size in SIZES.values()]
    features = JaggedIds.from_one_hot(list(SIZES), torch.stack(ids))
    dense = torch.rand(num_samples, 5, generator=generator)
    labels = torch.randint(0, 2, (num_samples,), generator=generator)
    return Batch(dense, features, labels, weights).to(torch.device(device))


def make_model(kind="dlrm", optimizer=None, device="cpu", dim=D, scale=1, **options):
    torch.manual_seed(0)
    optimizer = SGD(lr=0.1) if optimizer is None else optimizer
    device = torch.device(device)
    embeddings = HotColdEmbeddingBagCollection(
        make_tables(dim, scale), device=device, optimizer=optimizer, **options
    )
    sizes = [8, dim], [8, 1]
    if kind == "dcn_v2":
        model = DCNv2(embeddings, 5, *sizes, dcn_num_layers=2, dcn_low_rank_dim=3)
    elif kind == "deepfm":
        model = DeepFM(embeddings, 5, *sizes)
    elif kind == "masked_transformer":
        model = DLRM(embeddings, 5, *sizes, interaction=MaskedTransformerArch(3, dim))
    else:
        model = DLRM(embeddings, 5, *sizes)
    return DLRMTrain(model).to(device)


def dense_parameters(model):
    return [
        each for name, each in model.named_parameters() if "embedding_bag_collection" not in name
    ]


def train(batches, *, capture, kind="dlrm", dense="sgd", change=None, build=None, **options):
    """Trains on mini-batches; what came of it, as it was when training was over."""
    settings = {
        name: options.pop(name)
        for name in ("schedule", "batch_size", "custom_model_fwd", "skip")
        if name in options
    }
    model = (build or make_model)(**({} if build else {"kind": kind} | options))
    if change is not None:
        change(model)
    if "custom_model_fwd" in settings:
        settings["custom_model_fwd"] = settings["custom_model_fwd"](model)
    torch.manual_seed(1)
    parameters = model.parameters() if build else dense_parameters(model)
    optimizer = DENSE[dense](parameters, lr=0.05)
    pipeline = TrainPipeline(model, optimizer, capture=capture, **settings)
    outputs = list(pipeline.steps(batches))
    rows = model.model.sparse_arch.embedding_bag_collection
    return SimpleNamespace(
        outputs=[(loss, *output) for loss, output in outputs],
        weights=copy.deepcopy(model.state_dict()),
        states=rows.row_optimizer.state_dict()["state"] if hasattr(rows, "row_optimizer") else {},
        captured=pipeline.captured,
        pipeline=pipeline,
    )


def add_dropout(model):
    model.model.over_arch.model.insert(1, nn.Dropout(0.5))
    model.model.over_arch.forward = model.model.over_arch.model.forward


def require_equal(found, expected):
    assert len(found.outputs) == len(expected.outputs)
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert [tuple(each.shape) for each in ours] == [tuple(each.shape) for each in theirs]
        assert not any(each.requires_grad for each in ours)
        assert all(map(torch.equal, ours, theirs))
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
    for table, state in expected.states.items():
        for name, value in state.items():
            known = torch.as_tensor(found.states[table][name])
            assert torch.equal(known, torch.as_tensor(value)), (table, name)
