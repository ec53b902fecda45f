import argparse
import errno
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from itertools import takewhile
from types import SimpleNamespace

import pytest

import recsys
from recsys.cli import commands, main
from recsys.cli.options import EXAMPLES, TRAIN_EXAMPLES, build_parser
from recsys.config import load_config, walk_keys
from tests import forks


def run_cli(*arguments):
    return main([str(argument) for argument in arguments])


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

    assert [name for name in commands(build_parser(), "recsys") if f"`{name}" not in rows] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere"], "nowhere does not exist; prepare a store with"),
        (["train", "synthetic:criteo-kaggle", "--set", "x=1"], "x is not a key"),
        (["train", "synthetic:criteo-kaggle", "--set", "data=x"], "data is set elsewhere"),
        (["train", "synthetic:criteo-kaggle", "--set", "device=cuda"], "sees no CUDA device"),
        (
            [
                *("train", "synthetic:criteo-kaggle", "--set", "embeddings=torch"),
                *("--set", "optimizer.name=rowwise_adagrad"),
            ],
            "not in torch.optim, so embeddings 'torch' cannot use it",
        ),
        (["evaluate", "nowhere"], "nowhere is not a run"),
        (["predict", "nowhere", "a.csv", "--out", "b.parquet"], "nowhere is not a run"),
        (["export", "nowhere", "--to", "safetensors", "--out", "f"], "nowhere is not a run"),
        (["export", "nowhere", "--to", "torch-export", "--out", "f.pt2"], "nowhere is not a run"),
        (
            ["export", "nowhere", "--to", "safetensors", "--quantize", "int8", "--out", "f"],
            "--quantize int8 goes with --to torch-export only",
        ),
        *[
            (
                ["export", "nowhere", "--to", to, "--checkpoint", number, "--out", "f"],
                "--checkpoint",
            )
            for to, number in (("torch-export", "1"), ("safetensors", "x"))
        ],
        (["report", "nowhere"], "nowhere has neither a run.json nor an ablate.json"),
        (["ablate", "nowhere.toml", "--run", "out"], "nowhere.toml cannot be read"),
        (
            ["prepare", "criteo-kaggle", "nowhere", "--out", "s"],
            "raw input nowhere must be a file",
        ),
        (
            ["prepare", "criteo-1tb", "nowhere", "--out", "s"],
            "raw input nowhere must be a file",
        ),
        (["profile", "nowhere", "--out", "f.npz"], "nowhere does not exist; prepare a store with"),
        (["profile", "synthetic:other", "--out", "f"], "must be 'synthetic:criteo-kaggle'"),
        (["plan", "nowhere", "--budget", "1GiB", "--out", "f"], "nowhere: there is no such file"),
        (["evaluate", "nowhere", "--json", "."], ". is a folder"),
        (["train"], "data is missing"),
        (["train", "--resume"], "--run DIR"),
        (["train", "data", "--checkpoint", "3"], "--checkpoint"),
        (["train", "--resume", "--run", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_ends_with_a_message_and_status_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    assert run_cli(*arguments) == 2

    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file/new/x.json", "pipe"])
def test_a_result_never_takes_the_place_of_a_file_a_pipe_or_a_device(tmp_path, capsys, place):
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")  # a device of the system would be lost where this fails

    assert run_cli("evaluate", tmp_path / "no_run", "--json", tmp_path / place) == 2

    assert str(tmp_path / place.partition("/")[0]) in capsys.readouterr().err


def test_help_lists_every_configuration_key(capsys):
    with pytest.raises(SystemExit) as caught:
        run_cli("train", "--help")

    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for key in walk_keys():
        assert key.same_as or key.name in printed


def test_warnings_of_commands_show_no_source_code(tmp_path, small_settings, monkeypatch, capsys):
    def show(message, category, filename, lineno, file=None, line=None):
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    before = warnings.formatwarning
    monkeypatch.setattr(warnings, "showwarning", show)  # that of pytest prints nothing
    more = ["--set", "budget=1GiB", "--run", str(tmp_path / "run")]
    with warnings.catch_warnings():
        warnings.filterwarnings("always", "budget=")

        assert run_cli("train", "synthetic:criteo-kaggle", *small_settings, *more) == 0

    lines = capsys.readouterr().err.splitlines()
    (told,) = [line for line in lines if "warning" in line.lower()]
    assert told.startswith("recsys train: warning: budget=")
    assert "warnings.warn" not in "".join(lines)
    assert warnings.formatwarning is before


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["trian"], []])
def test_help_version_and_unknown_commands_do_not_wait_for_pytorch(arguments):
    code = (
        "import sys\nfrom recsys.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "finally:\n    assert not {'torch', 'numba', 'pandas', 'numpy'} & set(sys.modules)"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )

    assert "AssertionError" not in ended.stderr
    assert ended.returncode == (2 if arguments == ["trian"] else 0)
    if arguments == ["trian"]:
        assert "there is no command 'trian'; did you mean 'train'?" in ended.stderr
    elif arguments != ["--version"]:
        assert "examples:" in ended.stdout


@pytest.mark.in_ci("kept back")
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["kept back", "at once"])
def test_output_that_nothing_reads_is_no_error(tmp_path, unbuffered):
    (tmp_path / "clicks.csv").write_text("label,item\n0,a\n1,b\n")
    reader, writer = os.pipe()
    os.close(reader)

    ended = subprocess.run(
        [sys.executable, "-m", "recsys", "inspect", str(tmp_path / "clicks.csv")],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writer)

    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.outside_ci
