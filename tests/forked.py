"""Imported by the process that `forks` forks: what holds for each of its forks."""

import os

from tests.compiling import compile_once

if "PYTEST_XDIST_WORKER" in os.environ:
    compile_once()
