import shutil
import subprocess
import sys

import pytest

import recsys
import recsys.datasets
import recsys.embeddings
import recsys.models
import recsys.pipeline


def test_public_names_are_these_and_no_others():
    assert {
        "recsys": recsys.__all__,
        "recsys.datasets": recsys.datasets.__all__,
        "recsys.embeddings": recsys.embeddings.__all__,
        "recsys.models": recsys.models.__all__,
        "recsys.pipeline": recsys.pipeline.__all__,
    } == {
        "recsys": [
            "DLRM",
            "Batch",
            "DLRMTrain",
            "JaggedIds",
            "PooledEmbeddings",
            "__version__",
            "accelerate",
            "restore",
            "verify",
        ],
        "recsys.datasets": [
            "BatchLoader",
            "SampleSource",
            "Store",
            "SyntheticCriteo",
            "prepare_criteo_1tb",
            "prepare_criteo_kaggle",
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
            "TableConfig",
            "plan_hot_rows",
        ],
        "recsys.models": ["DLRM", "DLRMTrain"],
        "recsys.pipeline": [
            "FAE",
            "Auto",
            "HotColdLoader",
            "Hotline",
            "LookAhead",
            "Sequential",
            "TrainPipeline",
        ],
    }
    for module in (recsys, recsys.datasets, recsys.embeddings, recsys.models, recsys.pipeline):
        assert all(hasattr(module, name) for name in module.__all__)


IMPORT_ALL = """
import importlib, pathlib, pkgutil, sys
import recsys
assert pathlib.Path(recsys.__file__).is_relative_to(sys.argv[1]), recsys.__file__
for module in pkgutil.walk_packages(recsys.__path__, "recsys."):
    importlib.import_module(module.name)
assert (pathlib.Path(recsys.__file__).parent / "py.typed").is_file()
assert list(pathlib.Path(recsys.__file__).parent.rglob("report_page.html"))
"""


def run_python(*arguments, **options):
    subprocess.run([sys.executable, *map(str, arguments)], check=True, **options)


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path, pytestconfig):
    root, installed = tmp_path / "source", tmp_path / "site"
    # Building leaves a build folder behind, from which a later wheel would take deleted modules.
    root.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(pytestconfig.rootpath / name, root)
    shutil.copytree(pytestconfig.rootpath / "recsys", root / "recsys")
    offline = ("--quiet", "--no-deps")
    run_python("-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", tmp_path, root)
    (wheel,) = tmp_path.glob("recsys-*.whl")

    run_python("-m", "pip", "install", *offline, "--target", installed, wheel)

    environment = {"PYTHONPATH": str(installed)}
    run_python("-c", IMPORT_ALL, installed, cwd=tmp_path, env=environment)
