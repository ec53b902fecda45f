"""The site is built from the docs and the docstrings, and no link in it is broken."""

import argparse
import os
import runpy

import pytest

from recsys import embeddings
from recsys.cli.options import build_parsers
from recsys.config import walk_keys
from tests.forks import Fork


def build(root, folder):
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    os.chdir(root)
    from mkdocs.__main__ import cli

    cli(["build", "--strict", "--site-dir", str(folder)])


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(pytestconfig, tmp_path):
    fork = Fork(build, pytestconfig.rootpath, tmp_path)
    _, said = fork.end()

    assert fork.process.exitcode == 0, said
    signatures = (tmp_path / "reference/recsys.embeddings/index.html").read_text("utf-8")
    for name in embeddings.__all__:
        assert f".{name}" in signatures
    for page, linked in (
        ("index.html", "reference/examples/#quickstartpy"),
        ("models/index.html", "../reference/examples/#ablation"),
        ("frameworks/index.html", "../reference/examples/#frameworksplain_looppy"),
        ("tour/index.html", "../reference/examples/"),
        ("reference/examples/index.html", "../../ablation/"),
        ("reference/examples/index.html", "#larger_than_memorypy"),
    ):
        assert f'href="{linked}"' in (tmp_path / page).read_text("utf-8"), (page, linked)
    shown = (tmp_path / "reference/examples/index.html").read_text("utf-8")
    assert 'id="frameworksplain_looppy"' in shown
    assert "fonts.googleapis" not in (tmp_path / "index.html").read_text("utf-8")


def test_the_site_shows_every_file_of_examples(pytestconfig):
    examples = pytestconfig.rootpath / "examples"
    files = [*examples.rglob("*.py"), *examples.rglob("*.toml")]

    page = runpy.run_path(str(pytestconfig.rootpath / "docs/site/example_files.py"))[
        "examples_page"
    ]()

    assert len(files) > 20
    for file in files:
        language = {".py": "python", ".toml": "toml"}[file.suffix]
        block = f" {file.relative_to(examples)}\n\n````{language}\n{file.read_text('utf-8')}````\n"
        assert block in page, file


def test_the_site_lists_every_command_and_every_option(pytestconfig):
    pages = runpy.run_path(str(pytestconfig.rootpath / "docs/site/keys_and_commands.py"))

    sections = pages["commands_page"]().split("\n#")

    for command, options in commands_of(build_parsers()[0]):
        (section,) = [each for each in sections if each.splitlines()[0].endswith(f"# {command}")]
        for option in options:
            assert f"| `{option}" in section, (command, option)
    assert "| `--batch-size B` | samples per forward pass; default: 8192 |\n" in "".join(sections)


def commands_of(parser):
    """Every command with its option strings, and the commands under it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                options = [option for a in each._actions for option in a.option_strings]
                yield each.prog, [option for option in options if option not in ("-h", "--help")]
                yield from commands_of(each)


def test_the_site_lists_every_configuration_key_with_its_default(pytestconfig):
    pages = runpy.run_path(str(pytestconfig.rootpath / "docs/site/keys_and_commands.py"))

    page = pages["keys_page"]()

    for key in walk_keys():
        assert f"\n| `{key.name}` | " in page, key.name
    assert "| `batch_size` | 128 | samples per step (integer at least 1) |\n" in page
    assert "\n| `optimizer.eps` | depends on name | " in page
