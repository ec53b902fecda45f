"""What tests share: hypothesis profiles, the real samples, small data."""

import contextlib
import copy
import gc
import importlib
import io
import os
import re
import runpy
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

# Threads that spin while they wait for the next parallel loop take the cores from each other where
# there are few. OpenMP reads it once, when torch brings it in; processes that tests start have it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from recsys.ablate import load_ablation
from recsys.cli import main
from recsys.config import load_config, to_toml
from recsys.datasets.criteo import prepare_criteo_kaggle
from recsys.train.trainer import train
from tests.compiling import compile_once

# Without a GPU, Triton kernels are interpreted; Triton reads this when it decorates a kernel.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


gc.disable()  # until all tests are imported, none of which is garbage: a fifth of that time


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# Where several processes run the tests (`pytest -n`), each computes on one thread, and so do the
# processes that tests start.
_IS_ONE_OF_SEVERAL = "PYTEST_XDIST_WORKER" in os.environ
if _IS_ONE_OF_SEVERAL:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    compile_once()


@pytest.fixture(autouse=True)
def threads_as_before():
    """A test may choose another number of torch's threads; those after it have this one."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


_IS_STRESS = os.environ.get("HYPOTHESIS_PROFILE") == "stress"
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# Always the same cases, so that more of them would find nothing new; `make stress` draws others.
settings.register_profile("ci", max_examples=15, derandomize=True, **_COMMON)
settings.register_profile("stress", max_examples=1000, **_COMMON)
settings.load_profile("stress" if _IS_STRESS else "ci")


if _IS_ONE_OF_SEVERAL:

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(session):
        """Import this process's share of the tests, then all: pytest keeps what it compiles."""
        share, of = (
            int(os.environ[f"PYTEST_XDIST_WORKER{end}"].strip("gw")) for end in ("", "_COUNT")
        )
        root = session.config.rootpath
        asked = [Path(arg.partition("::")[0]).resolve() for arg in session.config.args]
        files = sorted(root.glob("tests/**/test_*.py"))
        asked_files = [file for file in files if any(map(file.is_relative_to, asked))]
        for file in asked_files[share::of]:
            # The collection imports the file again, and says what is wrong.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_collection_modifyitems(config, items):
    """Leave out what is slow, unless everything is wanted."""
    if _IS_STRESS:
        return
    left_out = [item for item in items if _is_slow(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def _is_slow(item):
    mark = item.get_closest_marker("slow")
    return mark is not None and not any(
        word in item.callspec.id for word in mark.kwargs.get("but", ())
    )


# Of the model and the data, whatever is small enough to train in a blink.
SMALL_SETTINGS = (
    "model.embedding_dim=4",
    "model.dense_arch=[8, 4]",
    "model.over_arch=[8, 1]",
    "synthetic.num_samples=2100",
    "synthetic.table_sizes=[30, 7, 1, 500]",
)


def _sample(folder, name="train.txt.gz"):
    root = os.environ.get("RECSYS_DATA")
    if not root:
        pytest.skip("set RECSYS_DATA to the folder of real samples")
    path = Path(root) / folder / name
    if not path.is_file():
        pytest.skip(f"RECSYS_DATA has no {folder}/{name}")
    return path


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request):
    """A device whose tensors Triton kernels can be launched with: a GPU; without one, the CPU."""
    pytest.importorskip("triton")
    has_gpu = torch.cuda.is_available()
    if has_gpu != (request.param == "cuda"):
        pytest.skip("kernels are compiled here" if has_gpu else "torch sees no CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True, scope="module")
def garbage_of_others_is_let_be():
    """Garbage is looked for in what a module's tests make: in what was imported, it takes 40 ms."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def process_group():
    """A process group of this process alone.

    Its store is in memory: one of `file://` may wait for its own file for ever (pytorch#31467).
    """
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def kaggle_10k():
    """The first 10,000 raw lines of Criteo Kaggle."""
    return _sample("criteo_kaggle_10k")


@pytest.fixture(scope="session")
def kaggle_137k():
    """A uniform sample of 137,139 raw lines of Criteo Kaggle."""
    return _sample("criteo_kaggle_137k")


@pytest.fixture(scope="session")
def day_0_head():
    """The first 1,000 raw lines of day 0 of Criteo 1TB."""
    return _sample("criteo_1tb_day0_1k", "day_0_head.txt.gz")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that all processes of a test run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if _IS_ONE_OF_SEVERAL else base


@pytest.fixture(scope="session")
def kaggle_137k_store(kaggle_137k, shared_folder):
    """The same, prepared by the first process that needs it."""
    path = shared_folder / "kaggle-137k"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            prepare_criteo_kaggle([kaggle_137k], path, show_progress=False)
    return path


@pytest.fixture(scope="session")
def kaggle_137k_run(kaggle_137k_store, shared_folder):
    """Trains one of two recipes on the same, once for all tests.

    Returns the run's folder and what `recsys train` printed.
    """
    recipes = {
        "sgd": ["optimizer.lr=0.1", "batch_size=128"],
        "adagrad": ["optimizer.name=adagrad", "optimizer.lr=0.01", "batch_size=1024"],
    }

    def train(recipe, embeddings="recsys"):
        path = shared_folder / f"kaggle-137k-{recipe}-{embeddings}"
        printed = path.with_suffix(".txt")
        settings = [*recipes[recipe], f"embeddings={embeddings}", "num_threads=1"]
        options = [part for setting in settings for part in ("--set", setting)]
        with FileLock(f"{path}.lock"):
            if not printed.exists():
                text = io.StringIO()
                with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                    status = main(["train", str(kaggle_137k_store), "--run", str(path), *options])
                assert status == 0, text.getvalue()
                printed.write_text(text.getvalue())
        return path, printed.read_text()

    return train


@pytest.fixture(scope="session")
def classic(pytestconfig):
    """The example with a model built the classic way: `ClassicDLRM`, `loss_of` and the rest."""
    return SimpleNamespace(
        **runpy.run_path(str(pytestconfig.rootpath / "examples" / "accelerate_classic.py"))
    )


@pytest.fixture
def small_config():
    """Builds a configuration that trains in a blink, from more settings."""

    def build(*settings, **values):
        config = load_config(None, [*SMALL_SETTINGS, *settings], **values)
        if config.data.startswith("synthetic:"):
            return config
        kept = [each for each in SMALL_SETTINGS if not each.startswith("synthetic.")]
        return load_config(None, [*kept, *settings], **values)

    return build


@pytest.fixture(scope="session")
def train_once(tmp_path_factory):
    """Trains as `train` does; a run that an earlier test had is a copy of that one's folder."""
    trained = {}

    def train_or_copy(config, run_dir, *, resume=False, show_progress=False):
        if resume or not config.data.startswith("synthetic:"):
            return train(config, run_dir, resume=resume, show_progress=show_progress)
        key = to_toml(config)
        if key in trained:
            record, folder = trained[key]
            shutil.copytree(folder, run_dir)
            return copy.deepcopy(record)
        record = train(config, run_dir, show_progress=show_progress)
        folder = shutil.copytree(run_dir, tmp_path_factory.mktemp("trained") / "run")
        trained[key] = copy.deepcopy(record), folder
        return record

    return train_or_copy


@pytest.fixture(scope="session")
def small_settings():
    """`--set` options of the same."""
    return [part for setting in SMALL_SETTINGS for part in ("--set", setting)]


@pytest.fixture
def ablation(tmp_path, small_settings):
    """Loads an ablation of what trains in a blink, from the text of its file."""

    def load(text, *settings):
        file = tmp_path / "ablation.toml"
        file.write_text(text)
        small = small_settings[1::2]
        if any(re.match("data=(?!synthetic:)", each) for each in settings):  # a store
            small = [each for each in small if not each.startswith("synthetic.")]
        return load_ablation(file, [*small, "num_threads=1", *settings])

    return load


@pytest.fixture
def raw_line():
    """Builds a raw Criteo line, a good one unless told otherwise."""

    def build(label="0", integers=None, categories=None):
        integers = ["1"] * 13 if integers is None else integers
        categories = ["05db9164"] * 26 if categories is None else categories
        return "\t".join([label, *integers, *categories])

    return build


@pytest.fixture
def whole_pictures():
    """Pictures are made as they are for users."""


@pytest.fixture(autouse=True)
def quick_pictures(request, monkeypatch):
    """Pages have pictures without pixels, which take most of their time.

    Not where a test asks for `whole_pictures`, nor in processes that tests start.
    """
    if "whole_pictures" not in request.fixturenames:
        monkeypatch.setattr("recsys.report.draw_curves", lambda _: b"\x89PNG")


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk():
    """Flushing takes most of the time of short runs; no test cuts the power.

    A descriptor that is not open is still an error. Processes that tests start do flush.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True, scope="session")
def can_be_interrupted():
    """Ctrl-C means Ctrl-C here, and in processes that tests start.

    A shell that runs the tests in the background has them ignore it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
