import shutil

import pytest

from recsys.ablate.run import ablate
from recsys.config import to_toml
from recsys.train.trainer import train


@pytest.fixture(scope="session")
def train_once(tmp_path_factory):
    """Trains as `train` does; a cell that an earlier test had is a copy of that one's folder."""
    trained = {}

    def train_or_copy(config, run_dir, *, resume=False, show_progress):
        key = to_toml(config)
        if resume or not config.data.startswith("synthetic:"):
            train(config, run_dir, resume=resume, show_progress=show_progress)
        elif key in trained:
            shutil.copytree(trained[key], run_dir)
        else:
            train(config, run_dir, show_progress=show_progress)
            folder = tmp_path_factory.mktemp("cell")
            trained[key] = shutil.copytree(run_dir, folder / "run")

    return train_or_copy


@pytest.fixture
def run_here(tmp_path, train_once):
    """Runs an ablation with its cells in this process; gives its record and the cells it ran.

    Given `results`, it is also kept in a file of results.
    """

    def run(config, run_cell=train_once, *, folder="out", results=None):
        ran = []

        def count_and_run(config, run_dir, **options):
            ran.append(run_dir.name)
            return run_cell(config, run_dir, **options)

        record = ablate(
            config, tmp_path / folder, results=results, show_progress=False, run_cell=count_and_run
        )
        return record, ran

    return run
