# On a machine with Python 3.11, `make train` and `make test` install what they need and run.

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
DATA ?=
RUN ?= runs/$(shell date +%Y%m%d-%H%M%S)
ARGS ?=
SECONDS ?= 600
MINUTES ?= 150

.PHONY: help setup train test check stress crash threads twins fuzz bench tables site clean

help:
	@echo "make train                         train DLRM on synthetic Criteo-shaped data"
	@echo "make train DATA=path/train.txt.gz  prepare a raw Criteo Kaggle file and train on it"
	@echo "           RUN=DIR ARGS='--set k=v'  folder of the run; more options of 'recsys train'"
	@echo "make test                          run the tests"
	@echo "make check                         ruff, formatting, mypy, import-linter, the size gate, the records"
	@echo "make stress                        run the property tests with many random cases, half an hour"
	@echo "make threads                       run 500 cases under random delays, count what they leave open"
	@echo "make twins MINUTES=150             train random models in tiers, and compare with plain PyTorch"
	@echo "make crash                         kill runs 200 times, and compare their models, 7 minutes"
	@echo "make fuzz SECONDS=600               read damaged and hostile files, for ten minutes"
	@echo "make bench                         measure the numbers in benchmarks/results (needs RECSYS_DATA)"
	@echo "make bench QUICK=1                 run every benchmark at a tiny size, into build/bench/"
	@echo "make tables                        make the tables in the docs"
	@echo "make site                          build these docs as a site, with the public signatures"
	@echo "make setup                         install pinned versions into .venv; the others call it"

setup: .venv/ready

.venv/ready: requirements/cpu.txt
	PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" sh requirements/setup.sh
	@touch $@

ifeq ($(DATA),)
train: setup
	$(BIN)/recsys train synthetic:criteo-kaggle --run $(RUN) $(ARGS)
else
# Raw files are prepared once. Many are called train.txt.gz, so the store's name has a checksum of
# their paths. `recsys prepare` refuses files that have changed since.
STORE := stores/$(notdir $(firstword $(DATA)))-$(shell echo "$(abspath $(DATA))" | cksum | cut -d' ' -f1)
train: setup $(STORE)
	$(BIN)/recsys train $(STORE) --run $(RUN) $(ARGS)

$(STORE): $(wildcard $(DATA)) | setup
	$(BIN)/recsys prepare criteo-kaggle $(DATA) --out $@
endif

# Python keeps what it has compiled, for the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
# A test that takes ten minutes hangs. The run then ends and prints where.
PYTEST := $(BIN)/python -m pytest -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# Most tests run side by side, one process a core and one thread each. Tests that need several
# threads run after them, one by one; only their files are imported for them.
WITH_THREADS = $(shell grep -rlE --include='*.py' 'mark\.serial\b' tests)
test: setup
	$(PYTEST) -m "not serial" -n logical --maxprocesses 4 --dist worksteal --max-worker-restart 0
	$(PYTEST) -m serial $(WITH_THREADS)

threads: setup
	PYTHONDEVMODE=1 $(BIN)/python tests/unit/threads.py --cases 500 --json benchmarks/results/threads.json

stress: setup
	HYPOTHESIS_PROFILE=stress $(BIN)/python -m pytest

twins: setup
	$(BIN)/python tests/exact/twins.py --minutes $(MINUTES) --json benchmarks/results/twins.json

crash: setup
	PYTHONPATH=. $(BIN)/python tests/train/crash.py --json benchmarks/results/crash.json

# Damages the input of every reader, at random, for a time; case n of a reader is always the same.
fuzz: setup
	PYTHONPATH=. $(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS) --json benchmarks/results/fuzz.json

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tests/house.py
	$(BIN)/python tests/released.py

# Quick sizes show that every benchmark works here; their numbers say nothing.
QUICK ?=
MEASURED := $(if $(QUICK),build/bench,benchmarks/results)
BENCHMARKS := lookup step models tiers checkpoints predict distributed prepare
bench: setup
	mkdir -p $(MEASURED)
	for name in $(BENCHMARKS); do \
		$(BIN)/python benchmarks/$$name.py $(if $(QUICK),--quick) --json $(MEASURED)/$$name.json || exit; \
	done
	$(BIN)/python benchmarks/prepare.py --table $(if $(QUICK),--quick) --json $(MEASURED)/prepare_table.json
	$(BIN)/python benchmarks/slipstream/cost.py $(if $(QUICK),--quick) --json $(MEASURED)/skipping.json

tables: setup
	$(BIN)/python benchmarks/tables.py

# Its theme advertises its successor unless told not to.
site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "the site begins at site/index.html"

clean:
	rm -rf .venv build dist site recsys.egg-info
