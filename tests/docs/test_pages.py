import json
import re
from statistics import mean

import pytest
import tables


def test_tables_are_what_their_json_makes_them(pytestconfig):
    placed = []
    for name in tables.DOCUMENTS:
        text = (pytestconfig.rootpath / name).read_text()
        placed += re.findall(r"<!-- table: (\w+) -->", text)
        assert tables.with_tables(text) == text

    assert sorted(placed) == sorted(tables.TABLES)


@pytest.mark.parametrize(("recipe", "least"), [("sgd", 0.718), ("adagrad", 0.759)])
@pytest.mark.parametrize("provider", ["torch", "fbgemm"])
def test_the_reference_recipes_reach_their_bounds_over_three_seeds(
    pytestconfig, recipe, least, provider
):
    folder = pytestconfig.rootpath / "benchmarks" / "results" / "reference"

    runs = [json.loads((folder / f"{recipe}-{provider}-{n}.json").read_text()) for n in range(3)]

    assert [run["config"]["seed"] for run in runs] == [0, 1, 2]
    assert mean(run["metrics"]["test"]["auc"] for run in runs) >= least


def test_kept_results_are_of_a_commit(pytestconfig):
    records = list((pytestconfig.rootpath / "benchmarks" / "results").rglob("*.json"))

    assert records
    for record in records:
        found = json.loads(record.read_text())
        environment = found["environment"]
        assert "unfinished" not in found, record
        assert environment["commit"], record
        assert environment["dirty"] is False, record


def test_every_link_between_documents_leads_to_a_file(pytestconfig):
    root = pytestconfig.rootpath
    documents = [*root.glob("*.md"), *root.glob("*/*.md"), *(root / "docs").rglob("*.md")]

    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_every_decision_is_in_the_index(pytestconfig):
    folder = pytestconfig.rootpath / "docs" / "decisions"
    pages = {page.name: page.read_text().split("\n")[0] for page in folder.glob("*.md")}
    del pages["README.md"]

    index = re.findall(r"^- \[(.*)\]\((.*)\)$", (folder / "README.md").read_text(), re.MULTILINE)

    assert {name: f"# {title}" for title, name in index} == pages


def test_pages_written_by_hand_stay_short(pytestconfig):
    root = pytestconfig.rootpath
    pages = [*root.glob("*.md"), root / "recsys" / "README.md", *root.glob("docs/**/*.md")]
    pages = [page for page in pages if page.name != "CHANGELOG.md"]

    words = sum(len(re.findall(r"\S*\w\S*", page.read_text())) for page in pages)

    assert words <= 30_000
    assert len(list(root.glob("docs/decisions/*.md"))) <= 21  # twenty, and the list of them


def test_kept_commands_name_no_place_of_the_machine_they_ran_on(pytestconfig):
    folder = pytestconfig.rootpath / "benchmarks" / "results"
    records = {file: json.loads(file.read_text()) for file in folder.rglob("*.json")}

    commands = {file: record["command"] for file, record in records.items() if "command" in record}

    assert commands
    for file, command in commands.items():
        assert not any(word.startswith("/") for word in command.split()), file


def test_files_of_the_routes_exist(pytestconfig):
    """Pages that lead to the code name files of the package."""
    root = pytestconfig.rootpath
    text = (root / "docs" / "architecture.md").read_text()
    drawn = "".join(re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    papers = "".join(re.findall(r"`[^`\n]*`", (root / "docs" / "papers.md").read_text()))
    route = (root / "recsys" / "README.md").read_text()
    steps = (root / "CONTRIBUTING.md").read_text()
    named = {*re.findall(r"[\w/]+\.py", drawn + papers + route)}
    named |= {*re.findall(r"recsys/([\w/]+\.py)", steps)}

    assert len(named) > 20
    assert [name for name in named if not (root / "recsys" / name).exists()] == []
