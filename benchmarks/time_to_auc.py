"""How long one DLRM trains until it has a test AUC, with the embeddings of several libraries.

    recsys       recsys' DLRM over its collection
    fbgemm       the same over FBGEMM's operator, whose optimizer runs in backward
    torchrec     TorchRec's DLRM over its collection, whose gradients are dense
    facebook     `DLRM_Net` of facebookresearch/dlrm, whose gradients are sparse
    accelerated  the same after `recsys.accelerate(always=True)`

    python benchmarks/time_to_auc.py STORE --dlrm CLONE --json FILE

STORE is what `recsys prepare criteo-kaggle` wrote, and CLONE a clone of facebookresearch/dlrm. All
begin with the same numbers in tables and layers, and train for one epoch on the same mini-batches
in the same order, by Adagrad 0.01 with B=1024. They take turns, seed by seed. The clock runs in
steps alone: it stops after each tenth of the epoch, when the test part is evaluated.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from fbgemm import FbgemmEmbeddingBags
from model import NUM_DENSE, samples, tables_of
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from turns import (
    bench_arguments,
    prepare_process,
    ratio,
    rows_by_provider,
    show_rows,
    take_turns,
)

import recsys
from recsys import DLRM, HotColdEmbeddingBagCollection, Store
from recsys.datasets import BatchLoader
from recsys.embeddings import Adagrad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from turns import Row

_DIM, _BATCH_SIZE, _LR, _TARGET = 16, 1024, 0.01, 0.75
_BOTTOM, _TOP = [512, 256, 64, _DIM], [512, 256, 1]
_NUM_PARTS = 10


class _Provider(NamedTuple):
    """A model, and what is specific to its library.

    Attributes:
        model: Maps dense features and `features_of` of the ids to logits, (B, 1).
        tables: Its tables, in the order of the features.
        optimizers: Their steps update it.
        features_of: Maps the ids of a mini-batch to what the model takes.
    """

    model: nn.Module
    tables: Sequence[Tensor]
    optimizers: Sequence[torch.optim.Optimizer]
    features_of: Callable[[Any], Any] = lambda ids: ids


class _Epoch(NamedTuple):
    seconds: Sequence[float]
    aucs: Sequence[float]

    @property
    def seconds_to_target(self) -> float:
        """Seconds of training before the first evaluation that has the target; nan if none has."""
        reached = (
            each for each, auc in zip(self.seconds, self.aucs, strict=True) if auc >= _TARGET
        )
        return next(reached, float("nan"))


def bench_time_to_auc(source: Any, providers: Sequence[str], num_seeds: int) -> Iterator[Row]:
    """Train one epoch for each seed and provider.

    Args:
        source: Is read.
        providers: Names of `_BUILDERS`.
        num_seeds: Seeds of numbers and orders.
    """
    found: dict[str, list[_Epoch]] = {name: [] for name in providers}
    test = list(BatchLoader(source, "test", 8192, shuffle=False))
    for seed in range(num_seeds):
        loader = BatchLoader(source, "train", _BATCH_SIZE, shuffle=True, seed=seed, drop_last=True)
        train = list(loader)
        calls = {name: partial(_train, name, source, train, test, seed) for name in providers}
        for name, [epoch] in take_turns(calls, 1, num_warm_up_rounds=seed == 0, seed=seed).items():
            found[name].append(epoch)
    case = f"B={_BATCH_SIZE},D={_DIM},optimizer=adagrad,target={_TARGET}"
    rows = partial(rows_by_provider, "time_to_auc", case)
    steps = {name: [epoch.seconds[-1] for epoch in epochs] for name, epochs in found.items()}
    spent = {name: [epoch.seconds_to_target for epoch in epochs] for name, epochs in found.items()}
    yield from rows(
        "auc", "1", {name: [e.aucs[-1] for e in epochs] for name, epochs in found.items()}
    )
    yield from rows("epoch", "s", steps)
    yield from rows("time_to_auc", "s", spent)
    for name in providers:
        yield ratio(
            "time_to_auc",
            case,
            name,
            f"speed_over_{providers[-1]}",
            values=spent[name],
            baseline=spent[providers[-1]],
        )


def _train(name: str, source: Any, train: Sequence[Any], test: Sequence[Any], seed: int) -> _Epoch:
    torch.manual_seed(seed)
    model, tables, optimizers, features_of = _BUILDERS[name](source)
    _draw(model, tables, seed)
    if name == "accelerated":
        recsys.accelerate(model, optimizer=optimizers[0], always=True)
    of_train = [
        (each.dense_features, features_of(each.sparse_features), each.labels) for each in train
    ]
    of_test = [(each.dense_features, features_of(each.sparse_features)) for each in test]
    labels = torch.cat([each.labels for each in test])
    seconds, spent, aucs = 0.0, [], []
    for part in np.array_split(np.arange(len(train)), _NUM_PARTS):
        begin = time.perf_counter()
        for number in part:
            dense, features, wanted = of_train[number]
            for optimizer in optimizers:
                optimizer.zero_grad()
            logits = model(dense, features).squeeze(1)
            loss = binary_cross_entropy_with_logits(logits, wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
        seconds += time.perf_counter() - begin
        with torch.no_grad():
            scores = torch.cat([model(*each).squeeze(1) for each in of_test])
        spent.append(seconds)
        aucs.append(float(roc_auc_score(labels, scores)))
    return _Epoch(spent, aucs)


@torch.no_grad()
def _draw(model: nn.Module, tables: Sequence[Tensor], seed: int) -> None:
    """Draw all numbers, the same ones for every library."""
    generator = torch.Generator().manual_seed(seed)
    for table in tables:
        bound = len(table) ** -0.5
        table.copy_(torch.empty_like(table).uniform_(-bound, bound, generator=generator))
    for layer in (each for each in model.modules() if isinstance(each, nn.Linear)):
        nn.init.xavier_normal_(layer.weight, generator=generator)
        nn.init.normal_(layer.bias, std=len(layer.bias) ** -0.5, generator=generator)


def _over(collection: Any, of_rows: torch.optim.Optimizer) -> _Provider:
    """Our DLRM over a collection whose rows have an optimizer of their own."""
    tables = collection.table_weights()
    model = DLRM(collection, NUM_DENSE, _BOTTOM, _TOP)
    in_tables = set(collection.parameters())
    dense = [each for each in model.parameters() if each not in in_tables]
    return _Provider(model, tables, [torch.optim.Adagrad(dense, lr=_LR), of_rows])


def _build_recsys(source: Any) -> _Provider:
    collection = HotColdEmbeddingBagCollection(
        tables_of(source, _DIM), optimizer=Adagrad(lr=_LR), auto_apply=False
    )
    assert collection.row_optimizer is not None
    return _over(collection, collection.row_optimizer)


def _build_fbgemm(source: Any) -> _Provider:
    collection = FbgemmEmbeddingBags(tables_of(source, _DIM), "adagrad", _LR)
    return _over(collection, collection.optimizer)


def _build_torchrec(source: Any) -> _Provider:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM as TorchRecDLRM  # noqa: N811

    configs = [
        EmbeddingBagConfig(
            name=each.name,
            num_embeddings=each.num_embeddings,
            embedding_dim=_DIM,
            feature_names=list(each.feature_names),
        )
        for each in tables_of(source, _DIM)
    ]
    collection = EmbeddingBagCollection(configs)
    tables = [bag.weight for bag in collection.embedding_bags.values()]
    model = TorchRecDLRM(collection, NUM_DENSE, _BOTTOM, _TOP)

    def features_of(ids: Any) -> Any:
        offsets = ids.offsets().long()
        return KeyedJaggedTensor.from_offsets_sync(ids.keys(), ids.values().long(), offsets)

    return _Provider(model, tables, [torch.optim.Adagrad(model.parameters(), lr=_LR)], features_of)


class _Facebook(nn.Module):
    """`DLRM_Net`, with logits as its result."""

    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        from dlrm_s_pytorch import DLRM_Net  # type: ignore[import-not-found]

        num_pairs = len(table_sizes) * (len(table_sizes) + 1) // 2
        widths = [NUM_DENSE, *_BOTTOM], [_DIM + num_pairs, *_TOP]
        sizes = np.array(table_sizes), *map(np.array, widths)
        self.net = DLRM_Net(_DIM, *sizes, arch_interaction_op="dot")
        self.net.top_l[-1] = nn.Identity()

    def forward(self, dense: Tensor, features: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.net(dense, *features)
        return logits


def _build_facebook(source: Any) -> _Provider:
    model = _Facebook(list(source.table_sizes.values()))
    tables = [bag.weight for bag in model.net.emb_l]

    def features_of(ids: Any) -> tuple[Tensor, Tensor]:
        values = ids.values().long().view(len(tables), -1)
        return torch.arange(values.shape[1]).repeat(len(tables), 1), values

    return _Provider(model, tables, [torch.optim.Adagrad(model.parameters(), lr=_LR)], features_of)


_BUILDERS: dict[str, Callable[[Any], _Provider]] = {
    "recsys": _build_recsys,
    "fbgemm": _build_fbgemm,
    "torchrec": _build_torchrec,
    "accelerated": _build_facebook,
    "facebook": _build_facebook,
}


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__)
    parser.add_argument("store", nargs="?", type=Path, help="a store; with --quick none is needed")
    parser.add_argument("--dlrm", type=Path, help="a clone of facebookresearch/dlrm")
    options = parser.parse_args()
    if options.store is None and not options.quick:
        parser.error("name a store, which `recsys prepare criteo-kaggle` writes, or give --quick")
    prepare_process()
    providers = list(_BUILDERS)
    if options.dlrm is None:
        providers = providers[:3]
    else:
        sys.path.insert(0, str(options.dlrm))
    source = samples(14 * 1024, [100] * 26) if options.store is None else Store(options.store)
    show_rows(bench_time_to_auc(source, providers, 1 if options.quick else 6), options)


if __name__ == "__main__":
    main()
