#!/bin/sh
# Makes .venv from requirements/cpu.txt and tries it; `make setup` skips it while the lock is
# unchanged. A .venv that did not get ready is removed, so that the next try starts afresh.
set -eu
trap 'rm -rf .venv' EXIT
trap 'exit 130' INT TERM

remedy() {
    echo >&2
    echo "setup failed: $1" >&2
    echo "If pip took a CUDA build of torch, ask for the CPU build:" >&2
    grep -m 1 'make setup PIP_ARGS' README.md >&2
    exit 1
}

"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: recsys needs Python 3.11 or later; name one with make PYTHON=python3.11" >&2
    exit 1
}
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
echo "setup: installing into .venv, once; this takes a minute or two"
# Imports compile what they import. pip would compile everything: 13,000 files, 45 seconds.
# shellcheck disable=SC2086  # PIP_ARGS is a list of options
.venv/bin/python -m pip install --quiet --no-compile --no-deps ${PIP_ARGS:-} \
    -r requirements/cpu.txt || remedy "pip could not install requirements/cpu.txt"
.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
unset PYTHONDONTWRITEBYTECODE
.venv/bin/python -c 'import torch, fbgemm_gpu' ||
    remedy "torch and fbgemm_gpu do not import together"
.venv/bin/python -W ignore -c 'import torchrec, matplotlib.pyplot, recsys.train.trainer, recsys.cli'
trap - EXIT
echo "setup: .venv is ready"
