import json
import subprocess
import sys

RUN_ALL = """
import contextlib, io, json, sys
from recsys.cli import main

found = []
for arguments in json.load(sys.stdin):
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            status = main(arguments)
        except SystemExit as ended:  # of the parser
            status = ended.code
    found.append((status, told.getvalue(), sorted({"torch", "numba"} & set(sys.modules))))
json.dump(found, sys.stdout)
"""
DATA = "synthetic:criteo-kaggle"
# What a newcomer types, and what the message says.
MISTAKES = {
    "train nosuch": "nosuch does not exist; prepare a store",
    "train synthetic:nosuch": "data must be 'synthetic:criteo-kaggle' if synthetic",
    "train clicks.csv": "clicks.csv is a file, and data must be a store",
    "train": "data is missing; name a store",
    "train nosuch --dry-run": "nosuch does not exist; prepare a store",
    f"train {DATA} --dry-run --run full": "run folder full is not empty",
    f"train {DATA} --dry-run --run full --resume": "--dry-run is for a new run",
    f"train {DATA} --set lr=1": "lr is not a key; did you mean",
    f"train {DATA} --set optimizer.name=foo": "optimizer.name must be 'sgd', 'adagrad'",
    f"train {DATA} --set skip.drop_input.guard.every=50": "every must be",
    f"train {DATA} --set budget=much": "budget must be",
    f"train {DATA} --config nosuch.toml": "nosuch.toml cannot be read",
    f"train {DATA} --config bad.toml": "bad.toml: optimizr is not a key; did you mean",
    f"train {DATA} --lr 1": "unrecognized arguments: --lr 1",
    f"train {DATA} --run full": "run folder full is not empty",
    f"train {DATA} --run clicks.csv": "clicks.csv is not a folder",
    "report clicks.csv/run": "clicks.csv/run",
    "train --run nosuch --resume": "nosuch has no run to continue",
    "train --run full --resume --set optimizer.lr=fast": "optimizer.lr must be a valid number",
    "evaluate nosuch": "nosuch is not a run",
    "evaluate model --data clicks.csv": "for a model that is trained, by `recsys prepare table "
    "clicks.csv --like ITS_STORE --out STORE`",
    "evaluate full": "full has no model.safetensors",
    "evaluate model --json -": "--json must name a file, got '-', which is not the standard output",
    "predict model clicks.csv --out -": "--out must name a file, got '-'",
    "predict nosuch clicks.csv --out scores.parquet": "nosuch is not a run",
    "predict model nosuch.csv --out scores.parquet": "table input nosuch.csv must be a file",
    "export nosuch --to safetensors --out model.pt": "nosuch is not a run",
    "export nosuch --to onnx --out model.pt": "invalid choice: 'onnx'",
    "apply nosuch delta --out model": "model input nosuch must be a file",
    "report nosuch": "nosuch has neither a run.json nor an ablate.json",
    "verify nosuch": "nosuch does not exist",
    "ablate nosuch.toml --run ablation": "No such file or directory; name a TOML file",
    "ablate ablation.toml --run ablation": "nosuch does not exist",
    "profile nosuch --out profile.npz": "nosuch does not exist",
    "plan nosuch.npz --budget 1GiB --out plan.npz": "name one that `recsys profile`",
    "inspect nosuch.csv": "must be a file, found nothing there; create it, or name another\n",
    "inspect full": "full must lead to CSV, TSV or Parquet files, found none; name another\n",
    "prepare table nosuch.csv --schema avazu --out store": "nosuch.csv must be a file",
    "prepare table clicks.csv --schema nosuch --out store": "nosuch",
    "prepare table clicks.csv --like nosuch --out store": "nosuch does not exist",
    "prepare criteo-kaggle nosuch.txt --out store": "raw input nosuch.txt must be a file",
    "prepare criteo-1tb day_0 --out store": "raw input day_0 must be a file",
}


def test_mistakes_of_every_command_are_told_before_torch_is_imported(tmp_path):
    (tmp_path / "clicks.csv").write_text("label,item\n1,2\n")
    (tmp_path / "bad.toml").write_text("optimizr.lr = 1")
    (tmp_path / "ablation.toml").write_text(
        'data = "nosuch"\n[ablate]\nseeds = [0]\nvariations = [{ name = "base" }]\n'
    )
    for run in ("full", "model"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "config.toml").write_text("")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")

    ended = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps([command.split() for command in MISTAKES]),
        check=True,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
    )

    found = json.loads(ended.stdout)
    for (command, message), (status, told, imported) in zip(MISTAKES.items(), found, strict=True):
        assert (command, status, imported) == (command, 2, []), told
        assert message in told, command
