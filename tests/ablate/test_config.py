from pathlib import Path

import pytest

from recsys.ablate import load_ablation
from recsys.errors import ConfigError

TWO_VARIATIONS = """
[[ablate.variations]]
name = "sgd"
[[ablate.variations]]
name = "adagrad"
optimizer.name = "adagrad"
optimizer.lr = 0.05
"""


def test_named_variations_are_crossed_with_the_grid(tmp_path):
    file = tmp_path / "ablation.toml"
    file.write_text(f"""
        [ablate]
        seeds = [0]
        {TWO_VARIATIONS}
        [ablate.grid]
        embeddings = ["recsys", "torch"]
        "model.dense_arch" = [[8, 16], [16]]
    """)

    cells = load_ablation(file).cells

    assert [
        (
            cell.variation,
            cell.config.optimizer.name,
            cell.config.embeddings,
            cell.config.model.dense_arch,
        )
        for cell in cells
    ] == [
        (f"{name},embeddings={provider},model.dense_arch={shown}", name, provider, built)
        for name in ("sgd", "adagrad")
        for provider in ("recsys", "torch")
        for shown, built in (("[8;16]", (8, 16)), ("[16]", (16,)))
    ]


def test_a_target_decides_when_cells_evaluate_and_on_which_part(ablation):
    grid = "[ablate.grid]\nbatch_size = [128, 1000, 8192]"

    to_test = ablation(f"[ablate]\nseeds = [0]\ntarget_auc = 0.7\n{grid}").cells
    to_validation = ablation(
        f"[ablate]\nseeds = [0]\ntarget_auc = 0.7\ntarget_split = 'validation'\n"
        f"eval_every_samples = 256\n{grid}"
    ).cells
    without = ablation(f"[ablate]\nseeds = [0]\n{grid}", "eval.every_steps=7").cells

    found = [
        [(cell.config.eval.every_steps, cell.config.eval.split) for cell in cells]
        for cells in (to_test, to_validation, without)
    ]
    assert found == [
        [(32, "test"), (4, "test"), (1, "test")],
        [(2, "validation"), (1, "validation"), (1, "validation")],
        [(7, "validation")] * 3,
    ]


@pytest.mark.parametrize("key", ["epochs = 0", "epoch = 1", "schedule.lookahead.dept = 2"])
def test_an_error_names_the_variation_or_the_table(ablation, key):
    name = key.partition(" ")[0]

    with pytest.raises(ConfigError, match=f"ablation.toml: variation 'a': {name}"):
        ablation(f"[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'a'\n{key}")
    with pytest.raises(ConfigError, match=f"ablate.{name.partition('.')[0]}"):
        ablation(f"[ablate]\nseeds = [0]\n{key}\n{TWO_VARIATIONS}")


def test_a_variation_wins_over_the_base_configuration_key_by_key(ablation):
    base = "optimizer.lr = 0.7\noptimizer.eps = 0.25"

    cells = ablation(f"{base}\n[ablate]\nseeds = [0]\n{TWO_VARIATIONS}").cells

    assert [(cell.config.optimizer.lr, cell.config.optimizer.eps) for cell in cells] == [
        (0.7, 0.25),
        (0.05, 0.25),
    ]


def test_a_setting_reaches_the_ablation_itself(ablation):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}", "ablate.seeds=[7]", "epochs=2")

    assert [(cell.seed, cell.config.epochs) for cell in config.cells] == [(7, 2), (7, 2)]


ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    path.relative_to(ROOT)
    for folder in ("examples", "benchmarks/slipstream")
    for path in (ROOT / folder).rglob("*.toml")
    if path.parent.name != "models"  # configurations of single runs
)


@pytest.mark.parametrize("name", EXAMPLES, ids=str)
def test_every_example_loads(pytestconfig, name):
    config = load_ablation(pytestconfig.rootpath / name)

    assert config.cells
