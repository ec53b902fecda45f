"""Models of plain PyTorch that `recsys bench models` accelerates, and mini-batches for them.

    kind                modules with the tables                                  several ids
    classic, bags       nn.EmbeddingBag, one for each table, sparse gradients    offsets
    collection          torchrec.EmbeddingBagCollection                          lengths
    embeddings          nn.Embedding, one for each table, sparse gradients       padded, summed
    dense-embeddings    the same with dense gradients
    tbsm                nn.Embedding, one for each table, sparse gradients       all kept

`classic` is the whole DLRM, and `tbsm` the whole sequence model; the others have one linear layer
after their tables. Ids are skewed: `E * u**8` for a uniform u, so that few rows get most lookups.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from recsys._support.torchrec_errors import cannot_import_torchrec
from recsys.models.dlrm import OverArch
from recsys.models.tbsm import TimeSeriesLayer, Tower

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "SHALLOW_KINDS",
    "TAOBAO_TABLE_SIZES",
    "WHOLE_KINDS",
    "TableBatch",
    "make_batch",
    "make_model",
    "make_without_tables",
]

WHOLE_KINDS = ("classic", "tbsm")
SHALLOW_KINDS = ("bags", "collection", "embeddings", "dense-embeddings")
TAOBAO_TABLE_SIZES = (987_994, 4_162_024, 9_439)  # users, items, categories
DIM, NUM_DENSE = 16, 13
NUM_STEPS = 20  # of the history of tbsm
MEAN_LENGTH = 8  # ids per sample and table, if they are jagged


class TableBatch(NamedTuple):
    """Dense features (B, 13), inputs of the tables, labels (B,)."""

    dense: Tensor
    inputs: Any
    labels: Tensor


def make_model(kind: str, table_sizes: Sequence[int]) -> nn.Module:
    """Make a model of plain PyTorch.

    Args:
        kind: A kind from the table above.
        table_sizes: Rows of each table.
    """
    if kind == "classic":
        return _Classic(table_sizes)
    if kind == "tbsm":
        return _TimeBased(table_sizes)
    return _Shallow(_TABLES[kind](table_sizes), len(table_sizes))


def make_without_tables(
    kind: str, num_tables: int, batch_size: int, device: str = "cpu"
) -> nn.Module:
    """Make a model of `WHOLE_KINDS` with constant vectors instead of lookups."""
    model = make_model(kind, [1] * num_tables).to(device)
    shapes: list[tuple[int, ...]] = [(batch_size, DIM)] * num_tables
    if kind == "tbsm":
        shapes = [(batch_size, length, DIM) for length in _STEPS]
    model.tables = _Constants(shapes, device)
    return model


def make_batch(
    kind: str,
    table_sizes: Sequence[int],
    batch_size: int,
    *,
    is_jagged: bool,
    seed: int,
    device: str = "cpu",
) -> TableBatch:
    """Make a mini-batch.

    Args:
        kind: The kind of model.
        table_sizes: Rows of each table.
        batch_size: B.
        is_jagged: Whether a sample has several ids per table.
        seed: Seed of all random numbers, which are drawn on the CPU.
        device: Where its tensors are.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, all_lengths = [], []
    fixed = _STEPS if kind == "tbsm" else (1,) * len(table_sizes)
    for num_rows, length in zip(table_sizes, fixed, strict=True):
        lengths = torch.full((batch_size,), length)
        if is_jagged:
            lengths = torch.randint(1, 2 * MEAN_LENGTH, (batch_size,), generator=generator)
        drawn = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64)
        ids.append((num_rows * drawn**8).long().to(device))
        all_lengths.append(lengths.to(device))
    labels = (torch.rand(batch_size, generator=generator) < 0.25).float()
    dense = torch.rand(batch_size, NUM_DENSE, generator=generator)
    return TableBatch(dense.to(device), _INPUTS[kind](ids, all_lengths), labels.to(device))


def _with_offsets(ids: list[Tensor], lengths: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(each, its.cumsum(0) - its) for each, its in zip(ids, lengths, strict=True)]


def _as_matrices(ids: list[Tensor], lengths: list[Tensor]) -> list[Tensor]:
    """The columns of one matrix if each sample has one id; else matrices padded with id 0."""
    if all(bool((its == 1).all()) for its in lengths):
        return list(torch.stack(ids, dim=1).unbind(1))
    found = []
    for each, its in zip(ids, lengths, strict=True):
        is_id = torch.arange(int(its.max()), device=its.device) < its.unsqueeze(1)
        padded = torch.zeros_like(is_id, dtype=torch.int64)
        found.append(padded.masked_scatter(is_id, each))
    return found


def _as_steps(ids: list[Tensor], lengths: list[Tensor]) -> list[Tensor]:
    return [each.view(len(its), -1) for each, its in zip(ids, lengths, strict=True)]


def _as_features(ids: list[Tensor], lengths: list[Tensor]) -> Any:
    keys = [f"f_{number}" for number in range(len(ids))]
    return _torchrec().KeyedJaggedTensor(keys, torch.cat(ids), lengths=torch.cat(lengths))


def _torchrec() -> Any:
    try:
        import torchrec  # importing it takes seconds
    except (ImportError, OSError) as error:
        raise cannot_import_torchrec("bench models", error) from error
    return torchrec


