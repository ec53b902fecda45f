"""`recsys train` on several processes."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

torchrec = pytest.importorskip("torchrec")

from ranks_train import run_training  # noqa: E402  # imports TorchRec

from recsys.cli import main  # noqa: E402
from recsys.models import DLRMTrain  # noqa: E402
from tests.train.judged_stores import SMALL_MODEL, write_store  # noqa: E402

SAVES = ("checkpoint.every_steps=9",)


@pytest.fixture(scope="module")
def whole(_all_ranks, tmp_path_factory):
    """A run of two epochs that nothing interrupts."""
    run = tmp_path_factory.mktemp("whole") / "run"
    _all_ranks(2).run("trains_a_run", run=str(run), settings=[*SAVES, "epochs=2"])
    return run


def model_of(run):
    return load_file(run / "model.safetensors")


def require_equal(run, other):
    ours, theirs = model_of(run), model_of(other)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


def history(run):
    lines = (run / "history.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(run):
    return [entry["train_loss"] for entry in history(run) if "train_loss" in entry]


def test_all_ranks_know_the_metrics_of_all_samples(ranks, tmp_path):
    settings = ["checkpoint.every_seconds=1000"]  # longer than the run
    first, second = ranks("trains_a_run", run=str(tmp_path / "run"), settings=settings)

    assert first["metrics"] == second["metrics"]
    assert first["status"] == "finished"
    assert first["num_steps"] == 22  # of 1,371 samples
    assert first["metrics"]["test"]["num_samples"] == 114
    assert first["processes"] == {"num_ranks": 2}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.toml",
        "history.jsonl",
        "model.safetensors",
        "run.json",
    ]


def test_ranks_rank_items_as_one_process_does(ranks, tmp_path):
    data, settings = write_store(tmp_path / "store", is_ranked=True), {"base": SMALL_MODEL}
    first, second = ranks(
        "trains_a_run", run=str(tmp_path / "run"), data=str(data.path), **settings
    )

    assert first["metrics"] == second["metrics"]
    assert main(["evaluate", str(tmp_path / "run"), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["metrics"]["test"]
    for name in ("recall_at_k", "ndcg_at_k"):
        assert found[name] == pytest.approx(first["metrics"]["test"][name], rel=1e-4)


def test_an_invalid_id_in_a_mini_batch_ahead_ends_all_ranks(failing_ranks, tmp_path):
    ended = failing_ranks("has_a_bad_id", run=str(tmp_path / "run"))

    (other, _), (own, _) = sorted(ended, key=lambda each: "id 1000000" in each[0])
    assert "IdOutOfRange" in own
    assert "OtherRankFailed" in other


def test_in_bf16_two_ranks_continue_as_one_process_that_computes_both_halves(
    ranks, tmp_path, monkeypatch
):
    begun, ours, theirs = (tmp_path / name for name in ("begun", "ours", "theirs"))
    # Every table is on one rank, and every mini-batch a whole one. So both sum rows in one order.
    settings = [f"synthetic.table_sizes={[60] * 26}", "synthetic.num_samples=298", "precision=bf16"]
    settings += ["checkpoint.every_steps=3"]
    run_training(begun, settings)
    shutil.copytree(begun, ours)
    shutil.copytree(begun, theirs)
    more = [*settings, "epochs=3"]

    found = ranks("trains_a_run", run=str(ours), settings=more, resume=True)
    forward = DLRMTrain.forward

    def in_halves(model, batch):
        parts = []
        for samples in torch.arange(len(batch.labels)).chunk(2):
            torch.clear_autocast_cache()  # else bfloat16 weights add up the gradients of both
            parts.append(forward(model, batch.select(samples)))
        loss = (parts[0][0] + parts[1][0]) / 2
        logits, labels = (torch.cat([part[1][place] for part in parts]) for place in (1, 2))
        return loss, (loss.detach(), logits, labels)

    monkeypatch.setattr(DLRMTrain, "forward", in_halves)
    run_training(theirs, more, resume=True)

    assert [each["step"] for each in found[0]["resumed"]] == [4]
    assert found[0]["num_steps"] == 12
    require_equal(ours, theirs)


def test_a_resumed_run_equals_the_whole_one(ranks, tmp_path, whole):
    parts = tmp_path / "parts"
    ranks("trains_a_run", run=str(parts), settings=[*SAVES, "budget=60KiB"])

    # The newest checkpoint, after step 22, is gone on one rank.
    found = ranks(
        "loses_a_checkpoint",
        run=str(parts),
        cut_rank=1,
        settings=[*SAVES, "epochs=2", "budget=60KiB"],
        resume=True,
    )

    require_equal(whole, parts)
    assert [each["step"] for each in found[0]["resumed"]] == [18]
    assert found[0]["schedule"]["mean_depth"] > 1.8
    assert losses(whole) == losses(parts)


def test_each_rank_draws_on_where_it_stopped(ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # The last mini-batch of the first epoch has 13 samples for one rank, and 14 for the other.
    settings = ["model.name=ranks_train:Dropping", "synthetic.num_samples=330"]
    settings += ["checkpoint.every_steps=3"]
    ranks("trains_a_run", run=str(whole), settings=[*settings, "epochs=2"])

    ranks("trains_a_run", run=str(parts), settings=settings)
    found = ranks("trains_a_run", run=str(parts), settings=[*settings, "epochs=2"], resume=True)

    assert [each["step"] for each in found[0]["resumed"]] == [5]
    require_equal(whole, parts)
    assert losses(whole) == losses(parts)


def test_full_disks_leave_the_newest_checkpoint_that_all_have(ranks, tmp_path, whole):
    parts, failing = tmp_path / "parts", [(2, 3), (3, 99)]
    ranks("has_full_disks", run=str(parts), failing=failing, settings=["checkpoint.every_steps=7"])

    found = ranks("trains_a_run", run=str(parts), settings=[*SAVES, "epochs=2"], resume=True)
    require_equal(whole, parts)
    assert [each["step"] for each in found[0]["resumed"]] == [7]


def test_a_loss_of_one_rank_that_is_not_finite_ends_all_as_one_process(ranks, tmp_path):
    first, second = ranks("has_a_bad_number", run=str(tmp_path / "run"))

    assert first["error"] == second["error"]
    assert re.fullmatch(
        rf"TrainingDiverged: after step {first['num_steps']}: process [01]: the loss is nan but "
        r"must be finite; no parameter was updated; dense_features of the mini-batch must be "
        r"finite numbers, got nan in sample \d+, column 5; .*",
        first["error"],
    )
    nothing = {"test": None, "validation": None}
    assert first["record"] == {"status": "diverged", "metrics": nothing}
    assert first["warnings"] == second["warnings"] == []


STOPS = ("eval.every_steps=5", "early_stopping.patience=3", "early_stopping.min_delta=0.9")
STOPS = (*STOPS, "early_stopping.keep=last")


def test_all_ranks_stop_early_at_the_same_step(ranks, tmp_path):
    first, second = ranks("has_callbacks", run=str(tmp_path / "run"), settings=[*STOPS])

    assert (first["num_steps"], second["num_steps"]) == (20, 20)
    assert first["metrics"] == second["metrics"]
    assert first["stopped_early"]["num_without"] == 3
    assert second["stopped_early"] == {"step": 20, "callback": None}
    assert first["calls"] == [5, 10, 15, 20]
    assert second["calls"] == []


@pytest.mark.parametrize(("given", "num_steps"), [(0, 10), (1, 22)])
def test_a_callback_of_the_first_rank_alone_ends_all(ranks, tmp_path, given, num_steps):
    found = ranks(
        "has_callbacks",
        run=str(tmp_path / "run"),
        settings=["eval.every_steps=5"],
        given=given,
        stop=10,
    )

    assert [each["num_steps"] for each in found] == [num_steps] * 2


def test_what_is_not_supported_is_refused(ranks, tmp_path):
    settings = ["batch_size=65"]
    found = ranks("is_given_others", run=str(tmp_path / "run"), settings=settings, of_last={})

    rule = "batch_size must be a multiple of the number of processes, 2"
    assert all(rule in message for message in found)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("of_last", "name"),
    [
        ({"settings": ["seed=3"]}, "seed must be the same on every rank, got 0 on rank 0 and 3 on"),
        ({"settings": ["epochs=2"]}, "epochs must be the same"),
        ({"resume": True}, "--resume must be the same"),
    ],
)
def test_what_ranks_are_given_must_be_the_same(ranks, tmp_path, of_last, name):
    for error in ranks("is_given_others", run=str(tmp_path / "run"), of_last=of_last):
        assert error.startswith(f"ConfigError: {name}")
    assert not any(tmp_path.iterdir())


def test_other_data_on_one_rank_is_an_error_on_all(ranks, tmp_path):
    for error in ranks("has_other_data", run=str(tmp_path / "run")):
        assert re.match(r"ConfigError: the data's fingerprint must be .* 'other' on rank 1", error)


def test_a_run_folder_that_one_rank_does_not_see_ends_all_ranks(failing_ranks, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"

    (first, _), (second, _) = failing_ranks("writes_to_two_folders", runs=[str(run), str(other)])

    assert f"ConfigError: {other / 'checkpoints'}: process 1 does not see this folder" in second
    assert "OtherRankFailed" in first


def test_an_error_of_a_callback_ends_all_ranks(failing_ranks, tmp_path):
    run = tmp_path / "run"

    (own, _), (others, seconds) = failing_ranks("has_callbacks", run=str(run), settings=[], fail=7)

    assert "CallbackFailed: callback Stops: on_report raised KeyError" in own
    assert "OtherRankFailed" in others
    assert "or was killed, which torchrun shows" in others
    assert "--max-restarts 3 with --resume" in others
    assert seconds < 30
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
