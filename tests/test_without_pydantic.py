"""The engine and its benchmarks import without pydantic: the machine with a GPU has none."""

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys, warnings
warnings.simplefilter("ignore")
sys.modules["pydantic"] = None
sys.path.insert(0, "benchmarks")
for room in ("embeddings", "pipeline", "models", "conversion"):
    package = importlib.import_module(f"recsys.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "triton" not in module.name:
            importlib.import_module(module.name)
for name in ("lookup", "step", "tiers", "gpu", "recsys.train.build"):
    importlib.import_module(name)
"""


def test_the_engine_and_its_benchmarks_import_without_pydantic(pytestconfig):
    subprocess.run([sys.executable, "-c", CODE], check=True, cwd=pytestconfig.rootpath)