def test_output_may_be_closed(tmp_path):
    (tmp_path / "clicks.csv").write_text("label,item\n0,a\n1,b\n")

    ended = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m recsys inspect {tmp_path}/clicks.csv >&-"],
        stderr=subprocess.PIPE,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, b"")


def test_errors_may_be_closed(small_settings, tmp_path):
    settings = [f"'{each}'" for each in small_settings]
    train = ["-m", "recsys", "train", "synthetic:criteo-kaggle", *settings]
    command = " ".join([sys.executable, *train, "--run", str(tmp_path / "run")])

    ended = subprocess.run(
        ["sh", "-c", f"exec {command} 2>&-"], stdout=subprocess.PIPE, text=True, check=False
    )

    assert ended.returncode == 0
    assert ended.stdout.split()[:2] == ["test", "validation"]  # what is told there comes nowhere


def test_another_pipe_that_breaks_is_an_error(monkeypatch, capsys):
    def fail(_):
        raise BrokenPipeError(errno.EPIPE, "the process of a cell ended")

    monkeypatch.setattr(commands, "_COMMANDS", {"ablate": fail})

    assert commands.run(SimpleNamespace(command="ablate")) == 2
    assert "the process of a cell ended" in capsys.readouterr().err


@pytest.mark.parametrize("text", [EXAMPLES, TRAIN_EXAMPLES])
def test_examples_of_the_help_are_commands(text):
    examples = [line.split() for line in text.splitlines() if line.startswith("  recsys ")]
    assert examples
    for _, *arguments in examples:
        options = build_parser().parse_args(list(takewhile(lambda each: each != ">", arguments)))
        load_config(None, getattr(options, "set", ()))


def test_a_run_is_resumed_without_naming_its_data_again(tmp_path, small_settings, capsys):
    folder, data = tmp_path / "run", "synthetic:criteo-kaggle"
    settings = [*small_settings, "--set", "checkpoint.every_steps=5"]

    assert run_cli("train", data, *settings, "--run", folder, "--resume") == 0
    assert f"{folder} is new: training starts from" in capsys.readouterr().err
    assert run_cli("train", "--run", folder, "--resume") == 0
    assert "is finished; to train more, set epochs above 1" in capsys.readouterr().err
    assert run_cli("train", "--run", folder, "--resume", "--set", "epochs=2") == 0
    record = json.loads((folder / "run.json").read_text())
    assert record["throughput"]["num_steps"] == 30
    assert record["resumed"] == [{"step": 15, "checkpoint": 3}]


def test_the_data_may_be_named_by_the_configuration(tmp_path, small_settings, capsys):
    file = tmp_path / "config.toml"
    file.write_text('data = "synthetic:criteo-kaggle"\n')

    assert run_cli("train", "--config", file, *small_settings, "--run", tmp_path / "run") == 0

    assert "test" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_with_what_was_measured(tmp_path, small_settings):
    folder = tmp_path / "run"
    command = forks.command(
        *("train", "synthetic:criteo-kaggle", "--run", folder, *small_settings),
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
    assert "interrupted at step" in printed
    assert f"continue it by: recsys train --run {folder} --resume" in printed


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "No space left on device; free some space, or name another place"),
        (errno.EDQUOT, "Disk quota exceeded; free some space, or name another place"),
        (errno.EFBIG, "File too large; name another place"),
    ],
)
def test_a_full_disk_names_the_place_that_a_buffered_write_does_not(
    monkeypatch, tmp_path, capsys, number, way_out
):
    def fill(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("recsys.datasets.tabular.split.Spool._write", fill)
    (tmp_path / "clicks.csv").write_text("click,ad\n0,1\n1,2\n")
    (tmp_path / "schema.toml").write_text('label = "click"\n[categorical.ad]\n')
    files = [str(tmp_path / "clicks.csv"), "--schema", str(tmp_path / "schema.toml")]

    assert main(["prepare", "table", *files, "--out", str(tmp_path / "store")]) == 2

    assert f"recsys prepare: {tmp_path / 'store'}: {way_out}\n" in capsys.readouterr().err
