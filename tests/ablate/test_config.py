from pathlib import Path

import pytest

from recsys.ablate.config import load_ablation
from recsys.errors import ConfigError
from recsys.train.parts.build import open_source

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
        embeddings = ["torch", "fbgemm"]
        "model.dense_arch" = [[8, 16], [16]]
    """)

    cells = load_ablation(file).cells()

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
        for provider in ("torch", "fbgemm")
        for shown, built in (("[8;16]", (8, 16)), ("[16]", (16,)))
    ]


def test_a_target_decides_when_cells_evaluate_and_on_which_part(ablation):
    grid = "[ablate.grid]\nbatch_size = [128, 1000, 8192]"

    to_test = ablation(f"[ablate]\nseeds = [0]\ntarget_auc = 0.7\n{grid}").cells()
    to_validation = ablation(
        f"[ablate]\nseeds = [0]\ntarget_auc = 0.7\ntarget_split = 'validation'\n"
        f"eval_every_samples = 256\n{grid}"
    ).cells()
    without = ablation(f"[ablate]\nseeds = [0]\n{grid}", "eval.every_steps=7").cells()

    found = [
        [(cell.config.eval.every_steps, cell.config.eval.split) for cell in cells]
        for cells in (to_test, to_validation, without)
    ]
    assert found == [
        [(32, "test"), (4, "test"), (1, "test")],
        [(2, "validation"), (1, "validation"), (1, "validation")],
        [(7, "validation")] * 3,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = 1", "there is no table [ablate]; it needs seeds"),
        ("[ablate]\nseed = 0", "unknown key ablate.seed; keys are ['seeds'"),
        ("[ablate]\nseeds = [0]", "ablate needs [[ablate.variations]] or [ablate.grid]"),
        ("[ablate]\nseeds = 3", "ablate.seeds must be a list of integers, got 3"),
        (TWO_VARIATIONS, "ablate.seeds must be a list of integers of at least 0, got []"),
        (f"[ablate]\nseeds = [true]\n{TWO_VARIATIONS}", "integers of at least 0, got [True]"),
        (f"[ablate]\nseeds = [-1]\n{TWO_VARIATIONS}", "ablate.seeds must be a list of integers of"),
        (f"[ablate]\nseeds = [1, 1]\n{TWO_VARIATIONS}", "seeds must be distinct, got 1 twice"),
        (
            f"[ablate]\nseeds = [0]\ntarget_auc = 70.0\n{TWO_VARIATIONS}",
            "ablate.target_auc must be between 0 and 1, got 70.0",
        ),
        (
            f"[ablate]\nseeds = [0]\ntarget_auc = 0.7\ntarget_split = 'train'\n{TWO_VARIATIONS}",
            "ablate.target_split must be one of 'validation', 'test'; got 'train'",
        ),
        (
            f"[ablate]\nseeds = [0]\ntarget_split = 'test'\n{TWO_VARIATIONS}",
            "ablate.target_split means nothing without ablate.target_auc",
        ),
        (
            f"[ablate]\nseeds = [0]\ntarget_auc = 0.7\neval_every_samples = 0\n{TWO_VARIATIONS}",
            "ablate.eval_every_samples must be at least 1, got 0",
        ),
        (
            f"seed = 3\n[ablate]\nseeds = [0]\n{TWO_VARIATIONS}",
            "the base configuration sets seed, which ablate.seeds sets; drop seed",
        ),
        (
            f"eval.split = 'test'\n[ablate]\nseeds = [0]\ntarget_auc = 0.7\n{TWO_VARIATIONS}",
            "sets eval.split, which ablate.target_split sets",
        ),
        (
            "[ablate]\nseeds = [0]\n[ablate.grid]\nseed = [1, 2]",
            "variation 'seed=1' sets seed, which ablate.seeds sets",
        ),
        (
            "[ablate]\nseeds = [0]\n[ablate.grid]\nepochs = 2",
            "ablate.grid.epochs must be a list of values, got 2",
        ),
        (
            "[ablate]\nseeds = [0]\n[ablate.grid]\nepochs = []",
            "ablate.grid.epochs must be a list of values, got []",
        ),
        (
            f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}\n[ablate.grid]\noptimizer.lr = [1, 2]",
            "optimizer.lr is set by variation 'adagrad' and by the grid",
        ),
        (
            "[ablate]\nseeds = [0]\n[ablate.grid]\noptimizer = [{name = 'sgd', lr = 1}]",
            "optimizer is a table, got {'name': 'sgd', 'lr': 1}; set its keys one by one, as in "
            "optimizer.name = ..., under [[ablate.variations]] if they belong together",
        ),
        (
            "[ablate]\nseeds = [0]\ntarget_auc = 0.7\n[ablate.grid]\neval = [{split = 'test'}]",
            "eval is a table, got {'split': 'test'}; set its keys one by one, as in eval.split",
        ),
        (
            "[ablate]\nseeds = [0]\n[ablate.grid]\nepochs = [0]",
            "variation 'epochs=0': epochs must be at least 1, got 0",
        ),
        (
            "[ablate]\nseeds = [0]\n[ablate.grid]\nepoch = [1]",
            "variation 'epoch=1': unknown key epoch; did you mean epochs?",
        ),
        (
            "[ablate]\nseeds = [0]\n[ablate.grid]\neval.ranking_k = [10, 20]",
            "variation 'eval.ranking_k=10' sets eval.ranking_k to 10: recall and NDCG must mean "
            "the same in all variations; set it in the base configuration",
        ),
        (
            "[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'all'\neval.ranking_groups = 0",
            "variation 'all' sets eval.ranking_groups to 0: recall and NDCG must mean the same",
        ),
        (
            f"[ablate]\nseeds = [0]\nbaseline = 'none'\n{TWO_VARIATIONS}",
            "ablate.baseline must name one of two or more variations, got 'none'; the variations "
            "are ['sgd', 'adagrad']",
        ),
        (
            "[ablate]\nseeds = [0]\nbaseline = 'x'\n[[ablate.variations]]\nname = 'x'",
            "ablate.baseline must name one of two or more variations, got 'x'",
        ),
        (
            f"[ablate]\nseeds = [0]\nbaseline = 1\n{TWO_VARIATIONS}",
            "ablate.baseline must be the name of a variation, got 1",
        ),
        (
            f"[ablate]\nseeds = [0]\nlate_share = 0.0\n{TWO_VARIATIONS}",
            "ablate.late_share must be in (0, 1], got 0.0",
        ),
        (
            f"[ablate]\nseeds = [0]\nlate_share = 2\n{TWO_VARIATIONS}",
            "ablate.late_share must be in (0, 1], got 2",
        ),
        (
            f"[ablate]\nseeds = [0]\nlate_share = nan\n{TWO_VARIATIONS}",
            "ablate.late_share must be in (0, 1], got nan",
        ),
        (
            "[ablate]\nseeds = [0]\n[[ablate.variations]]\nepochs = 1",
            "a variation needs a name of letters, digits and any of . _ + -, got None",
        ),
        (
            "[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = '../x'",
            "a variation needs a name of letters, digits and any of . _ + -, got '../x'",
        ),
        (
            "[ablate]\nseeds = [0]\n" + 2 * "[[ablate.variations]]\nname = 'x'\n",
            "names of variations must be distinct, got 'x' twice",
        ),
        (
            "[ablate]\nseeds = [0]\n[ablate.grid]\ndata = ['a/b', 'a_b']",
            "folder names of cells must be distinct, got 'data=a_b-seed0' twice",
        ),
    ],
)
def test_a_bad_file_is_refused(ablation, text, message):
    with pytest.raises(ConfigError) as caught:
        ablation(text)

    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["epochs = 0", "epoch = 1", "optimizer.lr = 'x'"])
def test_an_error_names_the_file(ablation, tmp_path, key):
    with pytest.raises(ConfigError) as of_base:
        ablation(f"{key}\n[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")
    with pytest.raises(ConfigError) as of_variation:
        ablation(f"[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'a'\n{key}")
    with pytest.raises(ConfigError) as of_table:
        ablation(f"[ablate]\nseeds = [0]\n{key}\n{TWO_VARIATIONS}")

    for caught in (of_base, of_variation, of_table):
        assert str(caught.value).startswith(f"{tmp_path / 'ablation.toml'}: ")


def test_an_error_of_a_setting_does_not_name_the_file(ablation, tmp_path):
    with pytest.raises(ConfigError) as caught:
        ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}", "ablate.sed=[0]")

    assert str(caught.value).startswith("unknown key ablate.sed; keys are")


def test_a_setting_that_a_variation_would_overrule_is_refused(ablation):
    with pytest.raises(ConfigError, match=r"--set optimizer\.lr=1 has no effect: variation"):
        ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}", "optimizer.lr=1")


def test_a_variation_wins_over_the_base_configuration_key_by_key(ablation):
    base = "optimizer.lr = 0.7\noptimizer.eps = 0.25"

    cells = ablation(f"{base}\n[ablate]\nseeds = [0]\n{TWO_VARIATIONS}").cells()

    assert [(cell.config.optimizer.lr, cell.config.optimizer.eps) for cell in cells] == [
        (0.7, 0.25),
        (0.05, 0.25),
    ]


def test_a_setting_reaches_the_ablation_itself(ablation):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}", "ablate.seeds=[7]", "epochs=2")

    assert [(cell.seed, cell.config.epochs) for cell in config.cells()] == [(7, 2), (7, 2)]


def test_the_example_is_three_providers_by_two_recipes_by_five_seeds(pytestconfig):
    config = load_ablation(pytestconfig.rootpath / "examples" / "ablate_embeddings.toml")

    found = {
        (
            cell.config.embeddings,
            cell.config.optimizer.name,
            cell.config.optimizer.lr,
            cell.config.batch_size,
            cell.seed,
        )
        for cell in config.cells()
    }

    assert found == {
        (embeddings, *recipe, seed)
        for embeddings in ("recsys", "torch", "fbgemm")
        for recipe in (("sgd", 0.1, 128), ("adagrad", 0.01, 1024))
        for seed in range(5)
    }
    assert (config.target_auc, config.target_split) == (0.7, "test")


def test_the_base_configuration_decides_what_recall_means(ablation):
    base = "eval.ranking_k = 5\neval.ranking_groups = 0"

    cells = ablation(f"{base}\n[ablate]\nseeds = [0]\n{TWO_VARIATIONS}").cells()

    evals = [cell.config.eval for cell in cells]
    assert [(each.ranking_k, each.ranking_groups) for each in evals] == [(5, 0), (5, 0)]


def test_a_grid_of_more_cells_than_can_be_trained_is_refused(ablation):
    grid = "".join(f'"a{key}" = {list(range(30))}\n' for key in range(30))

    with pytest.raises(ConfigError, match="ablate must have at most 10000 variations, got 2058911"):
        ablation(f"[ablate]\nseeds = [0]\n[ablate.grid]\n{grid}")


def test_an_interval_beyond_64_bits_is_refused(ablation):
    text = f"[ablate]\nseeds = [0]\ntarget_auc = 0.7\neval_every_samples = {10**400}\n"

    with pytest.raises(ConfigError, match=r"eval_every_samples must be .* less than 2\*\*63"):
        ablation(f"{text}{TWO_VARIATIONS}")


def test_a_baseline_may_be_a_combination_of_the_grid(ablation):
    config = ablation(
        "[ablate]\nseeds = [0]\nbaseline = 'epochs=1'\n[ablate.grid]\nepochs = [1, 2]"
    )

    assert config.describe()["baseline"] == "epochs=1"


EXAMPLES = sorted(
    path.relative_to(Path(__file__).parents[2] / "examples")
    for path in (Path(__file__).parents[2] / "examples").rglob("*.toml")
    if path.parent.name != "models"  # configurations of single runs
)


@pytest.mark.parametrize("name", EXAMPLES, ids=str)
def test_every_example_loads(pytestconfig, name):
    config = load_ablation(pytestconfig.rootpath / "examples" / name)

    assert config.cells()


@pytest.mark.parametrize("name", ["synthetic", "drift", "real"])
def test_the_examples_of_skipping_aim_at_equal_shares(pytestconfig, name):
    file = pytestconfig.rootpath / "examples" / "ablation" / f"slipstream_{name}.toml"

    config = load_ablation(file)

    controls = {"none", "fae", "paper-0.2-without-unseen-rows", "random_drop-0.14"}
    policies = ("paper", "drop_input", "freeze_rows", "subsample", "random_drop")
    names = [f"{policy}-{share}" for policy in policies for share in (0.1, 0.2, 0.4)]
    found = [variation.name for variation in config.variations]
    assert [name for name in found if name not in controls] == names
    assert found[0] == "none"
    assert (config.baseline, config.seeds) == ("none", (0, 1, 2))
    for cell in config.cells():
        policy, _, share = cell.variation.partition("-")
        skip = cell.config.skip
        if cell.variation in controls:
            assert skip.policy == (policy if share else "none")
            continue
        assert skip.policy == policy
        # Policies that wait for windows aim higher than the share that they are to reach.
        assert policy != "random_drop" or skip.share == float(share)
        assert policy == "paper" or float(share) <= skip.share < 3 * float(share)
        # A guard would lower the share.
        assert policy not in ("drop_input", "freeze_rows", "subsample") or skip.guard.every == 0
    targets = {
        cell.config.skip.paper.target / float(cell.variation.partition("-")[2])
        for cell in config.cells()
        if cell.config.skip.policy == "paper" and cell.variation not in controls
    }
    assert max(targets) / min(targets) < 1.2


def test_the_synthetic_examples_train_on_4_million_samples_in_whole_mini_batches(pytestconfig):
    for name, drift in (("synthetic", 0.0), ("drift", 0.1)):
        file = pytestconfig.rootpath / "examples" / "ablation" / f"slipstream_{name}.toml"
        config = load_ablation(file).cells()[0].config

        splits = open_source(config).splits

        assert len(splits["train"]) == 1953 * 2048
        assert len(splits["test"]) == 10**6
        assert config.synthetic.drift == drift
        assert not config.shuffle
        assert config.batch_size == 2048
