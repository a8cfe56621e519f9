# make report   the main job: train the toy model, open it and a real model up, write runs/report/index.html
# make test     the default tests            make check   linters, tests, slow tests (what CI runs)
# make notebooks  run every notebook         make bench   print the speed tables
# make cluster  tests on a real two-node Ray cluster on this machine (minutes; not part of check)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# whole files per process, one thread each: the counts that a file's tests gather stay together
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile
STAMP := $(VENV)/.installed

.PHONY: setup report test check lint slow cluster notebooks bench clean

setup: $(STAMP)

# torch first and pinned: left to itself, another package would ask for a build with several GB of GPU libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Python 3.11 or newer is needed, this is %s; try make PYTHON=python3.12' % sys.version)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,lens,notebooks,probes,cluster,dev]'
	touch $@

report: $(STAMP)
	$(BIN)/interp report

test: $(STAMP)
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

slow: $(STAMP)
	$(PYTEST) -m slow

cluster: $(STAMP)
	$(BIN)/python -m pytest -m cluster

check: lint test slow

notebooks: $(STAMP)
	$(BIN)/python notebooks/build.py

bench: $(STAMP)
	$(BIN)/python experiments/bench/forward.py
	$(BIN)/python experiments/bench/recording.py
	$(BIN)/python experiments/bench/sweep.py
	$(BIN)/python experiments/bench/engines.py

clean:
	rm -rf $(VENV) build dist *.egg-info
