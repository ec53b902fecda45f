"""Two processes that train in one folder at once: the second one is refused."""

import pytest

from recsys.errors import ConfigError
from recsys.train.progress import Progress
from recsys.train.run_folder import RunFolder
from tests.train.resumed_runs import SETTINGS, run


def test_one_process_at_a_time_trains_in_a_folder(small_config, tmp_path, monkeypatch):
    config = small_config(*SETTINGS)
    found = []
    add = Progress.add

    def add_and_resume(progress, *step):
        add(progress, *step)
        if progress.num_steps == 2:
            with pytest.raises(ConfigError, match="another `recsys train` is at work in") as caught:
                run(config, tmp_path / "run", resume=True)
            found.append(caught)

    monkeypatch.setattr(Progress, "add", add_and_resume)
    run(config, tmp_path / "run")

    assert len(found) == 1


def test_a_run_that_starts_while_another_writes_its_first_file_is_refused(
    small_config, tmp_path, monkeypatch
):
    config, other = small_config(*SETTINGS), small_config(*SETTINGS, "seed=5")
    write_config, found = RunFolder.write_config, []

    def start_other(folder, config):
        monkeypatch.setattr(RunFolder, "write_config", write_config)
        with pytest.raises(ConfigError, match="another `recsys train` is at work in") as caught:
            run(other, tmp_path / "run")
        found.append(caught)
        write_config(folder, config)

    monkeypatch.setattr(RunFolder, "write_config", start_other)
    record = run(config, tmp_path / "run")

    assert len(found) == 1
    assert record["status"] == "finished"
    assert RunFolder(tmp_path / "run").read_config() == config
