import pytest

from recsys.ablate import ablate


@pytest.fixture
def run_here(tmp_path, train_once):
    """Runs an ablation with its cells in this process; gives its record and the cells it ran."""

    def run(config, run_cell=train_once):
        ran = []

        def count_and_run(config, run_dir, **options):
            ran.append(run_dir.name)
            return run_cell(config, run_dir, **options)

        record = ablate(config, tmp_path / "out", show_progress=False, run_cell=count_and_run)
        return record, ran

    return run
