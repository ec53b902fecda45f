"""Reports of a run: those after a resume are those of an uninterrupted run."""

import re
import sys
import warnings

import numpy as np
import pytest
import torch

from recsys.pipeline.stalls import StageClock
from recsys.train.loop.progress import Progress
from recsys.train.metrics import evaluate_logits
from recsys.train.run_folder import RunFolder
from tests.train.resumed_runs import history


def add_step(progress, number, num_samples=3):
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(num_samples, generator=generator)
    labels = torch.randint(0, 2, (num_samples,), generator=generator)
    progress._clock.seconds["forward"] += 1
    progress.add(logits.exp().mean(), logits, labels)


@pytest.fixture
def make(tmp_path):
    def build(name):
        (tmp_path / name).mkdir()
        folder = RunFolder(tmp_path / name)
        return Progress(folder, StageClock(), 30, "validation", show=False), folder

    return build


@pytest.mark.parametrize("num_before", [0, 1, 4, 5])
def test_the_next_report_after_a_resume_is_that_of_an_uninterrupted_run(make, num_before):
    (whole, expected), (first, _), (resumed, found) = map(make, ("whole", "first", "resumed"))
    found_evaluation = evaluate_logits(torch.randn(4).numpy(), torch.tensor([0, 1, 0, 1]).numpy())
    for progress, numbers in ((whole, range(10)), (first, range(num_before))):
        for number in numbers:
            if number == 3:
                progress.add_evaluation(found_evaluation)
            add_step(progress, number)
            if number == 4:
                progress.report(0)

    resumed.load_state_dict(first.state_dict())
    resumed._clock.load_state_dict(first._clock.state_dict())
    for number in range(num_before, 10):
        if number == 3:
            resumed.add_evaluation(found_evaluation)
        add_step(resumed, number)
        if number == 4:
            resumed.report(0)

    whole.report(1)
    resumed.report(1)
    assert history(found.path) == history(expected.path)[-len(history(found.path)) :]
    assert resumed.last_evaluation == whole.last_evaluation == found_evaluation.as_dict()
    assert (resumed.num_steps, resumed.num_samples) == (10, 30)


def test_metrics_of_another_split_are_not_continued_with(make):
    (saved, _), (progress, _) = make("saved"), make("other")
    saved.add_evaluation(evaluate_logits(np.array([0.2, -0.1], "float32"), np.array([1, 0])))

    progress.load_state_dict(saved.state_dict() | {"split": "test"})

    assert progress.last_evaluation is None
    progress.load_state_dict(saved.state_dict())
    assert progress.last_evaluation == saved.last_evaluation is not None


def test_warnings_are_printed_above_the_bar(tmp_path, small_config, capsys, monkeypatch):
    def show(message, *_):  # that of pytest prints nothing
        sys.stderr.write(f"warning: {message}\n")

    monkeypatch.setattr(warnings, "showwarning", show)
    folder = RunFolder.create(tmp_path / "run", small_config())
    with (
        warnings.catch_warnings(),
        Progress(folder, StageClock(), 30, "validation", show=True),
    ):
        warnings.simplefilter("always")
        capsys.readouterr()
        warnings.warn("of the first step", stacklevel=1)
        printed = capsys.readouterr().err

    assert warnings.showwarning is show
    lines = re.split(r"[\r\n]", printed)
    assert "warning: of the first step" in lines
    assert "0.00/30.0 samples" in lines[-1]
