import importlib
import shutil
import subprocess
import sys
import sysconfig
import tomllib

import pytest
from packaging.requirements import Requirement


def test_public_names_are_these_and_no_others():
    public = {
        "recsys": [
            "DLRM",
            "Batch",
            "Checkpoints",
            "DLRMTrain",
            "HotColdEmbeddingBag",
            "HotColdEmbeddingBagCollection",
            "JaggedIds",
            "PooledEmbeddings",
            "Store",
            "TrainPipeline",
            "__version__",
            "accelerate",
            "estimate",
            "load_checkpoint",
            "restore",
            "save_checkpoint",
            "verify",
        ],
        "recsys.datasets": [
            "BatchLoader",
            "SampleSource",
            "Schema",
            "Store",
            "SyntheticCriteo",
            "prepare_criteo_1tb",
            "prepare_criteo_kaggle",
            "prepare_table",
            "write_store",
        ],
        "recsys.embeddings": [
            "SGD",
            "Adagrad",
            "Adam",
            "HotColdEmbedding",
            "HotColdEmbeddingBag",
            "HotColdEmbeddingBagCollection",
            "HotColdEmbeddingCollection",
            "HotPlan",
            "PartialRowWiseAdam",
            "PopularityProfile",
            "RowWiseAdagrad",
            "Staleness",
            "StalenessTracker",
            "TableConfig",
            "plan_hot_rows",
        ],
        "recsys.models": [
            "DIN",
            "DLRM",
            "TBSM",
            "DCNv2",
            "DLRMTrain",
            "DeepFM",
            "MaskedTransformerArch",
            "RetrievalTrain",
            "SASRec",
            "TwoTower",
            "pad_left",
            "sum_of_bags",
        ],
        "recsys.pipeline": [
            "FAE",
            "Auto",
            "DropInput",
            "FreezeRows",
            "Guard",
            "HotColdLoader",
            "Hotline",
            "Importance",
            "LookAhead",
            "Observe",
            "Paper",
            "RandomDrop",
            "Sequential",
            "Subsample",
            "TrainPipeline",
        ],
        "recsys.train": [
            "Callback",
            "EarlyStopping",
            "MLflow",
            "Predictor",
            "Recommender",
            "TensorBoard",
            "WeightsAndBiases",
            "export_run_checkpoint",
            "train",
        ],
        "recsys.config": [
            "AblationKeys",
            "CheckpointConfig",
            "CrossNetConfig",
            "DINConfig",
            "EarlyStoppingConfig",
            "EvalConfig",
            "FAEConfig",
            "HotlineConfig",
            "InteractionConfig",
            "Keys",
            "LearningRateConfig",
            "ModelConfig",
            "OptimizerConfig",
            "SASRecConfig",
            "ScheduleConfig",
            "SkipConfig",
            "SyntheticConfig",
            "TBSMConfig",
            "TrainConfig",
            "TransformerConfig",
            "TwoTowerConfig",
            "VariationKeys",
            "describe_config",
            "flat",
            "format_keys",
            "load_config",
            "put_key",
            "read_tree",
            "replace",
            "to_toml",
            "walk_keys",
        ],
        "recsys.errors": [
            "AlreadyExists",
            "BudgetTooSmall",
            "CallbackFailed",
            "CheckpointError",
            "ColdTierError",
            "ConfigError",
            "ConflictingWrite",
            "DatasetFormatError",
            "IdOutOfRange",
            "MalformedBags",
            "MissingDependency",
            "NonFiniteGradient",
            "OtherRankFailed",
            "ProfileError",
            "RecsysError",
            "StoreError",
            "TiersFailed",
            "TrainingDiverged",
            "WeightsError",
        ],
    }

    for name, names in public.items():
        module = importlib.import_module(name)
        assert module.__all__ == names, name
        assert all(hasattr(module, each) for each in names)


@pytest.mark.slow
def test_names_of_the_package_are_imported_when_they_are_used():
    code = """
import sys
import sysconfig
import recsys
assert not {"torch", "numba"} & set(sys.modules)
assert set(recsys.__all__) <= set(dir(recsys))
assert recsys.DLRM is recsys.models.DLRM
assert "torch._dynamo" not in sys.modules  # which takes a second
assert recsys.errors.ConfigError.__name__ == "ConfigError"
try:
    recsys.nosuch
except AttributeError as error:
    print(error)
"""
    assert run_python("-c", code).stdout == "module 'recsys' has no attribute 'nosuch'\n"


