"""Commands on a saved model whose tables need not fit in memory."""

import json
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from recsys.config import load_config
from recsys.datasets.store_writer import StoreWriter
from recsys.train.evaluate import evaluate_run, open_saved_model
from recsys.train.export import export_run
from recsys.train.predict import predict_run
from recsys.train.trainer import train
from tests.forks import Fork

NUM_ROWS, DIM = 1_600_000, 64
TABLE_BYTES = NUM_ROWS * DIM * 4


def anonymous_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def carried_out(command, run, out):
    if command == "evaluate":
        return evaluate_run(run)[0]
    if command.startswith("predict "):
        written, _ = predict_run(run, [command.removeprefix("predict ")], out, batch_size=64)
        return written.num_rows
    return export_run(run, command, out) and None


def carry_out_watched(*arguments):
    """Print what a command returns, and the anonymous memory that it took at its peak."""
    first = most = anonymous_bytes()
    is_done = threading.Event()

    def watch():
        nonlocal most
        while not is_done.wait(0.002):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    found = carried_out(*arguments)
    most = max(most, anonymous_bytes())
    is_done.set()
    watcher.join()
    sys.stdout.write(f"{json.dumps([found, most - first])}\n")


@pytest.fixture(scope="module")
def large_run(tmp_path_factory):
    """A run with rows in files, and its record."""
    settings = ["budget=16MiB", "cold_tier=file", "batch_size=64", "eval.batch_size=64"]
    settings += [f"model.embedding_dim={DIM}", f"model.dense_arch=[8, {DIM}]"]
    settings += ["model.over_arch=[8, 1]", "synthetic.num_samples=420", "num_threads=1"]
    settings += [f"synthetic.table_sizes={[3] * 11 + [NUM_ROWS]}"]
    config = load_config(None, settings, data="synthetic:criteo-kaggle")
    folder = tmp_path_factory.mktemp("large") / "run"
    record = train(config, folder, show_progress=False)
    assert (folder / "model.safetensors").stat().st_size > TABLE_BYTES
    yield folder, record
    (folder / "model.safetensors").unlink()


def carry_out(*arguments):
    """Carry out a command in a process of its own."""
    fork = Fork(carry_out_watched, *map(str, arguments))
    printed, said = fork.end()
    assert fork.process.exitcode == 0, said
    return json.loads(printed.splitlines()[-1])


@pytest.mark.slow
def test_a_model_is_evaluated_without_its_tables_in_memory(large_run, tmp_path):
    folder, record = large_run

    metrics, num_bytes = carry_out("evaluate", folder, tmp_path)

    assert metrics == record["metrics"]
    assert num_bytes < TABLE_BYTES / 2


def test_samples_are_predicted_without_tables_in_memory(large_run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, _ = large_run
    _, source, model = open_saved_model(folder)
    batch = source.read(np.arange(400))
    sizes = source.table_sizes
    with StoreWriter(tmp_path / "store", dense_transform="none") as writer:
        rows_FB = batch.sparse_features.values().numpy().reshape(len(sizes), 400)
        writer.append(batch.labels.numpy().astype(np.int8), batch.dense_features.numpy(), rows_FB.T)
        writer.finish(
            dense_names=[f"int_{column}" for column in range(source.num_dense)],
            table_sizes=sizes,
            splits={"train": range(0), "test": range(400), "validation": range(0)},
            about={"convention": "table", "sources": []},
        )

    num_samples, num_bytes = carry_out(
        f"predict {tmp_path / 'store'}", folder, tmp_path / "scores.parquet"
    )

    assert num_samples == 400
    assert num_bytes < TABLE_BYTES / 2
    scores = parquet.read_table(tmp_path / "scores.parquet").column("score").to_numpy()
    with torch.no_grad():
        expected = torch.sigmoid(model(batch)[1][1]).numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_a_model_is_exported_without_its_tables_in_memory(large_run, tmp_path):
    folder, _ = large_run

    _, num_bytes = carry_out("safetensors", folder, tmp_path / "out")

    assert (tmp_path / "out").stat().st_size > TABLE_BYTES
    assert num_bytes < TABLE_BYTES / 2
    (tmp_path / "out").unlink()
