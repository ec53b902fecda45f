"""A run's model in files for other programs.

    safetensors    the state dict of any model, without pickle; `dlrm` and `dcn_v2` have the keys of
                   TorchRec's `DLRM` and `DLRM_DCN` (tables `t_<table>`)
    torch-export   a program for `torch.export.load`, which runs without recsys

Checkpoints of a run, also of one that goes on, are exported as safetensors: whole, or only the rows
that changed.

    recsys export RUN --to safetensors --checkpoint 7 --out FULL       a whole model
    recsys export RUN --since 7 --out DELTA                            what changed after it
    recsys apply FULL DELTA [DELTA ...] --out FILE                     the whole model of today

A delta has the names that the deltas of a checkpoint have: for each table `KEY.rows`, (M,) int64
ascending, and `KEY`, the (M, D) rows; of everything else the whole tensor. In the metadata, `since`
and `checkpoint` are the numbers of the two checkpoints, and `since_id` and `checkpoint_id` their
ids. So a server knows whether a delta is the next one. Optimizer state is not in these files.
Memory does not grow with the model: rows are written where they belong in the file.

A program takes mini-batches of any size, and needs no recsys, numba or numpy. Its file has the text
`recsys.json`, which says what it takes and returns:

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
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from recsys._support.files import appearing_whole, existing, read_together, require_new
from recsys._support.safetensors_dtypes import DTYPES
from recsys._version import __version__
from recsys.batch import (
    Batch,
    JaggedIds,
    PooledEmbeddings,
    SampleSource,
    feature_tables,
    has_bags,
    histories_of,
)
from recsys.embeddings.collection import (
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    JaggedEmbeddings,
)
from recsys.embeddings.lookup.abstract import pooling_of
from recsys.embeddings.table import TableConfig, output_names
from recsys.errors import CheckpointError, ConfigError, WeightsError
from recsys.models.dlrm import DLRMTrain
from recsys.train.checkpoint.format import (
    ROWS,
    Piece,
    piece_number,
    read_blocks,
    read_checkpoint,
    read_state,
    safetensors_header,
    whole_tables,
)
from recsys.train.evaluate import open_saved_model
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


__all__ = ["apply_deltas", "export_checkpoint", "export_run", "export_run_checkpoint"]

_Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_FIRST = torch.zeros(1, dtype=torch.int64)  # rows from the first one on
_ABOUT = "recsys.json"  # the name of the JSON text inside a program's file
_FORMAT_VERSION = 1
_UNREADABLE = '"\\;,()[]'  # by torch.export.load, in names of modules
_LARGEST = 127  # -128 is not used, so that a row and its negative have negative values
_BLOCK_BYTES = 16 * 2**20  # of float32 rows that are quantized at a time
_TRACED_SAMPLES = 3  # any number but 0 and 1, which torch.export would take for a constant


def export_run(run_dir: str | Path, to: str, file: str | Path, quantize: str | None = None) -> Path:
    """Write the model of a run in another program's format.

    Args:
        run_dir: A run that saved its model.
        to: "safetensors" or "torch-export".
        file: A new file. The name of a program ends in ".pt2".
        quantize: For a program: "int8" to round rows to int8, with a scale for each row.

    Returns:
        The file.

    Raises:
        AlreadyExists: `file` exists.
        ConfigError: `run_dir` is not a run, or it saved no model; for a program also: the name of
            the file or of a table does not fit, its data has changed, or `torch.export` cannot
            trace the model.
        OSError: the disk is full, or cannot be written.
        StoreError: the run's data, which a program is traced with, is gone.
        WeightsError: a row has nan or inf and cannot be rounded.
    """
    folder, file = RunFolder.open(run_dir), Path(file)
    folder.require_model()
    require_new(file)
    if to == "torch-export":
        return _export_program(folder, file, quantize)
    with appearing_whole(file) as partial:
        shutil.copyfile(folder.model_file, partial)
    return file


def export_run_checkpoint(run_dir: str | Path, file: str | Path, number: int | None = None) -> Path:
    """Write the whole model of a run's checkpoint, as safetensors; the run may go on meanwhile.

    Args:
        run_dir: A run with checkpoints.
        file: A new file.
        number: Number of the checkpoint; None for the newest complete one.

    Returns:
        The file.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: `run_dir` is not a run.
        OSError: the disk is full, or cannot be written.
    """
    return export_checkpoint(RunFolder.open(run_dir).checkpoints_folder, file, number)


def export_checkpoint(
    folder: Path, file: str | Path, number: int | None = None, since: int | None = None
) -> Path:
    """Write the model of a checkpoint: all rows, or those that changed after an older one.

    Args:
        folder: The folder of checkpoints.
        file: A new file.
        number: Number of the checkpoint; None for the newest complete one.
        since: Number of the older checkpoint, whose own files may be deleted; None for all rows.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: there is no such checkpoint, it is damaged, it does not continue from
            `since`, or what changed since then is no longer known, because every row was copied
            again.
        OSError: the disk is full, or cannot be written.
    """
    with read_together(folder):
        manifest, pieces = read_checkpoint(folder, number)
        metadata = {"checkpoint": str(manifest.number), "checkpoint_id": manifest.id}
        changed: dict[str, Tensor] = {}
        if since is not None:
            ids = dict(manifest.since)
            if since not in ids:
                raise CheckpointError(
                    f"{folder}: what changed between checkpoint {since} and {manifest.number}, the "
                    f"newest, is not known; the changes since {list(ids)} are; export again after "
                    "the next checkpoint, or export the whole model"
                )
            metadata |= {"since": str(since), "since_id": ids[since]}
            pieces = [
                piece
                for piece in pieces
                if piece.name.startswith("delta") and piece_number(piece.name) > since
            ]
            changed = _changed_rows(folder, pieces)
        state = read_state(folder, manifest.deltas[0], is_mapped=True)["model"]
        whole = {key: tensor for key, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        whole |= {key + ROWS: rows for key, rows in changed.items()}
        shapes: _Shapes = {
            key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in whole.items()
        }
        for key, table in whole_tables(manifest, pieces).items():
            weight, rows = table.arrays["weight"], changed.get(key)
            shapes[key] = (
                DTYPES[weight.dtype],
                (table.end if rows is None else len(rows), *weight.row_shape),
            )
        with _writing(Path(file), shapes, metadata) as write:
            for key, tensor in whole.items():
                write(key, tensor)
            for piece in pieces:
                for block in read_blocks(folder, piece):
                    rows = block.rows
                    if block.key in changed:
                        rows = torch.searchsorted(changed[block.key], rows)
                    write(block.key, block.arrays["weight"], rows)
    return Path(file)


def apply_deltas(full: str | Path, deltas: Sequence[str | Path], file: str | Path) -> Path:
    """Write the model that results from a whole one and the deltas after it.

    Args:
        full: A whole model, as `export_checkpoint` or this function writes it.
        deltas: Deltas of `export_checkpoint`, in order.
        file: A new file.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: a file is damaged, or a delta is missing, repeated, or of another model.
        OSError: the disk is full, or cannot be written.
    """
    opened = [_open(Path(path)) for path in (full, *deltas)]
    before: tuple[Any, Any] = None, None
    for reader, path in zip(opened, (full, *deltas), strict=True):
        metadata = reader.metadata()
        since = metadata.get("since"), metadata.get("since_id")
        if since != before:
            found, wanted = (
                "a whole model" if number is None else f"a delta from checkpoint {number} ({name})"
                for number, name in (since, before)
            )
            raise CheckpointError(
                f"{path}: is {found}, and {wanted} must stand here; give a whole model, then each "
                "delta of the same training once, in order"
            )
        before = metadata["checkpoint"], metadata["checkpoint_id"]
    slices = {name: opened[0].get_slice(name) for name in opened[0].keys()}  # noqa: SIM118
    shapes: _Shapes = {
        name: (DTYPES[tensor.get_dtype()], tuple(tensor.get_shape()))
        for name, tensor in slices.items()
    }
    last = dict(zip(("checkpoint", "checkpoint_id"), before, strict=True))
    with _writing(Path(file), shapes, last) as write:
        for reader in opened:
            names = set(reader.keys())
            for name in names & shapes.keys():
                rows = reader.get_tensor(name + ROWS) if name + ROWS in names else _FIRST
                write(name, reader.get_tensor(name), rows)
    return Path(file)


def _open(path: Path) -> Any:
    """Open a safetensors file of a model or a delta.

    Raises:
        CheckpointError: it was not written by this module, or it is damaged.
    """
    try:
        file: Any = safe_open(path, "pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is not a complete safetensors file ({error})") from error
    if not {"checkpoint", "checkpoint_id"} <= (file.metadata() or {}).keys():
        raise CheckpointError(
            f"{path}: does not say of which checkpoint it is; write it by `recsys export RUN "
            "--to safetensors --checkpoint NUMBER`"
        )
    return file


def _changed_rows(folder: Path, deltas: Sequence[Piece]) -> dict[str, Tensor]:
    """For each table, the rows that deltas have, (M,) ascending."""
    found = {key: [torch.empty(0, dtype=torch.int64)] for piece in deltas for key in piece.tables}
    for piece in deltas:
        for block in read_blocks(folder, piece):
            found[block.key].append(block.rows)
    return {key: torch.unique(torch.cat(rows)) for key, rows in found.items()}


@contextmanager
def _writing(
    file: Path, shapes: _Shapes, metadata: Mapping[str, str]
) -> Iterator[Callable[..., None]]:
    """Write a new file of tensors.

    Args:
        file: The file.
        shapes: Dtype and shape of each tensor.
        metadata: Further texts.

    Yields:
        A function that writes a tensor, or some of its rows: their numbers, or that of the first
        of consecutive ones, follow the values.

    Raises:
        AlreadyExists: `file` exists.
        OSError: the disk is full, or cannot be written.
    """
    require_new(file)
    # Tensors with large numbers first, so that each begins at a multiple of its numbers' size.
    names = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))
    header, begins = safetensors_header({name: shapes[name] for name in names}, metadata)
    sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
    with appearing_whole(file) as partial:
        with partial.open("wb") as opened:
            # Takes the room now: a write to a mapped page could not report a full disk.
            os.posix_fallocate(opened.fileno(), 0, len(header) + sum(sizes.values()))
            opened.write(header)
        content = np.memmap(partial, np.uint8, "r+")

        def write(name: str, values: Tensor, rows: Tensor = _FIRST) -> None:
            if values.numel():
                shape = shapes[name][1]
                of_tensor = content[begins[name] : begins[name] + sizes[name]]
                of_tensor = of_tensor.reshape(shape[0] if shape else 1, -1)
                own = values.contiguous().view(-1).view(torch.uint8).numpy()
                own = own.reshape(-1, of_tensor.shape[1])
                begin = int(rows[0])
                of_tensor[slice(begin, begin + len(own)) if len(rows) == 1 else rows.numpy()] = own

        yield write
        content.flush()


def _export_program(folder: RunFolder, file: Path, quantize: str | None) -> Path:
    """Write the model of a run as a program of PyTorch alone."""
    if file.suffix != ".pt2":
        raise ConfigError(
            f"export: the name of a program must end in .pt2, as torch.export.load expects, got "
            f"{file}; write to {file.with_name(f'{file.name}.pt2')}"
        )
    record = folder.read_record()
    # On the CPU, whose collections can be mapped from the file; all providers have the same keys.
    _, source, model = open_saved_model(folder.path, device="cpu", embeddings="recsys")
    for table in source.table_sizes:
        if not set(_UNREADABLE).isdisjoint(table):
            raise ConfigError(
                f"export: a table of a program must have a name without {_UNREADABLE}, which "
                f"torch.export.load cannot read, got {table!r}; rename it, and train again"
            )
    _use_plain_tables(model, to_int8=quantize is not None)
    program = _trace(model.requires_grad_(False), source)
    tables = [module for module in model.modules() if isinstance(module, _TableRows)]
    table_bytes = sum(rows.nbytes for table in tables for rows in table.parameters())
    about = _describe(source, record) | {"rows": quantize or "float32", "table_bytes": table_bytes}
    # On a full disk, PyTorch's writer ends the process.
    if table_bytes > shutil.disk_usage(existing(file.parent)).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    # Through a stream: torch expects the name of a path to end in .pt2.
    with appearing_whole(file) as partial, partial.open("wb") as stream:
        torch.export.save(program, stream, extra_files={_ABOUT: json.dumps(about, indent=2)})
    return file


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
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


class _TableRows(nn.Module):
    """The rows of one table, float32 or int8 with scales; they serve only, without gradients."""

    scale: nn.Parameter | None

    def __init__(self, weight: Tensor, *, to_int8: bool) -> None:
        super().__init__()
        rows, scale = _quantized(weight) if to_int8 else (weight.detach(), None)
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Gather rows, (N, D) float32, by ids, (N,); an id that is not a row raises."""
        # Not `weight[ids]`, which counts negative ids from the end.
        rows = self.weight.index_select(0, ids)
        if self.scale is None:
            return rows
        return rows.float() * self.scale.index_select(0, ids).unsqueeze(1)

    def pool(self, ids: Tensor, lengths: Tensor, pooling: str) -> Tensor:
        """Gather and pool the rows of bags of these lengths, (B,); an empty bag gives zeros."""
        offsets = functional.pad(lengths.cumsum(0), (1, 0))
        table: Tensor = self.weight
        if self.scale is not None:  # pool gathered rows by their positions
            table = self(ids)
            ids = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
        return functional.embedding_bag(ids, table, offsets, mode=pooling, include_last_offset=True)


