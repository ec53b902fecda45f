"""Trains, and prints the kernels that are first needed while the clock of the run is on.

Runs in a process that has run no kernel: in the process of another run, kernels that the other has
used would not be compiled again.
"""

import json
import sys
import warnings

from numba.core.dispatcher import Dispatcher

import recsys.train.trainer as trainer
from recsys.config import load_config


def print_needed(run_dir, *settings):
    warnings.simplefilter("ignore")
    sys.stdout.write(f"{json.dumps(_needed_while_it_trains(run_dir, *settings))}\n")


def _needed_while_it_trains(run_dir, *settings):
    found = []
    compile_, fit = Dispatcher.compile, trainer.fit
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

    Dispatcher.compile, trainer.fit = compile_and_note, fit_and_note
    trainer.train(load_config(None, list(settings)), run_dir, show_progress=False)
    return found
