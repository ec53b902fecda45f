import re

import pytest

from recsys.bench.tables import DOCUMENTS, with_tables


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_are_what_their_json_makes_them(pytestconfig, name):
    text = (pytestconfig.rootpath / name).read_text()

    assert with_tables(text) == text


@pytest.mark.parametrize("name", ["README.md"])
def test_python_snippets_run(pytestconfig, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(
        r"^```python\n(.*?)^```",
        (pytestconfig.rootpath / name).read_text(),
        re.DOTALL | re.MULTILINE,
    )

    assert snippets
    for snippet in snippets:
        exec(compile(snippet, name, "exec"), {})


def test_every_command_of_the_readme_is_one_of_the_makefile(pytestconfig):
    makefile = (pytestconfig.rootpath / "Makefile").read_text()
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))

    named = set()
    for document in ("README.md", "CONTRIBUTING.md", "docs/benchmarks.md"):
        named |= set(re.findall(r"make (\w+)", (pytestconfig.rootpath / document).read_text()))

    assert {"train", "test", "check", "setup"} <= named <= targets
