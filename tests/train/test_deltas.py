import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from recsys.errors import AlreadyExists, CheckpointError
from recsys.train.checkpoint import Checkpoints, load_checkpoint
from recsys.train.checkpoint.format import read_manifest
from recsys.train.export import apply_deltas, export_checkpoint
from tests.train.checkpoint.trainings import make_training, require_equal, set_block_bytes


def train(training, number):
    for step in range(2):
        training.step(number * 10 + step, most=5 * number)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Five checkpoints, the model of each, the whole file of the first, and all deltas.

    All tests share them: a test that saves more checkpoints does so in a copy.
    """
    tmp_path = tmp_path_factory.mktemp("run")
    training = make_training()
    checkpoints = Checkpoints(
        tmp_path / "saved", model=training.model, optimizers=training.optimizers
    )
    models, deltas = {}, {}
    for number in range(1, 6):
        train(training, number)
        checkpoints.save()
        checkpoints.wait()
        models[number] = {key: value.clone() for key, value in training.model.state_dict().items()}
        if number == 1:
            export_checkpoint(tmp_path / "saved", tmp_path / "full")
        else:
            deltas[number] = export_checkpoint(
                tmp_path / "saved", tmp_path / f"delta{number}", since=number - 1
            )
    checkpoints.close()
    return SimpleNamespace(
        folder=tmp_path / "saved", models=models, full=tmp_path / "full", deltas=deltas
    )


def test_a_whole_file_has_the_model(run, tmp_path):
    require_equal(load_file(run.full), run.models[1])
    assert (
        export_checkpoint(run.folder, tmp_path / "four", 4).stat().st_size
        == run.full.stat().st_size
    )
    require_equal(load_file(tmp_path / "four"), run.models[4])


def test_whole_and_deltas_in_order_give_the_model(run, tmp_path):
    for last in range(2, 6):
        given = [run.deltas[number] for number in range(2, last + 1)]
        apply_deltas(run.full, given, tmp_path / f"applied{last}")
        require_equal(load_file(tmp_path / f"applied{last}"), run.models[last])

    apply_deltas(tmp_path / "applied3", [run.deltas[4], run.deltas[5]], tmp_path / "on top")
    require_equal(load_file(tmp_path / "on top"), run.models[5])


def test_a_delta_has_changed_rows_only_and_says_from_where_to_where(run):
    with safe_open(run.deltas[3], "pt") as opened:
        metadata = opened.metadata()
        rows = opened.get_tensor("tables.embedding_bags.t0.weight.rows")
        values = opened.get_tensor("tables.embedding_bags.t0.weight")

    assert (metadata["since"], metadata["checkpoint"]) == ("2", "3")
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert rows.max() < 15
    assert torch.equal(values, run.models[3]["tables.embedding_bags.t0.weight"][rows])


def test_a_delta_may_span_several_checkpoints(run, tmp_path):
    export_checkpoint(run.folder, tmp_path / "since 1", since=1)
    apply_deltas(run.full, [tmp_path / "since 1"], tmp_path / "applied")

    require_equal(load_file(tmp_path / "applied"), run.models[5])


def test_after_a_new_full_copy_changes_since_the_one_before_it_are_known(tmp_path, monkeypatch):
    set_block_bytes(monkeypatch, 500)
    training, since = make_training("host"), []
    checkpoints = Checkpoints(
        tmp_path / "saved", model=training.model, optimizers=training.optimizers
    )
    for number in range(1, 8):
        train(training, number)
        checkpoints.save()
        assert checkpoints.wait() == number
        since.append([each for each, _ in read_manifest(tmp_path / "saved").since])
        if number > 1:
            delta = export_checkpoint(
                tmp_path / "saved", tmp_path / f"delta{number}", since=number - 1
            )
            apply_deltas(tmp_path / f"full{number - 1}", [delta], tmp_path / f"full{number}")
            require_equal(load_file(tmp_path / f"full{number}"), training.model.state_dict())
        else:
            export_checkpoint(tmp_path / "saved", tmp_path / "full1")
    checkpoints.close()

    assert any(len(each) == 1 for each in since[2:])
    with pytest.raises(CheckpointError, match=r"between checkpoint 1 and 7, .*not known"):
        export_checkpoint(tmp_path / "saved", tmp_path / "delta", since=1)


def apply(run, numbers, folder, whole=None):
    deltas = [run.deltas[number] for number in numbers]
    apply_deltas(run.full if whole is None else whole, deltas, folder)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda run, folder: apply(run, [3], folder), "delta3"),
        (lambda run, folder: apply(run, [2, 4], folder), "delta4"),
        (lambda run, folder: apply(run, [2, 2], folder), "delta2"),
        (lambda run, folder: apply(run, [3, 2], folder), "delta3"),
        (lambda run, folder: apply(run, [3], folder, run.deltas[2]), "delta2: is a delta"),
        (lambda run, folder: apply_deltas(run.full, [run.full], folder), "a whole model"),
        (lambda run, folder: export_checkpoint(run.folder, folder, since=5), "checkpoint 5"),
        (lambda run, folder: export_checkpoint(run.folder, folder, since=9), "checkpoint 9"),
    ],
)
def test_a_delta_that_does_not_continue_is_refused_by_name(run, tmp_path, act, name):
    with pytest.raises(CheckpointError, match=name):
        act(run, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_delta_of_another_training_is_refused(run, tmp_path):
    other = make_training(seed=1)
    with Checkpoints(
        tmp_path / "other", model=other.model, optimizers=other.optimizers
    ) as checkpoints:
        checkpoints.save()
        checkpoints.save()
    delta = export_checkpoint(tmp_path / "other", tmp_path / "delta", since=1)

    with pytest.raises(
        CheckpointError, match=r"delta: is a delta from checkpoint 1 .* must stand here"
    ):
        apply_deltas(run.full, [delta], tmp_path / "applied")


def test_a_training_that_went_back_has_other_ids(run, tmp_path):
    """Checkpoints 4 and 5 are given up, and the run goes on from 4."""
    folder = shutil.copytree(run.folder, tmp_path / "saved")
    again = make_training(seed=1)
    load_checkpoint(folder, model=again.model, optimizers=again.optimizers, number=4)
    checkpoints = Checkpoints(folder, model=again.model, optimizers=again.optimizers, after=4)
    train(again, 9)
    checkpoints.save()
    checkpoints.close()
    applied = apply_deltas(
        run.full, [run.deltas[number] for number in (2, 3, 4)], tmp_path / "four"
    )

    with pytest.raises(CheckpointError, match=r"between checkpoint 5 and 6, .*not known"):
        export_checkpoint(folder, tmp_path / "since 5", since=5)
    delta = export_checkpoint(folder, tmp_path / "since 4", since=4)
    apply_deltas(applied, [delta], tmp_path / "six")

    require_equal(load_file(tmp_path / "six"), dict(again.model.state_dict()))
    with pytest.raises(CheckpointError, match="since 4: is a delta from checkpoint 4"):
        apply_deltas(applied, [run.deltas[5], delta], tmp_path / "none")


def test_files_of_others_are_refused_by_name(run, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "plain")
    (tmp_path / "text").write_text("hello")
    for name, header in (
        ("numbers", {"__metadata__": {"checkpoint": 3}}),
        ("list", {"__metadata__": ["checkpoint"]}),
        ("below 0", {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}),
    ):
        (tmp_path / name).write_bytes(
            (200).to_bytes(8, "little") + json.dumps(header).encode().ljust(200) + bytes(4)
        )

    for name, message in (
        ("plain", "does not say of which checkpoint it is"),
        ("text", "is not a complete safetensors file"),
        ("numbers", "is not a complete safetensors file"),
        ("list", "is not a complete safetensors file"),
        ("below 0", "is not a complete safetensors file"),
    ):
        with pytest.raises(CheckpointError, match=f"{name}: .*{message}"):
            apply_deltas(run.full, [tmp_path / name], tmp_path / "applied")
        assert not (tmp_path / "applied").exists()
    with pytest.raises(AlreadyExists):
        apply_deltas(run.full, [], run.full)


def test_a_server_needs_no_library_to_apply_a_delta(run):
    """As the docs show it: numpy and the layout of safetensors files."""
    content = run.deltas[2].read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    table = load_file(run.full)["tables.embedding_bags.t0.weight"].numpy()

    def tensor(name, dtype):
        begin, end = header[name]["data_offsets"]
        data = content[8 + length + begin : 8 + length + end]
        return np.frombuffer(data, dtype).reshape(header[name]["shape"])

    rows = tensor("tables.embedding_bags.t0.weight.rows", "<i8")
    table[rows] = tensor("tables.embedding_bags.t0.weight", "<f4")

    assert torch.equal(torch.from_numpy(table), run.models[2]["tables.embedding_bags.t0.weight"])
