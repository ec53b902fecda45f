"""Launches past Triton's checks run what Triton would run; see `launching.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from recsys._support.cuda.triton_launches import Launched, launched  # noqa: E402


def test_arguments_of_every_kind_find_the_kernel_that_triton_compiles_for_them(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, Path(__file__).with_name("launching.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert not done.returncode, done.stderr
    pairs = json.loads(done.stdout)

    assert len({by_triton[0][0] for by_triton, _ in pairs}) > 20
    for by_triton, known in pairs:
        assert known == by_triton


@pytest.mark.parametrize(("hip", "kind"), [(None, Launched), ("7.0", triton.JITFunction)])
def test_on_rocm_every_launch_goes_through_triton(monkeypatch, hip, kind):
    def kernel(source): ...

    monkeypatch.setattr(torch.version, "hip", hip)
    assert type(launched(triton.JITFunction(kernel))) is kind
