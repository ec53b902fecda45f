"""What an ablation, or a page, refuses: what is done, the error's class, the name that it gives."""

from pathlib import Path

import pytest

from recsys.ablate import ablate, load_ablation
from recsys.errors import AlreadyExists, ConfigError, StoreError
from recsys.report import write_report

SGD = "[[ablate.variations]]\nname = 'sgd'\noptimizer.lr = 0.1\n"


def load(text, *settings):
    """Loads an ablation of one seed from a file in the current folder."""
    Path("ablation.toml").write_text(text.replace("SEEDS", "[ablate]\nseeds = [0]"))
    return load_ablation(Path("ablation.toml"), settings)


def run_in_a_folder_with_something_else():
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    ablate(load(f"SEEDS\n{SGD}"), "out")


def run_twice_at_once():
    config = load(f"SEEDS\n{SGD}")
    ablate(config, "out", run_cell=lambda *_, **__: ablate(config, "out"))


REFUSALS = [
    ("no table", lambda: load("epochs = 1"), ConfigError, "[ablate]"),
    ("unknown key", lambda: load(f"SEEDS\nsed = 1\n{SGD}"), ConfigError, "ablate.sed"),
    ("no variations", lambda: load("SEEDS"), ConfigError, "ablate.variations"),
    ("no seeds", lambda: load(f"[ablate]\n{SGD}"), ConfigError, "ablate.seeds"),
    ("a seed twice", lambda: load(f"[ablate]\nseeds = [1, 1]\n{SGD}"), ConfigError, "ablate.seeds"),
    ("a name twice", lambda: load(f"SEEDS\n{SGD}{SGD}"), ConfigError, "'sgd'"),
    (
        "a name that is a path",
        lambda: load("SEEDS\nvariations = [{name = '../x'}]"),
        ConfigError,
        "'../x'",
    ),
    (
        "a grid of a value",
        lambda: load("SEEDS\ngrid.epochs = 2"),
        ConfigError,
        "ablate.grid.epochs",
    ),
    ("a bad value", lambda: load("SEEDS\ngrid.epochs = [0]"), ConfigError, "variation 'epochs=0'"),
    (
        "a key twice",
        lambda: load(f"SEEDS\ngrid.optimizer.lr = [1]\n{SGD}"),
        ConfigError,
        "optimizer.lr",
    ),
    (
        "a setting without effect",
        lambda: load(f"SEEDS\n{SGD}", "optimizer.lr=1"),
        ConfigError,
        "--set optimizer.lr=1",
    ),
    ("a seed of the base", lambda: load(f"seed = 3\nSEEDS\n{SGD}"), ConfigError, "ablate.seeds"),
    (
        "a split beside the target's",
        lambda: load(f"eval.split = 'test'\nSEEDS\ntarget_auc = 0.7\n{SGD}"),
        ConfigError,
        "ablate.target_split",
    ),
    (
        "a split without a target",
        lambda: load(f"SEEDS\ntarget_split = 'test'\n{SGD}"),
        ConfigError,
        "ablate.target_auc",
    ),
    (
        "an unknown baseline",
        lambda: load(f"SEEDS\nbaseline = 'none'\n{SGD}"),
        ConfigError,
        "ablate.baseline",
    ),
    (
        "a huge grid",
        lambda: load("SEEDS\n" + "".join(f"grid.a{n} = [1, 2]\n" for n in range(20))),
        ConfigError,
        "ablate.grid",
    ),
    ("an empty list", lambda: load("SEEDS\ngrid.epochs = []"), ConfigError, "ablate.grid.epochs"),
    (
        "missing data",
        lambda: ablate(load(f"data = 'nowhere'\nSEEDS\n{SGD}"), "out"),
        StoreError,
        "nowhere",
    ),
    ("something else there", run_in_a_folder_with_something_else, AlreadyExists, "--run"),
    ("two at once", run_twice_at_once, ConfigError, "another `recsys ablate`"),
    ("a page of no run", lambda: write_report(Path()), ConfigError, "run.json"),
]


@pytest.mark.parametrize(
    ("does", "kind", "name"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS]
)
def test_it_is_refused_and_named(does, kind, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(kind) as caught:
        does()

    assert name in str(caught.value)
