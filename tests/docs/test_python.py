"""The Python code of the documents runs, and prints what the documents say."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recsys.datasets import Store
from tests.docs.test_docstrings import MODULES

ROOT = Path(__file__).parents[2]
# Pages of which each block runs by itself, in the order of the page and in one folder.
PAGES = [
    "README.md",
    "docs/callbacks.md",
    "docs/gpu.md",
    "docs/fast-memory.md",
    "docs/python.md",
    "docs/slipstream.md",
    "docs/tables.md",
]
# Pages whose blocks need more, and what runs them.
OTHER_PAGES = {
    "docs/distributed.md": "tests/distributed/test_docs.py",
    "docs/file-formats.md": "tests/docs/test_first_pages.py",
    "docs/migration.md": "tests/docs/test_migration.py",
    "docs/models.md": "tests/docs/test_models.py",
    "docs/tour.md": "tests/docs/test_python.py",
}
# Private modules that pages import from, because they have no public name for it yet.
PRIVATE = {
    "recsys.cli",
}
LANGUAGES = {"", "python", "sh", "text", "toml"}  # of blocks; "" is for output and drawings


def python_of(page):
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def clicks(tmp_path):
    """The schema of docs/tables.md, and a file that it fits."""
    rng = np.random.default_rng(0)
    times = pd.date_range("2026-01-01", periods=400, freq="min")
    columns = {
        "click": rng.integers(0, 2, 400),
        "time": times.strftime("%Y-%m-%d %H:%M:%S"),
        "price": rng.uniform(0, 90, 400).round(2),
        "user_id": rng.integers(0, 30, 400),
        "site": rng.choice(["a", "b", "c"], 400),
        "ad": rng.integers(0, 20, 400),
        "tags": rng.choice(["x|y", "x", "y|z"], 400),
    }
    pd.DataFrame(columns).to_csv(tmp_path / "clicks.csv", index=False)
    text = (ROOT / "docs" / "tables.md").read_text("utf-8")
    (schema,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "schema.toml").write_text(schema)


@pytest.mark.slow(but=("README.md", "docs/python.md", "docs/tables.md", "docs/fast-memory.md"))
@pytest.mark.parametrize("page", PAGES)
def test_each_block_of_a_page_runs(page, clicks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = python_of(page)

    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})

    if page == "docs/tables.md":
        first, second = Store("store"), Store("store2")
        assert first.num_samples == second.num_samples == 400
        assert first.table_sizes == second.table_sizes


@pytest.mark.slow
def test_the_tour_runs_from_its_first_block_to_its_last(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "tour.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", text, re.DOTALL | re.M)
    found = {}

    for code, shown in blocks:
        exec(compile(code, "docs/tour.md", "exec"), found)
        # Another machine has other last digits.
        numbers = r"\d[\d.,]*(?:e[-+]\d+)?"
        assert re.sub(numbers, "#", capsys.readouterr().out) == re.sub(numbers, "#", shown)

    assert found["losses_ahead"] == found["losses_tiered"]
    assert found["losses_tiered"] == pytest.approx(found["losses"], abs=1e-4)


def test_the_printed_estimate_is_that_of_its_snippet(capsys):
    text = (ROOT / "docs" / "fast-memory.md").read_text("utf-8")
    pattern = r"^```python\n([^`]*recsys\.estimate\([^`]*)^```\n\nprints\n\n```\n(.*?)^```"
    [(snippet, printed)] = re.findall(pattern, text, re.DOTALL | re.MULTILINE)

    exec(compile(snippet, "docs/fast-memory.md", "exec"), {})

    assert capsys.readouterr().out == printed


def test_every_page_with_python_code_is_run_by_a_test():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    with_python = {str(page.relative_to(ROOT)) for page in pages if python_of(page)}

    assert with_python == {*PAGES, *OTHER_PAGES}
    for page, test in OTHER_PAGES.items():
        names = f'"{page}"', f'"{Path(page).name}"'
        assert any(name in (ROOT / test).read_text("utf-8") for name in names)


def test_pages_import_from_public_modules():
    code = "".join(block for page in [*PAGES, *OTHER_PAGES] for block in python_of(page))

    found = set(re.findall(r"^ *(?:from|import) (recsys[\w.]*)", code, re.MULTILINE))
    assert "recsys.train" in found
    assert found - set(MODULES) == PRIVATE


def test_every_block_of_code_names_its_language():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        text = page.read_text("utf-8")
        blocks = re.findall(r"^ *```(\S*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
        assert {language for language, _ in blocks} <= LANGUAGES, page
        plain = [block for language, block in blocks if language in ("", "text")]
        indented = re.findall(
            r"(?:^    .*\n)+", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M
        )
        for block in (*plain, *indented):
            assert not re.search(r"^ *(import|from) [\w.]+|^ *(def|class) \w+", block, re.M), page
