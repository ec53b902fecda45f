"""Every command that a document shows is one that the command line takes."""

import argparse
import re
import shlex
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from recsys.ablate import load_ablation
from recsys.cli.options import GROUPS, build_parsers
from recsys.config import TrainConfig, load_config
from recsys.datasets import Schema
from recsys.errors import ConfigError
from tests.docs.shown_commands import commands_of, lines_meant, overlooked

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    file
    for pattern in (
        *("*.md", "Makefile", "docs/**/*.md", "docs/**/*.py", "examples/**/*.*"),
        *("benchmarks/*.md", "recsys/*.md"),
    )
    for file in ROOT.glob(pattern)
    if file.suffix in ("", ".md", ".py", ".toml")
)
LEAST_COMMANDS = 150


def relaxed(parser):
    """The same parser for commands that a sentence mentions, which may leave out what it needs."""
    for group in parser._mutually_exclusive_groups:
        group.required = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                relaxed(each)
        elif action.nargs is None:
            action.nargs = "?"
        elif action.nargs == "+":
            action.nargs = "*"
        action.required = False
    return parser


def problem_of(shown, parsers, capsys):
    """What is wrong with a command; None if nothing is."""
    for arguments in lines_meant(shown.text):
        try:
            options = parsers[shown.is_whole].parse_args(arguments)
        except SystemExit as ended:
            printed = capsys.readouterr()
            if ended.code:
                return printed.err.strip().splitlines()[-1]
            continue  # it asks for help
        settings = [each for each in getattr(options, "set", []) if each.lower() != "key=value"]
        config, json = getattr(options, "config", None), getattr(options, "json", None)
        if json is not None and not (ROOT / json).parent.is_dir():
            return f"the folder of {json} does not exist"
        file = ROOT / config if config is not None and len(config.parts) > 1 else None
        try:
            if options.command == "ablate" and file is not None:
                load_ablation(file, settings)
            else:  # a file of the reader's
                load_config(file, [each for each in settings if not each.startswith("ablate.")])
        except ConfigError as error:
            return str(error)
    return None


@pytest.fixture(scope="module")
def parsers():
    return {True: build_parsers()[0], False: relaxed(build_parsers()[0])}


def shown_in(document, program):
    text = document.read_text("utf-8")
    found = commands_of(text, is_markdown=document.suffix == ".md")
    return [each for each in found if each.program == program]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_commands_are_taken_by_the_command_line(document, parsers, capsys):
    wrong = {
        shown.text: problem
        for shown in shown_in(document, "recsys")
        if (problem := problem_of(shown, parsers, capsys)) is not None
    }

    assert wrong == {}


def test_commands_are_found():
    texts = [shown.text for file in DOCUMENTS for shown in shown_in(file, "recsys")]

    assert len(texts) >= LEAST_COMMANDS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_command_in_a_line_of_code_is_overlooked(document):
    text = document.read_text("utf-8")

    assert (
        overlooked(
            text,
            [name for of in GROUPS.values() for name in of],
            is_markdown=document.suffix == ".md",
        )
        == []
    )


def test_targets_and_variables_of_make_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"\$\((\w+)\)|^(\w+) \?=", makefile, re.MULTILINE))
    named, set_to = set(), set()

    for file in DOCUMENTS:
        for shown in shown_in(file, "make"):
            for word in shlex.split(shown.text, comments=True):
                variable, is_set, _ = word.partition("=")
                (set_to if is_set else named).add(variable)

    assert {"train", "test", "check", "setup"} <= named <= targets
    assert {"DATA", "PIP_ARGS"} <= set_to <= set(chain.from_iterable(variables))


def test_scripts_that_documents_run_exist():
    scripts = {
        shown.text.split()[0]
        for file in DOCUMENTS
        for shown in shown_in(file, "python")
        if not shown.text.startswith("-m ")
    }

    assert len(scripts) > 15
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


def test_toml_blocks_are_ablations_configurations_or_schemas(tmp_path):
    blocks = [
        block
        for file in DOCUMENTS
        for block in re.findall(r"^```toml\n(.*?)^```", file.read_text("utf-8"), re.DOTALL | re.M)
    ]

    assert len(blocks) >= 5
    for block in blocks:
        keys = tomllib.loads(block)
        file = tmp_path / "block.toml"
        file.write_text(block)
        if "ablate" in keys:
            load_ablation(file, ())
        elif keys.keys() <= TrainConfig.model_fields.keys():
            load_config(file, ())
        else:  # a part of a schema may leave the label to the reader
            Schema.from_dict(keys if "negatives" in keys else {"label": "click", **keys})
