"""Imported last by the process that `forks` forks: what would take each fork long, done once."""

import gc
import os

import numba

from tests.compiling import compile_once

if "PYTEST_XDIST_WORKER" in os.environ:
    compile_once()
numba.njit(lambda number: number)(1)  # numba makes itself ready when it first compiles
gc.collect()
gc.freeze()  # a fork that looks for garbage would look at, and copy, all that was imported
