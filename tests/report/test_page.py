import json
import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from recsys._support.sizes import format_bytes
from recsys.ablate.config import load_ablation
from recsys.ablate.run import ablate
from recsys.cli import main
from recsys.config import TrainConfig, describe_config
from recsys.errors import ConfigError
from recsys.pipeline.stalls import STAGES, stage_seconds, stage_title
from recsys.pipeline.suggestions import Suggestion
from recsys.report.ablation_table import format_ablation
from recsys.report.page import write_report
from recsys.report.summary import format_metrics, tabulate_hits
from recsys.train.run_files.run_folder import RunFolder
from recsys.train.trainer import train


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


def check_self_contained(page, num_pictures=1):
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert len(page.sources) == num_pictures
    for source in page.sources:
        kind, _, content = source.partition(",")
        assert kind == "data:image/png;base64"
        assert b64decode(content).startswith(b"\x89PNG")


@pytest.mark.usefixtures("whole_pictures")
def test_the_page_of_a_run_holds_all_of_its_record_and_needs_no_other_file(
    small_config, tmp_path, capsys
):
    record = train(small_config("num_threads=1"), tmp_path / "run", show_progress=False)

    status = main(["report", str(tmp_path / "run")])

    assert status == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'report.html'}\n"
    page = Page(tmp_path / "run" / "report.html")
    check_self_contained(page)
    metrics, chosen, configuration, environment, _ = page.tables
    assert metrics[0] == ["", "test", "validation"]
    assert metrics[1] == [
        "auc",
        *(f"{record['metrics'][split]['auc']:.4f}" for split in ("test", "validation")),
    ]
    error = record["metrics"]["test"]["auc_standard_error"]
    assert metrics[2][:2] == ["auc standard error", f"{error:.4f}"]
    assert ["optimizer.lr", "0.1"] in configuration
    assert ["model.dense_arch", "8, 4"] in chosen
    assert len(chosen) < len(configuration) / 3
    assert ["memory", format_bytes(record["environment"]["memory_bytes"])] in environment
    assert ["model.dense_arch", "8, 4"] in configuration
    assert ["commit", record["environment"]["commit"] or "-"] in environment
    text = "".join(page.text)
    assert "finished: 1,800 samples in 15 steps" in text
    for stage in STAGES:
        assert f"{stage_title(stage)} {record['stalls'][f'{stage}_seconds']:.2f} s" in text


