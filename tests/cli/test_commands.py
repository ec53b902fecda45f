import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from types import ModuleType

import pytest

import recsys
from recsys.cli import main
from recsys.cli.options import EXAMPLES, TRAIN_EXAMPLES, build_parsers
from recsys.config import load_config, walk_keys
from tests import forks

DATA = "synthetic:criteo-kaggle"
# What a newcomer types, and what the message says.
MISTAKES = {
    "train nosuch": "recsys prepare criteo-kaggle RAW --out nosuch",
    "train synthetic:nosuch": "data must be 'synthetic:criteo-kaggle' if synthetic",
    "train clicks.csv": "recsys inspect clicks.csv > schema.toml",
    "train": "data is missing; name a store",
    "train nosuch --dry-run": "nosuch does not exist",
    f"train {DATA} --dry-run --run full": "run folder full is not empty",
    f"train {DATA} --set x=1": "x is not a key",
    f"train {DATA} --set data=x": "data=x is set elsewhere",
    f"train {DATA} --set device=cuda": "sees no CUDA device",
    f"train {DATA} --set embeddings=torch --set optimizer.name=rowwise_adagrad": "torch",
    f"train {DATA} --config nosuch.toml": "nosuch.toml",
    f"train {DATA} --config bad.toml": "bad.toml: optimizr is not a key; did you mean optimizer?",
    f"train {DATA} --lr 1": "unrecognized arguments: --lr 1; configuration keys are given by --set",
    f"train {DATA} --run full": "full is not empty",
    f"train {DATA} --run clicks.csv": "clicks.csv is not a folder",
    f"train {DATA} --checkpoint 3": "--checkpoint",
    "train --resume": "name the data",
    "train --run nosuch --resume": "recsys train STORE --run nosuch --resume",
    "train --run full --resume --set optimizer.lr=fast": "optimizer.lr",
    "trian": "invalid choice: 'trian'",
    "evaluate nosuch": "recsys train DATA --run nosuch",
    "evaluate full": "full has no model.safetensors",
    "predict nosuch clicks.csv --out scores.parquet": "nosuch is not a run",
    "export nosuch --to safetensors --out model.pt": "nosuch is not a run",
    "export nosuch --to safetensors --quantize int8 --out f": "--quantize int8",
    "export nosuch --to torch-export --checkpoint 1 --out f": "--checkpoint 1",
    "export nosuch --to safetensors --checkpoint x --out f": "--checkpoint",
    "apply nosuch delta --out model": "nosuch",
    "report nosuch": "nosuch has neither a run.json nor an ablate.json",
    "verify nosuch": "nosuch does not exist",
    "ablate nosuch.toml --run ablation": "nosuch.toml",
    "profile nosuch --out profile.npz": "nosuch does not exist",
    "profile synthetic:other --out f": "must be 'synthetic:criteo-kaggle'",
    "plan nosuch.npz --budget 1GiB --out plan.npz": "name one that `recsys profile`",
    "plan full --budget 1MiB --out plan": "recsys profile full --out PROFILE.npz",
    "inspect nosuch.csv": "nosuch.csv must be a file",
    "inspect full": "full must lead to CSV, TSV or Parquet files",
    "prepare table nosuch.csv --schema avazu --out store": "nosuch.csv must be a file",
    "prepare table clicks.csv --schema nosuch --out store": "nosuch",
    "prepare table clicks.csv --like nosuch --out store": "nosuch does not exist",
    "prepare criteo-kaggle nosuch.txt --out store": "raw input nosuch.txt must be a file",
    "prepare criteo-1tb day_0 --out store": "raw input day_0 must be a file",
}


