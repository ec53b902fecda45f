"""What the pages for newcomers show is what the commands print, and their blocks run."""

import json
import re
import tomllib

import numpy as np
import pytest

from recsys.cli import main


@pytest.fixture
def page(pytestconfig):
    return lambda name: (pytestconfig.rootpath / "docs" / name).read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def assert_printed(block, printed):
    """Every line of a block was printed, in this order; `...` stands for any lines."""
    lines, position = printed.splitlines(), 0
    for line in block.splitlines():
        if line != "...":
            assert line in lines[position:], line
            position += lines[position:].index(line) + 1


@pytest.fixture
def walk(page, kaggle_137k_store, tmp_path, monkeypatch):
    """A folder in which the commands of docs/budget.md run on the real sample."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "kaggle").symlink_to(kaggle_137k_store)
    [recipe] = blocks(page("budget.md"), "toml")
    (tmp_path / "recipe.toml").write_text(recipe)
    return tmp_path


@pytest.mark.slow
def test_the_page_about_budgets_shows_what_its_commands_print(page, walk, capsys):
    commands = [line for block in blocks(page("budget.md"), "sh") for line in block.splitlines()]
    shown = blocks(page("budget.md"), "text")
    dry_run, profile, plan, train = (line.split()[1:] for line in commands if "STORE" not in line)

    assert main(dry_run) == 0
    assert_printed(shown[0], capsys.readouterr().out)
    assert main(profile) == main(plan) == 0
    assert_printed(shown[1], capsys.readouterr().out)
    plain, planned = re.findall(r"^hits .*", "\n".join(shown), re.MULTILINE)
    assert plain != planned
    for hits, run, more in (
        (plain, "plain", []),
        (planned, "planned", ["--set", "plan=plan.npz"]),
    ):
        assert main([*train[:-1], run, *more, "--set", "num_threads=1"]) == 0
        record = json.loads((walk / run / "run.json").read_text())
        assert hits in capsys.readouterr().out
        assert record["tiers"]["cold_tier"] == "host"


@pytest.mark.slow
def test_the_first_run_on_real_data_is_the_one_that_is_shown(page, walk, capsys):
    shown = next(
        block for block in blocks(page("getting-started.md"), "text") if "316,191" in block
    )

    assert main(["train", "stores/kaggle", "--run", "run", "--set", "num_threads=1"]) == 0

    prepared, *lines = shown.splitlines()
    assert_printed("\n".join(lines[1:]), capsys.readouterr().out)
    meta = json.loads((walk / "stores/kaggle/meta.json").read_text())
    sizes = meta["num_embeddings"].values()
    assert prepared.endswith(
        f": {meta['num_samples']:,} samples, {sum(sizes):,} distinct ids in {len(sizes)} columns"
    )


@pytest.mark.slow
def test_a_budget_gives_the_metrics_of_the_run_without_one(page, walk):
    """As docs/getting-started.md says of its last two commands."""
    text = page("getting-started.md").replace("\\\n", "")
    runs = [
        line.replace("train store", "train stores/kaggle").split()[1:]
        for block in blocks(text, "sh")
        for line in block.splitlines()
        if "adagrad" in line
    ]

    for run in runs:
        assert main([*run, "--set", "num_threads=1"]) == 0

    plain, budget = (
        json.loads((walk / name / "run.json").read_text())
        for name in ("runs/adagrad", "runs/budget")
    )
    assert plain["metrics"] == budget["metrics"]
    assert (plain["tiers"], budget["config"]["budget"]) == (None, "8MiB")


def test_the_page_about_files_reads_what_is_in_them(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {}

    for block in blocks(page("file-formats.md"), "python"):
        capsys.readouterr()
        exec(compile(block, "docs/file-formats.md", "exec"), found)

    assert re.fullmatch(r"from checkpoint 1 to \d+\n", capsys.readouterr().out)
    assert found["rows"].shape == (2000, 26)
    for number, counts in enumerate(found["counts_of"].values()):
        expected = np.bincount(found["rows"][:, number], minlength=len(counts))
        np.testing.assert_array_equal(counts, expected)
    weight = "sparse_arch.embedding_bag_collection.embedding_bags.t_cat_0.weight"
    np.testing.assert_array_equal(found["full"][weight], found["model"][weight])
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["budget"] == "256KiB"