def test_a_page_shows_first_which_keys_do_not_have_their_defaults(
    small_config, train_once, tmp_path
):
    train_once(small_config("num_threads=1"), tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    record = json.loads(file.read_text())
    record["config"] = describe_config(replace(TrainConfig(), batch_size=77))
    file.write_text(json.dumps(record))

    _, chosen, configuration, *_ = Page(write_report(tmp_path / "run")).tables

    assert chosen == [["key", "value"], ["batch_size", "77"]]
    assert ["batch_size", "77"] in configuration
    assert len(configuration) > 50

    record["config"]["batch_size"] = TrainConfig().batch_size
    file.write_text(json.dumps(record))

    assert "Every key has its default." in "".join(Page(write_report(tmp_path / "run")).text)


def test_the_bar_of_stages_is_as_wide_as_they_took(small_config, train_once, tmp_path):
    record = train_once(small_config("num_threads=1"), tmp_path / "run")

    page = write_report(tmp_path / "run").read_text()

    widths = [float(width) for width in re.findall(r'style="width:([\d.]+)%', page)]
    stages = stage_seconds(record["stalls"])
    expected = [seconds / sum(stages.values()) * 100 for seconds in stages.values()]
    assert widths == pytest.approx(expected, abs=0.006)


def test_what_a_record_says_cannot_become_markup(small_config, train_once, tmp_path):
    train_once(small_config("num_threads=1"), tmp_path / "<b>run</b>")
    file = tmp_path / "<b>run</b>" / "run.json"
    record = json.loads(file.read_text())
    record["config"]["data"] = record["data"]["name"] = '<script>alert("1")</script>'
    record["environment"]["cpu"] = "<img src=x> & co"
    file.write_text(json.dumps(record))

    path = write_report(tmp_path / "<b>run</b>")

    page = Page(path)
    check_self_contained(page)
    assert ["data", '<script>alert("1")</script>'] in page.tables[1]
    assert ["cpu", "<img src=x> & co"] in page.tables[3]
    assert "b" not in page.tags


@pytest.mark.usefixtures("whole_pictures")
def test_a_run_that_diverged_at_once_has_a_page(small_config, tmp_path):
    with pytest.raises(ArithmeticError):
        train(small_config("optimizer.lr=1e30"), tmp_path / "run", show_progress=False)

    page = Page(write_report(tmp_path / "run"))

    assert any(text.startswith("diverged: ") for text in page.text)
    assert "no evaluation was made, or the run diverged" in page.text


def test_a_page_says_how_far_an_auc_can_be_off_and_what_the_best_one_is(
    small_config, train_once, tmp_path
):
    record = train_once(small_config("num_threads=1"), tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    changed = json.loads(file.read_text())
    changed["metrics"]["test"]["max_auc_error"] = 0.00003
    file.write_text(json.dumps(changed))

    text = " ".join("".join(Page(write_report(tmp_path / "run")).text).split())

    assert "auc was counted in bins; it is wrong by at most 3.0e-05" in text
    assert f"best AUC possible {record['data']['best_auc']:.4f}" in text


def test_a_record_from_before_a_metric_was_measured_has_a_page(small_config, train_once, tmp_path):
    train_once(small_config("num_threads=1"), tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    record = json.loads(file.read_text())
    for metrics in record["metrics"].values():
        del metrics["max_auc_error"], metrics["calibration"]
    file.write_text(json.dumps(record))

    page = Page(write_report(tmp_path / "run"))

    assert ["calibration", "-", "-"] in page.tables[0]
    assert "calibration                      -             -" in format_metrics(record["metrics"])


def test_a_damaged_record_is_named(small_config, tmp_path):
    RunFolder.create(tmp_path, small_config())
    (tmp_path / "run.json").write_text('{"status": "fin')

    with pytest.raises(ConfigError, match=r"run\.json is damaged, it is not JSON .*; remove it"):
        write_report(tmp_path)


def test_the_page_of_an_ablation_states_the_interval_that_was_used(small_settings, tmp_path):
    file = tmp_path / "ablation.toml"
    file.write_text(
        "[ablate]\nseeds = [0]\ntarget_auc = 0.999\neval_every_samples = 200\n"
        "[ablate.grid]\nbatch_size = [50, 600]\n"
    )
    config = load_ablation(file, [*small_settings[1::2], "num_threads=1"])

    record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train)

    assert [cell["eval_every_samples"] for cell in record["cells"]] == [200, 600]
    assert "one is made every 200 to 600 samples" in format_ablation(record)
    text = "".join(Page(tmp_path / "out" / "report.html").text)
    assert "one is made every 200 to 600 samples. The clock leaves" in text
    best_auc = record["cells"][0]["run"]["data"]["best_auc"]
    assert f"Best AUC possible: {best_auc:.4f}." in " ".join(text.split())


@pytest.mark.in_ci("[1]")
@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        ("[1]", "; the only one is made after the last step. "),
        ("[1, 3]", "; one is made every 3,600 samples, but in 1 of 2 cells only the last one. "),
    ],
)
@pytest.mark.usefixtures("whole_pictures")
def test_cells_too_short_to_be_evaluated_on_the_way_are_told(
    small_settings, tmp_path, epochs, expected
):
    file = tmp_path / "ablation.toml"
    file.write_text(
        "batch_size = 600\n[ablate]\nseeds = [0]\ntarget_auc = 0.999\n[ablate.grid]\n"
        f"epochs = {epochs}\n"
    )
    config = load_ablation(file, [*small_settings[1::2], "num_threads=1"])

    with pytest.warns(UserWarning, match=r"every_steps is 6, and the run has 3 steps; lower it, o"):
        record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train)

    assert expected in format_ablation(record)
    assert expected in "".join(Page(tmp_path / "out" / "report.html").text)


@pytest.mark.outside_ci
@pytest.mark.usefixtures("whole_pictures")
def test_the_page_of_an_ablation_holds_its_table_its_cells_and_their_curves(
    small_settings, tmp_path
):
    file = tmp_path / "ablation.toml"
    file.write_text(
        "[ablate]\nseeds = [0, 1]\ntarget_auc = 0.999\neval_every_samples = 256\n"
        "[ablate.grid]\noptimizer.name = ['sgd', 'adagrad']\n"
    )
    config = load_ablation(file, [*small_settings[1::2], "num_threads=1"])

    record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train)

    page = Page(tmp_path / "out" / "report.html")
    check_self_contained(page, num_pictures=2)
    summary, cells, keys, _, base, _ = page.tables
    titles = ["test AUC", "test logloss", "validation AUC", "test normalized entropy"]
    titles += ["test calibration", "seconds of training", "samples/s", "MiB of fast memory"]
    assert summary[0] == ["variation", *titles]
    row = record["rows"][0]
    assert summary[1][:2] == [
        "optimizer.name=sgd",
        f"{row['mean']:.4f}\nsd {row['std']:.4f}",
    ]
    text = "".join(page.text)
    assert "No cell has a value of: seconds to test AUC 0.999." in text
    assert "Two seeds: a spread or an interval of two values says little" in text
    assert cells[0] == ["cell", *titles, "status"]
    assert [line[:2] for line in cells[1:]] == [
        [cell["name"], "{auc:.4f} \xb1 {auc_standard_error:.4f}".format(**metrics)]
        for cell, metrics in ((cell, cell["run"]["metrics"]["test"]) for cell in record["cells"])
    ]
    assert ["optimizer.name=adagrad", "optimizer.name = adagrad"] in keys
    assert ["model.embedding_dim", "4"] in base


