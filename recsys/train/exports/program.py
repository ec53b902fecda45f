"""Export of a run's model as a program of PyTorch alone, made by `torch.export`.

    FILE.pt2    what `torch.export.load` reads: the program, its tensors, and the text
                `recsys.json`, which says what the program takes and returns

The program needs no recsys, numba or numpy. `traced` says what its inputs are. Its last step is the
logit; dense features must have gone through the transforms of the data, and ids are rows of tables.

Float32 tables are mapped from the run's file. `torch.export.save` holds two copies of one table at
a time, so the peak of memory is about twice the largest table; with int8 rows, all rows in int8 and
twice the largest table in int8. `torch.export.load` reads all tables to memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.files import appearing_whole, require_new
from recsys._support.machine import set_num_threads
from recsys._version import __version__
from recsys.batch import feature_tables, has_bags, histories_of
from recsys.config import replace
from recsys.errors import ConfigError
from recsys.train.evaluate import evaluation_config
from recsys.train.exports import QUANTIZATIONS
from recsys.train.exports.plain_tables import quantize_tables, table_bytes, use_plain_tables
from recsys.train.exports.torch_files import opened_for_torch
from recsys.train.exports.traced import trace
from recsys.train.parts.build import build_model, open_source, require_features_of
from recsys.train.run_files.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from recsys.batch import SampleSource

__all__ = ["export_program"]


_ABOUT = "recsys.json"  # the name of the JSON text inside a program's file
_FORMAT_VERSION = 1


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
            has changed, or `torch.export` cannot trace the model.
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
    model, _ = build_model(config, source, table_device="meta")
    folder.load_model(model.model)
    use_plain_tables(model)
    model.eval().requires_grad_(False)
    if quantize is not None:
        quantize_tables(model)
    features = list(feature_tables(source))
    program = trace(model, features, source.num_dense, has_bags=has_bags(source))
    about = _describe(source, record)
    about |= {"rows": quantize or "float32", "table_bytes": table_bytes(model)}
    # Through a stream: torch expects the name of a path to end in .pt2.
    with appearing_whole(file) as partial, opened_for_torch(partial) as stream:
        torch.export.save(program, stream, extra_files={_ABOUT: json.dumps(about, indent=2)})
    return file


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
