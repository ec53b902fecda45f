import pytest

from recsys.ablate.run import ablate
from recsys.train.trainer import train


@pytest.fixture
def run_here(tmp_path):
    """Runs an ablation with its cells in this process; gives its record and the cells it ran."""

    def run(config, run_cell=train):
        ran = []

        def count_and_run(config, run_dir, **options):
            ran.append(run_dir.name)
            return run_cell(config, run_dir, **options)

        record = ablate(config, tmp_path / "out", show_progress=False, run_cell=count_and_run)
        return record, ran

    return run
