import pytest

from recsys.ablate.run import ablate


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
