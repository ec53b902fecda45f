"""Trains with configurations, and prints the kernels first needed while the clock of a run is on.

    compiled_kernels.py '{"NAME": ["FOLDER OF THE RUN", "SETTING", ...], ...}'

Each run has a process, forked from this one, which has run no kernel: in the process of another
run, kernels that the other has used would not be compiled again.
"""

import json
import os
import sys

import matplotlib.figure  # noqa: F401  # as torch._dynamo, once instead of in each fork
import torch._dynamo  # noqa: F401
from numba.core.dispatcher import Dispatcher

import recsys.train.trainer as trainer
from recsys.config import load_config


def needed_while_it_trains(run_dir, *settings):
    found = []
    compile_, fit = Dispatcher.compile, trainer._fit
    is_fitting = False

    def compile_and_note(dispatcher, signature):
        if is_fitting:
            found.append(f"{dispatcher.py_func.__name__}{signature}")
        return compile_(dispatcher, signature)

    def fit_and_note(*arguments):
        nonlocal is_fitting
        is_fitting = True
        try:
            return fit(*arguments)
        finally:
            is_fitting = False

    Dispatcher.compile, trainer._fit = compile_and_note, fit_and_note
    trainer.train(load_config(None, list(settings)), run_dir, show_progress=False)
    return found


for name, arguments in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        found = needed_while_it_trains(*arguments)
        sys.stdout.write(f"{json.dumps([name, found])}\n")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