class _PlainTables(nn.Module):
    """Takes the place of a collection of recsys, with its keys; float32 rows are not copied."""

    def __init__(
        self,
        collection: HotColdEmbeddingBagCollection | HotColdEmbeddingCollection,
        *,
        to_int8: bool,
    ) -> None:
        super().__init__()
        self._is_pooled = isinstance(collection, HotColdEmbeddingBagCollection)
        self._name = "embedding_bags" if self._is_pooled else "embeddings"
        self._tables: list[TableConfig] = (
            collection.embedding_bag_configs()
            if isinstance(collection, HotColdEmbeddingBagCollection)
            else collection.embedding_configs()
        )
        rows = {
            name: _TableRows(module.weight, to_int8=to_int8)
            for name, module in getattr(collection, self._name).items()
        }
        self.add_module(self._name, nn.ModuleDict(rows))

    def forward(self, features: JaggedIds) -> PooledEmbeddings | dict[str, JaggedEmbeddings]:
        tables, bags = getattr(self, self._name), _bags_by_feature(features)
        found: list[Any] = []
        for table in self._tables:
            rows = tables[table.name]
            for feature in table.feature_names:
                ids, lengths = bags[feature]
                if not self._is_pooled:
                    found.append(JaggedEmbeddings(rows(ids), lengths))
                elif features.is_known_one_hot():
                    found.append(rows(ids))
                else:
                    found.append(rows.pool(ids, lengths, pooling_of(table)))
        names = output_names(self._tables)
        if not self._is_pooled:
            return dict(zip(names, found, strict=True))
        return PooledEmbeddings(
            names, [pooled.shape[1] for pooled in found], torch.cat(found, dim=1)
        )


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
    """Replace every collection of recsys in a model by a plain one."""
    plain: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, HotColdEmbeddingBagCollection | HotColdEmbeddingCollection):
            if module not in plain:
                plain[module] = _PlainTables(module, to_int8=to_int8)
            model.set_submodule(name, plain[module])


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
    kinds = {
        feature["name"]: feature.get("kind", "one")
        for feature in record["data"].get("features", ())
    }
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
