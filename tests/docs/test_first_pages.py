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
    """The lines of a block were printed one after the other; `...` stands for any lines."""
    lines, position = printed.splitlines(), 0
    for part in re.split(r"^\.\.\.(?:\n|\Z)", block, flags=re.MULTILINE):
        expected = part.splitlines()
        places = range(position, len(lines) - len(expected) + 1)
        found = [place for place in places if lines[place : place + len(expected)] == expected]
        assert found, f"not printed together and in this place:\n{part}\nin\n{printed}"
        position = found[0] + len(expected)


@pytest.fixture
def walk(page, kaggle_137k_store, tmp_path, monkeypatch):
    """A folder in which the commands of docs/fast-memory.md run on the real sample."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "kaggle").symlink_to(kaggle_137k_store)
    [recipe] = blocks(page("fast-memory.md"), "toml")
    (tmp_path / "recipe.toml").write_text(recipe)
    return tmp_path


@pytest.mark.slow
def test_the_page_about_budgets_shows_what_its_commands_print(page, walk, kaggle_137k_run, capsys):
    commands = [
        line for block in blocks(page("fast-memory.md"), "sh") for line in block.splitlines()
    ]
    shown = blocks(page("fast-memory.md"), "text")
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
        assert hits in capsys.readouterr().out
    resident, _ = kaggle_137k_run("adagrad")  # as docs/getting-started.md compares
    records = [
        json.loads((run / "run.json").read_text())
        for run in (walk / "plain", walk / "planned", resident)
    ]
    assert records[0]["metrics"] == records[1]["metrics"] == records[2]["metrics"]
    assert records[2]["tiers"] is None


def test_the_first_run_on_real_data_is_the_one_that_is_shown(
    page, kaggle_137k_run, kaggle_137k_store
):
    shown = next(
        block for block in blocks(page("getting-started.md"), "text") if "316,191" in block
    )

    _, printed = kaggle_137k_run("sgd")

    prepared, trained = shown.split("\n", 1)
    metric = re.compile(r"\b0\.\d{4}\b")
    assert_printed(metric.sub("M", trained), metric.sub("M", printed))
    for line in filter(metric.search, trained.splitlines()):  # processors round sums differently
        name = line[: metric.search(line).start()]
        [found] = re.findall(rf"^{name}(.*)", printed, re.MULTILINE)
        expected = [float(each) for each in metric.findall(line)]
        assert [float(each) for each in metric.findall(found)] == pytest.approx(expected, abs=0.005)
    meta = json.loads((kaggle_137k_store / "meta.json").read_text())
    sizes = meta["num_embeddings"].values()
    assert prepared.endswith(
        f": {meta['num_samples']:,} samples, {sum(sizes):,} distinct ids in {len(sizes)} columns"
    )


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
