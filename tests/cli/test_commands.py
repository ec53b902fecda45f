import argparse
import errno
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from itertools import takewhile
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import recsys
from recsys._support.config_fields import format_keys
from recsys.cli import commands, main
from recsys.cli.commands import build_parser
from recsys.cli.help import EXAMPLES, GROUPS, TRAIN_EXAMPLES
from recsys.config import TrainConfig, describe_keys, load_config
from tests import forks


def run_cli(*arguments):
    return main([str(argument) for argument in arguments])


def test_python_can_run_the_package_as_a_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["anything", "--version"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recsys", run_name="__main__")

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"recsys {recsys.__version__}\n"


def test_options_are_these_and_no_others():
    def options(parser):
        found = {}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= {name: options(sub) for name, sub in action.choices.items()}
            elif action.dest != "help":
                found[action.option_strings[-1] if action.option_strings else action.dest] = None
        return {key: value or "" for key, value in found.items()}

    assert options(build_parser()) == {
        "--version": "",
        "prepare": {
            "criteo-kaggle": {
                "raw": "",
                "--out": "",
            },
            "criteo-1tb": {
                "day": "",
                "--max-ind-range": "",
                "--out": "",
            },
            "table": {"files": "", "--schema": "", "--like": "", "--split": "", "--out": ""},
        },
        "inspect": {"files": "", "--label": "", "--ignore": "", "--quote": ""},
        "profile": {"store": "", "--out": "", "--samples": ""},
        "plan": {
            "profile": "",
            "--budget": "",
            "--out": "",
            "--config": "",
            "--set": "",
        },
        "train": {
            "data": "",
            "--config": "",
            "--set": "",
            "--run": "",
            "--dry-run": "",
            "--resume": "",
            "--checkpoint": "",
        },
        "verify": {"data": "", "--config": "", "--set": "", "--budgets": "", "--steps": ""},
        "ablate": {"config": "", "--set": "", "--run": ""},
        "report": {"run": ""},
        "evaluate": {"run": "", "--data": "", "--json": ""},
        "predict": {"run": "", "data": "", "--out": "", "--batch-size": "", "--store": ""},
        "export": {
            "run": "",
            "--to": "",
            "--since": "",
            "--checkpoint": "",
            "--quantize": "",
            "--out": "",
        },
        "apply": {"full": "", "deltas": "", "--out": ""},
    }


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


def test_prepare_train_evaluate(raw_line, tmp_path, small_settings, capsys):
    raw = tmp_path / "raw.txt"
    raw.write_text(
        "\n".join(
            raw_line(str(line % 3 // 2), [str(line % 5)] * 13, [f"{line % 7:x}"] * 26)
            for line in range(700)
        )
    )
    store, folder = tmp_path / "store", tmp_path / "run"

    assert run_cli("prepare", "criteo-kaggle", raw, "--out", store) == 0
    of_model = small_settings[:6]
    assert run_cli("train", store, *of_model, "--run", folder) == 0
    printed_by_train = capsys.readouterr().out
    metrics_file = tmp_path / "new" / "metrics.json"
    assert run_cli("evaluate", folder, "--data", store, "--json", metrics_file) == 0

    for word in ("auc", "logloss", "samples/s", str(folder)):
        assert word in printed_by_train
    record = json.loads((folder / "run.json").read_text())
    assert json.loads(metrics_file.read_text())["metrics"] == record["metrics"]


def test_bad_lines_are_reported(raw_line, tmp_path, capsys):
    raw = tmp_path / "raw.txt"
    raw.write_text(f"{raw_line()}\noops\n")

    assert run_cli("prepare", "criteo-kaggle", raw, "--out", tmp_path / "a") == 2
    assert f"{raw} line 2: expected 40" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere"], "nowhere does not exist; prepare a store with"),
        (["train", "synthetic:criteo-kaggle", "--set", "x=1"], "unknown key x"),
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
        (["evaluate", "nowhere", "--json", "."], ". is a folder; name a file to be written"),
    ],
)
def test_bad_input_ends_with_a_message_and_status_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    assert run_cli(*arguments) == 2

    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_would_lie_under_a_file_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")

    assert run_cli("evaluate", "run", "--json", tmp_path / "file" / "new" / "x.json") == 2

    assert f"cannot be written: {tmp_path / 'file'} is not a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_result_never_takes_the_place_of_a_pipe_or_a_device(tmp_path, capsys):
    # One of our own: a device of the system would be lost where this fails.
    os.mkfifo(tmp_path / "pipe")

    assert run_cli("evaluate", tmp_path / "no_run", "--json", tmp_path / "pipe") == 2

    assert f"{tmp_path / 'pipe'} is not a plain file" in capsys.readouterr().err


def test_help_lists_every_configuration_key(capsys):
    with pytest.raises(SystemExit) as caught:
        run_cli("train", "--help")

    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for name, _, _ in describe_keys():
        assert name in printed


def test_help_of_a_key_says_its_group_its_meaning_what_it_accepts_and_its_default():
    lines = format_keys(TrainConfig, width=200).split("\n")

    place = lines.index("lr_schedule: learning rates over the run")
    found = [" ".join(line.split()) for line in lines[place:]]
    assert (
        "lr_schedule.final factor that remains at the end (number in [0, 1]; default 0.0)" in found
    )
    assert "lr_schedule.decay how rates fall (one of none, linear, cosine; default none)" in found


@pytest.mark.parametrize(
    ("name", "kind", "command"),
    [
        ("clicks.csv", "a table", "recsys prepare table {file} --schema schema.toml --out STORE"),
        ("clicks.csv.gz", "a table", "recsys inspect {file} > schema.toml"),
        ("clicks.PARQUET", "a table", "recsys prepare table {file} --schema"),
        ("train.txt", "a file", "recsys prepare criteo-kaggle {file} --out STORE"),
    ],
)
@pytest.mark.parametrize("arguments", [["train"], ["verify"], ["profile", "--out", "f.npz"]])
def test_a_file_in_place_of_a_store_names_the_command_that_makes_one(
    arguments, name, kind, command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / name
    file.write_text("click,user\n1,2\n")

    assert run_cli(*arguments, file) == 2

    printed = capsys.readouterr().err
    assert f"{file} is {kind}, and data must be a store" in printed
    assert f"`{command.format(file=file)}" in printed
    assert list(tmp_path.iterdir()) == [file]


def test_warnings_of_commands_show_no_source_code(tmp_path, small_settings, monkeypatch, capsys):
    def show(message, category, filename, lineno, file=None, line=None):
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    before = warnings.formatwarning
    monkeypatch.setattr(warnings, "showwarning", show)  # that of pytest prints nothing
    more = ["--set", "eval.every_steps=1000", "--run", str(tmp_path / "run")]
    with warnings.catch_warnings():
        warnings.filterwarnings("always", "the only evaluation is")

        assert run_cli("train", "synthetic:criteo-kaggle", *small_settings, *more) == 0

    lines = capsys.readouterr().err.splitlines()
    (told,) = [line for line in lines if "warning" in line.lower()]
    assert told.startswith("recsys train: warning: the only evaluation is the one after the last")
    assert "warnings.warn" not in "".join(lines)
    assert warnings.formatwarning is before


def test_help_lists_every_command_once_under_a_heading(capsys):
    with pytest.raises(SystemExit):
        run_cli("--help")

    printed = capsys.readouterr().out
    commands, _, examples = printed.partition("options:")
    listed = re.findall(r"^ {4}(\S+)", commands, re.MULTILINE)
    (sub,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert sorted(listed) == sorted(sub.choices)
    assert all(f"  {heading}:\n" in commands for heading in GROUPS)
    assert "recsys train synthetic:criteo-kaggle --set budget=256MiB\n" in examples


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

    monkeypatch.setattr(
        commands, "_parse", lambda _: SimpleNamespace(command="ablate", run_command=fail)
    )

    assert commands.run([]) == 2
    assert "the process of a cell ended" in capsys.readouterr().err


def test_words_that_no_option_takes_are_told_by_the_command(capsys):
    for arguments in (["train", "store", "--epochs", "3"], ["report", "run", "--epochs=3"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2

    train, _, report = capsys.readouterr().err.partition("usage: recsys report")
    assert train.startswith("usage: recsys train")
    assert "unrecognized arguments: --epochs 3; configuration keys are given by --set" in train
    assert "unrecognized arguments: --epochs=3\n" in report


def test_errors_of_the_system_name_the_place(tmp_path, capsys):
    (tmp_path / "file").touch()

    assert run_cli("report", tmp_path / "file" / "run") == 2

    assert "recsys report: " in capsys.readouterr().err


def test_files_in_the_way_are_not_to_be_removed(tmp_path, small_settings, capsys):
    mine = tmp_path / "clicks.csv"
    mine.write_text("click,site\n0,a\n1,b\n")
    schema = tmp_path / "schema.toml"
    schema.write_text("label = 'click'\n[categorical.site]\n")

    for command in (
        ["train", "synthetic:criteo-kaggle", *small_settings, "--run", mine],
        ["prepare", "table", mine, "--schema", schema, "--out", mine],
    ):
        assert run_cli(*command) == 2
        told = capsys.readouterr().err
        assert f"{mine} is a file; choose " in told
        assert "remove" not in told


@pytest.mark.parametrize("text", [EXAMPLES, TRAIN_EXAMPLES])
def test_examples_of_the_help_are_commands(text):
    examples = [line.split() for line in text.splitlines() if line.startswith("  recsys ")]
    assert examples
    for _, *arguments in examples:
        options = build_parser().parse_args(list(takewhile(lambda each: each != ">", arguments)))
        load_config(None, getattr(options, "set", ()))


def test_meanings_of_keys_stand_in_one_column():
    lines = format_keys(TrainConfig, width=80).split("\n")

    assert max(map(len, lines)) <= 80
    for name, _, _ in describe_keys():
        (line,) = [each for each in lines if re.match(rf"  {name}( |$)", each)]
        assert line == f"  {name}" or line[2 + len(name) : 34].isspace()
        assert line[34:35] != " "


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
    file.write_text("epochs = 1\n")
    assert run_cli("train", "--config", file, "--run", tmp_path / "other") == 2
    assert "data is missing; name a store" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "data is missing; name a store, or synthetic:criteo-kaggle"),
        (["--resume"], "--resume continues the run in a folder; name it by --run DIR"),
        (["data", "--checkpoint", "3"], "--checkpoint N is for a run to continue; add --resume"),
        (["--resume", "--run", "nowhere"], "nowhere has no run to continue; name the data"),
    ],
)
def test_what_resuming_needs_is_said(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)

    assert run_cli("train", *options) == 2

    assert f"recsys train: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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
    assert (folder / "curves.png").is_file()
    assert "interrupted at step" in printed
    assert f"continue it by: recsys train --run {folder} --resume" in printed


def test_choices_of_the_command_line_are_those_of_the_functions_behind_it():
    from recsys.train.exports import FORMATS as MODEL_FORMATS
    from recsys.train.exports import QUANTIZATIONS

    def choices(*path):
        parser = build_parser()
        for name in path[:-1]:
            (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
            parser = commands.choices[name]
        (action,) = (a for a in parser._actions if a.dest == path[-1])
        return tuple(action.choices)

    assert choices("export", "to") == MODEL_FORMATS
    assert choices("export", "quantize") == QUANTIZATIONS


def test_a_run_is_exported_as_a_whole_and_as_deltas_that_apply(tmp_path, small_settings, capsys):
    run, files = tmp_path / "run", [str(tmp_path / name) for name in ("full", "delta", "applied")]
    settings = [*small_settings, "--set", "checkpoint.every_steps=2"]

    assert main(["train", "synthetic:criteo-kaggle", "--run", str(run), *settings]) == 0
    kept = sorted(path.stem for path in (run / "checkpoints").glob("*.json"))
    older, last = int(kept[0]), int(kept[1])
    export = ["export", str(run)]
    full = ["--to", "safetensors", "--checkpoint", str(older), "--out", files[0]]
    assert main([*export, *full]) == 0
    assert main([*export, "--since", str(older), "--out", files[1]]) == 0
    assert main(["apply", *files[:2], "--out", files[2]]) == 0
    assert main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "final")]) == 0

    found, expected = (load_file(name) for name in (files[2], tmp_path / "final"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    capsys.readouterr()
    assert main([*export, "--since", str(last), "--out", str(tmp_path / "none")]) == 2
    assert f"checkpoint {last} is the newest, so nothing has changed" in capsys.readouterr().err
    assert main([*export, "--to", "torch-export", "--checkpoint", "1", "--out", files[0]]) == 2
    assert "goes with --to safetensors only" in capsys.readouterr().err
    assert main([*export, "--to", "safetensors", "--checkpoint", "x", "--out", files[0]]) == 2
    assert "must be a number or 'last', got 'x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "; free some space, or name another place"),
        (errno.EMFILE, "; raise the limit of open files, as by `ulimit -n 4096`"),
    ],
)
def test_a_full_disk_or_table_of_files_is_told_with_what_helps(
    monkeypatch, tmp_path, capsys, number, way_out
):
    def fill(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("recsys.cli.commands.require_place", fill)

    assert main(["evaluate", "run", "--json", str(tmp_path / "rows.json")]) == 2
    assert capsys.readouterr().err.endswith(f"{way_out}\n")


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

    monkeypatch.setattr("recsys.datasets.tabular.store_parts.spool._write", fill)
    (tmp_path / "clicks.csv").write_text("click,ad\n0,1\n1,2\n")
    (tmp_path / "schema.toml").write_text('label = "click"\n[categorical.ad]\n')
    files = [str(tmp_path / "clicks.csv"), "--schema", str(tmp_path / "schema.toml")]

    assert main(["prepare", "table", *files, "--out", str(tmp_path / "store")]) == 2

    assert f"recsys prepare: {tmp_path / 'store'}: {way_out}\n" in capsys.readouterr().err
