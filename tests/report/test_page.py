"""The pages of runs and of ablations: one file, with all of the record, and nothing that runs."""

import csv
import json
from base64 import b64decode
from html.parser import HTMLParser

import pytest

from recsys.ablate import ablate
from recsys.cli import main
from recsys.errors import ConfigError
from recsys.report import format_run, write_report
from recsys.train.trainer import train

HOSTILE = "<script>alert(1)</script>\"'{{ 7 * 7 }}"


class Page(HTMLParser):
    """The tables of a page as lists of texts, its other text, its tags and its pictures."""

    def __init__(self, path):
        super().__init__()
        self.tables, self.text, self.tags, self.open = [], [], [], []
        self.sources = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        self.text.append(data)


def check_self_contained(page):
    assert "script" not in page.tags
    assert "link" not in page.tags
    (source,) = page.sources  # one picture
    kind, _, content = source.partition(",")
    assert kind == "data:image/png;base64"
    assert b64decode(content).startswith(b"\x89PNG")


@pytest.fixture
def changed_run(tmp_path, small_config, train_once):
    """The folder of a run whose record is changed by a function."""

    def change(function):
        train_once(small_config("num_threads=1"), tmp_path / "run")
        file = tmp_path / "run" / "run.json"
        record = json.loads(file.read_text())
        function(record)
        file.write_text(json.dumps(record))
        return tmp_path / "run"

    return change


@pytest.mark.usefixtures("whole_pictures")
def test_the_page_of_a_run_holds_what_was_printed_its_curves_and_its_keys(
    small_config, tmp_path, capsys
):
    config = small_config("num_threads=1", "budget=20KiB", "synthetic.table_sizes=[900, 700, 800]")
    record = train(config, tmp_path / "run", show_progress=False)
    printed = format_run(record, tmp_path / "run")

    status = main(["report", str(tmp_path / "run")])

    assert status == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'report.html'}\n"
    page = Page(tmp_path / "run" / "report.html")
    check_self_contained(page)
    assert printed in page.text
    assert "backward" in printed  # a stage
    assert f"{record['tiers']['lookup_hit_rate']:.1%} of lookups" in printed
    chosen, environment, data = page.tables
    assert ["model.dense_arch", "[8, 4]"] in chosen
    assert "epochs" not in [key for key, _ in chosen]  # has its default
    assert ["torch", record["environment"]["torch"]] in environment
    assert ["num_samples", str(record["data"]["num_samples"])] in data


@pytest.mark.usefixtures("whole_pictures")
def test_a_run_that_diverged_at_once_has_a_page(small_config, tmp_path):
    with pytest.raises(ArithmeticError):
        train(small_config("optimizer.lr=1e30"), tmp_path / "run", show_progress=False)

    (summary,) = [text for text in Page(write_report(tmp_path / "run")).text if "recipe" in text]

    assert summary.startswith("diverged at step ")
    assert "best AUC possible 0." in " ".join(summary.split())


def test_a_page_says_of_several_processes_which_numbers_are_those_of_one(changed_run):
    run = changed_run(lambda record: record.update(processes={"num_ranks": 2}))

    assert "2; tiers, stages and memory are those of the first" in write_report(run).read_text()


def test_no_text_of_a_record_is_read_as_markup(changed_run):
    def make_hostile(record):
        record["environment"] |= {HOSTILE: HOSTILE}
        record["config"] |= {"data": HOSTILE, HOSTILE: [HOSTILE]}
        record["data"] |= {"name": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}}

    page = Page(write_report(changed_run(make_hostile)))

    check_self_contained(page)
    assert [HOSTILE, HOSTILE] in page.tables[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("stalls"),
        lambda record: record.update(peak_memory_bytes="x"),
    ],
)
def test_a_damaged_record_is_refused_and_no_page_is_left(changed_run, damage):
    run = changed_run(damage)

    with pytest.raises(ConfigError, match=r"run\.json is damaged: .* again"):
        write_report(run)

    assert not list(run.glob("report*"))


@pytest.mark.usefixtures("whole_pictures")
def test_the_page_of_an_ablation_holds_its_table_and_its_comparison(ablation, tmp_path):
    config = ablation(
        "[ablate]\nseeds = [0, 1]\nbaseline = 'optimizer.lr=0.1'\n[ablate.grid]\n"
        "optimizer.lr = [0.1, 0.5, 1e30]\n",
        "eval.every_steps=4",
    )

    record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train)

    page = Page(tmp_path / "out" / "report.html")
    check_self_contained(page)
    summary, paired, keys, *_ = page.tables
    assert summary[0][:4] == ["variation", "test AUC", "test logloss", "validation AUC"]
    row = record["rows"][0]
    assert summary[1][:2] == ["optimizer.lr=0.1", f"{row['mean']:.4f} \xb1 {row['std']:.4f}"]
    assert summary[3][:2] == ["optimizer.lr=1e+30", "-"]
    entry = record["differences"][0]
    mean, low, high = (f"{entry[key]:+.5f}" for key in ("mean", "low", "high"))
    assert paired[1][:2] == ["optimizer.lr=0.5", f"{mean} ({low} to {high})"]
    assert "samples/s, ratio" in paired[0]
    assert ["optimizer.lr=0.5", "optimizer.lr = 0.5"] in keys
    diverged = "2 of 6 cells diverged: optimizer.lr=1e+30-seed0, optimizer.lr=1e+30-seed1."
    assert diverged in page.text
    markdown = (tmp_path / "out" / "table.md").read_text()
    assert f"| optimizer.lr=0.5 | {mean} ({low} to {high}) |" in markdown
    assert diverged in markdown
    lines = list(csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines()))
    assert [line["metric"] for line in lines] == [row["metric"] for row in record["rows"]]
    assert float(lines[0]["mean"]) == row["mean"]
    assert lines[-1]["mean"] == ""