def run_cli(*arguments):
    """The exit status of a command, also one that its parser refuses."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return ended.code


def test_python_can_run_the_package_as_a_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["anything", "--version"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recsys", run_name="__main__")

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"recsys {recsys.__version__}\n"


def test_the_page_of_commands_lists_every_command(pytestconfig):
    def commands(parser, name):
        found = [
            command
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
            for key, sub in action.choices.items()
            for command in commands(sub, f"{name} {key}")
        ]
        return found or [name]

    lines = (pytestconfig.rootpath / "docs" / "commands.md").read_text().splitlines()
    rows = " ".join(line.split(" | ")[0] for line in lines if line.startswith("| `"))

    assert [name for name in commands(build_parsers()[0], "recsys") if f"`{name}" not in rows] == []


@pytest.mark.filterwarnings("ignore:.* not at its end")
@pytest.mark.parametrize(("command", "message"), MISTAKES.items(), ids=list(MISTAKES))
def test_a_mistake_ends_with_a_message_and_status_2(
    command, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clicks.csv").write_text("label,item\n1,2\n")
    (tmp_path / "bad.toml").write_text("optimizr.lr = 1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.toml").write_text("")
    before = sorted(tmp_path.rglob("*"))

    assert run_cli(*command.split()) == 2

    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_help_lists_every_configuration_key(capsys):
    assert run_cli("train", "--help") == 0

    printed = capsys.readouterr().out
    assert [key.name for key in walk_keys() if key.name not in printed] == []


def test_warnings_of_commands_show_no_source_code(tmp_path, small_settings, monkeypatch, capsys):
    def show(message, category, filename, lineno, file=None, line=None):
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    before = warnings.formatwarning
    monkeypatch.setattr(warnings, "showwarning", show)  # that of pytest prints nothing
    more = ["--set", "budget=1GiB", "--run", str(tmp_path / "run")]
    with warnings.catch_warnings():
        warnings.filterwarnings("always", "budget=")

        assert run_cli("train", DATA, *small_settings, *more) == 0

    lines = capsys.readouterr().err.splitlines()
    (told,) = [line for line in lines if "warning" in line.lower()]
    assert told.startswith("recsys train: warning: budget=")
    assert "warnings.warn" not in "".join(lines)
    assert warnings.formatwarning is before


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["trian"], []])
def test_help_version_and_unknown_commands_do_not_wait_for_imports(arguments):
    code = (
        "import sys\nfrom recsys.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "finally:\n    assert not {'torch', 'pydantic', 'pandas', 'numpy'} & set(sys.modules)"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )

    assert "AssertionError" not in ended.stderr
    assert ended.returncode == (2 if arguments == ["trian"] else 0)
    assert ("examples:" in ended.stdout) == (arguments in ([], ["--help"]))


@pytest.mark.parametrize("text", [EXAMPLES, TRAIN_EXAMPLES])
def test_examples_of_the_help_are_commands(text):
    examples = [line.split() for line in text.splitlines() if line.startswith("  recsys ")]
    assert examples
    for _, *arguments in examples:
        options = build_parsers()[0].parse_args(" ".join(arguments).partition(" >")[0].split())
        load_config(None, getattr(options, "set", ()))


def test_a_run_is_resumed_without_naming_its_data_again(tmp_path, small_settings, capsys):
    file, folder = tmp_path / "config.toml", tmp_path / "run"
    file.write_text(f'data = "{DATA}"\n')
    settings = ["--config", file, *small_settings, "--set", "checkpoint.every_steps=5"]

    assert run_cli("train", *settings, "--run", folder) == 0
    assert "test" in capsys.readouterr().out
    assert run_cli("train", "--run", folder, "--resume") == 0
    assert "is finished; to train more, set epochs above 1" in capsys.readouterr().err
    assert run_cli("train", "--run", folder, "--resume", "--set", "epochs=2") == 0
    record = json.loads((folder / "run.json").read_text())
    assert record["throughput"]["num_steps"] == 30
    assert record["resumed"] == [{"step": 15, "checkpoint": 3}]


def test_ctrl_c_ends_cleanly_with_what_was_measured(tmp_path, small_settings):
    folder = tmp_path / "run"
    command = forks.command(
        *("train", DATA, "--run", folder, *small_settings),
        *("--set", "synthetic.num_samples=5000000", "--set", "eval.every_steps=20"),
        *("--set", "eval.max_samples=1000"),
    )
    history = folder / "history.jsonl"
    give_up = time.monotonic() + 300
    while not history.is_file() or "validation" not in history.read_text():
        assert command.process.is_alive()
        assert time.monotonic() < give_up
        time.sleep(0.05)

    os.kill(command.process.pid, signal.SIGINT)
    printed, _ = command.end()

    assert command.process.exitcode == 130
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert record["metrics"]["test"] is None
    assert record["metrics"]["validation"]["auc"] is not None
    assert record["throughput"]["samples_per_second"] > 0
    assert (folder / "model.safetensors").is_file()
    assert f"continue it by: recsys train --run {folder} --resume" in printed


def test_ctrl_c_while_a_command_imports_its_parts_says_so(monkeypatch, capsys):
    class Slow(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "recsys.cli.commands", Slow("commands"))

    assert run_cli("evaluate", "run") == 130
    assert capsys.readouterr().err == "interrupted\n"
