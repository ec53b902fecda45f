"""Export of a run's model as a program of PyTorch alone, made by `torch.export`.

    FILE.pt2    what `torch.export.load` reads: the program, its tensors, and the text
                `recsys.json`, which says what the program takes and returns

The program needs no recsys, numba or numpy, and takes mini-batches of any size:

data with one row per feature and sample    program(dense_features, ids)
data with bags                              program(dense_features, values, offsets)

dense_features    (B, I) float32, after the transforms of the data
ids               (B, F) int64, a column for each feature
values            (N,) int64, the rows of the first feature, then those of the second
offsets           (F * B + 1,) int64; bag (f, b) begins at offsets[f * B + b]
result            (B,) float32 logits

Its tables are modules of PyTorch's own operations, with the state_dict keys of the collections that
they replace. Rows are float32, or int8 with a float32 scale for each row, which are converted after
they are gathered:

    scale of a row    max |number| / 127; 0 for a row of zeros
    int8 value        round(number / scale), in [-127, 127]

A number differs from its original by half a scale at most. A row of D columns takes D + 4 bytes in
place of 4 * D: 0.31 of the bytes at D=16, 0.26 at D=128.

Float32 tables are mapped from the run's file. `torch.export.save` holds two copies of one table at
a time, so the peak of memory is about twice the largest table; with int8 rows, all rows in int8 and
twice the largest table in int8. `torch.export.load` reads all tables to memory.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from recsys._support.files import appearing_whole, existing, require_new
from recsys._support.machine import set_num_threads
from recsys._version import __version__
from recsys.batch import (
    Batch,
    JaggedIds,
    PooledEmbeddings,
    feature_tables,
    has_bags,
    histories_of,
)
from recsys.config import replace
from recsys.embeddings.collection import (
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    JaggedEmbeddings,
)
from recsys.embeddings.lookup.abstract import pooling_of
from recsys.embeddings.table import output_names
from recsys.errors import ConfigError, WeightsError
from recsys.models.dlrm import DLRMTrain
from recsys.train.build import build_model, open_source, require_features_of
from recsys.train.evaluate import evaluation_config
from recsys.train.exports import QUANTIZATIONS
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.batch import SampleSource
    from recsys.embeddings.table import TableConfig

__all__ = ["dequantize", "export_program", "quantize_rows"]

_ABOUT = "recsys.json"  # the name of the JSON text inside a program's file
_FORMAT_VERSION = 1
_UNREADABLE = '"\\;,()[]'  # by torch.export.load, in names of modules
_LARGEST = 127  # -128 is not used, so that a row and its negative have negative values
_BLOCK_BYTES = 16 * 2**20  # of float32 rows that are quantized at a time
_TRACED_SAMPLES = 3  # any number but 0 and 1, which torch.export would take for a constant


def export_program(run_dir: str | Path, file: str | Path, quantize: str | None = None) -> Path:
    """Write the model of a run as a program of PyTorch alone.

    Args:
        run_dir: A run that saved its model.
        file: A new file; its name ends in ".pt2".
        quantize: "int8" to round rows to int8 with a scale for each row.

    Returns:
        The file.

    Raises:
        AlreadyExists: `file` exists.
        ConfigError: a setting is unknown, `run_dir` is not a run, the run saved no model, its data
            has changed, a table has a name that a program cannot have, or `torch.export` cannot
            trace the model.
        OSError: the disk has no room for the tables.
        StoreError: the run's data is gone.
        WeightsError: a row has nan or inf and cannot be rounded.
    """
    file = Path(file)
    if file.suffix != ".pt2":
        raise ConfigError(
            f"export: the name of a program must end in .pt2, as torch.export.load expects, got "
            f"{file}; write to {file.with_name(f'{file.name}.pt2')}"
        )
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise ConfigError(f"export: quantize must be one of {QUANTIZATIONS}, got {quantize!r}")
    folder = RunFolder.open(run_dir)
    folder.require_model()
    record = folder.read_record()
    require_new(file)
    # On the CPU, whose collections can be mapped from the file; all providers have the same keys.
    config = replace(evaluation_config(folder.read_config()), device="cpu", embeddings="recsys")
    set_num_threads(config.num_threads)
    source = open_source(config, to_train=False)
    require_features_of(record, source)
    for table in source.table_sizes:
        if not set(_UNREADABLE).isdisjoint(table):
            raise ConfigError(
                f"export: a table of a program must have a name without {_UNREADABLE}, which "
                f"torch.export.load cannot read, got {table!r}; rename it, and train again"
            )
    model, _ = build_model(config, source, table_device="meta")
    folder.load_model(model.model)
    _use_plain_tables(model, to_int8=quantize is not None)
    program = _trace(model.eval().requires_grad_(False), source)
    tables = [module for module in model.modules() if isinstance(module, _TableRows)]
    table_bytes = sum(rows.nbytes for table in tables for rows in table.parameters())
    about = _describe(source, record)
    about |= {"rows": quantize or "float32", "table_bytes": table_bytes}
    # On a full disk, PyTorch's writer ends the process.
    if table_bytes > shutil.disk_usage(existing(file.parent)).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    # Through a stream: torch expects the name of a path to end in .pt2.
    with appearing_whole(file) as partial, partial.open("wb") as stream:
        torch.export.save(program, stream, extra_files={_ABOUT: json.dumps(about, indent=2)})
    return file


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round the rows of a table to int8, block by block.

    Args:
        weight: The rows. They may be mapped from a file.

    Shape:
        weight (E, D) floating point; results: rows (E, D) int8 and scales (E,) float32.

    Raises:
        WeightsError: a row has nan or inf.
    """
    num_rows, dim = weight.shape
    rows = torch.empty(num_rows, dim, dtype=torch.int8)
    scales = torch.empty(num_rows)
    step = max(1, _BLOCK_BYTES // (4 * dim))
    for begin in range(0, num_rows, step):
        part = slice(begin, begin + step)
        block = weight[part].float()
        scale = block.abs().amax(1) / _LARGEST
        if not bool(scale.isfinite().all()):
            row = begin + int((~scale.isfinite()).nonzero()[0])
            raise WeightsError(f"row {row} must be finite to be rounded to int8, got nan or inf")
        divisor = torch.where(scale > 0, scale, 1)
        # Numbers so small that their scale has few bits left may be more than 127 scales.
        block = (block / divisor.unsqueeze(1)).round_().clamp_(-_LARGEST, _LARGEST)
        rows[part], scales[part] = block, scale
    return rows, scales


def dequantize(rows: Tensor, scales: Tensor) -> Tensor:
    """The numbers that int8 rows stand for.

    Shape:
        rows (N, D) int8; scales (N,) float32; result (N, D) float32.
    """
    return rows.float() * scales.unsqueeze(1)


class _TableRows(nn.Module):
    """The rows of one table, float32 or int8 with scales; they serve only, without gradients."""

    scale: nn.Parameter | None

    def __init__(self, weight: Tensor, *, to_int8: bool) -> None:
        super().__init__()
        rows, scale = quantize_rows(weight) if to_int8 else (weight.detach(), None)
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Gather rows, (N, D) float32, by ids, (N,); an id that is not a row raises."""
        # Not `weight[ids]`, which counts negative ids from the end.
        rows = self.weight.index_select(0, ids)
        if self.scale is None:
            return rows
        return dequantize(rows, self.scale.index_select(0, ids))

    def pool(self, ids: Tensor, lengths: Tensor, pooling: str) -> Tensor:
        """Gather and pool the rows of bags of these lengths, (B,); an empty bag gives zeros."""
        offsets = functional.pad(lengths.cumsum(0), (1, 0))
        table: Tensor = self.weight
        if self.scale is not None:  # pool gathered rows by their places
            table = self(ids)
            ids = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
        return functional.embedding_bag(ids, table, offsets, mode=pooling, include_last_offset=True)


class _PooledTables(nn.Module):
    """Takes the place of a `HotColdEmbeddingBagCollection`."""

    def __init__(self, tables: Sequence[TableConfig], rows: nn.ModuleDict) -> None:
        super().__init__()
        self._tables = tables
        self.embedding_bags = rows

    def forward(self, features: JaggedIds) -> PooledEmbeddings:
        is_one_hot = features.is_known_one_hot()
        bags = _bags_by_feature(features)
        pooled: list[Tensor] = []
        for table in self._tables:
            rows = cast("_TableRows", self.embedding_bags[table.name])
            for feature in table.feature_names:
                ids, lengths = bags[feature]
                pooled.append(
                    rows(ids) if is_one_hot else rows.pool(ids, lengths, pooling_of(table))
                )
        dims = [vectors.shape[1] for vectors in pooled]
        return PooledEmbeddings(output_names(self._tables), dims, torch.cat(pooled, dim=1))


class _JaggedTables(nn.Module):
    """Takes the place of a `HotColdEmbeddingCollection`."""

    def __init__(self, tables: Sequence[TableConfig], rows: nn.ModuleDict) -> None:
        super().__init__()
        self._tables = tables
        self.embeddings = rows

    def forward(self, features: JaggedIds) -> dict[str, JaggedEmbeddings]:
        bags = _bags_by_feature(features)
        names = iter(output_names(self._tables))
        found: dict[str, JaggedEmbeddings] = {}
        for table in self._tables:
            for feature in table.feature_names:
                ids, lengths = bags[feature]
                found[next(names)] = JaggedEmbeddings(self.embeddings[table.name](ids), lengths)
        return found


def _bags_by_feature(features: JaggedIds) -> dict[str, tuple[Tensor, Tensor]]:
    """The ids of each feature, (N,), and the number of ids of each sample, (B,)."""
    keys = features.keys()
    if features.is_known_one_hot():
        rows_of_features = features.values().view(len(keys), -1)
        ones = torch.ones_like(rows_of_features[0])
        return {key: (rows_of_features[number], ones) for number, key in enumerate(keys)}
    lengths_of_bags = features.lengths().view(len(keys), -1)
    # Not slices: torch.export traces sizes that depend on values only for a split.
    ids = torch.split(features.values(), lengths_of_bags.sum(1).tolist())
    return dict(zip(keys, zip(ids, lengths_of_bags, strict=True), strict=True))


def _use_plain_tables(model: nn.Module, *, to_int8: bool) -> None:
    """Replace every collection of recsys in a model by a plain one; float32 rows are not copied."""
    plain: dict[nn.Module | None, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, HotColdEmbeddingBagCollection):
            tables, weights = module.embedding_bag_configs(), module.embedding_bags
            plain[module] = _PooledTables(tables, _plain_rows(weights, to_int8=to_int8))
        elif isinstance(module, HotColdEmbeddingCollection):
            tables, weights = module.embedding_configs(), module.embeddings
            plain[module] = _JaggedTables(tables, _plain_rows(weights, to_int8=to_int8))
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in plain:
                setattr(parent, name, plain[child])


def _plain_rows(modules: nn.ModuleDict, *, to_int8: bool) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            name: _TableRows(cast("Tensor", module.weight), to_int8=to_int8)
            for name, module in modules.items()
        }
    )


def _trace(model: nn.Module, source: SampleSource) -> ExportedProgram:
    """Trace a model that serves, for mini-batches of any size; the program holds its tensors.

    Args:
        model: Maps a `Batch` to (loss, (loss, logits, labels)), and its `model` computes the
            logits: of `DLRMTrain` from dense and sparse features, else from a `Batch`.
        source: The run's data.

    Raises:
        ConfigError: `torch.export` cannot trace the model.
    """
    features = list(feature_tables(source))
    batch, lookups = Dim("batch", min=1), Dim("lookups", min=0)
    num_bags = len(features) * _TRACED_SAMPLES
    dense = torch.zeros(_TRACED_SAMPLES, source.num_dense)
    program: nn.Module = _OfIds(model, features)
    ids = torch.zeros(_TRACED_SAMPLES, len(features), dtype=torch.int64)
    inputs: tuple[Tensor, ...] = dense, ids
    shapes = {"dense_features": {0: batch}, "ids": {0: batch}}
    if has_bags(source):
        program = _OfBags(model, features)
        # Two rows in each bag: more lookups than bags, so that the two sizes are not confused.
        inputs = dense, torch.zeros(2 * num_bags, dtype=torch.int64), 2 * torch.arange(num_bags + 1)
        shapes = {
            "dense_features": {0: batch},
            "values": {0: lookups},
            "offsets": {0: len(features) * batch + 1},
        }
    try:
        with torch.no_grad():
            return torch.export.export(program.eval(), inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch raises errors of many kinds
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"torch.export cannot trace {type(model.model).__name__}: {reason}; its forward must "
            "be operations on tensors that do not depend on the values of its input, with sizes "
            "from tensor.shape, not from len(); see the documentation of torch.export"
        ) from error


class _OfIds(nn.Module):
    """The logits of a model, without its loss, of one row for each feature and sample."""

    def __init__(self, model: nn.Module, features: Sequence[str]) -> None:
        super().__init__()
        self.model: nn.Module = model.model  # type: ignore[assignment]  # Module.__getattr__
        self._takes_batch = not isinstance(model, DLRMTrain)
        self._features = list(features)

    def score(self, dense_features: Tensor, sparse_features: JaggedIds) -> Tensor:
        """Logits, (B,)."""
        if self._takes_batch:
            no_labels = dense_features.new_zeros(dense_features.shape[0])
            logits: Tensor = self.model(Batch(dense_features, sparse_features, no_labels))
        else:
            logits = self.model(dense_features, sparse_features)
        return logits.reshape(-1).float()

    def forward(self, dense_features: Tensor, ids: Tensor) -> Tensor:
        return self.score(dense_features, JaggedIds.from_one_hot(self._features, ids.t()))


class _OfBags(_OfIds):
    def forward(  # type: ignore[override]  # of bags
        self, dense_features: Tensor, values: Tensor, offsets: Tensor
    ) -> Tensor:
        num_features, batch_size = len(self._features), dense_features.shape[0]
        # The comparison also tells torch.export how the two sizes depend on each other.
        if offsets.shape[0] != num_features * batch_size + 1:
            raise ValueError(
                f"offsets must have F * B + 1 entries with F = {num_features} and B = "
                f"{batch_size}, got {offsets.shape[0]}"
            )
        # The constructor of JaggedIds reads offsets, which have no values while they are traced.
        sparse = JaggedIds._unchecked(self._features, values, offsets, None)
        return self.score(dense_features, sparse)


def _describe(source: SampleSource, record: Mapping[str, Any]) -> dict[str, Any]:
    """What the program takes and returns, in JSON types."""
    tables = feature_tables(source)
    kinds = {each["name"]: each.get("kind", "one") for each in record["data"].get("features", ())}
    sparse = (
        [("values", ["N"], "int64"), ("offsets", ["F * B + 1"], "int64")]
        if has_bags(source)
        else [("ids", ["B", len(tables)], "int64")]
    )
    inputs = [("dense_features", ["B", source.num_dense], "float32"), *sparse]
    return {
        "format": "recsys program",
        "version": _FORMAT_VERSION,
        "made_by": {"recsys": __version__, "torch": torch.__version__},
        "inputs": [{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in inputs],
        "output": {"name": "logits", "shape": ["B"], "dtype": "float32"},
        "dense_features": record["data"].get("dense_names"),
        "features": [
            {
                "name": name,
                "table": table,
                "num_embeddings": source.table_sizes[table],
                "kind": kinds.get(name, "one"),
            }
            for name, table in tables.items()
        ],
        "histories": histories_of(source),
    }
