"""Readers of runs: configurations, run folders, saved models, ablations, report pages."""

from functools import partial
from unittest.mock import patch

from fuzz_cases import Reader, WrongOutcomeError, command
from fuzz_data import nothing
from fuzz_mutations import (
    TEXTS,
    hostile_value,
    mutate_bytes,
    mutate_file,
    mutate_json,
    mutate_json_lines,
    mutate_safetensors,
)

from recsys.ablate import ablate, load_ablation
from recsys.config import TrainConfig, load_config, to_toml, walk_keys
from recsys.train import train

SETTINGS = (
    "model.embedding_dim=4",
    "model.dense_arch=[8, 4]",
    "model.over_arch=[8, 1]",
    "synthetic.num_samples=280",
    "synthetic.table_sizes=[30, 7, 1, 50]",
    "num_threads=1",
    "batch_size=64",
)
ABLATION = """
[ablate]
seeds = [0]
target_auc = 0.7
eval_every_samples = 64
[[ablate.variations]]
name = "sgd"
optimizer.lr = 0.1
[ablate.grid]
schedule = ["", "sequential"]
"""


# Drawing takes most of the time of a run or a page, and shows no text of a record.
WITHOUT_PIXELS = patch("recsys.report.draw_curves", lambda _: b"\x89PNG")


def make_run(folder):
    with WITHOUT_PIXELS:
        train(load_config(None, SETTINGS), folder / "run", show_progress=False)


def _damage_run(run, random):
    file = random.choice(["config.toml", "run.json", "history.jsonl", "model.safetensors"])
    mutate = {
        "config.toml": mutate_bytes,
        "run.json": mutate_json,
        "history.jsonl": mutate_json_lines,
        "model.safetensors": mutate_safetensors,
    }[file]
    mutate_file(run / file, random, mutate)


def attack_run(folder, random):
    run = folder / "run"
    _damage_run(run, random)
    to = random.choice(["safetensors", "torch-export"])
    export = partial(command, "export", run, "--to", to, "--out", folder / "out.pt2")
    return random.choice([export, partial(command, "evaluate", run)])


def attack_run_report(folder, random):
    _damage_run(folder / "run", random)
    return partial(_report, folder / "run")


def _report(folder):
    with WITHOUT_PIXELS:
        command("report", folder)
    if "<script" in (folder / "report.html").read_text(encoding="utf-8"):
        raise WrongOutcomeError("text of a record is not escaped in the page")


def make_ablation(folder):
    (folder / "a.toml").write_text(ABLATION)
    config = load_ablation(folder / "a.toml", SETTINGS)
    with WITHOUT_PIXELS:
        ablate(config, folder / "out", show_progress=False, run_cell=train)


def attack_ablation_report(folder, random):
    if random.random() < 0.8:
        mutate_file(folder / "out" / "ablate.json", random, mutate_json)
    else:
        cell = random.choice(sorted((folder / "out" / "cells").iterdir()))
        mutate_file(cell / "history.jsonl", random, mutate_json_lines)
    return partial(_report, folder / "out")


def make_toml(folder):
    (folder / "a.toml").write_text(ABLATION)
    (folder / "c.toml").write_text(to_toml(load_config(None, SETTINGS)))


def attack_toml(folder, random):
    """The user names the file, and may name a pipe; so its text alone is damaged."""
    name, load = random.choice([("c.toml", load_config), ("a.toml", load_ablation)])
    text = (folder / name).read_bytes()
    if random.random() < 0.05:
        lines = [f"a{key} = {list(range(30))}\n" for key in range(30)]
        text = b"[ablate]\nseeds=[0]\n[ablate.grid]\n" + "".join(lines).encode()
    (folder / name).write_bytes(mutate_bytes(text, random))
    return partial(load, folder / name, SETTINGS)


def attack_settings(folder, random):
    key = random.choice([key.name for key in walk_keys()] + ["", "a" + ".a" * 5000, ".", "x"])
    value = hostile_value(random)
    texts = [str(value) if value != 10**400 else "9" * 4500, "[" * 9000, "1\nx=2", "1979-99-99"]
    if random.random() < 0.3:
        tree = value if isinstance(value, dict) else {}
        for part in reversed(key.split(".")[:20]):
            tree = {part: tree or value}
        return partial(TrainConfig, **tree)
    setting = f"{key}={random.choice([*texts, *TEXTS])}"
    return partial(load_config, None, [setting if random.random() < 0.9 else key])


_FILES = "types, sizes, missing keys, deep nesting; bytes; links, folders, pipes"
RUNS = (
    Reader(
        "run folder, saved model, export",
        _FILES,
        make_run,
        attack_run,
        ("out.pt2",),
        names_file=False,
    ),
    Reader("report of a run", _FILES + "; markup", make_run, attack_run_report, ("report.html",)),
    Reader(
        "report of an ablation", _FILES + "; markup, paths", make_ablation, attack_ablation_report
    ),
    Reader(
        "configurations, ablations",
        "bytes, numbers, nesting, huge grids",
        make_toml,
        attack_toml,
        names_file=False,
    ),
    Reader(
        "--set and nested keys",
        "values of other types and sizes, nesting",
        nothing,
        attack_settings,
        names_file=False,
    ),
)