def test_a_folder_that_is_neither_run_nor_ablation_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has neither a run\.json nor an ablate\.json"):
        write_report(tmp_path)


def test_a_page_says_of_several_processes_which_numbers_are_those_of_one(
    small_config, train_once, tmp_path
):
    train_once(small_config("num_threads=1"), tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    record = json.loads(file.read_text())
    alone = write_report(tmp_path / "run").read_text()
    record["processes"] = {"num_ranks": 2, "placement": {"t_a": 0, "t_b": 1, "t_c": None}}
    file.write_text(json.dumps(record))

    page = write_report(tmp_path / "run").read_text()

    told = "processes 2; 1 of 3 tables are divided by rows; tiers, checkpoints and memory are those"
    assert told in page
    assert "processes" not in alone


def test_a_page_has_what_other_settings_would_save_and_the_timeline_of_a_run_that_kept_one(
    small_config, tmp_path
):
    tables = "synthetic.table_sizes=[900, 700, 1, 800]"
    config = small_config("timeline_steps=4", "budget=20KiB", tables)
    record = train(config, tmp_path / "run", show_progress=False)

    page = write_report(tmp_path / "run").read_text()

    assert page.count('<img alt="timeline" src="data:image/png;base64,') == 1
    hits = f"<td>hits</td><td>{record['tiers']['lookup_hit_rate']:.1%} of lookups"
    assert "<h2>Fast memory</h2>" in page
    assert " hot of budget 20KiB, " in page
    assert hits in page
    (counted,) = [
        table for table in Page(tmp_path / "run" / "report.html").tables if "hits" in table[0]
    ]
    assert counted[0] == ["table", "rows", "lookups", "hits", "share of all misses"]
    assert counted[1:] == tabulate_hits(record["tiers"])
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    file = tmp_path / "run" / "run.json"
    one, *_ = record["stalls"]["predicted"]
    for share, is_told in ((0.011, True), (0.009, False)):
        one["saved_share"] = share
        record["stalls"]["predicted"] = [one]
        file.write_text(json.dumps(record))
        page = write_report(tmp_path / "run").read_text()
        assert (Suggestion.sentence(one) in page) == is_told
    del record["stalls"]["predicted"], record["stalls"]["binding"]
    file.write_text(json.dumps(record))
    assert "would save" not in write_report(tmp_path / "run").read_text()


HOSTILE = "<script>alert(1)</script>\"'{{ 7 * 7 }}"


def hostile(value):
    """A record with markup in every text, as a value and in a further key of every object."""
    if isinstance(value, dict):
        return {key: hostile(inner) for key, inner in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [hostile(inner) for inner in value]
    return HOSTILE if isinstance(value, str) and value != "finished" else value


def test_no_text_of_a_record_is_read_as_markup(tmp_path, small_config, train_once):
    train_once(small_config("num_threads=1"), tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    record = json.loads(file.read_text())
    for key in ("environment", "data", "config"):
        record[key] = hostile(record[key])
    file.write_text(json.dumps(record))

    page = Page(write_report(tmp_path / "run"))

    check_self_contained(page)
    assert HOSTILE in "".join(page.text)


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("stalls"),
        lambda record: record.update(stalls=[]),
        lambda record: record.update(peak_memory_bytes="x"),
        lambda record: record["config"].update(eval=5),
        lambda record: record["throughput"].update(train_seconds={}),
    ],
)
def test_a_damaged_record_is_refused_and_no_page_is_left(
    tmp_path, small_config, train_once, damage
):
    train_once(small_config("num_threads=1"), tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    record = json.loads(file.read_text())
    damage(record)
    file.write_text(json.dumps(record))

    with pytest.raises(ConfigError, match=r"run\.json is damaged: .* again"):
        write_report(tmp_path / "run")

    assert not list((tmp_path / "run").glob("report*"))


@pytest.mark.parametrize("name", ["..", "../..", "/etc", "a/b"])
def test_a_cell_named_by_a_path_is_refused(tmp_path, ablation, train_once, name):
    text = "[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'sgd'\n"
    ablate(ablation(text), tmp_path / "out", show_progress=False, run_cell=train_once)
    file = tmp_path / "out" / "ablate.json"
    record = json.loads(file.read_text())
    record["cells"][0]["name"] = name
    file.write_text(json.dumps(record))

    with pytest.raises(ConfigError, match=r"ablate\.json is damaged: a cell must be named as its"):
        write_report(tmp_path / "out")
