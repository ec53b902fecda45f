"""Trains with a configuration, and prints the kernels that are first needed while its clock runs.

Run as a process: kernels that another run has used are not compiled again.
"""

import json
import sys

from numba.core.dispatcher import Dispatcher

import recsys.train.trainer as trainer
from recsys.config import load_config


def main(run_dir, *settings):
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
    trainer.train(load_config(None, list(settings)), run_dir)
    sys.stdout.write(json.dumps(found))


main(*sys.argv[1:])