FROM_THE_WHEEL = """
import importlib, pathlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torchrec", "fbgemm_gpu"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import recsys
from recsys.cli import main
from recsys.errors import MissingDependency

installed, run, *settings = sys.argv[1:]
assert pathlib.Path(recsys.__file__).is_relative_to(installed), recsys.__file__
assert (pathlib.Path(recsys.__file__).parent / "py.typed").is_file()
needs_torchrec = "recsys.distributed", "recsys.train.rank_model"
for module in pkgutil.walk_packages(recsys.__path__, "recsys."):
    if not module.name.startswith(needs_torchrec):
        importlib.import_module(module.name)
try:
    importlib.import_module("recsys.distributed")
except MissingDependency as error:
    print(error)
assert list(pathlib.Path(recsys.__file__).parent.rglob("page.html"))
assert "avazu" in importlib.import_module("recsys.datasets.tabular.schema").named_schemas()
command = ["train", "synthetic:criteo-kaggle", *settings]
print("plain:", main([*command, "--run", run]))
"""


def run_python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        **options,
    )


def share_compiled_kernels(source, target):
    """Copy what numba has compiled: its files go by the content of the source and by the line."""
    for kind in ("nbc", "nbi"):  # code first: the index names what is there
        for file in source.rglob(f"__pycache__/*.{kind}"):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(file, copy)


ABOVE_THE_CLONE = """
import site
site.addsitedir("installed")  # reads .pth files, as at the start of an interpreter
import recsys
recsys.verify
print(recsys.__file__)
"""


def test_a_script_in_the_folder_above_a_clone_called_recsys_finds_the_package(
    tmp_path, pytestconfig
):
    clone, installed = tmp_path / "recsys", tmp_path / "installed"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "recsys"):
        (clone / name).symlink_to(pytestconfig.rootpath / name)
    build = f"import setuptools.build_meta as it; it.build_editable({str(tmp_path)!r})"
    run_python("-c", build, cwd=clone, stderr=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, installed, "zip")
    script = tmp_path / "script.py"
    script.write_text(ABOVE_THE_CLONE)

    dependencies = {"PYTHONPATH": sysconfig.get_path("purelib")}  # -S: without its .pth files
    ended = run_python("-S", script, cwd=tmp_path, env=dependencies)

    assert ended.stdout.strip() == str(clone / "recsys" / "__init__.py")


def test_the_wheel_holds_every_module_and_trains_without_torchrec_and_fbgemm(
    tmp_path, pytestconfig, small_settings
):
    root, installed = tmp_path / "source", tmp_path / "site"
    # Building leaves a build folder behind, from which a later wheel would take deleted modules.
    root.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(pytestconfig.rootpath / name, root)
    without_compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(pytestconfig.rootpath / "recsys", root / "recsys", ignore=without_compiled)
    offline = ("--quiet", "--no-deps")
    run_python("-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", tmp_path, root)
    (wheel,) = tmp_path.glob("recsys-*.whl")
    run_python("-m", "pip", "install", *offline, "--target", installed, wheel)
    share_compiled_kernels(pytestconfig.rootpath / "recsys", installed / "recsys")

    ended = run_python(
        *("-W", "error", "-c", FROM_THE_WHEEL, installed, tmp_path / "run", *small_settings),
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        stderr=subprocess.PIPE,
    )

    assert "recsys.distributed needs TorchRec, which is not installed" in ended.stdout
    assert "samples/s" in ended.stdout
    assert ended.stdout.endswith("plain: 0\n")


def test_the_extra_torchrec_bounds_the_three_packages_that_go_together(pytestconfig):
    project = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]
    lock = (pytestconfig.rootpath / "requirements" / "cpu.txt").read_text()
    locked = dict(line.split("==") for line in lock.splitlines() if "==" in line)
    locked["fbgemm-gpu"] = locked["fbgemm-gpu-cpu"]
    bounds = {
        bound.name: bound.specifier
        for bound in map(Requirement, project["optional-dependencies"]["torchrec"])
    }

    assert bounds.keys() == {"torch", "torchrec", "fbgemm-gpu"}
    for name, releases in bounds.items():
        assert "999" not in releases, f"{name} has no upper bound"
        assert locked[name] in releases
