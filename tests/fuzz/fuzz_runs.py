"""Readers of runs: configurations, run folders, saved models, ablations, report pages."""

import io
from contextlib import contextmanager, redirect_stderr
from functools import partial
from unittest.mock import patch

from fuzz_cases import Reader, WrongOutcomeError
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

from recsys import report
from recsys.ablate import ablate, load_ablation
from recsys.config import TrainConfig, load_config, to_toml, walk_keys
from recsys.errors import ConfigError
from recsys.report import write_report
from recsys.train.build import build_model, open_source
from recsys.train.export import export_run
from recsys.train.run_folder import RunFolder
from recsys.train.trainer import train

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


@contextmanager
def _without_pixels():
    """Drawing takes most of the time of a run or a page, and shows no text of a record."""
    with patch.object(report, "draw_curves", lambda _: b"\x89PNG"):
        yield


def make_run(folder):
    with _without_pixels():
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
    _damage_run(folder / "run", random)
    to = random.choice(["safetensors", "torch-export"])

    def use():
        run = RunFolder.open(folder / "run")
        run.read_history()
        run.read_record()
        config = run.read_config()
        if sum(config.synthetic.table_sizes) < 1000 and config.model.embedding_dim < 1000:
            model, _ = build_model(config, open_source(config), table_device="meta")
            run.load_model(model.model)
        export_run(run.path, to, folder / "out")

    return use


def attack_run_report(folder, random):
    _damage_run(folder / "run", random)
    return partial(_report, folder / "run")


def _report(folder):
    with _without_pixels():
        text = write_report(folder).read_text(encoding="utf-8")
    if "<script" in text:
        raise WrongOutcomeError("text of a record is not escaped in the page")


def _refuse(config, run_dir, *, show_progress):
    raise ConfigError(f"{run_dir}: it would be trained")


def _train(config, run_dir, *, show_progress):
    return train(config, run_dir, show_progress=False)


def make_ablation(folder):
    (folder / "a.toml").write_text(ABLATION)
    config = load_ablation(folder / "a.toml", SETTINGS)
    with _without_pixels():
        ablate(config, folder / "out", show_progress=False, run_cell=_train)


def attack_ablation(folder, random):
    out = folder / "out"
    cell = random.choice(sorted((out / "cells").iterdir()))
    if random.random() < 0.5:
        mutate_file(cell / "run.json", random, mutate_json)
    else:
        mutate_file(cell / "history.jsonl", random, mutate_json_lines)
    config = load_ablation(folder / "a.toml", SETTINGS)

    def resume():
        with _without_pixels(), redirect_stderr(io.StringIO()):
            ablate(config, out, show_progress=False, run_cell=_refuse)

    return resume


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


def _damage_text(file, random):
    """Damage what the file holds. The user names it, and may name a pipe."""
    file.write_bytes(mutate_bytes(file.read_bytes(), random))


def attack_toml(folder, random):
    _damage_text(folder / "c.toml", random)
    return partial(load_config, folder / "c.toml")


def attack_ablation_toml(folder, random):
    if random.random() < 0.1:
        grid = "[ablate]\nseeds=[0]\n[ablate.grid]\n" + "".join(
            f"a{key} = {list(range(30))}\n" for key in range(30)
        )
        (folder / "a.toml").write_text(grid)
    _damage_text(folder / "a.toml", random)
    return partial(load_ablation, folder / "a.toml", SETTINGS)


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
        "run folder, saved model, export", _FILES, make_run, attack_run, ("out",), names_file=False
    ),
    Reader("report of a run", _FILES + "; markup", make_run, attack_run_report, ("report.html",)),
    Reader("ablation, continued", _FILES, make_ablation, attack_ablation, names_file=False),
    Reader(
        "report of an ablation", _FILES + "; markup, paths", make_ablation, attack_ablation_report
    ),
    Reader(
        "configuration file", "bytes, numbers, nesting", make_toml, attack_toml, names_file=False
    ),
    Reader(
        "ablation file",
        "bytes, numbers, nesting, huge grids",
        make_toml,
        attack_ablation_toml,
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