def _weight(num_rows: int) -> Tensor:
    """Rows (E, D) that are not random: drawing 26 tables of a million rows takes seconds."""
    return torch.linspace(-0.1, 0.1, num_rows * DIM).view(num_rows, DIM)


class _Bags(nn.Module):
    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, DIM, mode="sum", sparse=True, _weight=_weight(size))
            for size in table_sizes
        )

    def forward(self, inputs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [bag(*each) for bag, each in zip(self.bags, inputs, strict=True)]


class _Embeddings(nn.Module):
    def __init__(self, table_sizes: Sequence[int], *, sparse: bool = True) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, DIM, padding_idx=0, sparse=sparse, _weight=_weight(size))
            for size in table_sizes
        )

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        found = [each(ids) for each, ids in zip(self.embeddings, inputs, strict=True)]
        return [each.sum(1) if each.dim() == 3 else each for each in found]


class _Collection(nn.Module):
    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        library = _torchrec()
        self.collection = library.EmbeddingBagCollection(
            tables=[
                library.EmbeddingBagConfig(
                    name=f"t_{number}",
                    num_embeddings=size,
                    embedding_dim=DIM,
                    feature_names=[f"f_{number}"],
                )
                for number, size in enumerate(table_sizes)
            ]
        )

    def forward(self, inputs: Any) -> list[Tensor]:
        return [self.collection(inputs).values()]


class _Steps(nn.Module):
    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, DIM, sparse=True, _weight=_weight(size)) for size in table_sizes
        )

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [each(ids) for each, ids in zip(self.embeddings, inputs, strict=True)]


class _Constants(nn.Module):
    """Returns the same vectors for every mini-batch; they get a gradient."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: str) -> None:
        super().__init__()
        self.vectors = [torch.randn(shape).to(device) for shape in shapes]

    def forward(self, inputs: object) -> list[Tensor]:
        return [each.detach().requires_grad_() for each in self.vectors]


class _Classic(nn.Module):
    """The DLRM of Naumov et al. (2019) as most people write it: one bag for each feature."""

    pairs: Tensor

    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        self.tables: nn.Module = _Bags(table_sizes)
        num_vectors = len(table_sizes) + 1
        self.bottom = _mlp(NUM_DENSE, 512, 256, 64, DIM)
        self.top = _mlp(DIM + num_vectors * (num_vectors - 1) // 2, 512, 256, 1)[:-1]
        self.register_buffer("pairs", torch.tril_indices(num_vectors, num_vectors, -1))

    def forward(self, dense: Tensor, inputs: Any) -> Tensor:
        dense = self.bottom(dense)
        vectors = torch.cat([dense, *self.tables(inputs)], dim=1).view(len(dense), -1, DIM)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([dense, pairs], dim=1))
        return logits.squeeze(1)


class _TimeBased(nn.Module):
    """TBSM on users, items and categories, with upstream's sizes for the Taobao data.

    One lookup of a table gets all steps of all samples. Histories are full.
    """

    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        self.tables: nn.Module = _Steps(table_sizes)
        self.tower = Tower(1, len(_STEPS), [DIM], [15, 15])
        self.head = TimeSeriesLayer(NUM_STEPS, 15)
        self.top = OverArch(30, [60, 1])

    def forward(self, dense: Tensor, inputs: Any) -> Tensor:
        users, items, categories = self.tables(inputs)
        fields = torch.stack([users.expand_as(items), items, categories], dim=2)
        position = torch.linspace(0, 1, NUM_STEPS + 1).repeat(len(dense)).unsqueeze(1)
        vectors = self.tower(position, fields.flatten(0, 1)).view(len(dense), NUM_STEPS + 1, -1)
        history, candidate = vectors[:, :-1], vectors[:, -1]
        context = self.head(history, candidate)
        logits: Tensor = self.top(torch.cat([context, candidate], dim=1))
        return logits.squeeze(1)


class _Shallow(nn.Module):
    """Tables and one linear layer."""

    def __init__(self, tables: nn.Module, num_tables: int) -> None:
        super().__init__()
        self.tables = tables
        self.top = nn.Linear(DIM * num_tables, 1)

    def forward(self, dense: Tensor, inputs: Any) -> Tensor:
        found = self.tables(inputs)
        logits: Tensor = self.top(found[0] if len(found) == 1 else torch.cat(found, dim=1))
        return logits.squeeze(1)


_TABLES: dict[str, Callable[[Sequence[int]], nn.Module]] = {
    "bags": _Bags,
    "collection": _Collection,
    "embeddings": _Embeddings,
    "dense-embeddings": partial(_Embeddings, sparse=False),
}
_INPUTS: dict[str, Callable[[list[Tensor], list[Tensor]], Any]] = {
    "classic": _with_offsets,
    "bags": _with_offsets,
    "collection": _as_features,
    "embeddings": _as_matrices,
    "dense-embeddings": _as_matrices,
    "tbsm": _as_steps,
}
# Ids of a sample, by table: of the user, and of the history with the candidate after it.
_STEPS = (1, NUM_STEPS + 1, NUM_STEPS + 1)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)
